"""How contenders look: colours that can be told apart on light and dark ground and by the colour-blind, and marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunedcomm.report.measured import LIBRARY, TUNED

__all__ = ["CEILING", "CHOSEN_COLOUR", "STATUS_COLOURS", "Style", "between", "styles_of"]

# After Okabe and Ito's colours, the darkest a little lighter.
_COLOURS = (
    "#2f86d6",
    "#e69f00",
    "#00a37a",
    "#d678ac",
    "#8b6cf0",
    "#56b4e9",
    "#a39a00",
    "#b0764a",
    "#1fb5b0",
    "#e06c75",
)
_MARKS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon", "hexagram")
STATUS_COLOURS = {
    "infeasible": "#8a94a6",
    "compile_error": "#2f86d6",
    "incorrect": "#d678ac",
    "crashed": "#e05a2b",
    "hung": "#8b6cf0",
}


@dataclass(frozen=True, slots=True)
class Style:
    """Of one contender, the same in every figure of a report.

    Attributes:
        colour: `#rrggbb`.
        mark: plotly's name of the marker.
        dash: plotly's name of the line's pattern.
        width: of the line.
    """

    colour: str
    mark: str = "circle"
    dash: str = "solid"
    width: float = 1.8


CEILING = Style("#8a94a6", mark="line-ew", dash="dash", width=1.6)
CHOSEN_COLOUR = "#e05a2b"
_FIXED = {
    TUNED: Style("#e05a2b", mark="star", width=3.2),
    LIBRARY: Style("#8a94a6", mark="circle-open", width=2.2),
}


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """A style for each contender; those that appear most often get the colours that differ most."""
    counted = Counter(name for name in names if name not in _FIXED)
    ordered = sorted(counted, key=lambda name: (-counted[name], name))
    found = {
        name: Style(_COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)], "solid" if i < len(_COLOURS) else "dot")
        for i, name in enumerate(ordered)
    }
    return {**_FIXED, **found}


def between(share: float, colours: Sequence[str] = ("#56b4e9", "#e05a2b")) -> str:
    """The colour at `share` of the way from the first to the second."""
    first, second = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours)
    mixed = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
