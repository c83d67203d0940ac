"""Draw the README's plot from bench/results: `python docs/measured_plot.py`; needs tunedcomm[report].

The points stand in the image as text, too, which a test compares with the results.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from measured_rows import Run, newest, p50, runs, size_text
from measured_tables import ALL_REDUCE, TORCH

PLOT = Path(__file__).with_name("all_reduce_h200.png")
WORLD_SIZE = 4
_GROUND, _TEXT, _GRID = "#ffffff", "#1a2230", "#e3e7ed"
# Curve to colour, marker and width.
_LOOKS = {
    "NCCL": ("#8a94a6", "o", 2.0),
    "PyTorch's operators, the best": ("#2f86d6", "s", 2.0),
    "Kraken": ("#00a37a", "D", 2.0),
    "tunedcomm": ("#e05a2b", "*", 3.0),
}
Points = list[list[float]]


def points() -> dict[str, Points]:
    """Curve to [bytes, µs, speed-up over NCCL in the same run]."""
    found: dict[str, Points] = {name: [] for name in _LOOKS}

    def add(curve: str, size: int, run: Run, us: float) -> None:
        found[curve].append([size, us, round(p50(run, "library") / us, 3)])

    for size, run in newest(ALL_REDUCE, "all_reduce", WORLD_SIZE, needs=TORCH[1]).items():
        add("NCCL", size, run, p50(run, "library"))
        add("PyTorch's operators, the best", size, run, min(p50(run, name) for name in TORCH if name in run))
        add("tunedcomm", size, run, p50(run, "tuned"))
    for size, held in runs(ALL_REDUCE, "all_reduce", WORLD_SIZE).items():
        measured = next((run for run in held if {"kraken", "library"} <= set(run)), None)
        if measured is not None:
            add("Kraken", size, measured, p50(measured, "kraken"))
    return {curve: held for curve, held in found.items() if held}


def text_of(path: Path, key: str) -> str:
    """What a PNG says under `key`.

    Raises:
        KeyError: nothing.
    """
    data, at = path.read_bytes(), 8
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        name, _, value = data[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and name.decode("latin-1") == key:
            return value.decode("latin-1")
        at += 12 + length
    raise KeyError(key)


def _panel(axes: Any, curves: dict[str, Points], column: int, title: str) -> None:
    for curve, held in curves.items():
        colour, mark, width = _LOOKS[curve]
        sizes, values = [point[0] for point in held], [point[column] for point in held]
        axes.plot(sizes, values, color=colour, marker=mark, linewidth=width, markersize=3 + 2 * width, label=curve)
    ticks = [1 << power for power in range(10, 29, 3)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size_text(tick) for tick in ticks])
    axes.set_title(title, color=_TEXT, fontsize=11, loc="left")
    axes.set_facecolor(_GROUND)
    axes.tick_params(colors=_TEXT, labelsize=9)
    axes.grid(True, color=_GRID, linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color(_GRID)


def draw(path: Path) -> None:
    """Write the image."""
    from matplotlib.figure import Figure

    curves = points()
    figure = Figure(figsize=(10.4, 4.2), dpi=110, facecolor=_GROUND, layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, curves, 1, "all_reduce on 4 × H200, bf16, CUDA graphs: latency, µs")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _panel(right, curves, 2, "times as fast as NCCL in the same run")
    right.set_ylim(bottom=0)
    legend = left.legend(loc="upper left", fontsize=9.5, frameon=False)
    for text in legend.get_texts():
        text.set_color(_TEXT)
    figure.savefig(path, facecolor=_GROUND, metadata={"Software": None, "Points": json.dumps(curves)})


if __name__ == "__main__":
    draw(PLOT)
