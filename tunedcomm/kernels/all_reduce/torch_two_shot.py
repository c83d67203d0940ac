"""torch_two_shot: PyTorch's `symm_mem.two_shot_all_reduce_`; unless in place on symmetric memory, through staging.

Numerics: library (fp32 sums by the slice's owner, an order of its own). Graph-safe. A lost peer leaves it spinning, so
it only runs when it is forced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce._torch import refuse_torch, staging_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.library import no_config
from tunedcomm.space import Config, Space
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TORCH_TWO_SHOT"]


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del config
    return refuse_torch(problem, limits, granularity=16 * problem.world_size)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch

    del config
    name = workspace.group.group_name
    if problem.input_kind == "symmetric" and problem.in_place:

        def run_in_place(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            del outputs, stream
            torch.ops.symm_mem.two_shot_all_reduce_(inputs[0], "sum", name)

        return run_in_place
    staging = staging_of(problem, workspace)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        staging.copy_(inputs[0].view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(staging, "sum", name)
        outputs[0].view(-1).copy_(staging)

    return run


TORCH_TWO_SHOT = register_variant(
    Variant(
        op="all_reduce",
        name="torch_two_shot",
        numerics="library",
        summary="PyTorch's symmetric-memory two-shot",
        space=Space(),
        infeasible=_infeasible,
        default=no_config,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        bounded=False,
    )
)
