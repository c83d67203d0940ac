"""all_to_all and all_to_all_v; the base class of their variants.

all_to_all: every rank sends one chunk to each rank and gets one from each; result chunk i comes from rank i.

all_to_all_v: every rank sends each rank a number of rows of its own; counts differ from pair to pair. No rank knows the
counts of the others, and all must run the same kernel. So a problem knows nothing of counts but a bound that all ranks
state alike: its shape is (elements of the largest chunk that any rank may send any,). Inputs are the rows, and the
elements sent to and got from each rank, int64 on the host: launches read them when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import draw_any, register_move
from tunedcomm.kernels.common.variant import LibraryVariant, MoveVariant, Workspace
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Problem

if TYPE_CHECKING:
    import torch

_ROWS = "rows"  # begins `Problem.layout`; the alignment follows


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    return (draw_any(problem, problem.numel * problem.world_size, rank, seed, kind, device),)


def _received(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    """Of all_to_all_v, inputs also say how many elements a rank sends each."""
    import torch

    chunks = [values.split(counts[0].tolist() if counts else problem.numel) for values, *counts in inputs]
    return torch.cat([chunks_of_rank[rank] for chunks_of_rank in chunks])


ALL_TO_ALL = register_move(
    "all_to_all",
    "every rank sends one chunk to each rank; result chunk i comes from rank i",
    shape_help="number of elements that one rank sends one peer, e.g. 98304",
    make_inputs=_make_inputs,
    received=_received,
    largest_mib=64,
)


def row_alignment(problem: Problem) -> int:
    """Alignment of every chunk and its place in bytes, 16, 4, 2 or 1: a row's.

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
    counts = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (send, recv))
    return (values[: sum(send)].clone(), *counts)


def _make_outputs_v(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    numel = sum(made_up_counts(problem))
    return (torch.empty(numel, dtype=getattr(torch, problem.dtype), device=device),)


ALL_TO_ALL_V = register_move(
    "all_to_all_v",
    "every rank sends each rank a number of rows of its own",
    shape_help="elements of the largest chunk that one rank may send one peer, e.g. 98304",
    make_inputs=_make_inputs_v,
    make_outputs=_make_outputs_v,
    received=_received,
    largest_mib=64,
)


class AllToAllVariant(MoveVariant):
    op = "all_to_all"


class Library(LibraryVariant, registered=True):
    """NCCL (gloo on CPUs). Dtypes that the backend does not know travel as bytes. Graph-safe on NCCL.

    The counts of all_to_all_v are its split sizes; a graph replays the counts of its capture.
    """

    op = "all_to_all"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        exchange: Any = dist.all_to_all_single
        group = workspace.group
        as_bytes = workspace.device.type == "cpu" or problem.dtype not in self.named_dtypes
        width = ITEMSIZE[problem.dtype] if as_bytes else 1

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            out, x = outputs[0].view(-1), inputs[0].view(-1)
            if as_bytes:
                out, x = out.view(torch.uint8), x.view(torch.uint8)
            # Of all_to_all_v, the elements received from and sent to each rank.
            splits = [[count * width for count in counts.tolist()] for counts in reversed(inputs[1:])]
            exchange(out, x, *splits, group=group)

        return run


class LibraryV(Library, registered=True):
    op = "all_to_all_v"
