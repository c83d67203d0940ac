"""library: NCCL (gloo on CPUs), then PyTorch's addition; every problem's fall-back and baseline.

Numerics: library. Graph-safe on NCCL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels._host import Launch
from tunedcomm.kernels.all_reduce.library import library_reduction
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY"]


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del problem, config, limits
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    del problem, limits
    return {}


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    del problem, config
    reduce = library_reduction("sum", workspace.group)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        (x, bias), (out,) = inputs, outputs
        if out is not x:
            out.copy_(x)
        reduce(out)
        out.add_(bias)

    return run


LIBRARY = register_variant(
    Variant(
        op="all_reduce_bias",
        name="library",
        numerics="library",
        summary="NCCL on GPUs, gloo on CPUs, then an addition",
        space=Space(),
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
    )
)
