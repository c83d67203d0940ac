"""lamport, one_shot, one_shot_fp32, multimem: every chunk goes to its owner, or is read by it, in one piece.

**lamport.** Every rank pushes its chunks to their owners without flags; packets announce themselves. The protocol is
as in all_reduce's `lamport`, with its two stages and its proof, but rank j is sent chunk j alone, and the own chunk
never leaves. No chunk is empty, so every peer is sent at least one packet.

**one_shot.** Every rank reads its chunk of all ranks' inputs and sums; one flag exchange a block. Plain input: each
rank copies the other ranks' chunks of its input into its own one-shot area, each from a whole packet on, the blocks
exchange flags, and everybody reads its chunk of everybody's copy. Symmetric input: peers read the input itself,
whatever its size. Flags and areas are used as by all_gather's `pull`. Loads are issued for all ranks at once and added
in rank order. `one_shot_fp32` gives fp32 sums of 16-bit floats: half of the bytes of an fp32 reduce_scatter cross the
links.

**multimem.** The switch sums each rank's chunk of all ranks' copies with `multimem.ld_reduce`. The input is copied into
the scatter area, chunk j from packet j × total on, flags, each rank loads the sums of its chunk through the multicast
address, flags, after which nobody reads the scatter areas any more. Refused where the fabric reports no multicast.

Numerics: ordered; multimem library (each element is summed once, for its one owner, in an order that is the switch's).
Graph-safe: call counters and epochs live in the lane.
Source: as all_reduce's `lamport`, the first half of a two-shot; the pull scheme of the one-shot all_reduce, of which
each rank needs a part; NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_message, refuse_multicast, refuse_one_shot
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next, take_sum
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    block_range,
    exchange_flags,
    read_counter,
    shifted,
    write_counter,
)
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape_sentinels,
    insert_own,
    load_bytes,
    load_reduce,
    mean_packets,
    num_packets,
    packets_of,
    write_elements,
)
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, store_packets
from tunedcomm.kernels.common.variant import MULTIMEM_GRID, PULL_GRID, LamportVariant, PullVariant
from tunedcomm.kernels.common.wide import write_sum
from tunedcomm.kernels.reduce_scatter.op import ReduceScatterVariant
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem


@triton.jit
def lamport_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push chunks to their owners, poll the own chunk, sum. Slot r of a stage holds rank r's packets, tightly packed.

    Example:
        2 ranks, 8 fp32 elements each: chunk j is packet j (total = 1). Rank 0 stores packet 1 at offset 0 of rank 1's
        stage, rank 1 stores packet 0 at offset 16 of rank 0's stage. Rank 0 polls offset 16, clears it, and writes its
        own packet 0 plus rank 1's to its output.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    offsets, first, stride = block_range(BLOCK)

    # 1. Push chunk j to rank j.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        place = stage + (rank * total + packet) * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + load_bytes(x + owner * nbytes + packet * 16, left, mask, ALIGN)
        for i in tl.static_range(WORLD_SIZE - 1):
            w0, w1, w2, w3 = escape_sentinels(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
            store_packets(peers[i] + place, w0, w1, w2, w3, mask, REMOTE=True)
    launch_next(PDL)

    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    # 2. Poll the peers' packets of the own chunk, clear their places, sum in rank order.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        own = load_bytes(x + rank * nbytes + packet * 16, nbytes - packet * 16, mask, ALIGN)
        slot = local + stage + packet * 16
        s0, s1, s2, s3 = take_sum(own, slot, total * 16, empty, mask, rank, timeout_ns, status, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, ALIGN < 16)
    end_call(local, calls)


class Lamport(LamportVariant, ReduceScatterVariant, registered=True):
    name = "lamport"
    summary = "chunks pushed to their owners without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)


@triton.jit
def one_shot_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status,
    input_peers, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Publish the peers' chunks, exchange flags, read the own chunk of all ranks and sum.

    `numel` is one chunk's. Chunk j of a copy begins j × total packets into the area.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the peers' chunks to the own area; peers read a symmetric input where it lies.
    if not SYMMETRIC:
        for start in tl.range(first, total, stride):
            packet = start + offsets
            mask = packet < total
            for i in tl.static_range(WORLD_SIZE - 1):
                owner = (rank + 1 + i) % WORLD_SIZE
                at = x + owner * nbytes + packet * 16
                w0, w1, w2, w3 = load_bytes(at, nbytes - packet * 16, mask, ALIGN)
                store_packets(local + own_area + (owner * total + packet) * 16, w0, w1, w2, w3, mask)

    # 2. Exchange flags. Releases the copies (or what wrote the inputs), acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read the own chunk of every rank and sum in rank order.
    own_chunk = x + rank * nbytes
    if SYMMETRIC:
        shift = rank * nbytes
        sources = shifted(input_peers, shift)
    else:
        shift = own_area + rank * total * 16
        sources = shifted(peers, shift)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(sources, own_chunk, i, rank, WORLD_SIZE) + packet * 16
            if SYMMETRIC:
                words = words + load_bytes(source, left, mask, ALIGN)
            else:
                words = words + load_packets(source, mask & (rank != i))
        if not SYMMETRIC:
            own = load_bytes(own_chunk + packet * 16, left, mask, ALIGN)
            words = insert_own(words, own, rank, WORLD_SIZE)
        write_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, WIDTH, AVG, ALIGN < 16, WIDE)
    if SYMMETRIC:
        # 4. Exchange flags. Orders the peers' reads of this rank's input before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)
    else:
        write_counter(local, epoch + 1, EPOCH_OFFSET)


class OneShot(PullVariant, ReduceScatterVariant, registered=True):
    name = "one_shot"
    summary = "every rank reads its chunk of all inputs and sums; one exchange of flags"
    kernels = (one_shot_kernel,)
    space = Space({**PULL_GRID, "items": Choice(1, 2)})

    def num_staged(self, problem: Problem) -> int:
        return problem.world_size

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        symmetric = problem.input_kind == "symmetric"
        return (
            self.refuse(problem, limits)
            or (None if symmetric else refuse_one_shot(problem, limits, messages=problem.world_size))
            or blocks_and_threads(config, limits, self.work_packets(problem), max_rounds=1 << 16 if symmetric else 8)
        )

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "WIDE": self.wide}


class OneShotWide(OneShot, registered=True):
    name = "one_shot_fp32"
    summary = "fp32 sums of 16-bit floats: every rank reads its chunk of all inputs; one exchange of flags"
    wide = True


@triton.jit
def multimem_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, multicast, scatter,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Block b publishes and sums the same positions of every chunk, so blocks b wait for each other alone."""
    epoch = read_counter(local, EPOCH_OFFSET)
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the own input to the own scatter area.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        for i in tl.static_range(WORLD_SIZE):
            at = x + i * nbytes + packet * 16
            w0, w1, w2, w3 = load_bytes(at, nbytes - packet * 16, mask, ALIGN)
            store_packets(local + scatter + (i * total + packet) * 16, w0, w1, w2, w3, mask)
    # 2. Exchange flags. Releases the copies, acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    # 3. Load the sums of the own chunk, which the switch makes.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        offset = scatter + (rank * total + packet) * 16
        sums = load_reduce(multicast, peers, local, offset, mask, DTYPE, WORLD_SIZE)
        s0, s1, s2, s3 = mean_packets(sums, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, ALIGN < 16)
    # 4. Exchange flags. Tells the peers that this rank reads no scatter area any more.
    exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2, EPOCH_OFFSET)


class Multimem(ReduceScatterVariant, registered=True):
    name = "multimem"
    numerics = "library"
    summary = "the switch sums each chunk for its owner (NVLink multicast)"
    kernels = (multimem_kernel,)
    space = Space(MULTIMEM_GRID)
    trailing_arguments = ("multicast", "scatter")

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        needed = problem.world_size * packets_of(problem.nbytes) * PACKET_BYTES
        reason = refuse_multicast(limits) or super().refuse(problem, limits)
        return reason or refuse_message(needed, limits.staging_bytes)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {"num_blocks": min(packets_of(problem.nbytes) / 256, 32), "num_warps": 8}
