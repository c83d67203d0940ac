"""all_reduce_bias: the sum over the ranks, and a bias added to every row of it.

The kernels are all_reduce's variants of the same names on plain input, with a bias that is added to the sums
as they are written: protocol, areas, flags and lane rules are theirs. They are entries of their own, so that an edit of
one op does not retire the other's measurements. What differs:

- rows are whole packets, so there is no tail; packets behind the end of the matrix are neither sent nor read;
- `two_shot` and `two_shot_lamport`: owners add the bias to their slices before they push them;
- `two_shot_lamport`: slices are not padded, and every slice has a packet (`infeasible` sees to it). A sum by the
  ordered rule is never −0.0, nor is it with a bias, so `escape_sentinel` changes nothing.

Numerics: ordered, `library`: library. Graph-safe. Source: see all_reduce's variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.lamport import Lamport, TwoShotLamport
from tunedcomm.kernels.all_reduce.one_shot import OneShot
from tunedcomm.kernels.all_reduce.op import library_reduction, refuse_empty_slices, refuse_rows
from tunedcomm.kernels.all_reduce.two_shot import RING, TwoShot
from tunedcomm.kernels.common.feasibility import Launch, packets_a_block
from tunedcomm.kernels.common.in_order import InOrderVariant, reduce_in_order
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next, push_to_all, take_sum
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers,
    block_range,
    exchange_flags,
    read_counter,
    shifted,
    write_counter,
)
from tunedcomm.kernels.common.launch import Argument
from tunedcomm.kernels.common.packets import add_extras, escape_sentinels, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.reference import (
    SUM_DTYPES,
    draw,
    generator_of,
    hidden_rows,
    ordered_sum,
    outputs_like,
    row_shapes,
    with_extras,
)
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_from, poll_packets, store_packets
from tunedcomm.kernels.common.variant import PUSH_GRID, LibraryVariant, Workspace
from tunedcomm.metrics import all_reduce_factor
from tunedcomm.space import Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """(x, bias), the bias the same on every rank."""
    of_rank, shared = generator_of(rank, seed, device), generator_of(problem.world_size, seed, device)
    return draw(problem.shape, problem.dtype, of_rank, kind), draw(problem.shape[1:], problem.dtype, shared, kind)


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (sum(x.double() for x, _ in inputs) + inputs[rank][1].double(),)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return (with_extras(ordered_sum([x for x, _ in inputs], "sum"), inputs[rank][1]),)


ALL_REDUCE_BIAS = register_op(
    OpSpec(
        name="all_reduce_bias",
        summary="the ranks' sum plus a bias",
        reductions=("sum",),
        dtypes=SUM_DTYPES,
        shape_help="rows x columns, the bias has one element a column, e.g. 64x8192",
        rank_of_shape=2,
        make_inputs=_make_inputs,
        make_outputs=outputs_like,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖: two roundings in the payload's dtype.
        tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=all_reduce_factor,
        default_shapes=row_shapes,
        ordered_reference=_ordered_reference,
        model_shapes=hidden_rows,
    )
)


@triton.jit
def with_bias(s, bias, packet, row, mask, DTYPE: tl.constexpr):
    """Sums that were rounded plus the bias of their columns, rounded once more."""
    column = packet.to(tl.int32) % row.to(tl.int32)
    b = load_packets(bias + column.to(tl.int64) * 16, mask)
    return add_extras(s, b, b, DTYPE, True, False)


@triton.jit
def bias_lamport_kernel(
    x, bias, out, total, row, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll the peers' packets, sum, add the bias.

    Slot r of a stage holds rank r's packets, tightly packed.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    # 1. Push the own packets into slot `rank` of every peer's stage.
    push_to_all(x, total, stage, peers, rank, WORLD_SIZE, BLOCK)
    launch_next(PDL)

    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    # 2. Poll the peers' packets in the own stage, clear their places, sum in rank order, add the bias.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        own = load_packets(x + packet * 16, mask)
        slot = local + stage + packet * 16
        s = take_sum(own, slot, total * 16, empty, mask, rank, timeout_ns, status, DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, mask, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, mask)
    end_call(local, calls)


@triton.jit
def bias_one_shot_kernel(
    x, bias, out, total, row, local, peers, rank, timeout_ns, status, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets, sum and add."""
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    sources = shifted(peers, own_area)
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the own input to the own area.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        store_packets(local + own_area + packet * 16, w0, w1, w2, w3, mask)

    # 2. Exchange flags. Releases the copies, acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read the packet of every rank, sum in rank order, add the bias.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        own = load_packets(x + packet * 16, mask)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(sources, x, i, rank, WORLD_SIZE)
            words = words + load_packets(source + packet * 16, mask & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, mask, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, mask)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


@triton.jit
def bias_two_shot_kernel(
    x, bias, out, total, row, local, peers, rank, timeout_ns, status,
    scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Plain input. In round c: push chunk c, reduce chunk c − 1, collect chunk c − 2.

    Flags as in all_reduce's `two_shot_kernel`: max(1, 2c) for a pushed chunk, min(2c + 3, 2C) for a reduced one.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    offsets, first, stride = block_range(BLOCK)
    span = ((share + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    for c in tl.range(0, num_chunks + 2):
        # 1. Push chunk c of slice j to rank j.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(share, (c + 1) * span), stride):
                at = start + offsets
                mask = at < share
                for i in tl.static_range(WORLD_SIZE - 1):
                    packet = (rank + 1 + i) % WORLD_SIZE * share + at
                    sent_mask = mask & (packet < total)
                    w0, w1, w2, w3 = load_packets(x + packet * 16, sent_mask)
                    store_packets(peers[i] + scatter + (rank * slot + at - lap) * 16, w0, w1, w2, w3, sent_mask)
            arrive(peers, rank, epoch + tl.maximum(1, 2 * c), WORLD_SIZE)
        # 2. Sum chunk c − 1 of the own slice in rank order, add the bias, push the result to every peer.
        if (c >= 1) & (c <= num_chunks):
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(share, (d + 1) * span), stride):
                at = start + offsets
                packet = rank * share + at
                mask = (at < share) & (packet < total)
                own = load_packets(x + packet * 16, mask)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(local + scatter + (i * slot + at - lap) * 16, mask & (rank != i))
                s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
                s0, s1, s2, s3 = with_bias(s, bias, packet, row, mask, DTYPE)
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + gather + (rank * slot + at - lap) * 16, s0, s1, s2, s3, mask)
                store_packets(out + packet * 16, s0, s1, s2, s3, mask)
            reduced = epoch + tl.minimum(2 * d + 3, 2 * num_chunks)
            arrive(peers, rank, reduced, WORLD_SIZE)
        # 3. Copy chunk c − 2 of the peers' slices to the output.
        if c >= 2:
            e = c - 2
            lap = (e - e % ring) * span
            await_peers(local, rank, epoch + tl.minimum(2 * e + 3, 2 * num_chunks), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + e * span, tl.minimum(share, (e + 1) * span), stride):
                at = start + offsets
                mask = at < share
                for i in tl.static_range(WORLD_SIZE):
                    packet = i * share + at
                    peer_mask = mask & (packet < total) & (rank != i)
                    w0, w1, w2, w3 = load_packets(local + gather + (i * slot + at - lap) * 16, peer_mask)
                    store_packets(out + packet * 16, w0, w1, w2, w3, peer_mask)
    write_counter(local, epoch + 2 * num_chunks, EPOCH_OFFSET)


@triton.jit
def bias_two_shot_lamport_kernel(
    x, bias, out, total, row, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three loops over a slice: push all, reduce and push sums, collect all."""
    calls, scatter = begin_call(local, arena, stage_bytes, PDL)
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16
    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)

    # 1. Push slice j to rank j.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        place = scatter + (rank * share + at) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            packet = (rank + 1 + i) % WORLD_SIZE * share + at
            sent_mask = mask & (packet < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, sent_mask)
            address = peers[i] + place
            w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
            store_packets(address, w0, w1, w2, w3, sent_mask, REMOTE=True)

    # 2. Sum the own slice, add the bias, push the result to every peer, clear the polled places.
    for start in tl.range(first, share, stride):
        at = start + offsets
        packet = rank * share + at
        mask = (at < share) & (packet < total)
        own = load_packets(x + packet * 16, mask)
        place = local + scatter + at * 16
        words = poll_packets(place, share * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, mask, DTYPE)
        s0, s1, s2, s3 = escape_sentinels(s0, s1, s2, s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + packet * 16, s0, s1, s2, s3, mask, REMOTE=True)
        store_packets(out + packet * 16, s0, s1, s2, s3, mask)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * share * 16, empty, empty, empty, empty, mask & (rank != i))
    launch_next(PDL)

    # 3. Collect the peers' slices and clear their places.
    for start in tl.range(first, share, stride):
        at = start + offsets
        for i in tl.static_range(WORLD_SIZE):
            packet = i * share + at
            peer_mask = (at < share) & (packet < total) & (rank != i)
            place = local + gather + packet * 16
            w0, w1, w2, w3 = poll_from(place, peer_mask, tl.full((BLOCK,), i, tl.int32), timeout_ns, status)
            store_packets(out + packet * 16, w0, w1, w2, w3, peer_mask)
            store_packets(place, empty, empty, empty, empty, peer_mask)
    end_call(local, calls)


class _WithBias:
    """The differences from all_reduce's variant of the same name; the kernel takes `(x, bias, out, total, row, …)`."""

    op = "all_reduce_bias"

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return refuse_rows(problem, limits)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {"WORLD_SIZE": problem.world_size, "DTYPE": problem.dtype, "BLOCK": packets_a_block(config)}

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        total = packets_of(problem.nbytes)
        return (None, None, None, total, total // problem.shape[0])

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return inputs[0].data_ptr(), inputs[1].data_ptr(), outputs[0].data_ptr()


class BiasLamport(_WithBias, Lamport, registered=True):
    kernels = (bias_lamport_kernel,)


class BiasOneShot(_WithBias, OneShot, registered=True):
    summary = "every rank reads all inputs, sums them and adds; one exchange of flags"
    kernels = (bias_one_shot_kernel,)


class BiasTwoShot(_WithBias, TwoShot, registered=True):
    kernels = (bias_two_shot_kernel,)
    space = Space({**PUSH_GRID, "num_chunks": PowerOfTwo(1, 16)})

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if packets_a_block(config) > 256 and problem.world_size > 4:
            return f"{packets_a_block(config)} packets a block at once from {problem.world_size} ranks spill registers"
        return super().refuse_config(problem, config, limits)


class BiasTwoShotLamport(_WithBias, TwoShotLamport, registered=True):
    kernels = (bias_two_shot_lamport_kernel,)

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return super().refuse(problem, limits) or refuse_empty_slices(problem)


class BiasLibrary(LibraryVariant, registered=True):
    """NCCL (gloo on CPUs), then PyTorch's addition."""

    op = "all_reduce_bias"
    summary = "NCCL on GPUs, gloo on CPUs, then an addition"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce = library_reduction("sum", workspace.group)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            (x, bias), (out,) = inputs, outputs
            if out is not x:
                out.copy_(x)
            reduce(out)
            out.add_(bias)

        return run


class BiasInOrder(InOrderVariant, registered=True):
    op = "all_reduce_bias"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, bias, out = inputs[0].view(-1), inputs[1].view(-1), outputs[0].view(problem.shape)
            reduce_in_order(x, out.view(-1), "sum", workspace.group)
            out.copy_(with_extras(out, bias))

        return run
