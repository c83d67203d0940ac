"""Quantised wires in kernels: the arithmetic of `tunedcomm.fp8`, with the same bits.

In kernels a packet of 16 bytes holds 16 elements, so 8 packets, which 8 neighbouring threads hold, are a group. A sum
adds what arrives from all ranks in rank order in fp32, the own part too, so every rank gets the same bits. A mean is
divided by n. One-shot variants round it once to the payload's dtype. Two-shot variants quantise it once more, and the
owner of a slice keeps what it sends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.fp8 import E4M3_MAX, FP8_WIRE, GROUP, INT8_MAX, LEAST_SCALE, MOST_SCALE
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    load_bytes,
    narrow,
    narrow_e4m3,
    read_elements,
    store_bytes,
    widen,
    write_elements,
)
from tunedcomm.kernels.common.sync import INTERPRET, as_mask, load_packets, store_packets

_LEAST_SCALE, _MOST_SCALE = tl.constexpr(LEAST_SCALE), tl.constexpr(MOST_SCALE)
_IS_FP8 = tl.constexpr(FP8_WIRE)
_GROUP = tl.constexpr(GROUP)
_E4M3_MAX, _INT8_MAX = tl.constexpr(E4M3_MAX), tl.constexpr(INT8_MAX)
GROUP_PACKETS = tl.constexpr(GROUP // PACKET_BYTES)
_INFINITY = tl.constexpr(0x7F800000)
# Adding 1.5 · 2^23 rounds to a whole number, whose low byte then stands in the low byte of the sum.
_SHIFT = tl.constexpr(12582912.0)
_E4M3_BIAS = tl.constexpr(2.0**120)  # an e4m3 shifted into the place of an fp32 is that much too small


def wire_packets(numel: int) -> int:
    """Packets that hold so many quantised elements, whole groups."""
    return -(-numel // GROUP) * (GROUP // PACKET_BYTES)


@triton.jit
def read_values(
    x, packet, numel, mask, DTYPE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Sixteen elements a packet, in fp32; what lies behind the end reads as 0. ALIGN is as in `packets`."""
    values = ()
    for j in tl.static_range(WIDTH):
        at = packet * WIDTH + j
        if ALIGN == 16:
            words = read_elements(x, at, numel, mask, WIDTH, TAIL)
        else:
            left = numel * WIDTH - at * 16
            words = load_bytes(x + at * 16, left, mask & (left > 0), ALIGN)
        for w in tl.static_range(4):
            low, high = widen(words[w], DTYPE)
            values = values + (low,)  # type: ignore[assignment]
            if DTYPE != "float32":
                values = values + (high,)  # type: ignore[assignment]
    return values


@triton.jit
def write_values(
    out, packet, numel, values, mask,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Inverse of `read_values`, rounded once."""
    for j in tl.static_range(WIDTH):
        at = packet * WIDTH + j
        words = ()
        for w in tl.static_range(4):
            if DTYPE == "float32":
                words = words + (narrow(values[4 * j + w], values[4 * j + w], DTYPE),)  # type: ignore[assignment]
            else:
                low, high = values[8 * j + 2 * w], values[8 * j + 2 * w + 1]
                words = words + (narrow(low, high, DTYPE),)  # type: ignore[assignment]
        w0, w1, w2, w3 = words[0], words[1], words[2], words[3]  # type: ignore[misc]
        if ALIGN == 16:
            write_elements(out, at, numel, w0, w1, w2, w3, mask, WIDTH, TAIL)
        else:
            left = numel * WIDTH - at * 16
            store_bytes(out + at * 16, left, w0, w1, w2, w3, mask & (left > 0), ALIGN)


@triton.jit
def _largest_of_group(value):
    """Maximum over each 8 neighbours, which all of them get."""
    if INTERPRET:
        offsets = tl.arange(0, value.shape[0])
        for exponent in tl.static_range(3):
            value = tl.maximum(value, tl.gather(value, offsets ^ (1 << exponent), 0))
        return value
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .s32 other;
            mov.s32 $0, $1;
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
def _byte(value):
    """The low byte of the nearest whole number."""
    return (value + _SHIFT).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def quantise(values, WIRE: tl.constexpr):
    """Four words and the group's scale for 16 elements.

    The maximum compares bits of magnitudes as whole numbers: these have the same order, with NaN above infinity.
    """
    largest = values[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
    for k in tl.static_range(1, 16):
        largest = tl.maximum(largest, values[k].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = _largest_of_group(largest)
    of_one = tl.full(largest.shape, _E4M3_MAX if WIRE == _IS_FP8 else _INT8_MAX, tl.float32)
    scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), of_one), _LEAST_SCALE)
    scale = tl.minimum(scale, _MOST_SCALE)
    scale = tl.where(largest >= _INFINITY, float("nan"), scale)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    wire = ()
    for w in tl.static_range(4):
        v0, v1 = values[4 * w] * inverse, values[4 * w + 1] * inverse
        v2, v3 = values[4 * w + 2] * inverse, values[4 * w + 3] * inverse
        if WIRE == _IS_FP8:
            wire = wire + (narrow_e4m3(v0, v1) | (narrow_e4m3(v2, v3) << 16),)  # type: ignore[assignment]
        else:
            word = _byte(v0) | (_byte(v1) << 8) | (_byte(v2) << 16) | (_byte(v3) << 24)
            wire = wire + (word,)  # type: ignore[assignment]
    return wire + (scale,)


@triton.jit
def _widen_e4m3(pair):
    """Interpreter: the e4m3 in the low byte in fp32."""
    return (((pair & 0x80) << 24) | ((pair & 0x7F) << 20)).to(tl.float32, bitcast=True) * _E4M3_BIAS


@triton.jit
def _widen_int8(w, BYTE: tl.constexpr):
    """A byte of a word, with sign, in fp32: 2^23 + 128 + byte as a float, less 2^23 + 128."""
    return ((((w >> (8 * BYTE)) & 0xFF) ^ 0x80) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _elements(w, WIRE: tl.constexpr):
    """The four elements of a word, in fp32."""
    if WIRE != _IS_FP8:
        return _widen_int8(w, 0), _widen_int8(w, 1), _widen_int8(w, 2), _widen_int8(w, 3)
    elif INTERPRET:
        return _widen_e4m3(w), _widen_e4m3(w >> 8), _widen_e4m3(w >> 16), _widen_e4m3(w >> 24)
    else:
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b16 lower, upper;
            mov.b32 {lower, upper}, $2;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=&r,=r,r",
            [w],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        e0, e1 = widen(lower, "float16")
        e2, e3 = widen(upper, "float16")
        return e0, e1, e2, e3


@triton.jit
def sum_wires(wires, FIRST: tl.constexpr, COUNT: tl.constexpr, WIRE: tl.constexpr):
    """Sixteen fp32 sums a packet, from +0.0, of COUNT wires (4 words and a scale each) from number FIRST on."""
    sums = ()
    for w in tl.static_range(4):
        s0 = tl.zeros(wires[0].shape, tl.float32)
        s1, s2, s3 = s0, s0, s0
        for i in tl.static_range(FIRST, FIRST + COUNT):
            e0, e1, e2, e3 = _elements(wires[5 * i + w], WIRE)
            scale = wires[5 * i + 4]
            s0 += e0 * scale
            s1 += e1 * scale
            s2 += e2 * scale
            s3 += e3 * scale
        sums = sums + (s0, s1, s2, s3)  # type: ignore[assignment]
    return sums


@triton.jit
def store_wire(area, scales, place, wire, mask):
    """Store packets at addresses `area` + 16 · `place`, and the scale of each group at its place among `scales`."""
    store_packets(area + place * 16, wire[0], wire[1], wire[2], wire[3], mask)
    is_first = mask & (place % GROUP_PACKETS == 0)
    if INTERPRET:
        is_first = as_mask(is_first)
    tl.store((scales + place // GROUP_PACKETS * 4).to(tl.pointer_type(tl.float32)), wire[4], mask=is_first)


@triton.jit
def load_wire(area, scales, place, mask):
    """Inverse of `store_wire`; zeros where not `mask`."""
    words = load_packets(area + place * 16, mask)
    if INTERPRET:
        mask = as_mask(mask)
    scale = tl.load((scales + place // GROUP_PACKETS * 4).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    return words + (scale,)


@triton.jit
def num_wire_packets(numel):
    """`wire_packets` in a kernel."""
    return (numel + _GROUP - 1) // _GROUP * GROUP_PACKETS
