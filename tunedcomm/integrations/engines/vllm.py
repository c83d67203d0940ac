"""vLLM: a communicator that asks tunedcomm before vLLM's own back ends, and vLLM's fused norm.

vLLM makes one device communicator for every process group (world, tp, dp, ep, pp, …). The class below derives from
vLLM's own, so `isinstance` checks, `ca_comm` and whatever is not a collective stay as they are. A group that is asked
for nothing costs nothing.

All routes to vLLM's fused all-reduce and norm (its compiler pass, and models that call it themselves) end in one
operator, which is asked here, too.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.integrations.engines.group import NORM_CALL, EngineGroup, are_equal, serve_one, serve_operator

# The mixin's methods call the methods of the class behind it.
_Base: Any = object
NORM = "flashinfer_trtllm_fused_allreduce_norm"
# FlashInfer's AllReduceFusionPattern: kARResidualRMSNorm, kARResidualRMSNormFP8Quant.
_PLAIN, _FP8 = 1, 2


def is_deterministic() -> bool:
    """True with VLLM_BATCH_INVARIANT=1."""
    return bool(getattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", False))


class ServesCollectives(_Base):  # type: ignore[misc]
    """Stands before a `DeviceCommunicatorBase` of vLLM: asks tunedcomm, and goes on to the base where that declines.

    Attributes:
        tuned: what is asked; None for a group that torch.distributed does not know.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tuned: EngineGroup | None = None
        if self.device_group in dist.distributed_c10d._world.pg_map:
            self.tuned = EngineGroup("vllm", self.device_group, self.device, ordered=is_deterministic())

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        found = serve_one(self, "all_reduce", "all_reduce", input_, ("sum",))
        return super().all_reduce(input_) if found is None else found

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found = serve_one(self, "all_gather", "all_gather", input_, (dim,))
        return super().all_gather(input_, dim) if found is None else found

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found = self._scatter("reduce_scatter", input_, dim)
        return super().reduce_scatter(input_, dim) if found is None else found

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        is_one = isinstance(input_, torch.Tensor)
        found = self._gather([input_] if is_one else input_, dim, sizes)  # type: ignore[arg-type, list-item]
        whole: torch.Tensor | list[torch.Tensor] = (
            super().all_gatherv(input_, dim, sizes) if found is None else found[0] if is_one else found
        )
        return whole

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        found = self._scatter("reduce_scatterv", input_, dim, sizes)
        return super().reduce_scatterv(input_, dim, sizes) if found is None else found

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        found = self._scatter("reduce_scatterv", input_, dim, sizes, output)
        return super().reduce_scatterv_into_output(input_, output, dim, sizes) if found is None else found

    def custom_all_gather(self, input_: torch.Tensor) -> torch.Tensor | None:
        found = serve_one(self, "custom_all_gather", "all_gather", input_, (0,))
        return super().custom_all_gather(input_) if found is None else found

    def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
        found = self._scatter("custom_reduce_scatter", input_, 0)
        return super().custom_reduce_scatter(input_) if found is None else found

    def destroy(self) -> None:
        if self.tuned is not None:
            self.tuned.close()
        super().destroy()

    def _gather(self, xs: list[torch.Tensor], dim: int, sizes: list[int] | None) -> list[torch.Tensor] | None:
        if self.tuned is None:
            return None
        if dim != 0:
            self.tuned.pass_on("all_gatherv", f"shares of dimension {dim}")
            return None
        return self.tuned.serve_rows("all_gatherv", "all_gather_v", xs, sizes)

    def _scatter(
        self,
        call: str,
        x: torch.Tensor,
        dim: int,
        sizes: list[int] | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        dim %= max(x.dim(), 1)
        # Along later dimensions vLLM's result is another: it moves the first one there, not that one to the front.
        if self.tuned is not None and dim == 0:
            found = self.tuned.serve_rows(call, "reduce_scatter_v", [x], sizes, output)
            return None if found is None else found[0]
        if self.tuned is not None and (not are_equal(sizes) or dim > (output is None)):
            self.tuned.pass_on(call, f"shares of dimension {dim}")
            return None
        return serve_one(self, call, "reduce_scatter", x, ("sum", dim), output)


def communicator_class(stock: str) -> str:
    """The name under which vLLM finds the class for its CUDA groups; the fused norm is hooked, too.

    Args:
        stock: name of the class that it derives from.
    """
    if "TunedCudaCommunicator" not in globals():
        module, _, name = stock.rpartition(".")
        base = getattr(importlib.import_module(module), name)
        globals()["TunedCudaCommunicator"] = type("TunedCudaCommunicator", (ServesCollectives, base), {})
        serve_operator(f"vllm::{NORM}", fused_norm)
    return f"{__name__}.TunedCudaCommunicator"


def fused_norm(
    *,
    allreduce_in: torch.Tensor,
    residual: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    world_size: int,
    pattern_code: int,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_factor: torch.Tensor | None = None,
    weight_bias: float = 0.0,
    **others: Any,
) -> tuple[()] | None:
    """Serve vLLM's operator: sum over the tensor parallel group, residual, RMS norm, and a static fp8 scale or none.

    Without `norm_out` the norm takes the place of `allreduce_in`, and the new residual the place of `residual`. With
    `norm_out` the new residual takes the place of `allreduce_in`, and `residual` stays. The pattern for fp8 writes no
    norm.

    Returns:
        Empty where it was served, None where vLLM's own kernel is to run.
    """
    from vllm.distributed.parallel_state import get_tp_group

    tuned: EngineGroup | None = getattr(get_tp_group().device_communicator, "tuned", None)
    if tuned is None or tuned.size != world_size:
        return None
    is_fp8 = pattern_code == _FP8 and quant_out is not None and quant_out.dtype == torch.float8_e4m3fn
    if not (is_fp8 and scale_factor is not None) and not (pattern_code == _PLAIN and quant_out is None):
        tuned.pass_on(NORM_CALL, f"pattern {pattern_code} of FlashInfer")
        return None
    x, held, norm, quantized = map(_rows, (allreduce_in, residual, norm_out, quant_out))
    found = tuned.serve_norm(
        x,
        rms_gamma,
        held,
        rms_eps,
        weight_offset=weight_bias,
        scale=None if quantized is None else scale_factor,
        out=norm if quantized is None else quantized,
        residual_out=held if norm is None else None,
    )
    if found is None:
        return None
    y, summed = found[:2]
    if norm is not None:
        x.copy_(summed)
    elif quantized is None:
        x.copy_(y)
    return ()


def _rows(tensor: torch.Tensor | None) -> Any:
    """The tensor with its last dimension kept and the others as one."""
    return tensor if tensor is None or tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])
