"""Counting NaN in a tensor, for the check of inputs; found by their bits, so that every dtype is counted alike."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tunedcomm.kernels.common.launch import CompileRequest

NUM_CELLS = 64  # blocks of a launch, each with a cell of its own for what it finds
WIDTHS = (1, 2, 4, 8)
# dtype to (the bits without the sign, the largest of them that is no NaN).
NAN_BITS: Mapping[str, tuple[int, int]] = {
    "bfloat16": (0x7FFF, 0x7F80),
    "float16": (0x7FFF, 0x7C00),
    "float32": (0x7FFFFFFF, 0x7F800000),
    "float64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "float8_e4m3fn": (0x7F, 0x7E),
    "float8_e5m2": (0x7F, 0x7C),
}


@triton.jit
def _bits(address, mask, WIDTH: tl.constexpr):
    if WIDTH == 1:
        return tl.load(address.to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.int64)
    elif WIDTH == 2:
        return tl.load(address.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int64)
    elif WIDTH == 4:
        return tl.load(address.to(tl.pointer_type(tl.int32)), mask=mask, other=0).to(tl.int64)
    else:
        return tl.load(address.to(tl.pointer_type(tl.int64)), mask=mask, other=0)


@triton.jit
def count_nan_kernel(x, numel, bits, largest, cells, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the number of elements whose `bits` exceed `largest` to this block's cell, if there are any.

    A cell with something in it stays as it is where nothing is found: no replay hides what another found.
    """
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    found = tl.zeros((BLOCK,), tl.int64)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
        element = start + lanes
        here = element < numel
        value = _bits(x + element * WIDTH, here, WIDTH) & bits
        found += (here & (value > largest)).to(tl.int64)
    count = tl.sum(found, axis=0)
    p = (cells + tl.program_id(0).to(tl.int64) * 8).to(tl.pointer_type(tl.int64))
    tl.store(p, count, mask=count > 0)


def count_nan_request(width: int) -> CompileRequest:
    """The binary for elements of `width` bytes."""
    return CompileRequest.of(count_nan_kernel, {"WIDTH": width, "BLOCK": 1024}, num_warps=8)
