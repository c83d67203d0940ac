"""Elements in packets: reading inputs, writing outputs, and fp32 sums with one rounding at the end.

A packet holds 8 elements of a 16-bit dtype or 4 of fp32. Payload words are moved as bits; only sums look inside them.

**Ordered numerics.** `ordered` variants start from +0.0 and add the ranks' values in fp32 in rank order 0 … n−1, divide
by n for avg, and round once to the payload's dtype. Starting from +0.0 makes the sum blind to the sign of zero inputs,
which is what lets `arm` replace the sentinel by +0.0 without changing any result. A result that avg rounds to −0.0 is
written as +0.0 for the same reason: it may have to travel as a packet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, as_mask, load_packets, store_packets

__all__ = ["PACKET_BYTES", "packets_of"]

PACKET_BYTES = 16


def packets_of(nbytes: int) -> int:
    """Packets that hold `nbytes`, the last one perhaps in part."""
    return -(-nbytes // PACKET_BYTES)


@triton.jit
def num_packets(numel, WIDTH: tl.constexpr):
    """Packets that hold `numel` elements of `WIDTH` bytes."""
    return (numel.to(tl.int64) * WIDTH + 15) // 16


@triton.jit
def _load_word(x, element, end, mask, WIDTH: tl.constexpr):
    """One 32-bit word made of the elements from `element` on; elements from `end` on read as 0."""
    if WIDTH == 4:
        return tl.load((x + element * 4).to(tl.pointer_type(tl.int32)), mask=mask & (element < end), other=0)
    else:
        p = (x + element * 2).to(tl.pointer_type(tl.int16))
        low = tl.load(p, mask=mask & (element < end), other=0).to(tl.int32) & 0xFFFF
        high = tl.load(p + 1, mask=mask & (element + 1 < end), other=0).to(tl.int32)
        return low | (high << 16)


@triton.jit
def _store_word(out, element, end, word, mask, WIDTH: tl.constexpr):
    """Inverse of `_load_word`."""
    if WIDTH == 4:
        tl.store((out + element * 4).to(tl.pointer_type(tl.int32)), word, mask=mask & (element < end))
    else:
        p = (out + element * 2).to(tl.pointer_type(tl.int16))
        tl.store(p, word.to(tl.int16), mask=mask & (element < end))
        tl.store(p + 1, (word >> 16).to(tl.int16), mask=mask & (element + 1 < end))


@triton.jit
def read_elements(x, packet, numel, mask, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Packets of a contiguous, 16-byte aligned tensor at address `x`; what lies behind its end reads as 0.

    TAIL: the last packet is not full and is read element by element, so that nothing behind the tensor is touched.
    """
    PER: tl.constexpr = 16 // WIDTH
    numel = numel.to(tl.int64)
    if INTERPRET:
        mask = as_mask(mask)
    full = mask & (packet < numel // PER)
    w0, w1, w2, w3 = load_packets(x + packet * 16, full)
    if TAIL:
        last = mask & (packet == numel // PER)
        element = packet * PER
        w0 |= _load_word(x, element, numel, last, WIDTH)
        w1 |= _load_word(x, element + PER // 4, numel, last, WIDTH)
        w2 |= _load_word(x, element + PER // 2, numel, last, WIDTH)
        w3 |= _load_word(x, element + 3 * PER // 4, numel, last, WIDTH)
    return w0, w1, w2, w3


@triton.jit
def write_elements(out, packet, numel, w0, w1, w2, w3, mask, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Write packets to a contiguous, 16-byte aligned tensor at address `out`; nothing behind its end is touched."""
    PER: tl.constexpr = 16 // WIDTH
    numel = numel.to(tl.int64)
    if INTERPRET:
        mask = as_mask(mask)
    store_packets(out + packet * 16, w0, w1, w2, w3, mask & (packet < numel // PER))
    if TAIL:
        last = mask & (packet == numel // PER)
        element = packet * PER
        _store_word(out, element, numel, w0, last, WIDTH)
        _store_word(out, element + PER // 4, numel, w1, last, WIDTH)
        _store_word(out, element + PER // 2, numel, w2, last, WIDTH)
        _store_word(out, element + 3 * PER // 4, numel, w3, last, WIDTH)


@triton.jit
def arm(w):
    """Make a payload word distinct from the sentinel.

    The sentinel's bits are −0.0 in fp32 and (−0.0, +0.0) in two 16-bit halves, whatever the dtype; replacing that one
    word by 0 turns −0.0 into +0.0 and leaves every other word alone, NaN payloads included.
    """
    return tl.where(w == SENTINEL, 0, w)


@triton.jit
def widen(w, DTYPE: tl.constexpr):
    """The one or two elements of a word as (low, high) fp32; high is 0 for fp32 payloads."""
    if DTYPE == "float32":
        return w.to(tl.float32, bitcast=True), 0.0
    elif DTYPE == "bfloat16":
        return (w << 16).to(tl.float32, bitcast=True), (w & -65536).to(tl.float32, bitcast=True)
    else:
        low = w.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, high


@triton.jit
def _round_bfloat16(value):
    """Interpreter: bits of fp32 rounded to nearest even in bf16, NaN kept a NaN."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)


@triton.jit
def narrow(low, high, DTYPE: tl.constexpr):
    """A word of the two fp32 values, each rounded to nearest even in the payload's dtype."""
    if DTYPE == "float32":
        return low.to(tl.int32, bitcast=True)
    elif INTERPRET:
        if DTYPE == "bfloat16":
            return _round_bfloat16(low) | (_round_bfloat16(high) << 16)
        else:
            bits = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            return bits | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    elif DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _positive_zero(w, DTYPE: tl.constexpr):
    """Turn a −0.0 in either element of a word into +0.0."""
    if DTYPE == "float32":
        return tl.where(w == SENTINEL, 0, w)
    else:
        w = tl.where((w & 0xFFFF) == 0x8000, w & -65536, w)
        return tl.where((w & -65536) == SENTINEL, w & 0xFFFF, w)


@triton.jit
def _mean(value, WORLD_SIZE: tl.constexpr):
    if (WORLD_SIZE & (WORLD_SIZE - 1)) == 0:
        return value * (1.0 / WORLD_SIZE)  # exact, as a division by a power of two is
    else:
        return tl.div_rn(value, tl.full(value.shape, WORLD_SIZE, tl.float32))


@triton.jit
def sum_word(words, OFFSET: tl.constexpr, DTYPE: tl.constexpr, AVG: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Reduce word `OFFSET` of the packets in `words` (4 words a rank, ranks in order) by the ordered rule."""
    low, high = widen(words[OFFSET], DTYPE)
    low += 0.0
    high += 0.0
    for i in tl.static_range(1, WORLD_SIZE):
        more_low, more_high = widen(words[4 * i + OFFSET], DTYPE)
        low += more_low
        high += more_high
    if AVG:
        low = _mean(low, WORLD_SIZE)
        if DTYPE != "float32":
            high = _mean(high, WORLD_SIZE)
        return _positive_zero(narrow(low, high, DTYPE), DTYPE)
    else:
        return narrow(low, high, DTYPE)


@triton.jit
def sum_packets(words, DTYPE: tl.constexpr, AVG: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Reduce the packets in `words` (4 words a rank, ranks in order) by the ordered rule; four words."""
    return (
        sum_word(words, 0, DTYPE, AVG, WORLD_SIZE),
        sum_word(words, 1, DTYPE, AVG, WORLD_SIZE),
        sum_word(words, 2, DTYPE, AVG, WORLD_SIZE),
        sum_word(words, 3, DTYPE, AVG, WORLD_SIZE),
    )


@triton.jit
def insert_own(words, own, rank, WORLD_SIZE: tl.constexpr):
    """Put the caller's own packet in its place among the ranks' packets."""
    mixed = ()
    for i in tl.static_range(WORLD_SIZE):
        for w in tl.static_range(4):
            mixed = mixed + (tl.where(rank == i, own[w], words[4 * i + w]),)  # type: ignore[assignment]
    return mixed


@triton.jit
def _mean_word(w, DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr):
    low, high = widen(w, DTYPE)
    low = _mean(low, WORLD_SIZE)
    if DTYPE != "float32":
        high = _mean(high, WORLD_SIZE)
    return _positive_zero(narrow(low, high, DTYPE), DTYPE)


@triton.jit
def mean_packets(words, DTYPE: tl.constexpr, AVG: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Divide the elements of one packet (four words) by the world size if AVG; for sums that are rounded already."""
    if AVG:
        return (
            _mean_word(words[0], DTYPE, WORLD_SIZE),
            _mean_word(words[1], DTYPE, WORLD_SIZE),
            _mean_word(words[2], DTYPE, WORLD_SIZE),
            _mean_word(words[3], DTYPE, WORLD_SIZE),
        )
    else:
        return words[0], words[1], words[2], words[3]
