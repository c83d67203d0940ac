"""lamport, pull: every chunk goes to its receiver at once, or is read by it, after one exchange of flags or two.

**lamport.** Every rank pushes each peer its chunk without flags, and data announce themselves. The protocol is as in
all_gather's `lamport`, with its masks and its proof, but rank j is sent chunk j alone. The own chunk is copied
straight. No chunk is empty, so every peer is sent at least one packet and waited for.

**pull.** Every rank reads its chunk from each peer. Plain input: each rank copies the peers' chunks into its own
one-shot area, a slot for each receiver, the blocks exchange flags, and each rank reads its slot of every peer's area.
Symmetric input: peers read the input itself. Flags and areas are used as by all_gather's `pull`. The own chunk is
copied while the flags travel.

Numerics: ordered (bits are moved). Graph-safe: call counters and epochs live in the lane.
Source: as all_reduce's `lamport`, without a sum and with escapes; the pull is our own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_to_all.op import AllToAllVariant
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_one_shot
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    exchange_flags,
    read_counter,
    shifted,
    write_counter,
)
from tunedcomm.kernels.common.packets import (
    escape,
    escaped_slots,
    has_escape,
    load_bytes,
    restore,
    sentinel_mask_of,
    store_bytes,
)
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_packets, poll_words, store_packets, store_word
from tunedcomm.kernels.common.variant import LamportVariant, PullVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def lamport_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push each peer its chunk, copy the own chunk, poll the peers' chunks. Slot r of a stage holds what rank r sent.

    Example:
        2 ranks, 8 fp32 elements each: chunk j is packet j (total = 1). Rank 0 stores packet 1 at offset 0 of rank 1's
        stage, rank 1 stores packet 0 at offset 16 of rank 0's stage. Each rank copies the chunk that it keeps. Rank 0
        polls offset 16, clears it and writes the packet to bytes 16 … 31 of its output. The masks of the 2 packets of a
        stage lie at offsets 32 and 36.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    offsets, first, stride = block_range(BLOCK)

    # 1. Push chunk j to rank j, with masks where packets have an ESCAPE.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
            chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
            words = words + load_bytes(chunk + packet * 16, left, mask, ALIGN)
        place = rank * total + packet
        for i in tl.static_range(WORLD_SIZE - 1):
            e0, e1 = escape(words[4 * i]), escape(words[4 * i + 1])
            e2, e3 = escape(words[4 * i + 2]), escape(words[4 * i + 3])
            store_packets(peers[i] + stage + place * 16, e0, e1, e2, e3, mask, REMOTE=True)
            sentinels = sentinel_mask_of(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
            store_word(peers[i] + masks + place * 4, sentinels, mask & has_escape(e0, e1, e2, e3))
    launch_next(PDL)

    # 2. Copy the own chunk, poll the peers' packets and masks, clear their places, write the packets out.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, mask, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, mask, ALIGN)
        place = local + stage + packet * 16
        mask_address = local + masks + packet * 4
        words = poll_packets(place, total * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        slots = escaped_slots(words, WORLD_SIZE)
        peer_sentinels = poll_words(mask_address, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            peer_mask = mask & (rank != i)
            store_packets(place + i * total * 16, empty, empty, empty, empty, peer_mask)
            store_word(mask_address + i * total * 4, empty, (slots & (1 << i)) != 0)
            r0, r1 = restore(words[4 * i], peer_sentinels[i], 0), restore(words[4 * i + 1], peer_sentinels[i], 1)
            r2, r3 = restore(words[4 * i + 2], peer_sentinels[i], 2), restore(words[4 * i + 3], peer_sentinels[i], 3)
            store_bytes(out + i * nbytes + packet * 16, left, r0, r1, r2, r3, peer_mask, ALIGN)
    end_call(local, calls)


class Lamport(LamportVariant, AllToAllVariant, registered=True):
    name = "lamport"
    summary = "push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)
    packet_bytes = 16 + 4


@triton.jit
def pull_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status,
    input_peers, area, area_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Slot s of a rank's area holds the chunk for rank + 1 + s.

    Example:
        3 ranks. Rank 0's area holds its chunk for rank 1 in slot 0 and its chunk for rank 2 in slot 1. Rank 2 is two
        ranks after rank 0, so it reads slot 1 of rank 0's area.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the peers' chunks to the own area; peers read a symmetric input where it lies.
    if SYMMETRIC:
        sources = input_peers
    else:
        sources = shifted(peers, own_area)
        for start in tl.range(first, total, stride):
            packet = start + offsets
            mask = packet < total
            words = ()
            for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
                words = words + load_bytes(chunk + packet * 16, nbytes - packet * 16, mask, ALIGN)
            for i in tl.static_range(WORLD_SIZE - 1):
                place = local + own_area + (i * total + packet) * 16
                store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)

    # 2. Exchange flags. Releases the copies (or what wrote the inputs), acquires the peers'; the own chunk is copied
    # meanwhile.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, mask, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, mask, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read the chunk for this rank from every peer and write it out.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            if SYMMETRIC:
                words = words + load_bytes(sources[i] + rank * nbytes + packet * 16, left, mask, ALIGN)
            else:  # this rank comes (WORLD_SIZE - 2 - i) + 1 after rank + 1 + i
                words = words + load_packets(sources[i] + ((WORLD_SIZE - 2 - i) * total + packet) * 16, mask)
        for i in tl.static_range(WORLD_SIZE - 1):
            place = out + (rank + 1 + i) % WORLD_SIZE * nbytes + packet * 16
            w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            store_bytes(place, left, w0, w1, w2, w3, mask, ALIGN)
    if SYMMETRIC:
        # 4. Exchange flags. Orders the peers' reads of this rank's input before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)
    else:
        write_counter(local, epoch + 1, EPOCH_OFFSET)


class Pull(PullVariant, AllToAllVariant, registered=True):
    name = "pull"
    summary = "every rank reads its chunk from each peer; best where peers can address the input"
    kernels = (pull_kernel,)
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 132, 264),
            "num_warps": PowerOfTwo(2, 16),
            "items": Choice(1, 2, 4),
        }
    )

    def num_staged(self, problem: Problem) -> int:
        return problem.world_size - 1

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        if int(config["num_warps"]) * int(config["items"]) > 32:
            return "more than 1024 packets a block at once spill registers"
        symmetric = problem.input_kind == "symmetric"
        if not symmetric and (reason := refuse_one_shot(problem, limits, messages=problem.world_size - 1)):
            return reason
        return blocks_and_threads(config, limits, self.work_packets(problem), max_rounds=256 if symmetric else 8)
