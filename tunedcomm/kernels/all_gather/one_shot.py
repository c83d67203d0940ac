"""lamport, pull: every input goes to all ranks at once, or is read by them, after one exchange of flags or two.

**lamport.** A push without flags; data announce themselves. Best at small sizes. The protocol is that of all_reduce's
`lamport`, with its two stages and its proof; no call is empty, so every peer is sent a packet. Every bit of a payload
counts here, so sentinel words travel as escapes (see `packets`): behind the slots of packets lies one mask word a
packet, which is sent, polled and cleared exactly for packets with an ESCAPE. So a call still clears all that is sent to
it, and any mix of sizes and ops is right.

**pull.** Every rank reads all ranks' inputs. The rules of the areas are in `symm.layout`; block b publishes and reads
the same packets on every rank.

- Plain input up to the size of a one-shot area: each rank copies its input into its own area, the blocks exchange
  flags, and everybody reads everybody's copy. The epoch grows by one, so the areas take turns and no flag is needed at
  the end.
- Larger plain input: the copy lies in the own scatter area. Peers may write that area from the start of their next
  call, so this call ends only after every peer has raised a flag after its last read of anybody's copy.
- Symmetric input: peers read the input itself, so flags are exchanged before (the inputs are there) and after (nobody
  reads any more; the caller may overwrite its input). Any size.

Numerics: ordered (nothing is computed). Graph-safe: call counters and epochs live in the lane.
Source: as all_reduce's `lamport`, for payloads whose every bit counts; the one-shot scheme of NCCL-free serving stacks
and PyTorch's symmetric memory operators.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tunedcomm.kernels.all_gather.op import AllGatherVariant
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_message
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
    packets_of,
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
from tunedcomm.kernels.common.variant import PULL_GRID, LamportVariant, PullVariant, Workspace
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def lamport_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll theirs, write them out. Slot r of a stage holds rank r's, tightly packed."""
    if PDL and not INTERPRET:
        gdc_wait()
    peers = (q0, q1, q2, q3, q4, q5, q6)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    total = (nbytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    lanes, first, step = block_range(BLOCK)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        sentinels = sentinel_mask_of(w0, w1, w2, w3)
        e0, e1, e2, e3 = escape(w0), escape(w1), escape(w2), escape(w3)
        marked = here & has_escape(e0, e1, e2, e3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + stage + (rank * total + packet) * 16, e0, e1, e2, e3, here, REMOTE=True)
            store_word(peers[i] + masks + (rank * total + packet) * 4, sentinels, marked)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, here, ALIGN)
    if PDL and not INTERPRET:
        gdc_launch_dependents()

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, here, rank, timeout_ns, status, WORLD_SIZE)
        noted = local + masks + packet * 4
        slots = escaped_slots(words, WORLD_SIZE)
        sentinels = poll_words(noted, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            theirs = here & (rank != i)
            store_packets(place + i * total * 16, empty, empty, empty, empty, theirs)
            store_word(noted + i * total * 4, empty, ((slots >> i) & 1) != 0)
            store_bytes(
                out + i * nbytes + packet * 16, nbytes - packet * 16,
                restore(words[4 * i], sentinels[i], 0), restore(words[4 * i + 1], sentinels[i], 1),
                restore(words[4 * i + 2], sentinels[i], 2), restore(words[4 * i + 3], sentinels[i], 3), theirs, ALIGN,
            )  # fmt: skip
    write_counter(local, calls + 1, STATE_OFFSET)


class Lamport(LamportVariant, AllGatherVariant, registered=True):
    name = "lamport"
    summary = "one-shot push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)
    packet_bytes = 16 + 4


_MANY_PACKETS, _LEAST_BLOCKS = 1 << 15, 16


@triton.jit
def pull_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    x0, x1, x2, x3, x4, x5, x6, area, area_bytes, ends,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets; `ends` is 1 where flags end the call too."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    total = (nbytes + 15) // 16
    lanes, first, step = block_range(BLOCK)
    if SYMMETRIC:
        peers = (x0, x1, x2, x3, x4, x5, x6)
    else:
        peers = (q0 + mine, q1 + mine, q2 + mine, q3 + mine, q4 + mine, q5 + mine, q6 + mine)
        for start in tl.range(first, total, step):
            packet = start + lanes
            here = packet < total
            w0, w1, w2, w3 = load_packets(x + packet * 16, here)
            store_packets(local + mine + packet * 16, w0, w1, w2, w3, here)

    # Releases the copies (or what wrote the inputs), acquires the peers'; the own part is written meanwhile.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, here)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, here, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            words = words + load_packets(peers[i] + packet * 16, here)
        for i in tl.static_range(WORLD_SIZE - 1):
            place = out + ((rank + 1 + i) % WORLD_SIZE) * nbytes + packet * 16
            w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            store_bytes(place, nbytes - packet * 16, w0, w1, w2, w3, here, ALIGN)
    if ends != 0:
        # Orders the peers' reads of what is this rank's before whatever follows this kernel.
        arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2, WORLD_SIZE)
        await_peers(local, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 1 + ends, EPOCH_OFFSET)


class Pull(PullVariant, AllGatherVariant, registered=True):
    name = "pull"
    summary = "every rank reads all inputs, from staging or, where they are symmetric, from where they lie"
    kernels = (pull_kernel,)
    space = Space({**PULL_GRID, "items": Choice(1, 2, 4)})

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits) or self.refuse_items(problem, config):
            return reason
        packets, room = packets_of(problem.nbytes), max(limits.one_shot_bytes, limits.staging_bytes)
        if problem.input_kind != "symmetric" and (reason := refuse_message(packets * 16, room)):
            return reason
        if limits.backend == "cuda" and packets >= _MANY_PACKETS and int(config["num_blocks"]) < _LEAST_BLOCKS:
            return f"{config['num_blocks']} blocks leave the links idle at {packets} packets"
        return blocks_and_threads(config, limits, packets, most_rounds=64 if packets <= 1 << 17 else 1 << 16)

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        layout = workspace.layout
        if problem.input_kind == "symmetric" or packets_of(problem.nbytes) * 16 > layout.one_shot_bytes:
            return layout.scatter, 0, 1
        return *super().arguments(problem, config, workspace), 0
