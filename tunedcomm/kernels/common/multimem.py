"""Multicast packets: one load that the switch reduces, one store that reaches every rank. Inline PTX for sm_90 and up.

A multicast address stands for the same offset in every rank's lane. Under the interpreter these functions are emulated
over the ranks' own addresses, so that the kernels run where there is no switch; on a GPU without NVLink multicast they
must never be executed (variants refuse in `infeasible`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.packets import sum_packets
from tunedcomm.kernels.common.sync import INTERPRET, load_packets, store_packets

__all__: list[str] = []


@triton.constexpr_function
def _load_reduce_asm(kind):
    """PTX of a predicated 16-byte `multimem.ld_reduce` with fp32 accumulation."""
    precision = "" if kind == "f32" else ".acc::f32"
    return (
        "{.reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"@p multimem.ld_reduce.relaxed.sys.global.add{precision}.v4.{kind} {{$0, $1, $2, $3}}, [$4];}}"
    )


@triton.constexpr_function
def _kind(dtype):
    return {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}[dtype]


@triton.constexpr_function
def _store_asm():
    return (
        "{.reg .pred p; setp.ne.u32 p, $6, 0; mov.u32 $0, 0; "
        "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};}"
    )


@triton.jit
def load_reduce(multicast, peers, local, offset, mask, DTYPE: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """The sum over all ranks of the packet at `offset` of the lane: fp32 accumulation in the switch, one rounding.

    The order of the sum is the switch's: the same bits for the same load, but not those of `ordered` variants.
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
                _load_reduce_asm(_kind(DTYPE)),
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
                _load_reduce_asm(_kind(DTYPE)),
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
            _store_asm(),
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
