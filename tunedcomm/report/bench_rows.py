"""Reading the CSV files of bench/results: rows of contenders, and tables of regret."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunedcomm.bench.csv import NEEDED
from tunedcomm.report.measured import LIBRARY, TUNED, Group, Measured

__all__ = ["BenchFile", "RegretRule", "read_csv"]

_RULES = ("world_size", "rule", "regret_mean", "regret_worst")
_HOST_COST = "host_cost:"
# What `bench/regret.py` writes: several configs of any variant, one of them the library.
_CANDIDATE = "candidate"
_SOFTWARE = ("gpu", "fabric", "driver", "torch", "triton", "nccl", "tunedcomm")


@dataclass(frozen=True, slots=True)
class RegretRule:
    """What one rule of selection loses at sizes that were not tuned; 1 is nothing."""

    world_size: int
    rule: str
    mean: float
    worst: float
    sizes: str


@dataclass(slots=True)
class BenchFile:
    """One CSV file.

    Attributes:
        name: of the file.
        rows: contenders.
        candidates: rows that time many candidates of one problem, for regret.
        rules: regret by rule.
        software: what the rows were measured with, each once.
        skipped: line to what is wrong with it.
    """

    name: str
    rows: list[Measured] = field(default_factory=list)
    candidates: list[Measured] = field(default_factory=list)
    rules: list[RegretRule] = field(default_factory=list)
    software: list[dict[str, str]] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)


def read_csv(path: Path) -> BenchFile:
    """Read one file; a line that makes no sense is left out and noted.

    Raises:
        ValueError: it cannot be read, or is neither rows of `tunedcomm bench` nor a table of regret.
    """
    found = BenchFile(path.name)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            is_rules = all(name in columns for name in _RULES)
            missing = [name for name in NEEDED if name not in columns]
            if missing and not is_rules:
                raise ValueError(
                    f"{path} is not a table that a report can show: it lacks the columns {', '.join(missing)}; give "
                    "files that `tunedcomm bench --csv` or bench/regret.py wrote"
                )
            for row in reader:
                try:
                    _take(row, found, is_rules=is_rules)
                except (ValueError, TypeError) as error:
                    found.skipped[reader.line_num] = str(error)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found


def _take(row: Mapping[str, str | None], found: BenchFile, *, is_rules: bool) -> None:
    if is_rules:
        found.rules.append(
            RegretRule(
                world_size=int(row["world_size"] or 0),
                rule=row["rule"] or "",
                mean=_number(row, "regret_mean"),
                worst=_number(row, "regret_worst"),
                sizes=row.get("sizes") or "",
            )
        )
        return
    measured = _measured(row, found.name)
    raw = row["contender"] == _CANDIDATE or (row["contender"] == LIBRARY and "regret" in found.name)
    (found.candidates if raw else found.rows).append(measured)
    software = {name: row.get(name) or "" for name in _SOFTWARE}
    if software not in found.software:
        found.software.append(software)


def _number(row: Mapping[str, str | None], name: str) -> float:
    value = float(row[name] or "nan")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {row[name]!r}, not a number > 0")
    return value


def _optional(row: Mapping[str, str | None], name: str) -> float | None:
    text = row.get(name)
    return float(text) if text else None


def _measured(row: Mapping[str, str | None], origin: str) -> Measured:
    def text(name: str) -> str:
        return row.get(name) or ""

    contender = text("contender")
    if not contender:
        raise ValueError("contender is empty")
    measured = Measured(
        group=Group(
            origin=origin,
            op=text("op"),
            world_size=int(text("world_size")),
            dtype=text("dtype"),
            mode=text("mode"),
            reduction=text("reduction"),
            input_kind=text("input_kind") or "plain",
            in_place=text("in_place").lower() == "true",
            layout=text("layout"),
            gpu=text("gpu"),
            fabric=text("fabric"),
            is_host_time=contender.startswith(_HOST_COST),
        ),
        shape=text("shape"),
        message_bytes=int(text("message_bytes")),
        contender=contender.removeprefix(_HOST_COST),
        config=text("config"),
        latency_p50_us=_number(row, "latency_p50_us"),
        latency_p10_us=_optional(row, "latency_p10_us"),
        latency_p90_us=_optional(row, "latency_p90_us"),
        error=_optional(row, "error"),
        date=text("date"),
        run_id=text("run_id"),
        is_chosen=contender == TUNED,
    )
    if not measured.extents:
        raise ValueError(f"shape {measured.shape!r} has no extents")
    return measured
