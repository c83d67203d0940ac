"""Sums of packets, written in the payload's dtype, or as fp32: two packets of results for one of 16-bit floats.

fp32 results of 16-bit floats are never rounded between, and have the bits of a sum of inputs converted to fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import sum_packets, widen, write_elements
from tunedcomm.kernels.common.sync import SENTINEL


@triton.jit
def _wide_mean(value, AVG: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """The bits of an fp32 sum, or of its mean, of which −0.0 is written as +0.0."""
    if AVG:
        value = tl.div_rn(value, tl.full(value.shape, WORLD_SIZE, tl.float32))
        word = value.to(tl.int32, bitcast=True)
        return tl.where(word == SENTINEL, 0, word)
    else:
        return value.to(tl.int32, bitcast=True)


@triton.jit
def write_wide_sum(
    words, out, packet, numel, mask,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Sum the packets in `words` (4 words a rank, ranks in order) from +0.0 in fp32 and write packet `packet`'s sums.

    Example:
        8 bf16 elements, packet 0: the sums of elements 0 … 3 go to bytes 0 … 15 of `out`, of 4 … 7 to bytes 16 … 31.
    """
    sums = ()
    for w in tl.static_range(4):
        low, high = widen(words[w], DTYPE)
        low += 0.0
        high += 0.0
        for i in tl.static_range(1, WORLD_SIZE):
            more_low, more_high = widen(words[4 * i + w], DTYPE)
            low += more_low
            high += more_high
        sums = sums + (_wide_mean(low, AVG, WORLD_SIZE), _wide_mean(high, AVG, WORLD_SIZE))  # type: ignore[assignment]
    write_elements(out, 2 * packet, numel, sums[0], sums[1], sums[2], sums[3], mask, 4, TAIL)  # type: ignore[misc]
    write_elements(out, 2 * packet + 1, numel, sums[4], sums[5], sums[6], sums[7], mask, 4, TAIL)  # type: ignore[misc]


@triton.jit
def write_sum(
    words, out, packet, numel, mask,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the packets in `words` in rank order and write packet `packet` of the result, as fp32 if WIDE."""
    if WIDE:
        write_wide_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, AVG, TAIL)
    else:
        s0, s1, s2, s3 = sum_packets(words, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
