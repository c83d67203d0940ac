"""all_gather_v and reduce_scatter_v: collectives of rows of which every rank has a number of its own.

    all_gather_v       x [counts[r], row] of rank r → the rows of all ranks, in rank order
    reduce_scatter_v   x [Σ counts, row] → the sum over all ranks of the rows of rank r, [counts[r], row]

The canonical shape is (max_count, row): the most rows that a rank may have, and the elements of a row. A rank's own
number of rows is no part of a problem, for all ranks must run the same kernel. The layout says where counts come from:

- `packed`: n whole numbers that the caller knows, arguments of the launch. Rows lie one rank after another.
- `device`: n int32 in the tensors' memory, which every launch reads. The same order, with room for n · max_count rows:
  those behind the last one are unspecified, in reduce_scatter_v's result zeros. Counts outside of 0 to max_count are
  clamped and noted in `Overflow`.
- `padded`, of all_gather_v: a rank knows its own count alone and sends it along. Rows of rank r begin at row
  r · max_count; those behind its count are unspecified.

all_gather_v also gives the counts, [n] int32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, packets_a_block, refuse_kernels
from tunedcomm.kernels.common.launch import AddressLaunch, Argument
from tunedcomm.kernels.common.packets import alignment_of
from tunedcomm.kernels.common.reference import (
    SUM_DTYPES,
    draw,
    draw_any,
    generator_of,
    ordered_sum,
    reduced,
)
from tunedcomm.kernels.common.variant import (
    KernelVariant,
    LibraryVariant,
    Workspace,
    all_gather_single,
    reduce_scatter_single,
    together,
)
from tunedcomm.kernels.moe.op import CLAMPED, Overflow
from tunedcomm.metrics import shard_factor
from tunedcomm.space import Config, Value
from tunedcomm.spec import DTYPES, ITEMSIZE, Limits, OpSpec, Problem, register_op
from tunedcomm.symm.layout import MAX_WORLD_SIZE

if TYPE_CHECKING:
    import torch

GATHER, SCATTER = "all_gather_v", "reduce_scatter_v"
PACKED, DEVICE, PADDED = "packed", "device", "padded"
_CLAMPED = tl.constexpr(CLAMPED)


@triton.jit
def read_counts(given, row_counts, max_rows, cell, WORLD_SIZE: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows of all ranks, int64, from memory at `given` or from the argument `row_counts`."""
    counts = ()
    num_wrong = max_rows * 0
    for i in tl.static_range(WORLD_SIZE):
        if LAYOUT == "device":
            count = tl.load((given + 4 * i).to(tl.pointer_type(tl.int32))).to(tl.int64)
            clamped = tl.minimum(tl.maximum(count, 0), max_rows)
            num_wrong += (count != clamped).to(tl.int64)
            counts = counts + (clamped,)  # type: ignore[assignment]
        else:
            counts = counts + (row_counts[i],)  # type: ignore[assignment]
    if (num_wrong != 0) & (tl.program_id(0) == 0):
        p = cell.to(tl.pointer_type(tl.int64))
        tl.store(p + 1, max_rows)
        tl.store(p, num_wrong + _CLAMPED)
    return counts


@triton.jit
def pick(counts, index, WORLD_SIZE: tl.constexpr):
    """The rows of rank `index`."""
    count = counts[0]
    for i in tl.static_range(1, WORLD_SIZE):
        count = tl.where(index == i, counts[i], count)
    return count


@triton.jit
def rows_before(counts, index, max_rows, WORLD_SIZE: tl.constexpr, LAYOUT: tl.constexpr):
    """The first row of rank `index` among the rows of all ranks."""
    if LAYOUT == "padded":
        return index * max_rows
    else:
        first = max_rows * 0
        for i in tl.static_range(WORLD_SIZE):
            first += tl.where(i < index, counts[i], 0)
        return first


@triton.jit
def write_counts(counts_out, counts, WORLD_SIZE: tl.constexpr):
    """Fill in the counts of the result; block 0 does."""
    if tl.program_id(0) == 0:
        for i in tl.static_range(WORLD_SIZE):
            tl.store((counts_out + 4 * i).to(tl.pointer_type(tl.int32)), counts[i].to(tl.int32))


def sample_counts(problem: Problem) -> list[int]:
    """Rows of the ranks of samples.

    Uneven, but as many as may be in reduce_scatter_v's layout `packed`, whose results have the shape of the counts.
    """
    most = problem.shape[0]
    if problem.op == SCATTER and problem.layout == PACKED:
        return [most] * problem.world_size
    return [(most, most // 2, most - most // 4, 0)[rank % 4] for rank in range(problem.world_size)]


def note_clamped(problem: Problem, counts: torch.Tensor, workspace: Any) -> torch.Tensor:
    """Counts within 0 to max_count, in stream order; notes that some were not."""
    clamped = counts.clamp(0, problem.shape[0])
    num_wrong = (counts != clamped).sum()
    overflow = Overflow.of(workspace.group, workspace.device)
    overflow.note((num_wrong + CLAMPED) * (num_wrong > 0), problem.shape[0], workspace)
    return clamped


def sources_of(counts: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rank, row within it) of rows 0 to room − 1 of packed rows; nonsense behind the last one."""
    import torch

    row = torch.arange(room, dtype=torch.int64, device=counts.device)
    ends = counts.long().cumsum(0)
    rank = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    return rank, row - (ends - counts)[rank]


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    counts, (most, row), on_device = sample_counts(problem), problem.shape, problem.layout == DEVICE
    if problem.op == GATHER:
        values = draw_any(problem, (most if on_device else counts[rank]) * row, rank, seed, kind, device)
    else:
        num_rows = most * problem.world_size if on_device else sum(counts)
        values = draw((num_rows * row,), problem.dtype, generator_of(rank, seed, device), kind)
    if problem.layout == PADDED:
        return (values.view(-1, row),)
    dtype, place = (torch.int32, device) if on_device else (torch.int64, "cpu")
    return values.view(-1, row), torch.tensor(counts, dtype=dtype, device=place)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    counts, (most, row), n = sample_counts(problem), problem.shape, problem.world_size
    dtype = getattr(torch, problem.dtype)
    if problem.op == SCATTER:
        return (torch.empty(most if problem.layout == DEVICE else counts[0], row, dtype=dtype, device=device),)
    num_rows = sum(counts) if problem.layout == PACKED else most * n
    shape = (n, most, row) if problem.layout == PADDED else (num_rows, row)
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(n, dtype=torch.int32, device=device)


def _exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    counts = sample_counts(problem)
    out, all_counts = _make_outputs(problem, inputs[0][0].device)
    out.view(-1).view(torch.uint8).zero_()
    flat = out.view(-1, problem.shape[1])
    firsts = list(accumulate(counts[:-1], initial=0))
    if problem.layout == PADDED:
        firsts = [peer * problem.shape[0] for peer in range(problem.world_size)]
    for peer, first in enumerate(firsts):
        flat[first : first + counts[peer]].copy_(inputs[peer][0][: counts[peer]])
    return out, all_counts.copy_(torch.tensor(counts, dtype=torch.int32, device="cpu"))


def _summed(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int, *, exact: bool) -> tuple[torch.Tensor]:
    import torch

    counts = sample_counts(problem)
    first = sum(counts[:rank])
    parts = [x[first : first + counts[rank]] for x, _ in inputs]
    total = ordered_sum(parts, "sum") if exact else reduced(parts, "sum", torch.float64)
    (out,) = _make_outputs(problem, inputs[0][0].device)
    out = torch.zeros_like(out, dtype=total.dtype)
    out[: counts[rank]] = total
    return (out,)


def _mask(problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Zeros behind the counts that the result names. In the layout `device` the rank decides which inputs are used."""
    import torch

    inputs = () if problem.layout == DEVICE else inputs[:1]
    if problem.op == SCATTER or not outputs or problem.layout == PACKED:
        return inputs, outputs
    out, counts = outputs
    rows = torch.arange(out.shape[-2], dtype=torch.int64, device=out.device)
    used = rows < (counts.unsqueeze(-1) if problem.layout == PADDED else counts.sum())
    words = out.view(torch.uint8)
    return inputs, (torch.where(used.unsqueeze(-1), words, torch.zeros_like(words)).view(out.dtype), counts)


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    if backend != "cuda":
        return [(1, 256), (16, 1024), (256, 1024)]
    return [(1 << power, 7168) for power in range(12)]


def _model_shapes(shard: Any) -> list[tuple[int, ...]]:
    return [(shard.tokens_per_rank, shard.model.hidden_size)]


_spec = functools.partial(
    OpSpec,
    rank_of_shape=2,
    make_inputs=_make_inputs,
    make_outputs=_make_outputs,
    message_bytes=lambda problem: problem.nbytes,
    busbw_factor=shard_factor,
    default_shapes=_default_shapes,
    is_per_rank=True,
    model_shapes=_model_shapes,
    mask_unspecified=_mask,
)
register_op(
    _spec(
        name=GATHER,
        summary="every rank gets the rows of all ranks, each of which has a number of its own",
        reductions=(),
        dtypes=DTYPES,
        shape_help="most rows of a rank x elements of a row, e.g. 64x7168",
        reference=lambda *arguments: tuple(each.double() for each in _exact(*arguments)),
        tolerance=dict.fromkeys(DTYPES, 0.0),
        ordered_reference=_exact,
        layouts=(PACKED, DEVICE, PADDED),
        related_forms=lambda problem: ((PACKED, DEVICE, PADDED), ()),
    )
)
register_op(
    _spec(
        name=SCATTER,
        summary="every rank gets the sum over all ranks of its rows, of which each has a number of its own",
        reductions=("sum",),
        dtypes=SUM_DTYPES,
        shape_help="most rows of a rank's result x elements of a row, e.g. 64x7168",
        reference=lambda *arguments: _summed(*arguments, exact=False),
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        ordered_reference=lambda *arguments: _summed(*arguments, exact=True),
        layouts=(PACKED, DEVICE),
        related_forms=lambda problem: ((PACKED, DEVICE), ()),
    )
)


class ByCountsVariant(KernelVariant):
    """A variant whose kernel takes `(x, given, out, counts_out, row_counts, max_rows, row_bytes, …, cell)`."""

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        is_sum = problem.op == SCATTER
        return refuse_kernels(problem, limits, SUM_DTYPES if is_sum else DTYPES, ("sum",) if is_sum else ("",))

    def row_bytes(self, problem: Problem) -> int:
        return problem.shape[1] * ITEMSIZE[problem.dtype]

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        return (None, None, None, 0 if problem.op == SCATTER else None, None, problem.shape[0], self.row_bytes(problem))

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        cell = Overflow.of(workspace.group, workspace.device).cell
        return (*super().arguments(problem, config, workspace), cell.data_ptr())

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        counts = inputs[1].tolist() if problem.layout == PACKED else [len(inputs[0])] * problem.world_size
        at_given = 0 if problem.layout == PADDED else inputs[1].data_ptr()
        return inputs[0].data_ptr(), at_given, *(each.data_ptr() for each in outputs), as_argument(counts)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        sums: dict[str, Value] = {"DTYPE": problem.dtype} if problem.op == SCATTER else {}
        return {
            "WORLD_SIZE": problem.world_size,
            "ALIGN": alignment_of(self.row_bytes(problem)),
            "LAYOUT": problem.layout,
            "BLOCK": packets_a_block(config),
            **sums,
        }

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        bound = super().bind(problem, config, workspace)
        assert isinstance(bound, AddressLaunch), "inputs are plain"
        if problem.layout != DEVICE:
            return bound
        overflow, launch = Overflow.of(workspace.group, workspace.device), bound.by_address
        on_host = workspace.device.type == "cpu"

        def run(stream: int, *arguments: Any) -> None:
            overflow.check(workspace)
            launch(stream, *arguments)
            if on_host:  # the interpreter has run the kernel to its end
                overflow.check(workspace)

        return AddressLaunch(run, bound.addresses)


def as_argument(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts as kernels take them."""
    return (*counts, *(0,) * (MAX_WORLD_SIZE - len(counts)))


class GatherLibrary(LibraryVariant, registered=True):
    """Grouped broadcasts for `packed`; else a gather of max_count rows of a rank, and copies. Graph-safe on NCCL."""

    op = GATHER
    numerics = "ordered"  # bits are moved
    summary = "grouped broadcasts of NCCL (gloo on CPUs), or a gather of padded rows"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        group, rank, (most, row), n = workspace.group, workspace.rank, problem.shape, problem.world_size
        gather = all_gather_single()

        def whole(x: torch.Tensor, out: torch.Tensor) -> None:
            gather(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)

        def run_packed(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, (out, all_counts), counts = inputs[0], outputs, inputs[1].tolist()
            shares = out.view(-1, row).split(counts)
            shares[rank].copy_(x.view(-1, row))
            with together(group, workspace.device):
                for root, share in enumerate(shares):
                    if share.numel():
                        dist.broadcast(share.view(-1).view(torch.uint8), group=group, group_src=root)
            for each, count in zip(all_counts, counts, strict=True):
                each.fill_(count)  # captures take no copies from the host

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, (out, all_counts) = inputs[0].view(-1, row), outputs
            if problem.layout == PADDED:
                sent = x.new_empty(most, row)
                sent[: len(x)].copy_(x)
                whole(sent, out)
                whole(torch.full((1,), len(x), dtype=torch.int32, device=x.device), all_counts)
                return
            all_counts.copy_(note_clamped(problem, inputs[1], workspace))
            got = x.new_empty(n * most, row)
            whole(x, got)
            peer, within = sources_of(all_counts, n * most)
            torch.index_select(got, 0, (peer * most + within).clamp(max=n * most - 1), out=out.view(-1, row))

        return run_packed if problem.layout == PACKED else run


class ScatterLibrary(LibraryVariant, registered=True):
    """Grouped reduces for `packed`, else a reduce_scatter of max_count rows for every rank. Graph-safe on NCCL."""

    op = SCATTER
    summary = "grouped reduces of NCCL (gloo on CPUs), or a reduce_scatter of padded rows"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        group, rank, (most, row), n = workspace.group, workspace.rank, problem.shape, problem.world_size
        scatter = reduce_scatter_single()

        def run_packed(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, counts = inputs
            shares = x.view(-1, row).clone().split(counts.tolist())
            with together(group, workspace.device):
                for root, share in enumerate(shares):
                    if share.numel():
                        dist.reduce(share, group=group, group_dst=root)
            outputs[0].view(-1, row).copy_(shares[rank])

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, counts = inputs[0].view(-1, row), note_clamped(problem, inputs[1], workspace)
            firsts = counts.long().cumsum(0) - counts
            within = torch.arange(most, dtype=torch.int64, device=x.device)
            places = (firsts.unsqueeze(1) + within).clamp(max=n * most - 1).view(-1)
            used = (within < counts.unsqueeze(1)).view(-1, 1)
            scatter(outputs[0].view(-1), torch.where(used, x[places], torch.zeros_like(x)).view(-1), group=group)

        return run_packed if problem.layout == PACKED else run
