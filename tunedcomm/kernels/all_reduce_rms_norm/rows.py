"""Rows of a matrix in packets: their bias, residual and RMS norm, with bits that no config changes.

A row is held by one block as `BLOCK` packets, a power of two with a thread for each 32 × num_warps of them, of which
those behind the row's end are zero.

**Rounding.** With s a rank-ordered sum that was rounded to the payload's dtype, everything else is fp32:

    h = round(s + bias + residual)          added from left to right, rounded once to the payload's dtype
    y = h · (1 / √(Σ h² / hidden + ε)) · weight, from left to right, every operation rounded to fp32; then rounded once

So y is a function of h as it is stored, whoever computes it.

**The order of Σ h²** is part of the rule, and is the same for every grid and every number of warps: the squares of a
packet in a tree of neighbours; 32 packets in a butterfly (16, 8, 4, 2, 1); sums of 32 packets whose numbers are equal
modulo 32 one after another; those 32 in a butterfly again. Zeros from padding do not change a sum of squares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm import fp8
from tunedcomm.kernels.common.packets import add_extras, narrow, narrow_e4m3, widen
from tunedcomm.kernels.common.sync import INTERPRET, as_mask, load_packets, store_packets

MAX_ROW_PACKETS = 2048  # 16384 elements of 16 bits; beyond that a block holds too much of a row in registers

_E4M3_MAX = tl.constexpr(fp8.E4M3_MAX)
_MIN_AMAX = tl.constexpr(0x2EDBE6FF)  # 1e-10 as bits of fp32
_INFINITY = tl.constexpr(0x7F800000)


def row_block(packets: int) -> int:
    """The constant `BLOCK` for rows of so many packets."""
    return max(32, 1 << (packets - 1).bit_length())


@triton.jit
def _butterfly(value):
    """Sum over each 32 neighbours, which all of them get."""
    if INTERPRET:
        offsets = tl.arange(0, value.shape[0])
        for exponent in tl.static_range(5):
            value += tl.gather(value, offsets ^ (16 >> exponent), 0)
        return value
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 other;
            mov.f32 $0, $1;
            shfl.sync.bfly.b32 other, $0, 16, 31, 0xffffffff;
            add.rn.f32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 8, 31, 0xffffffff;
            add.rn.f32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 4, 31, 0xffffffff;
            add.rn.f32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 2, 31, 0xffffffff;
            add.rn.f32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 1, 31, 0xffffffff;
            add.rn.f32 $0, $0, other;
            }""",
            "=&f,f",
            [value],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def row_sum(value, BLOCK: tl.constexpr):
    """Sum of one number a packet over the row, in the order of the module's text; every element gets it."""
    value = _butterfly(value)
    if BLOCK > 32:
        offsets = tl.arange(0, BLOCK)
        total = tl.gather(value, tl.where((offsets & 31) * 32 < BLOCK, (offsets & 31) * 32, 0), 0)
        total = tl.where((offsets & 31) * 32 < BLOCK, total, 0.0)
        for k in tl.static_range(1, BLOCK // 1024):
            total += tl.gather(value, (offsets & 31) * 32 + k * 1024, 0)
        value = _butterfly(total)
    return value


@triton.jit
def _squares(w, DTYPE: tl.constexpr):
    low, high = widen(w, DTYPE)
    if DTYPE == "float32":
        return low * low
    else:
        return low * low + high * high


@triton.jit
def _scaled(h, w, factor, DTYPE: tl.constexpr):
    """The one or two elements of a word of y, in fp32."""
    low, high = widen(h, DTYPE)
    weight_low, weight_high = widen(w, DTYPE)
    if DTYPE == "float32":
        return low * factor * weight_low, 0.0
    else:
        return low * factor * weight_low, high * factor * weight_high


@triton.jit
def _store_words(address, w0, w1, mask, COUNT: tl.constexpr):
    """Store one or two words to each `address` where `mask`."""
    if INTERPRET:
        p = address.to(tl.pointer_type(tl.int32))
        mask = as_mask(mask)
        tl.store(p, w0, mask=mask)
        if COUNT == 2:
            tl.store(p + 1, w1, mask=mask)
    elif COUNT == 2:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $4, 0;
            mov.u32 $0, 0;
            @p st.global.v2.b32 [$1], {$2, $3};
            }""",
            "=&r,l,r,r,r",
            [address, w0, w1, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)), w0, mask=mask)


@triton.jit
def _store_e4m3(out, packet, e0, e1, e2, e3, inverse, mask, DTYPE: tl.constexpr):
    """Store packets of (low, high) elements, each multiplied by `inverse`."""
    if DTYPE == "float32":
        word = narrow_e4m3(e0[0] * inverse, e1[0] * inverse) | (narrow_e4m3(e2[0] * inverse, e3[0] * inverse) << 16)
        _store_words(out + packet * 4, word, word, mask, 1)
    else:
        low = narrow_e4m3(e0[0] * inverse, e0[1] * inverse) | (narrow_e4m3(e1[0] * inverse, e1[1] * inverse) << 16)
        high = narrow_e4m3(e2[0] * inverse, e2[1] * inverse) | (narrow_e4m3(e3[0] * inverse, e3[1] * inverse) << 16)
        _store_words(out + packet * 8, low, high, mask, 2)


@triton.jit
def _write_e4m3(out, packet, h, weight, factor, scale, mask, DTYPE: tl.constexpr):
    """Write y divided by the scale: multiplied by its reciprocal, which is rounded to fp32."""
    inverse = tl.div_rn(1.0, tl.load(scale.to(tl.pointer_type(tl.float32))))
    e0, e1 = _scaled(h[0], weight[0], factor, DTYPE), _scaled(h[1], weight[1], factor, DTYPE)
    e2, e3 = _scaled(h[2], weight[2], factor, DTYPE), _scaled(h[3], weight[3], factor, DTYPE)
    _store_e4m3(out, packet, e0, e1, e2, e3, inverse, mask, DTYPE)


@triton.jit
def _y_word(h, w, factor, DTYPE: tl.constexpr):
    low, high = _scaled(h, w, factor, DTYPE)
    return narrow(low, high, DTYPE)


@triton.jit
def row_extras(bias, residual, at, packet, mask, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """(bias, residual) of the packets numbered `at` in their row and `packet` in the matrix; zeros for what is not."""
    nothing = tl.zeros(at.shape, tl.int32)
    b = (nothing, nothing, nothing, nothing)
    r = (nothing, nothing, nothing, nothing)
    if BIAS:
        b = load_packets(bias + at * 16, mask)
    if RESIDUAL:
        r = load_packets(residual + packet * 16, mask)
    return b, r


@triton.jit
def _store_h(s, b, r, residual_out, packet, mask, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr):
    """Store the words of h; return them and each packet's sum of squares."""
    h = add_extras(s, b, r, DTYPE, BIAS, RESIDUAL)
    store_packets(residual_out + packet * 16, h[0], h[1], h[2], h[3], mask)
    squares = (_squares(h[0], DTYPE) + _squares(h[1], DTYPE)) + (_squares(h[2], DTYPE) + _squares(h[3], DTYPE))
    return h, tl.where(mask, squares, 0.0)


@triton.jit
def _columns(row, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a row of `row` packets, in fp32."""
    PER_PACKET: tl.constexpr = 4 if DTYPE == "float32" else 8
    return tl.zeros((BLOCK,), tl.float32) + (row * PER_PACKET).to(tl.float32)


@triton.jit
def _norm_factor(columns, total, eps, BLOCK: tl.constexpr):
    """1 / √(total / columns + ε) for the row's sum of squares; `eps` are the bits of an fp32."""
    root = tl.sqrt_rn(tl.div_rn(total, columns) + eps.to(tl.int32).to(tl.float32, bitcast=True))
    return tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), root)


@triton.jit
def finish_row(
    s, b, r, weight, out, residual_out, scale, eps, row, packet, mask,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write h and y of one row.

    Args:
        s, b, r, weight: words of the row's sum, bias, residual and weight, zeros behind its end.
        eps: bits of an fp32.
        row: packets of a row.
        packet: numbers of the row's packets in the matrix.
        mask: packets of the row.
    """
    h, squares = _store_h(s, b, r, residual_out, packet, mask, DTYPE, BIAS, RESIDUAL)
    columns = _columns(row, DTYPE, BLOCK)
    factor = _norm_factor(columns, row_sum(squares, BLOCK), eps, BLOCK)
    if FP8:
        _write_e4m3(out, packet, h, weight, factor, scale, mask, DTYPE)
    else:
        y0 = _y_word(h[0], weight[0], factor, DTYPE)
        y1 = _y_word(h[1], weight[1], factor, DTYPE)
        y2 = _y_word(h[2], weight[2], factor, DTYPE)
        y3 = _y_word(h[3], weight[3], factor, DTYPE)
        store_packets(out + packet * 16, y0, y1, y2, y3, mask)


@triton.jit
def _size(pair):
    """Bits of the larger of two magnitudes."""
    return tl.maximum(pair[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF, pair[1].to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _sum_of_row(value, BLOCK: tl.constexpr):
    """`row_sum`, faster: each lane reads its warp's sum where that lies in a bank of its own.

    Not for the basic forms, whose compiled code is what was measured.
    """
    value = _butterfly(value)
    if BLOCK > 32:
        thread = tl.arange(0, BLOCK) & 31
        total = tl.gather(value, tl.where(thread * 32 < BLOCK, thread * 33, 0), 0)
        total = tl.where(thread * 32 < BLOCK, total, 0.0)
        for k in tl.static_range(1, BLOCK // 1024):
            total += tl.gather(value, thread * 33 + k * 1024, 0)
        value = _butterfly(total)
    return value


@triton.jit
def _largest_of_group(value, WIDE: tl.constexpr):
    """Maximum over each 16 neighbours, 32 if WIDE, which all of them get."""
    if INTERPRET:
        offsets = tl.arange(0, value.shape[0])
        for exponent in tl.static_range(5 if WIDE else 4):
            value = tl.maximum(value, tl.gather(value, offsets ^ (1 << exponent), 0))
        return value
    elif WIDE:
        return tl.inline_asm_elementwise(
            "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .s32 other;
            mov.s32 $0, $1;
            shfl.sync.bfly.b32 other, $0, 8, 31, 0xffffffff;
            max.s32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 4, 31, 0xffffffff;
            max.s32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 2, 31, 0xffffffff;
            max.s32 $0, $0, other;
            shfl.sync.bfly.b32 other, $0, 1, 31, 0xffffffff;
            max.s32 $0, $0, other;
            }""",
            "=&r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _largest_of_row(value, BLOCK: tl.constexpr):
    """Maximum over the row; warps read each other's as in `_sum_of_row`."""
    value = _largest_of_group(value, True)
    if BLOCK > 32:
        warp = tl.arange(0, BLOCK // 32)
        value = tl.gather(value, warp * 32 + (warp & 31), 0)
    return tl.max(value, 0)


@triton.jit
def _scale_of(largest, POW2: tl.constexpr):
    """The scale for a largest magnitude, which is given as the bits of an fp32."""
    scale = tl.div_rn(tl.maximum(largest, _MIN_AMAX).to(tl.float32, bitcast=True), _E4M3_MAX)
    if POW2:
        bits = scale.to(tl.int32, bitcast=True)
        scale = tl.where(bits > _INFINITY, bits, (bits + 0x7FFFFF) & _INFINITY).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _form_elements(h, w, factor, offset, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """The elements of a word of y in fp32; where there is one, the second is the first."""
    low, high = widen(h, DTYPE)
    weight_low, weight_high = widen(w, DTYPE)
    if OFFSET:
        weight_low += offset
        weight_high += offset
    low = low * factor * weight_low
    if DTYPE == "float32":
        return low, low
    else:
        return low, high * factor * weight_high


@triton.jit
def _stored_elements(w, DTYPE: tl.constexpr):
    """The elements of a word; where there is one, the second is the first."""
    low, high = widen(w, DTYPE)
    if DTYPE == "float32":
        return low, low
    else:
        return low, high


@triton.jit
def finish_form(
    s, b, r, weight, out, residual_out, scale, scales, norm_out, eps, offset, row, row_index, scale_strides,
    packet, mask, live, DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, QUANTIZE: tl.constexpr,
    NORM: tl.constexpr, POW2: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`finish_row` of the forms that are not basic; the rule for scales is in the module `op`.

    A thread has its packets of y rounded as the norm is stored. A row's scale takes a maximum over the block. The scale
    of 128 columns takes a maximum over 16 neighbouring packets (32 of fp32), which one warp holds. Maxima compare the
    bits of magnitudes as whole numbers: these have the same order, with NaN above infinity, so that no NaN gets lost.

    Args:
        scale: address of the given scale, where QUANTIZE is fp8.
        scales, norm_out: addresses of those outputs.
        eps, offset: bits of an fp32 each.
        row_index: the row of the matrix.
        scale_strides: between scales of neighbouring rows, and of one row, in elements.
        live: true if there is such a row.
    """
    if INTERPRET:
        mask, live = as_mask(mask), as_mask(live)
    h, squares = _store_h(s, b, r, residual_out, packet, mask, DTYPE, BIAS, RESIDUAL)
    columns = _columns(row, DTYPE, BLOCK)
    factor = _norm_factor(columns, _sum_of_row(squares, BLOCK), eps, BLOCK)
    add = offset.to(tl.int32).to(tl.float32, bitcast=True)
    e0 = _form_elements(h[0], weight[0], factor, add, DTYPE, OFFSET)
    e1 = _form_elements(h[1], weight[1], factor, add, DTYPE, OFFSET)
    e2 = _form_elements(h[2], weight[2], factor, add, DTYPE, OFFSET)
    e3 = _form_elements(h[3], weight[3], factor, add, DTYPE, OFFSET)
    if NORM or QUANTIZE != "fp8":
        y0, y1 = narrow(e0[0], e0[1], DTYPE), narrow(e1[0], e1[1], DTYPE)
        y2, y3 = narrow(e2[0], e2[1], DTYPE), narrow(e3[0], e3[1], DTYPE)
        if NORM:
            store_packets(norm_out + packet * 16, y0, y1, y2, y3, mask)
        if QUANTIZE == "":
            store_packets(out + packet * 16, y0, y1, y2, y3, mask)
    if QUANTIZE != "":
        if QUANTIZE == "fp8":
            inverse = tl.div_rn(1.0, tl.load(scale.to(tl.pointer_type(tl.float32))))
        else:
            e0, e1 = _stored_elements(y0, DTYPE), _stored_elements(y1, DTYPE)
            e2, e3 = _stored_elements(y2, DTYPE), _stored_elements(y3, DTYPE)
            largest = tl.maximum(tl.maximum(_size(e0), _size(e1)), tl.maximum(_size(e2), _size(e3)))
            largest = tl.where(mask, largest, 0)
            place = scales + row_index * scale_strides[0] * 4
            if QUANTIZE == "token":
                made = _scale_of(_largest_of_row(largest, BLOCK), POW2)
                tl.store(place.to(tl.pointer_type(tl.float32)), made, mask=live)
                inverse = tl.div_rn(1.0, made)
            else:
                WIDE: tl.constexpr = DTYPE == "float32"
                PACKETS: tl.constexpr = 32 if WIDE else 16
                made = _scale_of(_largest_of_group(largest, WIDE), POW2)
                at = tl.arange(0, BLOCK)
                places = (place + (at // PACKETS) * scale_strides[1] * 4).to(tl.pointer_type(tl.float32))
                tl.store(places, made, mask=mask & (at % PACKETS == 0))
                inverse = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), made)
        _store_e4m3(out, packet, e0, e1, e2, e3, inverse, mask, DTYPE)
