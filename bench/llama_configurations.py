"""The configurations that `bench/llama_tp.py` compares: PyTorch's own, and tunedcomm in and under the same model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from llama_model import Plan
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import tunedcomm
from tunedcomm.integrations.intercept import Interception

__all__ = ["CONFIGURATIONS", "Configuration", "Setup"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to run the model.

    Attributes:
        name: in the rows.
        compiled: by `torch.compile`, the whole stack at once.
        intercepted: inside of `tunedcomm.intercept`.
        extra: what is switched on in the compiler.
    """

    name: str
    compiled: bool = False
    intercepted: bool = False
    extra: Literal["", "async_tp", "fusion"] = ""


CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration("library_eager"),
        Configuration("intercept_eager", intercepted=True),
        Configuration("library_compiled", compiled=True),
        Configuration("intercept_compiled", compiled=True, intercepted=True),
        Configuration("fusion_compiled", compiled=True, intercepted=True, extra="fusion"),
        Configuration("async_tp_compiled", compiled=True, extra="async_tp"),
    )
}
_FUSION = "tunedcomm.integrations.fusion"
_NAMESPACES = ("_c10d_functional", "symm_mem", "tunedcomm")


class Counting(CustomGraphPass):
    """A pass over a graph that Inductor is about to lower: counts what moves data between ranks in it.

    Attributes:
        inner: a pass that comes before.
    """

    def __init__(self, inner: Callable[[torch.fx.Graph], None] | None) -> None:
        self.inner = inner
        self.found: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)
        for node in graph.nodes:
            namespace, _, name = str(node.target).partition(".")
            if node.op == "call_function" and namespace in _NAMESPACES and not name.startswith("wait_tensor"):
                self.found[name.partition(".")[0]] += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Counting:
        """Inductor copies its settings; a pass that knows a process group cannot be copied, and is not changed."""
        return self

    def uuid(self) -> None:
        """Not from a cache, for then nothing would be counted."""

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.found.items()))


@dataclass(slots=True)
class Setup:
    """Where the configurations run, and what they share on the way.

    Attributes:
        group: of the model's tensor parallelism.
        device: of this rank.
        backend: `torch.compile`'s.
        fuse: the fusion pass's `when`.
        forced: op to variant, for a machine whose databases hold nothing.
    """

    group: dist.ProcessGroup
    device: torch.device
    backend: str
    fuse: str
    forced: dict[str, str]
    _counting: dict[str, Counting] = field(default_factory=dict)

    def unavailable(self, configuration: Configuration, plan: Plan) -> str:
        """Why a configuration cannot run here, the same on every rank; else ""."""
        if configuration.extra == "async_tp":
            if self.device.type != "cuda":
                return "async tensor parallelism needs symmetric memory on GPUs"
            if plan == "plain":
                return "nothing is gathered or scattered, so async tensor parallelism has nothing to overlap"
            return _lacks_async_tp()
        if configuration.extra == "fusion":
            if self.backend != "inductor":
                return f"the fusion pass works in Inductor, and this runs with --backend {self.backend}"
            if importlib.util.find_spec(_FUSION) is None:
                return "this tunedcomm has no fusion pass"
        return ""

    def compile(
        self, configuration: Configuration, model: nn.Module, *, graph: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model as this configuration calls it, in CUDA graphs or not; what is compiled alike is compiled once."""
        if not configuration.compiled:
            return model
        if self.backend != "inductor":
            return torch.compile(model, backend=self.backend, dynamic=False)
        counting = self._counting.get(configuration.extra)
        if counting is None:
            counting = Counting(self._fusion(graph=graph) if configuration.extra == "fusion" else None)
            self._counting[configuration.extra] = counting
        options: dict[str, Any] = {"post_grad_custom_post_pass": counting}
        if configuration.extra == "async_tp":
            options["_micro_pipeline_tp"] = True
            _enable_symmetric_memory(self.group)
        return torch.compile(model, dynamic=False, options=options)

    def _fusion(self, *, graph: bool) -> Callable[[torch.fx.Graph], None]:
        fusion_pass = importlib.import_module(_FUSION).fusion_pass
        mode = "graph" if graph and self.device.type == "cuda" else "eager"
        made: Callable[[torch.fx.Graph], None] = fusion_pass(self.group, when=self.fuse, mode=mode)
        return made

    def collectives(self, configuration: Configuration) -> str:
        """What moves data in the compiled graphs; "" where that is not known."""
        return str(self._counting.get(configuration.extra, "")) if configuration.compiled else ""

    def told(self, configuration: Configuration) -> str:
        """What the fusion pass has to say of the graphs; "" for other configurations."""
        counting = self._counting.get(configuration.extra) if configuration.compiled else None
        return "" if counting is None or counting.inner is None else str(counting.inner)

    def forget(self) -> None:
        """Of what was compiled for a model that is gone."""
        self._counting.clear()
        torch._dynamo.reset()

    @contextlib.contextmanager
    def within(self, configuration: Configuration) -> Iterator[Interception | None]:
        """What its steps run in; entered on all ranks together."""
        with contextlib.ExitStack() as stack:
            if not configuration.intercepted:
                yield None
                return
            for op, variant in self.forced.items():
                stack.enter_context(tunedcomm.force(op, variant))
            yield stack.enter_context(tunedcomm.intercept(self.group))


def _lacks_async_tp() -> str:
    config = importlib.import_module("torch._inductor.config")
    if not hasattr(config, "_micro_pipeline_tp"):
        return f"torch {torch.__version__} has no _micro_pipeline_tp"
    if not hasattr(importlib.import_module("torch.distributed._symmetric_memory"), "enable_symm_mem_for_group"):
        return f"torch {torch.__version__} has no enable_symm_mem_for_group"
    return ""


def _enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    module = importlib.import_module("torch.distributed._symmetric_memory")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch does it by itself
        module.enable_symm_mem_for_group(group.group_name)
