"""Rows of bench/results: where, when and by which command they were measured, and files to append them to."""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tunedcomm.bench.csv import append_rows
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
Row = Mapping[str, Any]


def arguments(doc: str | None, **options: Any) -> argparse.Namespace:
    """Parse a script's command line.

    Args:
        doc: the script's docstring, shown by `--help`.
        options: option to its default, whose type it has; a switch for False, several values for a list, a path for
            None.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        told = {"default": default, "help": f"default: {default}"}
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            kind, action = (type(default[0]), "store") if default else (str, "extend")
            parser.add_argument(flag, nargs="+", action=action, type=kind, **told)
        else:
            parser.add_argument(flag, type=Path if default is None else type(default), **told)
    return parser.parse_args()


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


def read_trials(path: Path) -> list[Trial]:
    """Trials of a database that nobody writes, or of a recording in tests/data."""
    if path.suffix == ".db":
        with Database.open(path, readonly=True, immutable=True) as database:
            return database.trials()
    sys.path.append(str(ROOT / "tests"))
    from replay import read_recording

    found: list[Trial] = read_recording(path)
    return found


def show(rows: Sequence[Row], path: Path | None) -> None:
    """Print rows and, if a path is given, make a CSV of them."""
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if path is not None:
        path.unlink(missing_ok=True)
        append_rows(path, rows, rows[0])


def finish(path: Path, row: Row, *faults: str) -> None:
    """Append the only row of a run and print it; exit with 1 if one of the columns of faults is not 0."""
    append_rows(path, [row], row)
    print("".join(f"{name:20} {value}\n" for name, value in row.items()))
    found = [name for name in faults if row[name]]
    if found:
        sys.exit(f"not 0: {', '.join(found)}")
