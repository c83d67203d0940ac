"""Sums over the ranks, with a bias that is added before the one rounding; and which problems suit packets."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import PACKET_BYTES, narrow, widen
from tunedcomm.kernels.common.sync import load_packets
from tunedcomm.kernels.gemm.op import out_itemsize, refuse_gemm
from tunedcomm.spec import Limits, Problem

__all__ = ["refuse_packets"]


@triton.jit
def _sum_word(words, b, OFFSET: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    low, high = widen(words[OFFSET], DTYPE)
    low += 0.0
    high += 0.0
    for i in tl.static_range(1, WORLD_SIZE):
        more_low, more_high = widen(words[4 * i + OFFSET], DTYPE)
        low += more_low
        high += more_high
    if BIAS:
        more_low, more_high = widen(b[OFFSET], DTYPE)
        low += more_low
        high += more_high
    return narrow(low, high, DTYPE)


@triton.jit
def sum_and_bias(words, bias, column, mask, DTYPE: tl.constexpr, BIAS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Four words: the packets in `words` (4 words a rank, ranks in order) summed from +0.0, plus those of the bias.

    Args:
        bias: its address.
        column: numbers of the packets within their rows, int64.
        mask: packets that are wanted.
    """
    b = words
    if BIAS:
        b = load_packets(bias + column * 16, mask)
    return (
        _sum_word(words, b, 0, DTYPE, BIAS, WORLD_SIZE),
        _sum_word(words, b, 1, DTYPE, BIAS, WORLD_SIZE),
        _sum_word(words, b, 2, DTYPE, BIAS, WORLD_SIZE),
        _sum_word(words, b, 3, DTYPE, BIAS, WORLD_SIZE),
    )


def refuse_packets(problem: Problem, limits: Limits, *, panel_bytes: int) -> str | None:
    """Why no kernel that moves the result as packets can run `problem`, or None."""
    if reason := refuse_gemm(problem, limits, panel_bytes=panel_bytes):
        return reason
    if problem.shape[1] * out_itemsize(problem) % PACKET_BYTES:
        return f"rows of {problem.shape[1]} results are no whole packets of {PACKET_BYTES} bytes"
    return None
