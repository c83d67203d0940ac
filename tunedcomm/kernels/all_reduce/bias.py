"""all_reduce_bias: the sum over the ranks, and a bias added to every row of it.

The kernels are those of all_reduce's variants of the same names on plain input, with a bias that is added to the sums
as they are written: protocol, areas, flags and lane rules are theirs. They are entries of their own, so that an edit of
one op does not retire the other's measurements. What differs:

- rows are whole packets, so there is no tail; packets behind the end of the matrix are neither sent nor read;
- `two_shot` and `two_shot_lamport`: owners add the bias to their slices before they push them;
- `two_shot_lamport`: slices are not padded, and every slice has a packet (`infeasible` sees to it). A sum by the
  ordered rule is never −0.0, nor is it with a bias, so `arm` changes nothing;
- `unfused`: one of all_reduce's ordered kernels, then one kernel that adds the bias to the sums in place, which does
  not touch the lane.

Numerics: ordered, `library`: library. Graph-safe. Source: see all_reduce's variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_reduce.lamport import Lamport, TwoShotLamport
from tunedcomm.kernels.all_reduce.one_shot import OneShot
from tunedcomm.kernels.all_reduce.op import library_reduction, refuse_empty_slices, refuse_rows
from tunedcomm.kernels.all_reduce.two_shot import RING, TwoShot
from tunedcomm.kernels.all_reduce.unfused import SUM_KERNELS, UnfusedVariant, sum_space
from tunedcomm.kernels.common.feasibility import Launch, packets_a_block
from tunedcomm.kernels.common.in_order import InOrderVariant, reduce_in_order
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    STATE_OFFSET,
    address_of,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.packets import add_extras, arm, insert_own, packets_of, sum_packets
from tunedcomm.kernels.common.reference import (
    SUM_DTYPES,
    draw,
    generator_of,
    ordered_sum,
    outputs_like,
    row_shapes,
    with_extras,
)
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_from, poll_packets, store_packets
from tunedcomm.kernels.common.variant import PUSH_GRID, LibraryVariant, Workspace
from tunedcomm.metrics import busbw_factor
from tunedcomm.space import Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

_MAX_ADD_BLOCKS = 264


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """(x, bias), the bias the same on every rank."""
    own, shared = generator_of(rank, seed, device), generator_of(problem.world_size, seed, device)
    return draw(problem.shape, problem.dtype, own, kind), draw(problem.shape[1:], problem.dtype, shared, kind)


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
        busbw_factor=lambda world_size: busbw_factor("all_reduce", world_size),
        default_shapes=row_shapes,
        ordered_reference=_ordered_reference,
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
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll theirs, sum. Slot r of a stage holds rank r's packets, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        w0, w1, w2, w3 = arm(w0), arm(w1), arm(w2), arm(w3)
        place = stage + (rank * total + packet) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + place, w0, w1, w2, w3, here, REMOTE=True)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = load_packets(x + packet * 16, here)
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
    write_counter(local, calls + 1, STATE_OFFSET)


@triton.jit
def bias_one_shot_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets, sum and add."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    peers = (q0 + mine, q1 + mine, q2 + mine, q3 + mine, q4 + mine, q5 + mine, q6 + mine)
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        store_packets(local + mine + packet * 16, w0, w1, w2, w3, here)

    # Releases the copies, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = load_packets(x + packet * 16, here)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(peers, x, i, rank, WORLD_SIZE)
            words = words + load_packets(source + packet * 16, here & (rank != i))
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


@triton.jit
def bias_two_shot_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Plain input. In round c: push chunk c, reduce chunk c − 1, collect chunk c − 2.

    A block's flags count its steps. With C chunks, pushing chunk c is step max(1, 2c) and reducing it min(2c + 3, 2C).
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    lanes, first, step = block_range(BLOCK)
    span = ((share + step - 1) // step + num_chunks - 1) // num_chunks * step
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    for c in tl.range(0, num_chunks + 2):
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(share, (c + 1) * span), step):
                at = start + lanes
                here = at < share
                for i in tl.static_range(WORLD_SIZE - 1):
                    packet = (rank + 1 + i) % WORLD_SIZE * share + at
                    there = here & (packet < total)
                    w0, w1, w2, w3 = load_packets(x + packet * 16, there)
                    store_packets(peers[i] + scatter + (rank * slot + at - lap) * 16, w0, w1, w2, w3, there)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= num_chunks):
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(share, (d + 1) * span), step):
                at = start + lanes
                packet = rank * share + at
                here = (at < share) & (packet < total)
                own = load_packets(x + packet * 16, here)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(local + scatter + (i * slot + at - lap) * 16, here & (rank != i))
                s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
                s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + gather + (rank * slot + at - lap) * 16, s0, s1, s2, s3, here)
                store_packets(out + packet * 16, s0, s1, s2, s3, here)
            reduced = epoch + tl.minimum(2 * d + 3, 2 * num_chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, reduced, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            lap = (e - e % ring) * span
            await_peers(local, rank, epoch + tl.minimum(2 * e + 3, 2 * num_chunks), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + e * span, tl.minimum(share, (e + 1) * span), step):
                at = start + lanes
                here = at < share
                for i in tl.static_range(WORLD_SIZE):
                    packet = i * share + at
                    theirs = here & (packet < total) & (rank != i)
                    w0, w1, w2, w3 = load_packets(local + gather + (i * slot + at - lap) * 16, theirs)
                    store_packets(out + packet * 16, w0, w1, w2, w3, theirs)
    write_counter(local, epoch + 2 * num_chunks, EPOCH_OFFSET)


@triton.jit
def bias_two_shot_lamport_kernel(
    x, bias, out, total, row, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three loops over a slice: push all, reduce and push sums, collect all."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    scatter = arena + (calls & 1) * stage_bytes
    share = (total + WORLD_SIZE - 1) // WORLD_SIZE
    gather = scatter + WORLD_SIZE * share * 16
    lanes, first, step = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)

    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        place = scatter + (rank * share + at) * 16
        for i in tl.static_range(WORLD_SIZE - 1):
            packet = (rank + 1 + i) % WORLD_SIZE * share + at
            there = here & (packet < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, there)
            store_packets(peers[i] + place, arm(w0), arm(w1), arm(w2), arm(w3), there, REMOTE=True)

    for start in tl.range(first, share, step):
        at = start + lanes
        packet = rank * share + at
        here = (at < share) & (packet < total)
        own = load_packets(x + packet * 16, here)
        place = local + scatter + at * 16
        words = poll_packets(place, share * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        s = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, False, WORLD_SIZE)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        s0, s1, s2, s3 = arm(s0), arm(s1), arm(s2), arm(s3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + packet * 16, s0, s1, s2, s3, here, REMOTE=True)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * share * 16, empty, empty, empty, empty, here & (rank != i))
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, share, step):
        at = start + lanes
        for i in tl.static_range(WORLD_SIZE):
            packet = i * share + at
            theirs = (at < share) & (packet < total) & (rank != i)
            place = local + gather + packet * 16
            w0, w1, w2, w3 = poll_from(place, theirs, tl.full((BLOCK,), i, tl.int32), timeout_ns, status)
            store_packets(out + packet * 16, w0, w1, w2, w3, theirs)
            store_packets(place, empty, empty, empty, empty, theirs)
    write_counter(local, calls + 1, STATE_OFFSET)


@triton.jit
def bias_rows_kernel(
    out, bias, total, row, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The bias on sums that lie where the result goes; no peers."""
    if PDL and not INTERPRET:
        gdc_wait()
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        s = load_packets(out + packet * 16, here)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)


def x_bias_and_out(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
    """Addresses of the two inputs and the output."""
    return inputs[0].data_ptr(), inputs[1].data_ptr(), outputs[0].data_ptr()


class _WithBias:
    """The differences from all_reduce's variant of the same name; the kernel takes `(x, bias, out, total, row, …)`."""

    op = "all_reduce_bias"

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return refuse_rows(problem, limits)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {"WORLD_SIZE": problem.world_size, "DTYPE": problem.dtype, "BLOCK": packets_a_block(config)}

    def leading(self, problem: Problem) -> tuple[int | None, ...]:
        total = packets_of(problem.nbytes)
        return (None, None, None, total, total // problem.shape[0])

    def arrange(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return x_bias_and_out(inputs, outputs)


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


class BiasUnfused(UnfusedVariant, registered=True):
    op = "all_reduce_bias"
    summary = "an ordered all_reduce kernel, then one kernel that adds the bias"
    kernels = (*SUM_KERNELS, bias_rows_kernel)
    second_warps = "add_warps"
    space = sum_space(second_warps)

    def refuse_second(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_rows(problem, limits)

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        return {**super().wish(problem, limits), "add_warps": 8}

    def second_blocks(self, problem: Problem, config: Config) -> int:
        return max(1, min(-(-packets_of(problem.nbytes) // (32 * int(config["add_warps"]))), _MAX_ADD_BLOCKS))

    def second_constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {"DTYPE": problem.dtype, "BLOCK": 32 * int(config["add_warps"])}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        (reduce, kernel), total = self.bind_both(problem, config, workspace), packets_of(problem.nbytes)
        add = kernel.fix((None, None, total, total // problem.shape[0]))

        def by_address(stream: int, x: int, bias: int, out: int) -> None:
            reduce(stream, x, out)
            add(stream, out, bias)

        return AddressLaunch(by_address, x_bias_and_out)


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
