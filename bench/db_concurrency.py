"""Processes that write to one database while others read it: nothing may fail, get lost or be seen in part.

python bench/db_concurrency.py                                    # 8 write and 8 read for 60 s, one SQLite file
python bench/db_concurrency.py --db postgresql+psycopg://user@host/name

Writers record batches as tuners do, each row known by its writer, batch and place; runs, pins and problems are made on
the way. Readers load snapshots, list trials, count and look for environments. A reader must see a batch as a whole or
not at all, and never fewer trials than before. At the end every row must be there once. One line a run is appended to
bench/results/db/db_concurrency.csv.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_up import environments
from rows import RESULTS, arguments, finish, of_host
from sqlalchemy import text

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.values import utc_now
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem

WORLD_SIZE = 4
NUM_PROBLEMS = 200
BATCHES_A_PROBLEM = 20
MACHINES = environments(4, 2)


@dataclass
class Tally:
    """Counts of one process: its reads or writes, and the faults that it saw."""

    name: str
    rows: int = 0
    batches: int = 0
    longest_s: float = 0.0
    torn: int = 0
    shrunk: int = 0
    errors: list[str] = field(default_factory=list)

    def timed(self, action: Callable[[], int]) -> None:
        begin = time.perf_counter()
        self.rows += action()
        self.batches += 1
        self.longest_s = max(self.longest_s, time.perf_counter() - begin)


def problem_of(batch: int) -> Problem:
    index = batch // BATCHES_A_PROBLEM % NUM_PROBLEMS
    return Problem("all_reduce", (512 * (1 + index),), "bfloat16", WORLD_SIZE)


def write(url: str, writer: int, until: float, tally: Tally) -> None:
    """Batches of 1 to 20 trials, now and then another run and a pin."""
    rng = random.Random(writer)
    with Database.open(url, create=True) as database:
        run = database.start_run(command="write", seed=writer, budget="", host=tally.name)
        while time.time() < until:
            batch = tally.batches
            problem, environment, size = problem_of(batch), MACHINES[writer % len(MACHINES)], rng.randint(1, 20)
            records = [
                Trial(
                    problem=problem,
                    environment=environment,
                    variant=f"{tally.name}_{rng.randint(0, 3)}",
                    numerics="ordered",
                    source_hash="current",
                    config={"writer": writer, "batch": batch, "place": place, "size": size},
                    status="ok",
                    latency_p50_us=rng.uniform(2, 50),
                    baseline_p50_us=10.0,
                    final=rng.random() < 0.1,
                    run_id=run,
                    created_at=utc_now(),
                )
                for place in range(size)
            ]
            tally.timed(lambda records=records: len(database.record(records)))
            if batch % 50 == 49:
                database.pin(problem, Candidate.of("all_reduce", "library", {}), environment=environment, reason="")
                database.finish_run(run)
                run = database.start_run(command="write", seed=writer, budget="", host=tally.name)
        database.finish_run(run)


def look(tally: Tally, database: Database, problem: Problem, seen: Counter[Problem]) -> int:
    """List the trials of a problem; count what is not as it must be."""
    trials = database.trials(problem=problem)
    batches = Counter((t.config["writer"], t.config["batch"], t.config["size"]) for t in trials)
    tally.torn += sum(number != size for (_, _, size), number in batches.items())
    tally.shrunk += len(trials) < seen[problem]
    seen[problem] = len(trials)
    return len(trials)


def load(url: str, environment: Environment) -> int:
    return len(load_snapshot(environment, WORLD_SIZE, layers=[Layer("user", url)], strict=True).rows)


def read(url: str, reader: int, until: float, tally: Tally) -> None:
    """Read in turn what dispatch and the command line read."""
    rng = random.Random(-reader - 1)
    seen: Counter[Problem] = Counter()
    counted = 0
    while time.time() < until:
        tally.timed(lambda: load(url, rng.choice(MACHINES)))
        with Database.open(url, readonly=True) as database:
            for _ in range(5):
                tally.timed(lambda: look(tally, database, problem_of(rng.randrange(4000)), seen))
            trials = database.stats()["trials"]
            tally.shrunk += trials < counted
            counted = trials
            database.environments(op="all_reduce", world_size=WORLD_SIZE)


def work(
    body: Callable[[str, int, float, Tally], None], url: str, index: int, seconds: float, gate: Any, results: Any
) -> None:
    logging.getLogger("tunedcomm").setLevel(logging.ERROR)  # readers are told of other software at every turn
    tally = Tally(f"{body.__name__}_{index}")
    gate.wait()
    try:
        body(url, index, time.time() + seconds, tally)
    except Exception:  # noqa: BLE001 - counted and shown
        tally.errors.append(traceback.format_exc())
    results.put(tally)


def check(url: str, wanted: int) -> dict[str, object]:
    """Rows of so many recorded ones that are lost or there more than once."""
    with Database.open(url, readonly=True) as database, database.reading() as connection:
        rows = connection.execute(text("SELECT config FROM trial")).scalars()
        stored = Counter((c["writer"], c["batch"], c["place"], c["size"]) for c in map(json.loads, rows))
        integrity = "-"
        if database.path is not None:
            integrity = str(connection.execute(text("PRAGMA integrity_check")).scalar())
    whole = Counter((writer, batch, size) for writer, batch, _, size in stored)
    return {
        "lost": wanted - len(stored) + sum(number != size for (_, _, size), number in whole.items()),
        "doubled": sum(stored.values()) - len(stored),
        "integrity": integrity,
    }


def measure(args: argparse.Namespace, url: str) -> dict[str, object]:
    Database.open(url, create=True).close()
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    roles = [(write, i) for i in range(args.writers)] + [(read, i) for i in range(args.readers)]
    gate = spawn.Barrier(1 + len(roles))
    processes = [spawn.Process(target=work, args=(body, url, i, args.seconds, gate, results)) for body, i in roles]
    for process in processes:
        process.start()
    gate.wait()
    begin = time.time()
    found = [results.get(timeout=args.seconds + 300) for _ in processes]
    for process in processes:
        process.join()
    seconds = time.time() - begin
    errors = [error for tally in found for error in tally.errors]
    sys.stderr.write("".join(errors))
    wrote = [tally for tally in found if tally.name.startswith("write")]
    reads = [tally for tally in found if tally.name.startswith("read")]
    rows_written, rows_read = (sum(tally.rows for tally in group) for group in (wrote, reads))
    return {
        "database": "sqlite" if "://" not in url else url.partition(":")[0],
        "writers": args.writers,
        "readers": args.readers,
        "seconds": f"{seconds:.1f}",
        "batches": sum(tally.batches for tally in wrote),
        "rows_written": rows_written,
        "rows_written_per_s": f"{rows_written / seconds:.0f}",
        "longest_write_ms": f"{1000 * max(tally.longest_s for tally in wrote):.0f}",  # with the wait for other writers
        "reads": sum(tally.batches for tally in reads),  # snapshots, lists of trials, counts
        "rows_read": rows_read,
        "rows_read_per_s": f"{rows_read / seconds:.0f}",
        "longest_read_ms": f"{1000 * max(tally.longest_s for tally in reads):.0f}",
        "errors": len(errors) + sum(process.exitcode != 0 for process in processes),
        **check(url, rows_written),
        "torn": sum(tally.torn for tally in found),  # batches of which a reader saw a part
        "shrunk": sum(tally.shrunk for tally in found),  # times a reader saw fewer trials than before
        "file_mib": f"{Path(url).stat().st_size / 2**20:.1f}" if "://" not in url else "-",
        **of_host("sqlalchemy", sqlite=sqlite3.sqlite_version),
    }


def main() -> None:
    args = arguments(__doc__, writers=8, readers=8, seconds=60.0, db="", out=RESULTS / "db" / "db_concurrency.csv")
    with tempfile.TemporaryDirectory() as folder:
        row = measure(args, args.db or str(Path(folder) / "tuned.db"))
    finish(args.out, row, "errors", "lost", "doubled", "torn", "shrunk")


if __name__ == "__main__":
    main()
