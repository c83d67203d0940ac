"""Payloads in packets of 16 bytes: reading inputs, writing outputs, fp32 sums with one rounding, multicast.

A packet holds 8 elements of a 16-bit dtype or 4 of fp32. Payload words are moved as bits; only sums look inside them.
Functions with `elements` in their name serve kernels that reduce; those with `bytes`, kernels that only move payloads.

**Ordered numerics.** `ordered` variants start from +0.0 and add the ranks' values in fp32 in rank order 0 … n−1, divide
by n for avg, and round once to the payload's dtype. A sum that starts from +0.0 ignores the sign of zero inputs, so
`escape_sentinel` may replace the sentinel by +0.0 without changing any result. A result that avg rounds to −0.0 is
written as +0.0 for the same reason: it may have to travel as a packet.

**Alignment of bytes.** Chunks of a message begin at multiples of its size, which need not be a multiple of 16. `ALIGN`
is the greatest power of two up to 16 that divides it (`alignment_of`): packets are read and written in pieces of that
size and nothing outside a chunk is touched. With 16 that is one access a packet. An input that is read as one chunk
starts at a multiple of 16 and is read by whole packets whatever its size: what a packet holds behind the end lies in
the same 16 bytes, so it can be read, and is never written anywhere.

**Escapes.** A Lamport packet must not hold the sentinel, and kernels that move bytes must keep every bit, −0.0
included. A word that equals the sentinel travels as `ESCAPE`. A packet with an `ESCAPE` in it, its own or a payload's,
is followed by a mask of sentinel words: one word in an area of its own, whose bit w is set if word w was the sentinel.
A mask is below 16, so it cannot be the sentinel either. Receivers poll for a mask where they find an `ESCAPE`.

**Multicast.** A multicast address stands for the same offset in every rank's lane: one load that the switch reduces,
one store that reaches every rank (sm_90 and up). The interpreter emulates both over the ranks' own addresses. On a GPU
without NVLink multicast they must never run (`refuse_multicast`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm import fp8
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, as_mask, load_packets, store_packets

PACKET_BYTES = 16
_E4M3_MAX = tl.constexpr(fp8.E4M3_MAX)
ESCAPE = tl.constexpr(-0x7FFFFFFF)  # as int32; a word that hardly any payload holds: −0.0 beside a subnormal


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
    PER_PACKET: tl.constexpr = 16 // WIDTH
    numel = numel.to(tl.int64)
    if INTERPRET:
        mask = as_mask(mask)
    full = mask & (packet < numel // PER_PACKET)
    w0, w1, w2, w3 = load_packets(x + packet * 16, full)
    if TAIL:
        last = mask & (packet == numel // PER_PACKET)
        element = packet * PER_PACKET
        w0 |= _load_word(x, element, numel, last, WIDTH)
        w1 |= _load_word(x, element + PER_PACKET // 4, numel, last, WIDTH)
        w2 |= _load_word(x, element + PER_PACKET // 2, numel, last, WIDTH)
        w3 |= _load_word(x, element + 3 * PER_PACKET // 4, numel, last, WIDTH)
    return w0, w1, w2, w3


@triton.jit
def write_elements(out, packet, numel, w0, w1, w2, w3, mask, WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """Write packets to a contiguous, 16-byte aligned tensor at address `out`; nothing behind its end is touched."""
    PER_PACKET: tl.constexpr = 16 // WIDTH
    numel = numel.to(tl.int64)
    if INTERPRET:
        mask = as_mask(mask)
    store_packets(out + packet * 16, w0, w1, w2, w3, mask & (packet < numel // PER_PACKET))
    if TAIL:
        last = mask & (packet == numel // PER_PACKET)
        element = packet * PER_PACKET
        _store_word(out, element, numel, w0, last, WIDTH)
        _store_word(out, element + PER_PACKET // 4, numel, w1, last, WIDTH)
        _store_word(out, element + PER_PACKET // 2, numel, w2, last, WIDTH)
        _store_word(out, element + 3 * PER_PACKET // 4, numel, w3, last, WIDTH)


@triton.jit
def escape_sentinel(w):
    """Make a payload word distinct from the sentinel.

    The sentinel's bits are −0.0 in fp32 and (−0.0, +0.0) in two 16-bit halves, whatever the dtype; replacing that one
    word by 0 turns −0.0 into +0.0 and leaves every other word alone, NaN payloads included.
    """
    return tl.where(w == SENTINEL, 0, w)


@triton.jit
def escape_sentinels(w0, w1, w2, w3):
    """`escape_sentinel` for the four words of a packet."""
    return escape_sentinel(w0), escape_sentinel(w1), escape_sentinel(w2), escape_sentinel(w3)


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
def _e4m3_bits(value):
    """Interpreter: bits of fp32 rounded to nearest even in e4m3, saturated, NaN kept a NaN."""
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(value), _E4M3_MAX)
    of_size = size.to(tl.int32, bitcast=True)
    normal = ((of_size + 0x7FFFF + ((of_size >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2^14 rounds to multiples of 2^-9, the least of e4m3.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(size < 0.015625, subnormal, normal)
    found = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, found)
    return found | ((bits >> 24) & 0x80)


@triton.jit
def narrow_e4m3(low, high):
    """Two fp32 values as two e4m3 in the low half of an int32."""
    if INTERPRET:
        return _e4m3_bits(low) | (_e4m3_bits(high) << 8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 pair;
            cvt.rn.satfinite.e4m3x2.f32 pair, $2, $1;
            cvt.u32.u16 $0, pair;
            }""",
            "=r,f,f",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
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
def mean(value, WORLD_SIZE: tl.constexpr):
    """An fp32 sum divided by the number of ranks."""
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
        low = mean(low, WORLD_SIZE)
        if DTYPE != "float32":
            high = mean(high, WORLD_SIZE)
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
def weigh_packets(words, weights, valid, TOPK: tl.constexpr, DTYPE: tl.constexpr):
    """The weighted sum of TOPK packets (4 words each) by the ordered rule, four words."""
    summed = ()
    for w in tl.static_range(4):
        low = tl.zeros(words[w].shape, tl.float32)
        high = low
        for k in tl.static_range(TOPK):
            more_low, more_high = widen(words[4 * k + w], DTYPE)
            low = tl.where(valid[k], low + weights[k] * more_low, low)
            high = tl.where(valid[k], high + weights[k] * more_high, high)
        summed = summed + (narrow(low, high, DTYPE),)  # type: ignore[assignment]
    return summed


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
    low = mean(low, WORLD_SIZE)
    if DTYPE != "float32":
        high = mean(high, WORLD_SIZE)
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


def alignment_of(nbytes: int) -> int:
    """The constant `ALIGN` for chunks of `nbytes`: 16, 4, 2 or 1."""
    return next(align for align in (16, 4, 2, 1) if nbytes % align == 0)


@triton.jit
def add_word(s, b, r, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """Add a word of the bias and of the residual to a rounded sum, left to right in fp32; one rounding."""
    low, high = widen(s, DTYPE)
    if BIAS:
        more_low, more_high = widen(b, DTYPE)
        low += more_low
        high += more_high
    if RESIDUAL:
        more_low, more_high = widen(r, DTYPE)
        low += more_low
        high += more_high
    return narrow(low, high, DTYPE)


@triton.jit
def add_extras(s, b, r, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """`add_word` for a packet; the sum itself where there is nothing to add."""
    if BIAS or RESIDUAL:
        return (
            add_word(s[0], b[0], r[0], DTYPE, BIAS, RESIDUAL),
            add_word(s[1], b[1], r[1], DTYPE, BIAS, RESIDUAL),
            add_word(s[2], b[2], r[2], DTYPE, BIAS, RESIDUAL),
            add_word(s[3], b[3], r[3], DTYPE, BIAS, RESIDUAL),
        )
    else:
        return s[0], s[1], s[2], s[3]


@triton.jit
def _load_piece(address, left, OFFSET: tl.constexpr, mask, ALIGN: tl.constexpr):
    """`ALIGN` bytes at `OFFSET` of a packet as an int32, without sign; 0 from `left` on."""
    piece_mask = mask & (left > OFFSET)
    if ALIGN == 4:
        return tl.load((address + OFFSET).to(tl.pointer_type(tl.int32)), mask=piece_mask, other=0)
    elif ALIGN == 2:
        return tl.load((address + OFFSET).to(tl.pointer_type(tl.int16)), mask=piece_mask, other=0).to(tl.int32) & 0xFFFF
    else:
        return tl.load((address + OFFSET).to(tl.pointer_type(tl.int8)), mask=piece_mask, other=0).to(tl.int32) & 0xFF


@triton.jit
def _load_word_bytes(address, left, WORD: tl.constexpr, mask, ALIGN: tl.constexpr):
    word = _load_piece(address, left, 4 * WORD, mask, ALIGN)
    for i in tl.static_range(1, 4 // ALIGN):
        word |= _load_piece(address, left, 4 * WORD + i * ALIGN, mask, ALIGN) << (8 * ALIGN * i)
    return word


@triton.jit
def load_bytes(address, left, mask, ALIGN: tl.constexpr):
    """Four words of the packet at each `address`, of which `left` bytes belong to the chunk; 0 where not `mask`."""
    if INTERPRET:
        mask = as_mask(mask)
    if ALIGN == 16:
        return load_packets(address, mask)
    else:
        return (
            _load_word_bytes(address, left, 0, mask, ALIGN),
            _load_word_bytes(address, left, 1, mask, ALIGN),
            _load_word_bytes(address, left, 2, mask, ALIGN),
            _load_word_bytes(address, left, 3, mask, ALIGN),
        )


@triton.jit
def _store_word_bytes(address, left, word, WORD: tl.constexpr, mask, ALIGN: tl.constexpr):
    for i in tl.static_range(4 // ALIGN):
        piece_mask = mask & (left > 4 * WORD + i * ALIGN)
        piece = word >> (8 * ALIGN * i)
        at = address + (4 * WORD + i * ALIGN)
        if ALIGN == 4:
            tl.store(at.to(tl.pointer_type(tl.int32)), piece, mask=piece_mask)
        elif ALIGN == 2:
            tl.store(at.to(tl.pointer_type(tl.int16)), piece.to(tl.int16), mask=piece_mask)
        else:
            tl.store(at.to(tl.pointer_type(tl.int8)), piece.to(tl.int8), mask=piece_mask)


@triton.jit
def store_bytes(address, left, w0, w1, w2, w3, mask, ALIGN: tl.constexpr):
    """Inverse of `load_bytes`; nothing behind the chunk is touched."""
    if INTERPRET:
        mask = as_mask(mask)
    if ALIGN == 16:
        store_packets(address, w0, w1, w2, w3, mask)
    else:
        _store_word_bytes(address, left, w0, 0, mask, ALIGN)
        _store_word_bytes(address, left, w1, 1, mask, ALIGN)
        _store_word_bytes(address, left, w2, 2, mask, ALIGN)
        _store_word_bytes(address, left, w3, 3, mask, ALIGN)


@triton.jit
def escape(w):
    """The word as it travels."""
    return tl.where(w == SENTINEL, ESCAPE, w)


@triton.jit
def has_escape(w0, w1, w2, w3):
    """True for packets, as they travel, that have a mask."""
    return (w0 == ESCAPE) | (w1 == ESCAPE) | (w2 == ESCAPE) | (w3 == ESCAPE)


@triton.jit
def sentinel_mask_of(w0, w1, w2, w3):
    """The mask of sentinel words of a packet, from its words before they were escaped."""
    low = (w0 == SENTINEL).to(tl.int32) | ((w1 == SENTINEL).to(tl.int32) << 1)
    return low | ((w2 == SENTINEL).to(tl.int32) << 2) | ((w3 == SENTINEL).to(tl.int32) << 3)


@triton.jit
def escaped_slots(words, WORLD_SIZE: tl.constexpr):
    """Bits of the slots, for `poll_words`, whose packets (4 words each) have a mask."""
    bits = has_escape(words[0], words[1], words[2], words[3]).to(tl.int32)
    for i in tl.static_range(1, WORLD_SIZE):
        marked = has_escape(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
        bits |= marked.to(tl.int32) << i
    return bits


@triton.jit
def restore(w, sentinels, WORD: tl.constexpr):
    """Word `WORD` of a packet as it was before it was escaped."""
    return tl.where((w == ESCAPE) & (((sentinels >> WORD) & 1) != 0), SENTINEL, w)


@triton.constexpr_function
def _multimem_load_asm(kind):
    """PTX of a predicated 16-byte `multimem.ld_reduce` with fp32 accumulation."""
    precision = "" if kind == "f32" else ".acc::f32"
    return (
        "{.reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"@p multimem.ld_reduce.relaxed.sys.global.add{precision}.v4.{kind} {{$0, $1, $2, $3}}, [$4];}}"
    )


@triton.constexpr_function
def _multimem_kind(dtype):
    return {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}[dtype]


@triton.constexpr_function
def _multimem_store_asm():
    return (
        "{.reg .pred p; setp.ne.u32 p, $6, 0; mov.u32 $0, 0; "
        "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};}"
    )


@triton.jit
def load_reduce(multicast, peers, local, offset, mask, DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """The sum over all ranks of the packet at `offset` of the lane: fp32 accumulation in the switch, one rounding.

    The order of the sum is the switch's: the same bits for the same load, but not the bits of `ordered` variants.
    """
    if INTERPRET:
        words = load_packets(local + offset, mask)
        for i in tl.static_range(WORLD_SIZE - 1):
            words = words + load_packets(peers[i] + offset, mask)
        return sum_packets(words, DTYPE, False, WORLD_SIZE)
    else:
        constraints: tl.constexpr = "=&f,=&f,=&f,=&f,l,r" if DTYPE == "float32" else "=&r,=&r,=&r,=&r,l,r"
        if DTYPE == "float32":
            f0, f1, f2, f3 = tl.inline_asm_elementwise(
                _multimem_load_asm(_multimem_kind(DTYPE)),
                constraints,
                [multicast + offset, mask.to(tl.int32)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            return (
                f0.to(tl.int32, bitcast=True),
                f1.to(tl.int32, bitcast=True),
                f2.to(tl.int32, bitcast=True),
                f3.to(tl.int32, bitcast=True),
            )
        else:
            return tl.inline_asm_elementwise(
                _multimem_load_asm(_multimem_kind(DTYPE)),
                constraints,
                [multicast + offset, mask.to(tl.int32)],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )


@triton.jit
def store_all(multicast, peers, local, offset, w0, w1, w2, w3, mask, WORLD_SIZE: tl.constexpr):
    """Store a packet at `offset` of every rank's lane."""
    if INTERPRET:
        store_packets(local + offset, w0, w1, w2, w3, mask)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + offset, w0, w1, w2, w3, mask)
    else:
        tl.inline_asm_elementwise(
            _multimem_store_asm(),
            "=&r,l,f,f,f,f,r",
            [
                multicast + offset,
                w0.to(tl.float32, bitcast=True),
                w1.to(tl.float32, bitcast=True),
                w2.to(tl.float32, bitcast=True),
                w3.to(tl.float32, bitcast=True),
                mask.to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
