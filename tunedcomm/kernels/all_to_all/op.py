"""all_to_all and all_to_all_v; the base class of their variants.

all_to_all: every rank sends one chunk to each rank and gets one from each; result chunk i comes from rank i.

all_to_all_v: every rank sends each rank a number of rows of its own; counts differ from pair to pair. No rank knows the
counts of the others, and all must run the same kernel. So a problem knows nothing of counts but a bound that all ranks
state alike: its shape is (elements of the largest chunk that any rank may send any,). Inputs are the rows, and the
elements sent to and got from each rank, int64 on the host: launches read them when they are made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import generator_of, outputs_of_ranks, powers_of_two
from tunedcomm.kernels.common.variant import MoveVariant
from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import DTYPES, ITEMSIZE, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

_ROWS = "rows"  # begins `Problem.layout`; the alignment follows


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    import torch

    dtype = getattr(torch, problem.dtype)
    numel = problem.numel * problem.world_size
    generator = generator_of(rank, seed, device)
    if not dtype.is_floating_point:
        least, most = (0, 127) if kind == "random" else (0, 9)
        values = torch.randint(least, most, (numel,), generator=generator, device=device, dtype=torch.int32)
        return (values.to(dtype),)
    if kind == "integers":
        # Many zeros, every other of them negative: words like these must come through bit for bit too.
        values = torch.randint(-2, 3, (numel,), generator=generator, device=device, dtype=torch.int32).float()
        values[1::2].neg_()
        return (values.to(dtype),)
    values = torch.randn(numel, generator=generator, device=device, dtype=torch.float32)
    return (values.to(dtype),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    return (torch.cat([sent.view(problem.world_size, -1)[rank] for (sent,) in inputs]),)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (_ordered_reference(problem, inputs, rank)[0].double(),)


ALL_TO_ALL = register_op(
    OpSpec(
        name="all_to_all",
        summary="every rank sends one chunk to each rank; result chunk i comes from rank i",
        reductions=(),
        dtypes=DTYPES,
        shape_help="number of elements that one rank sends one peer, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs,
        make_outputs=outputs_of_ranks,
        reference=_reference,
        tolerance=dict.fromkeys(DTYPES, 0.0),  # what is moved is not rounded
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_to_all", world_size),
        default_shapes=functools.partial(powers_of_two, largest_mib=64),
        ordered_reference=_ordered_reference,
    )
)


def row_alignment(problem: Problem) -> int:
    """Alignment of every chunk and its place in bytes, 16, 4, 2 or 1: that of a row.

    It follows from the problem's size unless the layout states it: `rows4` are rows of a multiple of 4 bytes whose
    number makes the size a multiple of 16.
    """
    return int(problem.layout.removeprefix(_ROWS)) if problem.layout else alignment_of(problem.nbytes)


def layout_of(row_bytes: int, max_count: int) -> str:
    """`Problem.layout` for rows of that size; the inverse of `row_alignment`."""
    align = alignment_of(row_bytes)
    return "" if align == alignment_of(max_count * row_bytes) else f"{_ROWS}{align}"


def row_numel(problem: Problem) -> int:
    """Elements of the smallest row that a problem stands for."""
    return max(row_alignment(problem) // ITEMSIZE[problem.dtype], 1)


def made_up_counts(problem: Problem) -> list[int]:
    """Elements that rank r sends rank r + d of a sample input, by d: uneven, and as many received as sent."""
    row = row_numel(problem)
    rows = problem.numel // row
    shares = (rows, rows, rows // 2, rows - rows // 4)
    return [shares[d % len(shares)] * row for d in range(problem.world_size)]


def _sent(problem: Problem, rank: int) -> list[int]:
    """Elements that `rank` sends each rank."""
    by_distance = made_up_counts(problem)
    return [by_distance[(peer - rank) % problem.world_size] for peer in range(problem.world_size)]


def _make_inputs_v(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    (values,) = _make_inputs(problem, rank, seed, kind, device)
    send = _sent(problem, rank)
    recv = [_sent(problem, peer)[rank] for peer in range(problem.world_size)]
    return (values[: sum(send)].clone(), torch.tensor(send), torch.tensor(recv))


def _make_outputs_v(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    numel = sum(made_up_counts(problem))
    return (torch.empty(numel, dtype=getattr(torch, problem.dtype), device=device),)


def _ordered_reference_v(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    del problem
    return (torch.cat([values.split(send.tolist())[rank] for values, send, _ in inputs]),)


def _reference_v(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (_ordered_reference_v(problem, inputs, rank)[0].double(),)


ALL_TO_ALL_V = register_op(
    OpSpec(
        name="all_to_all_v",
        summary="every rank sends each rank a number of rows of its own",
        reductions=(),
        dtypes=DTYPES,
        shape_help="elements of the largest chunk that one rank may send one peer, e.g. 98304",
        rank_of_shape=1,
        make_inputs=_make_inputs_v,
        make_outputs=_make_outputs_v,
        reference=_reference_v,
        tolerance=dict.fromkeys(DTYPES, 0.0),
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_to_all_v", world_size),
        default_shapes=ALL_TO_ALL.default_shapes,
        ordered_reference=_ordered_reference_v,
    )
)


class AllToAllVariant(MoveVariant):
    op = "all_to_all"
