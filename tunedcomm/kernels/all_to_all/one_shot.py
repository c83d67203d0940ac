"""lamport, pull: every chunk goes to its receiver at once, or is read by it, after one exchange of flags or two.

**lamport.** Every rank pushes each peer its chunk without flags, and data announce themselves. The protocol is that of
all_gather's `lamport`, with its masks and its proof, but rank j is sent chunk j alone. The own chunk is copied
straight. No chunk is empty, so every peer is sent at least one packet and waited for.

**pull.** Every rank reads its chunk from each peer. Plain input: each rank copies what it sends into its own one-shot
area, a slot for each receiver, the blocks exchange flags, and everybody reads its slot of everybody's area. Symmetric
input: peers read the input itself. Flags and areas are used as by all_gather's `pull`. The own chunk is copied while
the flags travel.

Numerics: ordered (bits are moved). Graph-safe: call counters and epochs live in the lane.
Source: as all_reduce's `lamport`, without a sum and with escapes; the pull is our own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_to_all.op import AllToAllVariant
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_one_shot
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    STATE_OFFSET,
    arrive,
    await_peers,
    block_range,
    read_counter,
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
from tunedcomm.kernels.common.sync import (
    INTERPRET,
    SENTINEL,
    load_packets,
    poll_packets,
    poll_words,
    store_packets,
    store_word,
)
from tunedcomm.kernels.common.variant import LamportVariant, PullVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def lamport_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push each peer its chunk, copy the own one, poll the peers'. Slot r of a stage holds what rank r sent."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
            chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
            words = words + load_bytes(chunk + packet * 16, left, here, ALIGN)
        place = rank * total + packet
        for i in tl.static_range(WORLD_SIZE - 1):
            e0, e1 = escape(words[4 * i]), escape(words[4 * i + 1])
            e2, e3 = escape(words[4 * i + 2]), escape(words[4 * i + 3])
            store_packets(peers[i] + stage + place * 16, e0, e1, e2, e3, here, REMOTE=True)
            sentinels = sentinel_mask_of(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
            store_word(peers[i] + masks + place * 4, sentinels, here & has_escape(e0, e1, e2, e3))
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, here, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, here, ALIGN)
        place = local + stage + packet * 16
        beside = local + masks + packet * 4
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        slots = escaped_slots(words, WORLD_SIZE)
        said = poll_words(beside, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            theirs = here & (rank != i)
            store_packets(place + i * total * 16, empty, empty, empty, empty, theirs)
            store_word(beside + i * total * 4, empty, (slots & (1 << i)) != 0)
            r0, r1 = restore(words[4 * i], said[i], 0), restore(words[4 * i + 1], said[i], 1)
            r2, r3 = restore(words[4 * i + 2], said[i], 2), restore(words[4 * i + 3], said[i], 3)
            store_bytes(out + i * nbytes + packet * 16, left, r0, r1, r2, r3, theirs, ALIGN)
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(LamportVariant, AllToAllVariant, registered=True):
    name = "lamport"
    summary = "push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)
    packet_bytes = 16 + 4


@triton.jit
def pull_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    x0, x1, x2, x3, x4, x5, x6, area, area_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Slot s of a rank's area holds what it sends to rank + 1 + s."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    lanes, first, step = block_range(BLOCK)
    if SYMMETRIC:
        peers = (x0, x1, x2, x3, x4, x5, x6)
    else:
        peers = (q0 + mine, q1 + mine, q2 + mine, q3 + mine, q4 + mine, q5 + mine, q6 + mine)
        for start in tl.range(first, total, step):
            packet = start + lanes
            here = packet < total
            words = ()
            for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
                words = words + load_bytes(chunk + packet * 16, nbytes - packet * 16, here, ALIGN)
            for i in tl.static_range(WORLD_SIZE - 1):
                place = local + mine + (i * total + packet) * 16
                store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], here)

    # Releases the copies (or what wrote the inputs), acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, here, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, here, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            if SYMMETRIC:
                words = words + load_bytes(peers[i] + rank * nbytes + packet * 16, left, here, ALIGN)
            else:  # this rank comes (WORLD_SIZE - 2 - i) + 1 after rank + 1 + i
                words = words + load_packets(peers[i] + ((WORLD_SIZE - 2 - i) * total + packet) * 16, here)
        for i in tl.static_range(WORLD_SIZE - 1):
            place = out + (rank + 1 + i) % WORLD_SIZE * nbytes + packet * 16
            w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            store_bytes(place, left, w0, w1, w2, w3, here, ALIGN)
    if SYMMETRIC:
        # Orders the peers' reads of this rank's input before whatever follows this kernel.
        arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2, WORLD_SIZE)
        await_peers(local, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
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

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        if int(config["num_warps"]) * int(config["items"]) > 32:
            return "more than 1024 packets a block at once spill registers"
        symmetric = problem.input_kind == "symmetric"
        if not symmetric and (reason := refuse_one_shot(problem, limits, messages=problem.world_size - 1)):
            return reason
        return blocks_and_threads(config, limits, self.work_packets(problem), most_rounds=256 if symmetric else 8)
