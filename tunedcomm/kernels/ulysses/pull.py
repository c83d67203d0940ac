"""pull: every rank reads its share of each peer's input and writes it where its output wants it.

Symmetric input: peers read the input itself. Plain input: each rank copies the peers' shares into its own one-shot
area, a slot for each receiver. Flags and areas are used as by all_to_all's `pull`.

Numerics: ordered (bits are moved). Graph-safe.
Source: own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import packets_a_block
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
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PULL_GRID, PullVariant
from tunedcomm.kernels.ulysses.op import GATHER, SCATTER, UlyssesVariant
from tunedcomm.kernels.ulysses.push import copy_own, packet_at
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room


@triton.jit
def pull_kernel(
    x, out, total, send_unit, recv_unit, local, peers, rank, timeout_ns, status, input_peers, area, area_bytes,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Slot s of a rank's area holds the share of rank + 1 + s."""
    epoch = read_counter(local, EPOCH_OFFSET)
    total, send_unit, recv_unit = total.to(tl.int64), send_unit.to(tl.int64), recv_unit.to(tl.int64)
    own_area = area + (epoch & 1) * area_bytes
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the peers' shares to the own area; peers read a symmetric input where it lies.
    if SYMMETRIC:
        sources = input_peers
    else:
        sources = shifted(peers, own_area)
        for start in tl.range(first, total, stride):
            packet = start + offsets
            mask = packet < total
            words = ()
            for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                owner = (rank + 1 + i) % WORLD_SIZE
                words = words + load_packets(packet_at(x, packet, owner, send_unit, WORLD_SIZE), mask)
            for i in tl.static_range(WORLD_SIZE - 1):
                place = local + own_area + (i * total + packet) * 16
                store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)

    # 2. Exchange flags. Releases the copies (or what wrote the inputs), acquires the peers'; the own share is copied
    # meanwhile.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    copy_own(x, out, total, send_unit, recv_unit, rank, first, stride, offsets, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read the share of this rank from every peer and write it out.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            if SYMMETRIC:
                words = words + load_packets(packet_at(sources[i], packet, rank, send_unit, WORLD_SIZE), mask)
            else:  # this rank comes (WORLD_SIZE - 2 - i) + 1 after rank + 1 + i
                words = words + load_packets(sources[i] + ((WORLD_SIZE - 2 - i) * total + packet) * 16, mask)
        for i in tl.static_range(WORLD_SIZE - 1):
            place = packet_at(out, packet, (rank + 1 + i) % WORLD_SIZE, recv_unit, WORLD_SIZE)
            store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)
    if SYMMETRIC:
        # 4. Exchange flags. Orders the peers' reads of this rank's input before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)
    else:
        write_counter(local, epoch + 1, EPOCH_OFFSET)


class ScatterPull(PullVariant, UlyssesVariant, registered=True):
    op = SCATTER
    name = "pull"
    summary = "every rank reads its share of each peer's input; best where peers can address the input"
    kernels = (pull_kernel,)
    space = Space({**PULL_GRID, "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264), "items": Choice(1, 2, 4)})
    max_rounds = 256

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if packets_a_block(config) > 1024:
            return "more than 1024 packets a block at once spill registers"
        if (staged := self.staged_bytes(problem)) > limits.one_shot_bytes:
            return f"{staged} bytes exceed the one-shot area of {limits.one_shot_bytes} bytes"
        return None

    def staged_bytes(self, problem: Problem) -> int:
        """Bytes of the one-shot area that the peers' shares take."""
        shares = 0 if problem.input_kind == "symmetric" else problem.world_size - 1
        return shares * self.work_packets(problem) * PACKET_BYTES

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return Room(one_shot=self.staged_bytes(problem))


class GatherPull(ScatterPull, registered=True):
    op = GATHER
