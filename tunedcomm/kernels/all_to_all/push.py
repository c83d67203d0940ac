"""push: all_to_all through the peers' gather areas, ordered by flags; best at large sizes.

A rank pushes a piece of each peer's chunk into its slot of that peer's gather area, raises a flag, and copies what the
peers pushed to it to the result. With `num_chunks` > 1 a block does this piece by piece and pushes the next piece
before it waits for the last one, so that links do not idle while flags travel. Slots hold `RING` pieces, so messages
of any size fit if cut often enough. There is a slot for each peer and none for the rank itself, whose own chunk is
copied straight while the first flags travel.

Why no slot is overwritten too early, within a call: in round c a block pushes piece c into the place of piece c − 4. In
round c − 1 it waited for the flags that its counterparts raised after they pushed piece c − 2; before that, in their
round c − 3, they had copied piece c − 4 away.
From call to call: no rank pushes before it has seen every peer's first flag of this call, which a peer raises after its
last kernel, and all reads of its gather area, ended.

Numerics: ordered (bits are moved). Graph-safe.
Source: own; the ring is that of `all_reduce`'s `two_shot`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.all_to_all.op import AllToAllVariant
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_chunks
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import load_bytes, packets_of, store_bytes
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

RING = tl.constexpr(4)


@triton.jit
def push_kernel(
    x, out, nbytes, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, collect piece c − 1. Slot s of a gather area holds what rank + 1 + s sent."""
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    lanes, first, step = block_range(BLOCK)
    span = ((total + step - 1) // step + num_chunks - 1) // num_chunks * step
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    # Says that this rank reads its gather area no more.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, here, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, here, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + 1):
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(total, (c + 1) * span), step):
                packet = start + lanes
                here = packet < total
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                    chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
                    words = words + load_bytes(chunk + packet * 16, nbytes - packet * 16, here, ALIGN)
                for i in tl.static_range(WORLD_SIZE - 1):  # this rank comes (WORLD_SIZE - 2 - i) + 1 after the peer
                    place = peers[i] + gather + ((WORLD_SIZE - 2 - i) * slot + packet - lap) * 16
                    store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], here)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 + c, WORLD_SIZE)
        if c >= 1:
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(total, (d + 1) * span), step):
                packet = start + lanes
                here = packet < total
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):
                    words = words + load_packets(local + gather + (i * slot + packet - lap) * 16, here)
                for i in tl.static_range(WORLD_SIZE - 1):
                    place = out + (rank + 1 + i) % WORLD_SIZE * nbytes + packet * 16
                    w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
                    store_bytes(place, nbytes - packet * 16, w0, w1, w2, w3, here, ALIGN)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class Push(AllToAllVariant):
    name = "push"
    summary = "push through the peers' memory ordered by flags, pieces overlapped; best at large sizes"
    kernels = (push_kernel,)
    space = Space(
        {
            "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
            "num_warps": PowerOfTwo(4, 16),
            "items": Choice(1, 2, 4),
            "num_chunks": PowerOfTwo(1, 64),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        packets, chunks = packets_of(problem.nbytes), int(config["num_chunks"])
        per_block = 32 * int(config["num_warps"]) * int(config["items"])
        if per_block > 1024:
            return "more than 1024 packets a block at once spill registers"
        return refuse_chunks(
            problem, limits, rounds=self.num_rounds(problem, config), chunks=chunks, blocks=int(config["num_blocks"]),
            per_block=per_block, slots=problem.world_size - 1, ring=RING.value,
        ) or blocks_and_threads(config, limits, packets, most_rounds=64 * chunks)  # fmt: skip

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        if limits.backend == "host":
            return {"num_blocks": 2, "num_warps": 16, "items": 1, "num_chunks": 2}
        packets = packets_of(problem.nbytes)
        chunks = 1 if packets < 1 << 15 else 4 if packets < 1 << 20 else 16
        return {"num_blocks": min(packets / 512, 132), "num_warps": 16, "items": 1, "num_chunks": chunks}

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        return workspace.layout.gather, int(config["num_chunks"])


PUSH = Push().register()
