"""push: the root pushes its input to all peers, chunk by chunk, and they write it out meanwhile.

all_gather's `push` with one sender. In round c the root pushes chunk c into the gather area of every peer, where the
others read chunk c − 2; at the end of a round each block waits for its peers' flags of the round before and then raises
its own. The areas hold `RING` = 4 chunks. The root pushes chunk c over chunk c − 4: it has waited for the flags that
the peers raised at the end of their round c − 2, in which they read chunk c − 4. The first flags of a call say that the
peers have ended their calls before.

The root sends the message once to every peer, so its link carries world_size − 1 times the message: with many ranks
the library, which passes chunks on from rank to rank, is faster at large sizes.

Numerics: ordered (nothing is computed). Graph-safe.
Source: as all_gather's `push`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather.push import LAG
from tunedcomm.kernels.broadcast.op import BroadcastVariant
from tunedcomm.kernels.common.feasibility import MAX_NUM_CHUNKS, RING, packets_a_block
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    exchange_flags,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import packets_of, store_bytes
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PUSH_GRID, RingVariant, Workspace
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def push_kernel(
    x, out, root, nbytes, local, peers, rank, timeout_ns, status, gather, span, num_chunks, ring,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: the root sends chunk c, the others write out chunk c − LAG; `span` packets a chunk."""
    epoch = read_counter(local, EPOCH_OFFSET)
    total = (nbytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + LAG):
        # 1. The root pushes chunk c and copies it to its output unless that is its input.
        end = tl.where(rank == root, tl.minimum((c + 1) * span, total), 0)
        for start in tl.range(first + c * span, end, stride):
            packet = start + offsets
            mask = packet < total
            w0, w1, w2, w3 = load_packets(x + packet * 16, mask)
            place = gather + (packet - (c - c % ring) * span) * 16
            for i in tl.static_range(WORLD_SIZE - 1):
                store_packets(peers[i] + place, w0, w1, w2, w3, mask)
            store_bytes(out + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask & (x != out), ALIGN)

        # 2. The others write out chunk c − LAG.
        back = tl.maximum(c - LAG, 0)
        end = tl.where((rank == root) | (c < LAG), 0, tl.minimum((back + 1) * span, total))
        for start in tl.range(first + back * span, end, stride):
            packet = start + offsets
            mask = packet < total
            place = gather + (packet - (back - back % ring) * span) * 16
            w0, w1, w2, w3 = load_packets(local + place, mask)
            store_bytes(out + packet * 16, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)

        # 3. Chunk c − 1 is there; chunk c has been sent.
        if c <= num_chunks:
            await_peers(local, rank, epoch + 1 + c, timeout_ns, status, WORLD_SIZE)
        if c < num_chunks:
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class Push(RingVariant, BroadcastVariant, registered=True):
    name = "push"
    summary = "the root pushes chunks to all peers, which write them out meanwhile"
    kernels = (push_kernel,)
    space = Space({**PUSH_GRID, "items": Choice(1, 2), "num_chunks": PowerOfTwo(1, MAX_NUM_CHUNKS)})
    ring = RING

    def slots(self, problem: Problem) -> int:
        return 1

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return self.refuse_ring(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = packets_of(problem.nbytes)
        chunks = 2 if packets < 1 << 17 else 8 if packets < 1 << 20 else 32
        return {"num_blocks": min(packets / 512, 132), "num_warps": 16, "num_chunks": chunks}

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        stride = int(config["num_blocks"]) * packets_a_block(config)
        rounds, chunks = -(-packets_of(problem.nbytes) // stride), int(config["num_chunks"])
        span = -(-rounds // chunks)
        return workspace.layout.gather, span * stride, -(-rounds // span), min(chunks, RING)
