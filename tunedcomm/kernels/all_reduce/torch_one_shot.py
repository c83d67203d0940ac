"""torch_one_shot: PyTorch's `symm_mem.one_shot_all_reduce`; a plain input is copied into staging by the operator.

Numerics: library (fp32 sums, but an order of its own). Graph-safe. A lost peer leaves it spinning, so it
only runs when it is forced.
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

__all__ = ["TORCH_ONE_SHOT"]


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    del config
    if problem.nbytes > 8 * limits.one_shot_bytes:
        return f"one-shots are out of the question at {problem.nbytes} bytes"
    return refuse_torch(problem, limits, granularity=16)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch

    del config
    name = workspace.group.group_name
    if problem.input_kind == "symmetric" and not problem.in_place:

        def run_symmetric(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            del stream
            torch.ops.symm_mem.one_shot_all_reduce_out(inputs[0], "sum", name, outputs[0])

        return run_symmetric
    staging = staging_of(problem, workspace)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(staging, inputs[0].view(-1), "sum", name, outputs[0].view(-1))

    return run


TORCH_ONE_SHOT = register_variant(
    Variant(
        op="all_reduce",
        name="torch_one_shot",
        numerics="library",
        summary="PyTorch's symmetric-memory one-shot",
        space=Space(),
        infeasible=_infeasible,
        default=no_config,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        bounded=False,
    )
)
