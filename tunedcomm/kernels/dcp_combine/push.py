"""push: heads and LSEs through the peers' gather areas, ordered by flags, pieces overlapped; for more tokens.

The ring, its flags and its proof are as in all_to_all's `push`: in round c a rank pushes piece c of every peer's
heads and merges piece c − 1 of its own. A gather area holds a slot of packets for each peer, then a slot of LSEs.

Numerics: ordered. Graph-safe.
Source: own; the ring is all_to_all's `push`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_to_all.push import RING
from tunedcomm.kernels.common.feasibility import packets_a_block
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    exchange_flags,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.sync import INTERPRET, as_mask, load_packets, store_packets
from tunedcomm.kernels.common.variant import PUSH_GRID, PushRingVariant
from tunedcomm.kernels.dcp_combine.lamport import load_part, places_of, write_merged
from tunedcomm.kernels.dcp_combine.op import CombineVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def push_merge_kernel(
    x, lse, out, lse_out, total, local, peers, rank, timeout_ns, status, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BASE: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, merge piece c − 1. Slot s of a gather area holds what rank + 1 + s sent.

    Example:
        2 ranks, T = 1, H = 2, D = 4 in fp32, 1 piece. After the first flags rank 0 stores its packet of head 1 at
        offset 0 of rank 1's gather area and the LSE behind the slot of packets. In round 1 rank 1 merges both.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    total = total.to(tl.int64)
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span
    lses = gather + (WORLD_SIZE - 1) * slot * 16

    # 1. Tell the peers that this rank reads its gather area no more.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + 1):
        # 2. Push piece c of every peer's heads.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(total, (c + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                row, token = places_of(packet, HEADS, ROW)
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                    words = words + load_part(
                        x, lse, packet, row, token, (rank + 1 + i) % WORLD_SIZE, mask, HEADS, ROW, WORLD_SIZE
                    )  # fmt: skip
                is_first = mask & (packet % GROUP == 0)
                if INTERPRET:
                    is_first = as_mask(is_first)
                for i in tl.static_range(WORLD_SIZE - 1):  # this rank comes (WORLD_SIZE - 2 - i) + 1 after the peer
                    place = (WORLD_SIZE - 2 - i) * slot + packet - lap
                    w0, w1, w2, w3 = words[5 * i], words[5 * i + 1], words[5 * i + 2], words[5 * i + 3]  # type: ignore[var-annotated]
                    store_packets(peers[i] + gather + place * 16, w0, w1, w2, w3, mask)
                    beside = (peers[i] + lses + place // GROUP * 4).to(tl.pointer_type(tl.int32))
                    tl.store(beside, words[5 * i + 4], mask=is_first)
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        # 3. Merge piece c − 1 of what the peers pushed.
        if c >= 1:
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(total, (d + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                row, token = places_of(packet, HEADS, ROW)
                own = load_part(x, lse, packet, row, token, rank, mask, HEADS, ROW, WORLD_SIZE)
                got = ()
                for i in tl.static_range(WORLD_SIZE - 1):
                    place = i * slot + packet - lap
                    inside = mask
                    if INTERPRET:
                        inside = as_mask(inside)
                    beside = (local + lses + place // GROUP * 4).to(tl.pointer_type(tl.int32))
                    got = got + load_packets(local + gather + place * 16, mask)
                    got = got + (tl.load(beside, mask=inside, other=0),)
                # In rank order by selection: loads by rank, with the own one masked, take more registers.
                mixed, lse_words = (), ()
                for r in tl.static_range(WORLD_SIZE):
                    w0, w1, w2, w3, said = own
                    for i in tl.static_range(WORLD_SIZE - 1):
                        is_it = (rank + 1 + i) % WORLD_SIZE == r
                        w0, w1 = tl.where(is_it, got[5 * i], w0), tl.where(is_it, got[5 * i + 1], w1)
                        w2, w3 = tl.where(is_it, got[5 * i + 2], w2), tl.where(is_it, got[5 * i + 3], w3)
                        said = tl.where(is_it, got[5 * i + 4], said)
                    mixed = mixed + (w0, w1, w2, w3)  # type: ignore[assignment]
                    lse_words = lse_words + (said,)  # type: ignore[assignment]
                write_merged(mixed, lse_words, out, lse_out, packet, row, mask, DTYPE, BASE, ROW, WORLD_SIZE)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class Push(CombineVariant, PushRingVariant, registered=True):
    name = "push"
    summary = "push through the peers' memory ordered by flags, pieces overlapped; for more tokens"
    kernels = (push_merge_kernel,)
    space = Space({**PUSH_GRID, "items": Choice(1, 2), "num_chunks": PowerOfTwo(1, 16)})
    ring = RING.value
    most_registers = 255

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        of_thread = int(config["items"]) * problem.world_size
        if of_thread > (2 if packets_a_block(config) > 256 * int(config["items"]) else 8):
            return f"{of_thread} packets at once in each of {32 * int(config['num_warps'])} threads spill registers"
        return self.refuse_ring(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        packets = self.work_packets(problem)
        chunks = 1 if packets < 1 << 16 else 4
        return {"num_blocks": min(packets / 256, 132), "num_warps": 8, "num_chunks": chunks}
