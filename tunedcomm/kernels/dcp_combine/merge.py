"""The arithmetic of dcp_combine, once for kernels and once in PyTorch, with the same bits everywhere.

Let l_r be the LSE of rank r in base 2 or e, and m the largest finite one. Ranks whose LSE is NaN or infinite are left
out. With d_r = l_r − m, times log2 e for base e,

    w_r = 2^d_r,   W = Σ w_r,   out = Σ (w_r · (1 / W)) · out_r,   lse = m + log W

where sums go in rank order from +0.0 in fp32, and `out` is rounded once. No rank left: out = 0, lse = −inf.

2^d and log W are made of fp32 additions, multiplications and one division, each rounded, because `ex2.approx` of GPUs
and the libraries of CPUs differ in their last bits. So every kernel, PyTorch and the interpreter give the same bits.

- 2^d: d = k + f with |f| ≤ 1/2, and 2^f = Σ (f · ln 2)^i / i! up to i = 7, which leaves out 5e-9. Below 2^-126.5 it
  is 0.
- ln W: W = 2^k · t with √½ ≤ t < √2, s = (t − 1) / (t + 1), and ln t = 2 (s + s³/3 + s⁵/5 + s⁷/7 + s⁹/9), which leaves
  out 7e-10.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.common.reference import weighted_sum

if TYPE_CHECKING:
    import torch


def _fp32(value: float) -> float:
    """The nearest fp32 number."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


_E1, _E2, _E3, _E4, _E5, _E6, _E7 = (tl.constexpr(_fp32(math.log(2) ** i / math.factorial(i))) for i in range(1, 8))
_L3, _L5, _L7, _L9 = (tl.constexpr(_fp32(1 / i)) for i in (3, 5, 7, 9))
_LN2, _LOG2E = tl.constexpr(_fp32(math.log(2))), tl.constexpr(_fp32(1 / math.log(2)))
# Adding 1.5 · 2^23 rounds to a whole number, which then stands in the low bits.
_SHIFT, _SHIFT_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
_LEAST = tl.constexpr(-127.0)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)


@triton.jit
def exp2_bits(x):
    """2^x for x ≤ 0."""
    x = tl.maximum(x, _LEAST)
    shifted = x + _SHIFT
    f = x - (shifted - _SHIFT)
    p = _E7 * f + _E6
    p = p * f + _E5
    p = p * f + _E4
    p = p * f + _E3
    p = p * f + _E2
    p = p * f + _E1
    p = p * f + 1.0
    scale = (shifted.to(tl.int32, bitcast=True) - _SHIFT_BITS + 127) << 23
    return p * scale.to(tl.float32, bitcast=True)


@triton.jit
def ln_bits(w):
    """Ln w for 1 ≤ w ≤ 8."""
    bits = w.to(tl.int32, bitcast=True)
    k = (bits - _SQRT_HALF_BITS) >> 23
    t = (bits - (k << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(t - 1.0, t + 1.0)
    z = s * s
    p = _L9 * z + _L7
    p = p * z + _L5
    p = p * z + _L3
    s2 = s + s
    return k.to(tl.float32) * _LN2 + (s2 + s2 * (p * z))


@triton.jit
def weigh(lses, BASE: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """(weights, whether each rank counts, LSE of all) of the ranks' LSEs, a tuple in rank order."""
    highest = tl.full(lses[0].shape, float("-inf"), tl.float32)
    valid = ()
    for i in tl.static_range(WORLD_SIZE):
        counts = tl.abs(lses[i]) < float("inf")
        highest = tl.where(counts, tl.maximum(highest, lses[i]), highest)
        valid = valid + (counts,)  # type: ignore[assignment]
    total = tl.zeros(lses[0].shape, tl.float32)
    powers = ()
    for i in tl.static_range(WORLD_SIZE):
        distance = lses[i] - highest
        if BASE == "e":
            distance = distance * _LOG2E
        power = tl.where(valid[i], exp2_bits(distance), 0.0)
        total += power
        powers = powers + (power,)  # type: ignore[assignment]
    none = total == 0.0
    total = tl.where(none, 1.0, total)
    inverse = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)
    weights = ()
    for i in tl.static_range(WORLD_SIZE):
        weights = weights + (powers[i] * inverse,)  # type: ignore[assignment]
    log = ln_bits(total)
    if BASE == "2":
        log = log * _LOG2E
    return weights, valid, tl.where(none, float("-inf"), highest + log)


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """`exp2_bits`."""
    import torch

    x = x.clamp(min=_LEAST.value)
    shifted = x + _SHIFT.value
    f = x - (shifted - _SHIFT.value)
    p = f * _E7.value + _E6.value
    for coefficient in (_E5.value, _E4.value, _E3.value, _E2.value, _E1.value, 1.0):
        p = p * f + coefficient
    scale = (shifted.view(torch.int32) - _SHIFT_BITS.value + 127) << 23
    found: torch.Tensor = p * scale.view(torch.float32)
    return found


def _ln(w: torch.Tensor) -> torch.Tensor:
    """`ln_bits`."""
    import torch

    bits = w.view(torch.int32)
    k = (bits - _SQRT_HALF_BITS.value) >> 23
    t = (bits - (k << 23)).view(torch.float32)
    s = (t - 1.0) / (t + 1.0)
    z = s * s
    p = z * _L9.value + _L7.value
    for coefficient in (_L5.value, _L3.value):
        p = p * z + coefficient
    s2 = s + s
    found: torch.Tensor = k.float() * _LN2.value + (s2 + s2 * (p * z))
    return found


def merged(parts: torch.Tensor, lses: torch.Tensor, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The (out, lse) that kernels give.

    Args:
        parts: outputs of all ranks, [n, …, D].
        lses: their LSEs, [n, …], fp32.
        base: `e` or `2`.
    """
    import torch

    valid = lses.isfinite()
    highest = torch.where(valid, lses, -math.inf).amax(0)
    distance = torch.where(valid, lses - highest, 0.0)
    powers = torch.where(valid, _exp2(distance * _LOG2E.value if base == "e" else distance), 0.0)
    total = torch.zeros_like(highest)
    for power in powers:
        total = total + power
    none = total == 0.0
    total = torch.where(none, 1.0, total)
    weights = powers * (torch.ones_like(total) / total)
    log = _ln(total) * _LOG2E.value if base == "2" else _ln(total)
    rows = (each.reshape(-1, parts.shape[-1]) for each in parts)
    out = weighted_sum(list(rows), weights.flatten(1).t(), valid.flatten(1).t())
    return out.view(parts.shape[1:]), torch.where(none, -math.inf, highest + log)


def merged_fast(parts: torch.Tensor, lses: torch.Tensor, base: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(out, lse) of `merged` by PyTorch's own functions in `dtype`, whose bits depend on the machine."""
    import torch

    per_bit, lses, valid = math.log(2) if base == "2" else 1.0, lses.to(dtype), lses.isfinite()
    highest = torch.where(valid, lses, -math.inf).amax(0)
    distance = torch.where(valid, (lses - highest) * per_bit, -math.inf)
    weights = torch.where(valid, distance.softmax(0), 0.0).unsqueeze(-1)
    out = (torch.where(valid.unsqueeze(-1), parts.to(dtype), 0.0) * weights).sum(0)
    return out, highest + distance.logsumexp(0) / per_bit
