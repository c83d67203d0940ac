"""Kernels beside GEMMs that are not ours: a rank's share of a part summed, and the wait for the peers' sums."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.bias import with_bias
from tunedcomm.kernels.common.packets import sum_packets
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.gemm.panels import announce, await_chunk_of_all, call_number, is_last

__all__ = ["await_all_kernel", "sum_share_kernel"]


@triton.jit
def sum_share_kernel(
    own, bias, row, first, slots, slot_bytes, sums, packets, panels, p0, p1, p2, p3, p4, p5, p6, rank, part, ready,
    timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, PULLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one share of `packets` packets, at address `own` and in the slots, into `own`.

    Those that peers will pull also into `sums`, and announced.

    Args:
        bias, row, first: the bias, packets of a row of the result, and the share's first packet in it.
        part, ready: chunks by which the slots, and these sums, are announced.
    """
    number = call_number(panels)
    await_chunk_of_all(panels, part, rank, number, timeout_ns, status, WORLD_SIZE)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, packets, step):
        packet = start + lanes
        here = packet < packets
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = tl.where(rank == i, own, slots + i * slot_bytes)
            words = words + load_packets(source + packet * 16, here)
        s = sum_packets(words, DTYPE, False, WORLD_SIZE)
        if BIAS:
            s = with_bias(s, bias, first + packet, row, here, DTYPE)
        store_packets(own + packet * 16, s[0], s[1], s[2], s[3], here)
        if PULLED:
            store_packets(sums + packet * 16, s[0], s[1], s[2], s[3], here)
    if PULLED:
        last = is_last(panels, part, tl.num_programs(0))
        if last:
            announce(p0, p1, p2, p3, p4, p5, p6, rank, ready, number, WORLD_SIZE)


@triton.jit
def await_all_kernel(panels, chunk, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """One block: chunk `chunk` of every peer is here."""
    await_chunk_of_all(panels, chunk, rank, call_number(panels), timeout_ns, status, WORLD_SIZE)
