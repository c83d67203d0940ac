"""A shard pushed by blocks of a kernel into all peers' panels, chunk by chunk, each followed by its flag.

Several blocks send a chunk, to rank + 1 first, then to rank + 2, …. Each adds to a counter when its part is stored; the
one that finds all others done raises the flag. The addition releases what the block stored and acquires what the others
did, and the flag's store releases all of it at system scope. Nothing is waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm.ag import DATA
from tunedcomm.kernels.gemm.panels import announce_to, call_number, is_last
from tunedcomm.kernels.gemm.tiles import element_type

__all__ = ["SENT", "send_kernel"]

SENT = tl.constexpr(2)  # the first counter that sending uses: one for each peer and chunk
_PACKETS = tl.constexpr(2048)  # that a block has under way
_ROWS = tl.constexpr(256)


@triton.jit
def _send_scales(scale_a, target, start, end, num_senders):
    first = tl.program_id(0).to(tl.int64) * _ROWS
    for at in tl.range(start + first, end, num_senders.to(tl.int64) * _ROWS):
        row = at + tl.arange(0, _ROWS).to(tl.int64)
        here = row < end
        x = tl.load(scale_a.to(tl.pointer_type(tl.int32)) + row, mask=here, other=0)
        tl.store(target.to(tl.pointer_type(tl.int32)) + row, x, mask=here)


@triton.jit
def send_shard(
    a, scale_a, panels, p0, p1, p2, p3, p4, p5, p6, scales, number, rows, depth, chunk_rows, num_senders, rank,
    DTYPE: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """The part of one of the first `num_senders` blocks.

    Args:
        a, scale_a: addresses of the shard and of its rows' scales.
        panels, p0 …: addresses of the panels, the own ones and those of rank + 1, rank + 2, …
        scales: offset of the scales in the panels.
        number: the call's.
        rows, depth, chunk_rows: of the shard and of a chunk.
    """
    row_packets = depth.to(tl.int64) * (element_type(DTYPE).primitive_bitwidth // 8) // 16
    lanes = tl.arange(0, _PACKETS).to(tl.int64) + tl.program_id(0).to(tl.int64) * _PACKETS
    step = num_senders.to(tl.int64) * _PACKETS
    num_chunks = tl.cdiv(rows, chunk_rows)
    first = (rank * rows).to(tl.int64)
    for turn in tl.range(0, (num_chunks * (WORLD_SIZE - 1)).to(tl.int32)):
        peer = turn // num_chunks
        chunk = turn - peer * num_chunks
        target = tl.where(peer == 0, p0, tl.where(peer == 1, p1, tl.where(peer == 2, p2, p3)))
        target = tl.where(peer == 4, p4, tl.where(peer == 5, p5, tl.where(peer == 6, p6, target)))
        place = target + DATA + first * row_packets * 16
        start = (chunk * chunk_rows).to(tl.int64)
        end = tl.minimum(start + chunk_rows, rows)
        for packet in tl.range(start * row_packets, end * row_packets, step):
            at = packet + lanes
            here = at < end * row_packets
            w0, w1, w2, w3 = load_packets(a + at * 16, here)
            store_packets(place + at * 16, w0, w1, w2, w3, here)
        if SCALING == "rowwise":
            _send_scales(scale_a, target + scales + first * 4, start, end, num_senders)
        if is_last(panels, SENT + turn, num_senders):
            announce_to(target, rank, chunk, number)


@triton.jit
def send_kernel(
    a, scale_a, panels, p0, p1, p2, p3, p4, p5, p6, scales, rows, depth, chunk_rows, rank,
    DTYPE: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """All blocks send the shard."""
    send_shard(
        a, scale_a, panels, p0, p1, p2, p3, p4, p5, p6, scales, call_number(panels), rows, depth, chunk_rows,
        tl.num_programs(0), rank, DTYPE, SCALING, WORLD_SIZE,
    )  # fmt: skip
