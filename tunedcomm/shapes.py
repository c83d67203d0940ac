"""Shapes as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_shape", "parse_shape"]


def parse_shape(text: str) -> tuple[int, ...]:
    """Read `4096x8192x3584` or `98304`.

    Raises:
        ValueError: anything else.
    """
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"shape {text!r} is not of the form N or MxNxK, e.g. 98304 or 4096x8192x3584") from None
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {text!r} has a negative extent")
    return shape


def format_shape(shape: Sequence[int]) -> str:
    """The text that `parse_shape` reads back."""
    return "x".join(str(extent) for extent in shape)
