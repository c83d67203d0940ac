"""The variant `library`, which every op has: the fall-back and baseline, with nothing to tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import Limits, Numerics, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["no_config", "register_library"]


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del problem, config, limits
    return None


def no_config(problem: Problem, limits: Limits) -> dict[str, Value]:
    """The one config of a variant with nothing to tune."""
    del problem, limits
    return {}


def register_library(
    op: str,
    bind: Callable[[Problem, Config, Workspace], Launch],
    *,
    summary: str = "NCCL on GPUs, gloo on CPUs",
    numerics: Numerics = "library",
) -> Variant:
    """Register what runs `op` everywhere, whatever its blocks are: it has no config and is never infeasible."""
    return register_variant(
        Variant(
            op=op,
            name="library",
            numerics=numerics,
            summary=summary,
            space=Space(),
            infeasible=_infeasible,
            default=no_config,
            bind=bind,
            num_blocks=lambda problem, config: -1,
        )
    )
