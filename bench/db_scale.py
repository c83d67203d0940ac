"""A database as large as a busy cluster's: how long a snapshot, `lookup` and `explain` take on it.

python bench/db_scale.py                                   # 1,000,000 trials, ten kinds of machines, one file
python bench/db_scale.py --world-sizes 8                   # all trials of a kind in one snapshot: the worst case
python bench/db_scale.py --hardware 5 --software 2         # a snapshot reads the trials of two software versions

bench/made_up.py makes the trials: of --hardware kinds of machines with --software versions each, at --world-sizes, the
last of which is asked for. Times are medians over --repeats processes of each kind: `uncached` after the file left the
page cache, `cold` in a new process, `warm` again in the same one, `start_up` the imports alone. One line a run is
appended to bench/results/db/db_scale.csv. Run it on an idle machine; the file goes into the folder for temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from made_up import environments, make_database
from rows import RESULTS, ROOT, arguments, finish, of_host

from tunedcomm.hardware import HARD_FIELDS, Environment

SNAPSHOT = """
import json, sys, time
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.hardware import Environment
path, environment, world_size, repeats = json.loads(sys.argv[1])
here, times = Environment.from_dict(environment), []
for _ in range(repeats):
    begin = time.perf_counter()
    found = load_snapshot(here, world_size, layers=[Layer("user", path)], strict=True)
    times.append(time.perf_counter() - begin)
print(json.dumps({"times": times, "rows": len(found.rows)}))
"""
# What `lookup` needs of others, and nothing of ours: the time below which no change here can bring it.
START_UP = """
import gc, os
gc.disable()
import typer
app = typer.Typer()
@app.command()
def imports(shape: int) -> None:
    import sqlalchemy.orm, sqlalchemy.dialects.sqlite, triton
    os._exit(0)
app(args=["8"])
"""
LOOKUP = ("--op", "all_reduce", "--shape", "98304", "--dtype", "bfloat16")


def run(code: Sequence[str], **variables: str) -> tuple[float, str]:
    """Wall seconds and output of a new Python process."""
    begin, environment = time.perf_counter(), {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, *code], env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{shlex.join(code)[:200]} failed: {done.stderr}")
    return seconds, done.stdout


def forget(path: Path) -> None:
    """Ask the kernel to drop the file from its page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def ms(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f}"


def time_snapshots(path: Path, environment: Environment, world_size: int, repeats: int) -> dict[str, str]:
    """Times of a snapshot in new processes and again in the same one."""

    def loads(times: int) -> dict[str, list[float]]:
        task = json.dumps([str(path), environment.to_dict(), world_size, times])
        found: dict[str, list[float]] = json.loads(run(["-c", SNAPSHOT, task])[1])
        return found

    uncached, cold = [], []
    for _ in range(repeats):
        forget(path)
        uncached += loads(1)["times"]
        cold += loads(1)["times"]
    warm = loads(1 + repeats)
    return {
        "snapshot_rows": str(warm["rows"]),
        "snapshot_uncached_ms": ms(uncached),
        "snapshot_cold_ms": ms(cold),
        "snapshot_warm_ms": ms(warm["times"][1:]),
    }


def time_commands(path: Path, environment: Environment, world_size: int, repeats: int) -> dict[str, str]:
    """Times of `lookup` and `explain` as processes; they take turns, so that other load meets all alike."""
    arguments = (*LOOKUP, "--world-size", str(world_size), "--hardware", environment.digest[:12])
    codes = {name: ["-m", "tunedcomm.cli.main", name, *arguments] for name in ("lookup", "explain")}
    codes["start_up"] = ["-c", START_UP]
    seconds: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(repeats):
        for name, code in codes.items():
            seconds[name].append(run(code, TUNEDCOMM_DB=str(path), TRITON_INTERPRET="0")[0])
    best = {"lookup_best_ms": f"{1000 * min(seconds['lookup']):.1f}"}
    return {**{f"{name}_ms": ms(times) for name, times in seconds.items()}, **best}


def count(path: Path, query: str, *values: object) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(query, values).fetchone()[0])


def measure(args: argparse.Namespace, path: Path) -> dict[str, object]:
    world_sizes = [int(size) for size in args.world_sizes.split(",")]
    shape = {"hardware": args.hardware, "software": args.software, "world_sizes": world_sizes, "seed": args.seed}
    seconds = make_database(path, trials=args.trials, **shape)
    environment, world_size = environments(args.hardware, args.software)[0], world_sizes[-1]
    like = [f"{name} = ?" for name in HARD_FIELDS]
    of_snapshot = (
        "SELECT count(*) FROM trial JOIN problem ON problem.id = problem_id WHERE world_size = ? AND environment_id IN "
        f"(SELECT id FROM environment WHERE {' AND '.join(like)})"
    )
    return {
        "trials": count(path, "SELECT count(*) FROM trial"),
        "hardware": args.hardware,
        "software": args.software,
        "world_sizes": args.world_sizes.replace(",", " "),
        "problems": count(path, "SELECT count(*) FROM problem"),
        "seed": args.seed,
        "file_mib": f"{path.stat().st_size / 2**20:.1f}",
        "write_per_s": f"{args.trials / seconds:.0f}",
        "snapshot_trials": count(path, of_snapshot, world_size, *environment.hard_key),
        **time_snapshots(path, environment, world_size, args.repeats),
        **time_commands(path, environment, world_size, args.repeats),
        "repeats": args.repeats,
        **of_host("sqlalchemy", "triton", "typer", sqlite=sqlite3.sqlite_version),
    }


def main() -> None:
    options = {"world_sizes": "2,4,8", "seed": 0, "repeats": 9, "out": RESULTS / "db" / "db_scale.csv"}
    args = arguments(__doc__, trials=1_000_000, hardware=10, software=1, **options)
    with tempfile.TemporaryDirectory() as folder:
        finish(args.out, measure(args, Path(folder) / "tuned.db"))


if __name__ == "__main__":
    main()
