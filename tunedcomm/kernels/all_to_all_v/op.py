"""all_to_all_v: every rank sends each rank a number of rows of its own; counts differ from pair to pair.

No rank knows the counts of the others, and all must run the same kernel. So a problem knows nothing of counts but a
bound that all ranks state alike: its shape is (elements of the largest chunk that any rank may send any,). Inputs are
the rows, and the elements sent to and got from each rank, int64 on the host: launches read them when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_to_all.op import ALL_TO_ALL
from tunedcomm.kernels.all_to_all_v._counts import made_up_counts
from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import DTYPES, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_TO_ALL_V"]


def _sent(problem: Problem, rank: int) -> list[int]:
    """Elements that `rank` sends each rank."""
    by_distance = made_up_counts(problem)
    return [by_distance[(peer - rank) % problem.world_size] for peer in range(problem.world_size)]


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    (values,) = ALL_TO_ALL.make_inputs(problem, rank, seed, kind, device)
    send = _sent(problem, rank)
    recv = [_sent(problem, peer)[rank] for peer in range(problem.world_size)]
    return (values[: sum(send)].clone(), torch.tensor(send), torch.tensor(recv))


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    numel = sum(made_up_counts(problem))
    return (torch.empty(numel, dtype=getattr(torch, problem.dtype), device=device),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    del problem
    return (torch.cat([values.split(send.tolist())[rank] for values, send, _ in inputs]),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (_ordered_reference(problem, inputs, rank)[0].double(),)


ALL_TO_ALL_V = register_op(
    OpSpec(
        name="all_to_all_v",
        summary="every rank sends each rank a number of rows of its own",
        reductions=(),
        dtypes=DTYPES,
        shape_help="elements of the largest chunk that one rank may send one peer, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        tolerance=dict.fromkeys(DTYPES, 0.0),
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_to_all_v", world_size),
        default_shapes=ALL_TO_ALL.default_shapes,
        ordered_reference=_ordered_reference,
    )
)
