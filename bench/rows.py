"""Rows of bench/results: where, when and by which command they were measured, and files to append them to."""

from __future__ import annotations

import csv
import os
import platform
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunedcomm.hardware import Environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
Row = Mapping[str, Any]


def command() -> str:
    """The command that runs, without the folders of its arguments."""
    return " ".join([f"bench/{Path(sys.argv[0]).name}", *(Path(each).name for each in sys.argv[1:])])


def of_run(environment: Environment) -> dict[str, Any]:
    """Columns of a run on GPUs."""
    names = ("gpu", "fabric", "torch", "triton", "nccl", "driver", "tunedcomm")
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    known = {name: getattr(environment, name) for name in names}
    return {**known, "command": command(), "run_id": secrets.token_hex(6), "date": date}


def of_host(*packages: str, **servers: str) -> dict[str, Any]:
    """Columns of a run that needs no GPU, with the versions of packages and of what is not a package."""
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **servers,
        **{package: version(package) for package in packages},
        "command": f"python {command()}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }


def append(path: Path, rows: Sequence[Row], columns: Iterable[str] = ()) -> None:
    """Append rows to a CSV; a new one gets `columns`, by default the first row's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        there = next(csv.reader(file), [])
        writer = csv.DictWriter(file, there or tuple(columns) or tuple(rows[0]), lineterminator="\n")
        if not there:
            writer.writeheader()
        writer.writerows(rows)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Make a CSV of these rows alone."""
    path.unlink(missing_ok=True)
    append(path, rows)
