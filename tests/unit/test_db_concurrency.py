"""Several processes on one database: no error, no lost row, one schema."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

from db_samples import H200, problem, trial

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database

_BATCHES = 20
_ROWS = 10


def _write(path: str, name: str, gate: object) -> None:
    gate.wait()  # type: ignore[attr-defined]
    with Database.open(path, create=True) as database:
        run = database.start_run(command=name, seed=None, budget="", host=name)
        for batch in range(_BATCHES):
            database.record(
                trial(name, problem=problem(2 << (batch % 5)), config={"num_blocks": batch * _ROWS + i}, run_id=run)
                for i in range(_ROWS)
            )
        database.finish_run(run)


def test_writers_that_start_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "dir" / "tuned.db"
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(3)
    names = ["writer_a", "writer_b"]
    processes = [spawn.Process(target=_write, args=(str(path), name, gate)) for name in names]
    for process in processes:
        process.start()
    gate.wait()
    sizes = []
    while any(process.is_alive() for process in processes):
        if path.exists():
            sizes.append(len(load_snapshot(H200, 4, layers=[Layer("user", str(path))]).rows))
        processes[0].join(0.05)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sizes == sorted(sizes), "a reader saw rows vanish"
    with Database.open(path, readonly=True) as database:
        stored = database.trials()
        assert len(stored) == 2 * _BATCHES * _ROWS
        for name in names:
            assert {t.config["num_blocks"] for t in stored if t.variant == name} == set(range(_BATCHES * _ROWS))
        assert database.stats()["problems"] == 5
        assert all(run.finished_at is not None for run in database.runs())
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM tunedcomm_version").fetchone() == (1,)
