"""Two engines of a few lines, with the modules, classes and operators by which tunedcomm serves the real ones."""

from __future__ import annotations

import functools
import sys
import types
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

libraries: list[Any] = []
own: list[str] = []  # calls that the engine's own code made


def add_module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            add_module(parent)
        setattr(sys.modules[parent], child, module)
    return module


def reference_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    held = x.float() + residual.float()
    held = held.to(x.dtype)
    wide = held.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype), held


# vLLM


class Communicator:
    """A communicator over gloo, with the methods of vLLM's."""

    ca_comm = None

    def __init__(self, cpu_group: Any, device: Any = None, device_group: Any = None, unique_name: str = "") -> None:
        self.device, self.device_group, self.unique_name = device, device_group, unique_name
        self.world_size = dist.get_world_size(device_group)
        self.destroyed = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        own.append("all_reduce")
        if input_.dtype == torch.complex64:
            raise ValueError("the engine's own error")
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        own.append("all_gather")
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(parts, input_.contiguous(), group=self.device_group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        own.append("reduce_scatter")
        whole = input_.clone()
        dist.all_reduce(whole, group=self.device_group)
        return whole.chunk(self.world_size, dim)[dist.get_rank(self.device_group)].contiguous()

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        own.append("all_gatherv")
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, input_, group=self.device_group)
        return torch.cat(gathered) if isinstance(input_, torch.Tensor) else [torch.cat(p) for p in zip(*gathered)]  # noqa: B905

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        own.append("reduce_scatterv")
        whole = input_.clone()
        dist.all_reduce(whole, group=self.device_group)
        return whole.split(sizes or whole.shape[0] // self.world_size)[dist.get_rank(self.device_group)].contiguous()

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))

    def custom_all_gather(self, input_: torch.Tensor) -> torch.Tensor | None:
        own.append("custom_all_gather")
        return None

    def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
        own.append("custom_reduce_scatter")
        return None

    def get_symmetric_memory_buffer(self, role: str) -> str:
        return role

    def destroy(self) -> None:
        self.destroyed = True


class CudaPlatformBase:
    stock = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return cls.stock


NORM_ARGUMENTS = (
    "(Tensor(a!) allreduce_in, Tensor(b!) residual, Tensor rms_gamma, float rms_eps, SymInt world_size, "
    "bool launch_with_pdl, bool fp32_acc, SymInt max_token_num, SymInt pattern_code, Tensor(c!)? norm_out=None, "
    "Tensor(d!)? quant_out=None, Tensor(e!)? scale_out=None, Tensor? scale_factor=None, float weight_bias=0.0) -> ()"
)


def own_norm(*args: Any, **kwargs: Any) -> None:
    own.append("fused norm")


def add_vllm(*, batch_invariant: bool = False, elastic: bool = False) -> Any:
    """Make `vllm` importable; `engine.tp` is the coordinator that models ask for."""
    engine = SimpleNamespace(tp=None)
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=elastic))
    add_module("vllm")
    add_module("vllm.envs", VLLM_BATCH_INVARIANT=batch_invariant)
    add_module("vllm.config", get_current_vllm_config_or_none=lambda: config)
    add_module("vllm.platforms.cuda", CudaPlatformBase=CudaPlatformBase)
    add_module("vllm.distributed.device_communicators.cuda_communicator", CudaCommunicator=Communicator)
    add_module("vllm.distributed.parallel_state", get_tp_group=lambda: engine.tp)
    return engine


def define_vllm_norm(key: str = "CPU") -> Any:
    """Define the operator, as vLLM does when its compiler passes are imported."""
    library: Any = torch.library.Library("vllm", "FRAGMENT")
    library.define(f"flashinfer_trtllm_fused_allreduce_norm{NORM_ARGUMENTS}")
    library.impl("flashinfer_trtllm_fused_allreduce_norm", own_norm, key)
    libraries.append(library)
    return torch.ops.vllm.flashinfer_trtllm_fused_allreduce_norm


def make_communicator(group: Any, name: str = "tp:0", device: Any = torch.device("cpu")) -> Any:  # noqa: B008
    """What vLLM's coordinator does when it makes a group."""
    module, _, cls = sys.modules["vllm.platforms.cuda"].CudaPlatformBase.get_device_communicator_cls().rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], cls)(cpu_group=group, device=device, device_group=group, unique_name=name)


# SGLang


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, list[Any]] = {}  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any = None) -> None:
        cls.hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            path, _, attribute = target.rpartition(".")
            owner = sys.modules.get(path) or getattr(sys.modules[path.rpartition(".")[0]], path.rpartition(".")[2])
            for hook in hooks:
                setattr(owner, attribute, _wrapped(hook, getattr(owner, attribute)))
        cls.hooks = {}


def _wrapped(hook: Any, original: Any) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return run


class GroupCoordinator:
    def __init__(self, group: Any) -> None:
        self.device_group, self.device = group, torch.device("cpu")
        self.world_size = dist.get_world_size(group)

    def _all_reduce_out_place(self, input_: torch.Tensor, outplace_all_reduce_method: str) -> torch.Tensor:
        own.append("out of place")
        out = input_.clone()
        self._all_reduce_in_place(out)
        return out

    def _flashinfer_allreduce(self, input_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not served")

    def _all_reduce_in_place(self, input_: torch.Tensor) -> None:
        own.append("in place")
        dist.all_reduce(input_, group=self.device_group)

    def _all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
        own.append("all_gather")
        dist.all_gather_into_tensor(output, input, group=self.device_group)

    def _reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        own.append("reduce_scatter")
        whole = input.clone()
        dist.all_reduce(whole, group=self.device_group)
        output.copy_(whole.chunk(self.world_size)[dist.get_rank(self.device_group)])
        return output

    def all_gatherv(self, input_: Any, sizes: list[int] | None = None, output: Any = None) -> list[torch.Tensor]:
        own.append("all_gatherv")
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, input_, group=self.device_group)
        return [torch.cat(gathered)]

    def reduce_scatterv(self, input_: torch.Tensor, output: Any = None, sizes: Any = None) -> torch.Tensor:
        own.append("reduce_scatterv")
        whole = self._all_reduce_out_place(input_, "auto")
        return whole.split(sizes)[dist.get_rank(self.device_group)].contiguous()

    def destroy(self) -> None:
        own.append("destroy")


def _sglang_norm(
    input_tensor: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    max_token_num: int = 2048,
    use_attn_tp_group: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    own.append("fused norm")
    return input_tensor.clone(), residual.clone()


def add_sglang(*, deterministic: bool = False) -> Any:
    """Make `sglang` importable, as far as it is when it loads plug-ins; `engine.tp` is the group of fused norms."""
    engine = SimpleNamespace(tp=None)
    envs = SimpleNamespace(SGLANG_ENABLE_DETERMINISTIC_INFERENCE=SimpleNamespace(get=lambda: deterministic))
    add_module("sglang")
    add_module("sglang.srt.environ", envs=envs)
    add_module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    add_module("sglang.srt.distributed.parallel_state", GroupCoordinator=GroupCoordinator)
    library: Any = torch.library.Library("sglang", "FRAGMENT")
    library.define(
        "flashinfer_allreduce_residual_rmsnorm(Tensor input_tensor, Tensor residual, Tensor weight, float eps=1e-06, "
        "SymInt max_token_num=2048, bool use_attn_tp_group=True) -> (Tensor, Tensor)"
    )
    library.impl("flashinfer_allreduce_residual_rmsnorm", _sglang_norm, "CPU")
    libraries.append(library)
    add_module(
        "sglang.srt.layers.flashinfer_comm_fusion",
        flashinfer_allreduce_residual_rmsnorm=_sglang_norm,
        resolve_fusion_group=lambda *, use_attn_tp_group: (engine.tp.world_size, 0, engine.tp),
    )
    return engine
