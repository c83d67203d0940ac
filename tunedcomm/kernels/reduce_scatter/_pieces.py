"""What is done to a piece of every chunk: push it to the owners, sum what came."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import insert_own, load_bytes, sum_packets, write_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets

__all__: list[str] = []


@triton.jit
def push_piece(
    x, peers, place, first, end, step, nbytes, rank,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push packets from `first` on, every `step` up to `end`, of every chunk to its owner.

    Packet p of a chunk goes to `place` + 16 p in the owner's lane. All peers' packets are loaded before the first is
    stored, so that as many loads as there are peers are on their way.
    """
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, step):
        packet = start + lanes
        here = packet < end
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):
            owner = (rank + 1 + i) % WORLD_SIZE
            words = words + load_bytes(x + owner * nbytes + packet * 16, nbytes - packet * 16, here, ALIGN)
        for i in tl.static_range(WORLD_SIZE - 1):
            at = peers[i] + place + packet * 16
            store_packets(at, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], here)


@triton.jit
def sum_piece(
    x, out, numel, place, slot_bytes, first, end, step, nbytes, rank,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum such packets of the own chunk; rank i's packet p lies at address `place` + i × `slot_bytes` + 16 p."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(first, end, step):
        packet = start + lanes
        here = packet < end
        own = load_bytes(x + rank * nbytes + packet * 16, nbytes - packet * 16, here, ALIGN)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(place + i * slot_bytes + packet * 16, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, ALIGN < 16)
