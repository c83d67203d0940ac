"""8-bit payloads: the names of quantised wires, the constants that scales are made of, and the cast."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0  # the largest finite value of e4m3
FP8_WIRE, INT8_WIRE = WIRES = ("fp8_group128", "int8_group128")
GROUP = 128  # columns that share a scale where quantize is group128


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Cast fp32 to e4m3, saturated."""
    import torch

    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
