"""Reading bench/results for the pages: runs, and how numbers are written."""

from __future__ import annotations

import csv
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
Row = dict[str, str]
Run = dict[str, Row]
KIB, MIB = 1 << 10, 1 << 20


@functools.cache
def rows(name: str) -> tuple[Row, ...]:
    """All rows of a file of bench/results."""
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def only(name: str, **wanted: str) -> Row:
    """The one row that has these values."""
    found = [row for row in rows(name) if all(row[column] == value for column, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {name} have {wanted}; there must be one")
    return found[0]


@functools.cache
def runs(name: str, op: str, world_size: int, mode: str = "graph") -> dict[int, list[Run]]:
    """Message size to the runs that measured it in bf16 on plain inputs, contender to row, newest first."""
    found: dict[int, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(name):
        kind = (row["op"], row["world_size"], row["mode"], row["dtype"], row["input_kind"], row["in_place"])
        if kind == (op, str(world_size), mode, "bfloat16", "plain", "False"):
            found[int(row["message_bytes"])][row["run_id"]][row["contender"]] = row
    return {
        size: sorted(by_run.values(), key=lambda run: max(row["date"] for row in run.values()), reverse=True)
        for size, by_run in sorted(found.items())
    }


def newest(name: str, op: str, world_size: int, mode: str = "graph", *, needs: str = "tuned") -> dict[int, Run]:
    """Message size to the newest run that has dispatch's choice, the library and `needs`."""
    found = {}
    for size, held in runs(name, op, world_size, mode).items():
        complete = [run for run in held if {"tuned", "library", needs} <= set(run)]
        if complete:
            found[size] = complete[0]
    return found


def by_shape(name: str, op: str, world_size: int, dtype: str = "bfloat16") -> dict[str, Run]:
    """Shape to the newest run in graphs that has dispatch's choice, contender to row, in the file's order."""
    found: dict[str, dict[str, Run]] = defaultdict(lambda: defaultdict(dict))
    for row in rows(name):
        if (row["op"], row["world_size"], row["mode"], row["dtype"]) == (op, str(world_size), "graph", dtype):
            found[row["shape"]][row["run_id"]][row["contender"]] = row
    complete = {shape: [run for run in held.values() if "tuned" in run] for shape, held in found.items()}
    return {shape: max(held, key=lambda run: run["tuned"]["date"]) for shape, held in complete.items() if held}


def p50(run: Run, contender: str) -> float:
    """Median of a contender in µs."""
    return float(run[contender]["latency_p50_us"])


def us(run: Run, contender: str) -> str:
    """Median of a contender in µs, a dash where it did not run."""
    return f"{p50(run, contender):.2f}" if contender in run else "–"


def size_text(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def short(value: float | str) -> str:
    """Two or more digits: 1.7, 29, 131."""
    number = float(value)
    return f"{number:.1f}".removesuffix(".0") if number < 10 else f"{number:.0f}"


def count(value: int | str) -> str:
    """With commas."""
    return f"{int(value):,}"


def table(heads: dict[str, str], lines: list[list[str]]) -> str:
    """Markdown; heads to how their columns are aligned: l or r."""
    rule = "".join("---:|" if side == "r" else "---|" for side in heads.values())
    text = [f"| {' | '.join(heads)} |", f"|{rule}"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])
