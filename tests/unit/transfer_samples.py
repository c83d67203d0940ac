"""Databases that the tests of exports, imports and merges share, and what they hold in words."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from db_samples import H200, OLDER, problem, trial

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database
from tunedcomm.selection.snapshot import Row, Snapshot

H100 = replace(H200, gpu="NVIDIA H100", num_links=16, fabric="nvswitch-16")


def in_words(record: Trial) -> str:
    """All but ids, which differ between databases."""
    return repr(replace(record, id=None, run_id=None))


SIZES = tuple(1 << exponent for exponent in range(10, 24, 4))


def store(path: Path, records: Iterable[Trial], *, command: str = "tunedcomm tune") -> Path:
    with Database.open(path, create=True) as database:
        run = database.start_run(command=command, seed=1, budget="none", host="node")
        # Each source by itself: those of one call are not told apart by time.
        for _, group in itertools.groupby(records, key=lambda record: record.source_hash):
            database.record([replace(record, run_id=run) for record in group])
        database.finish_run(run)
    return path


def config(num_blocks: int) -> dict[str, Any]:
    return {"config": {"num_blocks": num_blocks}}


NOT_OK: dict[str, Any] = {"latency_us": None}


def sweep() -> list[Trial]:
    """Everything a sweep leaves behind, at several sizes, with finals at most of them."""
    found: list[Trial] = []
    for index, size in enumerate(SIZES):
        here: dict[str, Any] = {"problem": problem(size)}
        time = 100 * index
        for blocks in (1, 2, 4, 8, 16):
            for place, variant in enumerate(("one_shot", "two_shot", "lamport")):
                latency = 3 + place + blocks / 8 + index
                found.append(trial(variant, latency, after=time + blocks, **config(blocks), **here))
        # Measured again and slower: the newest counts, not the fastest.
        found.append(trial("lamport", 40.0, after=time + 20, **config(16), **here))
        found += [
            trial("one_shot", **NOT_OK, status="pruned", after=time + n, **config(32 + n), **here) for n in (1, 2)
        ]
        found.append(trial("atomic", **NOT_OK, status="pruned", reason="too slow", after=time, **config(1), **here))
        found.append(trial("atomic", **NOT_OK, status="infeasible", reason="no fabric", **config(2), **here))
        if index != 3:
            found += [
                trial("library", 10.0, final=True, after=time + 50, **here),
                trial("one_shot", 4.5, final=True, after=time + 50, **config(4), **here),
                trial("lamport", 4.4 + index, final=True, after=time + 50, **config(2), **here),
            ]
    small, large = {"problem": problem(SIZES[0])}, {"problem": problem(SIZES[3])}
    found += [
        # Failed and good since, without finals: the failure must stay forgiven.
        trial("two_shot", **NOT_OK, status="hung", reason="no sign of life", after=301, **config(16), **large),
        trial("two_shot", 9.5, after=350, **config(16), **large),
        # Good and failed since.
        trial("two_shot", **NOT_OK, status="incorrect", after=999, **config(1), **large),
        trial("lamport", **NOT_OK, status="crashed", after=5, **config(64), **small),
        trial("lamport", **NOT_OK, status="compile_error", reason="too much", **config(128), **small),
        # Another environment, another world size, another source of the same variant.
        trial("one_shot", 2.0, final=True, environment=OLDER, **config(8), **small),
        trial("one_shot", 3.0, problem=problem(world_size=2), **config(8)),
        trial("one_shot", 1.0, final=True, source_hash="later", after=9000, **config(8), **small),
    ]
    return found


def snapshot_of(path: Path, world_size: int = 4) -> Snapshot:
    return load_snapshot(H200, world_size, layers=[Layer("packaged", str(path))], strict=True)


def rows_of(path: Path) -> tuple[Row, ...]:
    """The rows of a database of one's own."""
    return load_snapshot(H200, 4, layers=[Layer("user", str(path))], strict=True).rows


def change(path: Path, *statements: str) -> None:
    """Run SQL on a file as somebody else's program would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.executescript(statement)


def everything(path: Path) -> set[str]:
    """Every trial with the command that recorded it, without ids."""
    with Database.open(path, readonly=True) as database:
        runs = {run.id: run.command for run in database.runs()}
        return {f"{runs[t.run_id]}: {in_words(t)}" for t in database.trials() if t.run_id is not None}


def lines_of(target: str | Path, path: Path) -> bytes:
    """All rows of a database, which do not depend on ids."""
    export_database([target], path, form="jsonl", everything=True, force=True)
    return path.read_bytes()


def digests(target: str | Path) -> dict[tuple[str, int], str]:
    """The digest of every snapshot that the database can give."""
    return {
        (environment.digest, world_size): load_snapshot(
            environment, world_size, layers=[Layer("user", str(target))], strict=True
        ).digest
        for environment in (H200, OLDER, H100)
        for world_size in (2, 4)
    }
