"""push, multimem: every rank pushes its input to all peers, chunk by chunk through their gather areas.

A block exchanges flags: a rank that has raised its first one has left its earlier calls, so its gather area is free.
Then it goes round: in round c it pushes chunk c into its slot of every peer's gather area and, packet by packet in the
same loop, writes out what the peers pushed in round c − 2; at its end it waits for the peers' flags of round c − 1 and
then raises its own. Links and local memory work at the same time, and the flags that a round waits for were raised a
whole round ago. The areas hold `RING` = 4 chunks, so messages of any size fit if they are cut often enough.

Why no chunk is overwritten too early: in round c a block pushes chunk c into the place of chunk c − 4. Before, it
waited for the flags that its counterparts on all peers raised at the end of their round c − 2, in which they wrote out
(read) chunk c − 4. From call to call: a peer pushes only after this rank's first flag of the same call, which this rank
raises after its own call before, and all reads of its gather area, ended. Slot i of a rank's area belongs to the peer
i + 1 after it: only this peer's block b writes, and only this rank's block b reads, what lies there at block b's
places, for all blocks have the same places on every rank.

Blocks begin their first chunk at different places, so that they do not all wait for flags, or for their stores to
arrive, at the same time; they go the same number of rounds.

multimem: the same kernel, in which one store reaches every rank's gather area through the switch. A rank's own gather
area gets its own chunks too, in a slot that nobody reads. Each rank may store only when all have raised their first
flag of the call, which `push` waits for as well; the rest of its proof holds word for word. Refused where the fabric
reports no multicast.

Numerics: ordered (nothing is computed). Graph-safe.
Source: chunked pushes as in NCCL's protocols, with flags in the place of its FIFO; NVLink SHARP as PyTorch's multimem
operators use it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather.op import AllGatherVariant
from tunedcomm.kernels.common.feasibility import (
    MAX_NUM_CHUNKS,
    RING,
    blocks_and_threads,
    cut_to_fit,
    grid_rounds,
    packets_a_block,
    refuse_multicast,
    refuse_staging,
)
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of, store_all, store_bytes
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PUSH_GRID, Workspace
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

LAG = tl.constexpr(2)


@triton.jit
def ring_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status,
    multicast, gather, span, num_chunks, ring, spread,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, MULTIMEM: tl.constexpr,
):  # fmt: skip
    """In round c: send chunk c and, in the same loop, write out the peers' chunk c − LAG.

    A block raises its flags to 1 when it has begun, and to 2 + c when it has sent chunk c. It waits for the peers'
    flags of chunk c − 1 at the end of round c and not where the next round begins: so no block barrier stands between
    the fence of its own flag and the next round, and only the warp that raises the flag waits for its stores.
    `spread` is 1 where the blocks begin at different places of their first chunk.

    Example:
        2 ranks, 8 fp32 elements each (2 packets), 1 chunk. A gather area has one slot, the peer's. Each rank copies its
        own part while the first flags travel. Round 0: rank 0 stores its packets at places 0 and 1 of rank 1's slot.
        Round 2: rank 0 writes what lies at places 0 and 1 of its own slot to bytes 32 … 63 of its output, rank 1 to
        bytes 0 … 31.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    total = (nbytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    late = spread * (tl.program_id(0) * (span // stride) // tl.num_programs(0)) * stride
    slot = ring * span

    # 1. Tell the peers that this rank's gather area may be written; copy the own part of the first chunk until all
    # have said so.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, tl.minimum(total, span - late), stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
        store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 2. Push chunk c to every peer and write out the peers' chunk c − LAG.
    for c in tl.range(0, num_chunks + LAG):
        lap = (c - c % ring) * span
        back = tl.maximum(c - LAG, 0)
        back = (back - back % ring) * span
        end = tl.minimum((c + 1) * span, total + late + LAG * span)
        end = tl.where((c >= num_chunks) & (c < LAG), 0, end)  # nothing left to send, and nothing there yet
        for start in tl.range(first + c * span, end, stride):
            sent = start + offsets
            packet = sent - late
            mask = (packet >= 0) & (packet < total)
            arrived = sent - LAG * span
            arrived_packet = arrived - late
            arrived_mask = (arrived_packet >= 0) & (arrived_packet < total)
            w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
            words = ()
            for i in tl.static_range(WORLD_SIZE - 1):
                source = (rank + 1 + i) % WORLD_SIZE if MULTIMEM else i
                words = words + load_packets(local + gather + (source * slot + arrived - back) * 16, arrived_mask)
            place = gather + (sent - lap) * 16
            if MULTIMEM:
                store_all(multicast, peers, local, place + rank * slot * 16, w0, w1, w2, w3, mask, WORLD_SIZE)
            else:
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + place + (WORLD_SIZE - 2 - i) * slot * 16, w0, w1, w2, w3, mask)
            own = mask & (c > 0)
            store_bytes(out + rank * nbytes + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, own, ALIGN)
            for i in tl.static_range(WORLD_SIZE - 1):
                target = out + ((rank + 1 + i) % WORLD_SIZE) * nbytes + arrived_packet * 16
                w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
                store_bytes(target, nbytes - arrived_packet * 16, w0, w1, w2, w3, arrived_mask, ALIGN)
        if c <= num_chunks:
            await_peers(local, rank, epoch + 1 + c, timeout_ns, status, WORLD_SIZE)
        if c < num_chunks:
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class Push(AllGatherVariant, registered=True):
    name = "push"
    summary = "every rank pushes chunks to all peers and writes out theirs meanwhile; best at large sizes"
    kernels = (ring_kernel,)
    space = Space({**PUSH_GRID, "items": Choice(1, 2), "num_chunks": PowerOfTwo(1, MAX_NUM_CHUNKS)})
    multimem = False

    def slots(self, problem: Problem) -> int:
        """Places of a chunk in a gather area: one a peer, or a rank where one store reaches the same place of all."""
        return problem.world_size if self.multimem else problem.world_size - 1

    def cut(self, problem: Problem, config: Config, staging_bytes: int) -> tuple[int, int, int]:
        """Packets of a chunk, number of chunks, and 1 where blocks begin late (`spread`), for which one is added."""
        stride, chunks = int(config["num_blocks"]) * packets_a_block(config), int(config["num_chunks"])
        rounds = grid_rounds(packets_of(problem.nbytes), config)
        span, num_chunks = cut_to_fit(
            rounds, chunks, unit_bytes=stride * PACKET_BYTES, slots=self.slots(problem), staging_bytes=staging_bytes
        )
        spread = 1 if span > 1 and chunks > 1 else 0
        return span * stride, num_chunks + spread, spread

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits) or self.refuse_items(problem, config):
            return reason
        packets, chunks = packets_of(problem.nbytes), int(config["num_chunks"])
        rounds = grid_rounds(packets, config)
        if rounds < chunks and chunks > 1:
            return f"{rounds} rounds cannot be split into {chunks} chunks"
        span, num_chunks, _ = self.cut(problem, config, limits.staging_bytes)
        max_rounds = 64 * chunks if chunks < MAX_NUM_CHUNKS else 1 << 16
        return refuse_staging(
            problem, limits, chunk_bytes=span * PACKET_BYTES, num_chunks=num_chunks, slots=self.slots(problem)
        ) or blocks_and_threads(config, limits, packets, max_rounds=max_rounds)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        span, num_chunks, _ = self.cut(problem, config, layout.staging_bytes)
        return Room(gather=self.slots(problem) * min(num_chunks, RING) * span * PACKET_BYTES)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        if limits.backend == "host":
            return {"num_blocks": 2, "num_warps": 16, "items": 1, "num_chunks": 2}
        packets = packets_of(problem.nbytes)
        chunks = 2 if packets < 1 << 17 else 8 if packets < 1 << 20 else 32
        return {"num_blocks": min(packets / 512, 132), "num_warps": 16, "items": 1, "num_chunks": chunks}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "MULTIMEM": self.multimem}

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        """Multicast address 0 stands for the emulation under the interpreter."""
        layout, multicast = workspace.layout, workspace.lanes[problem.mode].multicast
        span, num_chunks, spread = self.cut(problem, config, layout.staging_bytes)
        return multicast, layout.gather, span, num_chunks, min(num_chunks, RING), spread


class Multimem(Push, registered=True):
    name = "multimem"
    summary = "every rank's one store reaches all ranks (NVLink multicast)"
    multimem = True

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_multicast(limits) or super().infeasible(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = packets_of(problem.nbytes)
        chunks = 1 if packets < 1 << 17 else 32
        return {"num_blocks": min(packets / 256, 32), "num_warps": 8, "items": 1, "num_chunks": chunks}
