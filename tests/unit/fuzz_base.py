"""Sound databases to be spoilt: a small sweep with all there is, in every state in which SQLite leaves its files."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import limits_for

__all__ = ["HERE", "WORLD_SIZE", "Base", "bases", "problems", "record"]

HERE = Environment(
    gpu="NVIDIA H200",
    num_sms=132,
    compute_capability=90,
    memory_gib=141,
    fabric="nvswitch-18",
    num_links=18,
    multicast=False,
    nodes=1,
    driver="570.1",
    cuda="13.0",
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.9",
    tunedcomm="0.1.0",
)
WORLD_SIZE = 4
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
SIDES = ("", "-wal", "-shm", "-journal")


@dataclass(frozen=True)
class Base:
    """The files of a sound database.

    Attributes:
        name: its state.
        files: what is appended to the path, to the content.
        page_size: of the file.
    """

    name: str
    files: dict[str, bytes] = field(repr=False)
    page_size: int


def problems() -> list[Problem]:
    """What the sweep has measured: six sizes in two modes."""
    return [
        Problem("all_reduce", (1 << log2,), "bfloat16", WORLD_SIZE, mode=mode)
        for log2, mode in itertools.product(range(11, 22, 2), ("graph", "eager"))
    ]


def record(problem: Problem, variant: str, *, source_hash: str | None = None, **changes: object) -> Trial:
    """An ok trial with the variant's default config and the source hash as it is."""
    known = get_variant(problem.op, variant)
    config = known.default(problem, limits_for(HERE, WORLD_SIZE))
    values: dict[str, object] = {
        "config": config,
        "status": "ok",
        "latency_p10_us": 4.9,
        "latency_p50_us": 5.0 + len(variant),
        "latency_p90_us": 5.2 + len(variant),
        "samples": 50,
        "baseline_p50_us": 40.0,
        "error": 0.002,
    }
    return Trial(
        problem=problem,
        environment=HERE,
        variant=variant,
        numerics=known.numerics,
        source_hash=source_hash or kernels.source_hash(known),
        **{**values, **changes},  # type: ignore[arg-type]
    )


def _records(run: int) -> list[Trial]:
    found = []
    for problem in problems():
        found += [record(problem, name, final=True) for name in ("library", "lamport", "two_shot", "two_shot_lamport")]
        found += [record(problem, "one_shot"), record(problem, "lamport", source_hash="0123456789abcdef")]
        found.append(record(problem, "multimem_one_shot", status="infeasible", reason="no multicast", samples=0))
    first = problems()[0]
    older = replace(HERE, torch="2.9.0")
    found.append(
        record(first, "two_shot", status="hung", reason="no progress for 20 s", latency_p50_us=None, samples=0)
    )
    found.append(replace(record(replace(first, world_size=2), "lamport", final=True), environment=older))
    found.append(replace(record(replace(first, dtype="float16"), "lamport"), environment=older))
    return [replace(r, run_id=run, created_at=START + timedelta(seconds=i)) for i, r in enumerate(found)]


def _fill(path: Path) -> None:
    kernels.discover()
    with Database.open(path, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=0, budget="", host="fuzz")
        database.record(_records(run))
        database.pin(problems()[2], Candidate.of("all_reduce", "library", {}), environment=HERE, reason="as agreed")
        database.finish_run(run)


def _rewrite(path: Path, *pragmas: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("journal_mode=DELETE", *pragmas):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("VACUUM")


def _in_utf16(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        statements = list(connection.iterdump())
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA encoding='UTF-16le'")
        connection.executescript("\n".join(statements))


def _busy(path: Path, *pragmas: str) -> dict[str, bytes]:
    """The files while a writer is in the middle of a transaction that it cannot hold in memory."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in (*pragmas, "cache_size=2", "cache_spill=1"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN")
        connection.execute("UPDATE trial SET samples = samples + 1, reason = reason || 'again'")
        if "journal_mode=WAL" in pragmas:
            connection.execute("COMMIT")
        files = {side: path.with_name(path.name + side) for side in SIDES}
        return {side: file.read_bytes() for side, file in files.items() if file.exists()}


def bases(folder: Path) -> list[Base]:
    """One database in every state."""
    _fill(folder / "sound.db")
    states: dict[str, tuple[int, Callable[[Path], dict[str, bytes] | None]]] = {
        "closed": (4096, lambda path: None),
        "rollback": (1024, lambda path: _rewrite(path, "page_size=1024")),
        "vacuumed": (512, lambda path: _rewrite(path, "page_size=512", "auto_vacuum=FULL")),
        "utf16": (4096, _in_utf16),
        "wal": (4096, lambda path: _busy(path, "journal_mode=WAL", "wal_autocheckpoint=0")),
        "journal": (4096, lambda path: _busy(path, "journal_mode=DELETE")),
    }
    found = []
    for name, (page_size, make) in states.items():
        path = folder / f"{name}.db"
        shutil.copy(folder / "sound.db", path)
        files = make(path) or {"": path.read_bytes()}
        found.append(Base(name, files, page_size))
    assert set(found[4].files) == {"", "-wal", "-shm"}
    assert set(found[5].files) == {"", "-journal"}
    return found
