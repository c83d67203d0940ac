"""Sums of 16-bit floats that are written as fp32 and never rounded between: two packets of results for one of input."""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import widen, write_elements
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
