"""lamport, pull: every input goes to all ranks at once, or is read by them, after one exchange of flags or two.

**lamport.** A push without flags; data announce themselves. Best at small sizes. The protocol is all_reduce's
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

from tunedcomm.kernels.all_gather.op import AllGatherVariant
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_message
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
    packets_of,
    restore,
    sentinel_mask_of,
    store_bytes,
)
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_packets, poll_words, store_packets, store_word
from tunedcomm.kernels.common.variant import PULL_GRID, LamportVariant, PullVariant, Workspace
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room


@triton.jit
def lamport_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push own packets to all peers, poll the peers' packets, write them out.

    Slot r of a stage holds rank r's packets, tightly packed.

    Example:
        2 ranks, 8 fp32 elements each (2 packets, total = 2). Rank 1 stores its packets at offsets 32 and 48 of rank 0's
        stage. If its packet 1 has an ESCAPE, rank 1 stores that packet's mask at 64 + 12, behind the 4 packets of the
        stage. Rank 0 polls 32 and 48, then 76 because packet 1 has an ESCAPE, clears all three and writes bytes 32 …
        63 of its output.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = (nbytes + 15) // 16
    masks = stage + WORLD_SIZE * total * 16
    offsets, first, stride = block_range(BLOCK)

    # 1. Push the own packets, and masks where they have an ESCAPE, to every peer; write the own part of the output.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        sentinels = sentinel_mask_of(w0, w1, w2, w3)
        e0, e1, e2, e3 = escape(w0), escape(w1), escape(w2), escape(w3)
        marked = mask & has_escape(e0, e1, e2, e3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + stage + (rank * total + packet) * 16, e0, e1, e2, e3, mask, REMOTE=True)
            store_word(peers[i] + masks + (rank * total + packet) * 4, sentinels, marked)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    launch_next(PDL)

    # 2. Poll the peers' packets and masks, clear their places, write the packets out.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        place = local + stage + packet * 16
        words = poll_packets(place, total * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        mask_address = local + masks + packet * 4
        slots = escaped_slots(words, WORLD_SIZE)
        sentinels = poll_words(mask_address, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            peer_mask = mask & (rank != i)
            store_packets(place + i * total * 16, empty, empty, empty, empty, peer_mask)
            store_word(mask_address + i * total * 4, empty, ((slots >> i) & 1) != 0)
            store_bytes(
                out + i * nbytes + packet * 16, nbytes - packet * 16,
                restore(words[4 * i], sentinels[i], 0), restore(words[4 * i + 1], sentinels[i], 1),
                restore(words[4 * i + 2], sentinels[i], 2), restore(words[4 * i + 3], sentinels[i], 3),
                peer_mask, ALIGN,
            )  # fmt: skip
    end_call(local, calls)


class Lamport(LamportVariant, AllGatherVariant, registered=True):
    name = "lamport"
    summary = "one-shot push without flags: packets announce themselves; best at small sizes"
    kernels = (lamport_kernel,)
    packet_bytes = 16 + 4


_MANY_PACKETS, _MIN_BLOCKS = 1 << 15, 16


@triton.jit
def pull_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status,
    input_peers, area, area_bytes, ends,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets; `ends` is 1 where flags end the call too."""
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    total = (nbytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the own input to the own area; peers read a symmetric input where it lies.
    if SYMMETRIC:
        sources = input_peers
    else:
        sources = shifted(peers, own_area)
        for start in tl.range(first, total, stride):
            packet = start + offsets
            mask = packet < total
            w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
            store_packets(local + own_area + packet * 16, w0, w1, w2, w3, mask)

    # 2. Exchange flags. Releases the copies (or what wrote the inputs), acquires the peers'; the own part is written
    # meanwhile.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read every peer's packets and write them out.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            words = words + load_packets(sources[i] + packet * 16, mask)
        for i in tl.static_range(WORLD_SIZE - 1):
            place = out + ((rank + 1 + i) % WORLD_SIZE) * nbytes + packet * 16
            w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
            store_bytes(place, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    if ends != 0:
        # 4. Exchange flags. Orders the peers' reads of this rank's input or copy before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
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
        if limits.backend == "cuda" and packets >= _MANY_PACKETS and int(config["num_blocks"]) < _MIN_BLOCKS:
            return f"{config['num_blocks']} blocks leave the links idle at {packets} packets"
        return blocks_and_threads(config, limits, packets, max_rounds=64 if packets <= 1 << 17 else 1 << 16)

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        layout = workspace.layout
        if problem.input_kind == "symmetric" or packets_of(problem.nbytes) * 16 > layout.one_shot_bytes:
            return layout.scatter, 0, 1
        return *super().arguments(problem, config, workspace), 0

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        nbytes = packets_of(problem.nbytes) * 16
        if problem.input_kind == "symmetric":
            return Room()
        return Room(scatter=nbytes) if nbytes > layout.one_shot_bytes else Room(one_shot=nbytes)
