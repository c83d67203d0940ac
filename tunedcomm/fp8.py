"""8-bit payloads: constants of their scales, the cast to e4m3, and what quantised wires make of a tensor.

128 consecutive elements of a message are a group; a last group that is not full is padded with zeros. A group of fp32
values v travels as 128 bytes q and one fp32 scale, with M = 448 for fp8 (e4m3) and M = 127 for int8:

    amax = max |v|,   scale = max(amax / M, 2^-126),   q = v · (1 / scale),   v' = q · scale

Each operation is rounded once, q to nearest even. A scale is at most the largest fp32 of which 127 are finite. A group
with a NaN or an infinity has the scale NaN, so all of it arrives as NaN. Zeros stay zeros: sums start from +0.0, as
does each v' that is not summed, so −0.0 arrives as +0.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

E4M3_MAX, INT8_MAX = 448.0, 127.0  # the largest finite values
Wire: TypeAlias = Literal["fp8_group128", "int8_group128"]
FP8_WIRE, INT8_WIRE = WIRES = ("fp8_group128", "int8_group128")
# ‖e‖ / ‖ref‖ of sums of normal values that are quantised once, and, by two_shot_quantized, twice.
WIRE_ERRORS = {FP8_WIRE: (0.026, 0.036), INT8_WIRE: (0.007, 0.009)}
GROUP = 128  # elements that share a scale: of wires, and of a row where quantize is group128
SCALE_BYTES = 4  # of a group on a wire
LEAST_SCALE, MOST_SCALE = 2.0**-126, 8454659 * 2.0**98  # of wires: the largest fp32 / 127, rounded down


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Cast fp32 to e4m3, saturated."""
    import torch

    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantised(values: torch.Tensor, wire: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [groups, 128] in e4m3 or int8, scales [groups] in fp32) of a flat tensor."""
    import torch

    is_fp8 = wire == FP8_WIRE
    groups = torch.nn.functional.pad(values.float(), (0, -len(values) % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(1)
    # Divided by tensors on purpose: PyTorch divides by numbers by multiplying with their reciprocals on GPUs.
    scales = (largest / torch.full_like(largest, E4M3_MAX if is_fp8 else INT8_MAX)).clamp(LEAST_SCALE, MOST_SCALE)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    scaled = groups * (torch.ones_like(scales) / scales).unsqueeze(1)
    return to_e4m3(scaled) if is_fp8 else scaled.round().nan_to_num(0.0).to(torch.int8), scales


def dequantised(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The groups as they arrive, flat fp32; a last group that was padded still is."""
    return (q.float() * scales.unsqueeze(1)).view(-1)


def sent(values: torch.Tensor, wire: str) -> torch.Tensor:
    """A flat tensor as it arrives: fp32, of the same length, without −0.0."""
    return dequantised(*quantised(values, wire))[: len(values)] + 0.0
