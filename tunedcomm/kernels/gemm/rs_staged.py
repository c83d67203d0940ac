"""Kernels beside GEMMs that are not ours: pushing a chunk to its owner, summing what is staged."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import sum_packets, write_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm.panels import announce_to, await_chunk_of_all, call_number, is_last
from tunedcomm.symm import layout

__all__ = ["push_chunk_kernel", "sum_slots_kernel"]

_DATA = tl.constexpr(layout.PANEL_DATA)


@triton.jit
def push_chunk_kernel(source, target, packets, panels, owner, rank, chunk, counter, BLOCK: tl.constexpr):
    """Copy `packets` packets from address `source` to `target`, in the panels at `owner`; raise the chunk's flag there.

    Waits for nothing.
    """
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, packets, step):
        packet = start + lanes
        here = packet < packets
        w0, w1, w2, w3 = load_packets(source + packet * 16, here)
        store_packets(target + packet * 16, w0, w1, w2, w3, here)
    if is_last(panels, counter, tl.num_programs(0)):
        announce_to(owner, rank, chunk, call_number(panels))


@triton.jit
def sum_slots_kernel(
    out, numel, panels, slot_bytes, span, rank, timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what lies in the slots of the own panels, in rank order, chunks of `span` packets; the own slot is full."""
    number = call_number(panels)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = slot_bytes // 16
    for chunk in tl.static_range(CHUNKS):
        await_chunk_of_all(panels, chunk, rank, number, timeout_ns, status, WORLD_SIZE)
        end = tl.minimum(total, (chunk + 1) * span)
        for start in tl.range(chunk * span + tl.program_id(0).to(tl.int64) * BLOCK, end, step):
            packet = start + lanes
            here = packet < end
            words = ()
            for i in tl.static_range(WORLD_SIZE):
                words = words + load_packets(panels + _DATA + i * slot_bytes + packet * 16, here)
            s0, s1, s2, s3 = sum_packets(words, DTYPE, AVG, WORLD_SIZE)
            write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
