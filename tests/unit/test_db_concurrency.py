"""Several processes on one database: no error, no lost row, one schema."""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import replace

from db_samples import H200, problem, trial
from sqlalchemy import text

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database

_BATCHES = 10
_ROWS = 10


def _write(url: str, name: str, gate: object) -> None:
    gate.wait()  # type: ignore[attr-defined]
    with Database.open(url, create=True) as database:
        run = database.start_run(command=name, seed=None, budget="", host=name)
        for batch in range(_BATCHES):
            database.record(
                trial(name, problem=problem(2 << (batch % 5)), config={"num_blocks": batch * _ROWS + i}, run_id=run)
                for i in range(_ROWS)
            )
        database.finish_run(run)


def test_writers_that_start_at_once_lose_nothing(database_url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(3)
    names = ["writer_a", "writer_b"]
    processes = [spawn.Process(target=_write, args=(database_url, name, gate)) for name in names]
    for process in processes:
        process.start()
    gate.wait()
    sizes = []
    while any(process.is_alive() for process in processes):
        sizes.append(len(load_snapshot(H200, 4, layers=[Layer("user", database_url)]).rows))
        processes[0].join(0.05)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sizes == sorted(sizes), "a reader saw rows vanish"
    with Database.open(database_url, readonly=True) as database:
        stored = database.trials()
        assert len(stored) == 2 * _BATCHES * _ROWS
        for name in names:
            assert {t.config["num_blocks"] for t in stored if t.variant == name} == set(range(_BATCHES * _ROWS))
        assert database.stats()["problems"] == 5
        assert all(run.finished_at is not None for run in database.runs())
        with database.reading() as connection:
            assert connection.execute(text("SELECT count(*) FROM tunedcomm_version")).scalar() == 1
            if database.path is not None:
                assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"


def _add_new_rows(url: str, index: int, gate: object) -> None:
    """Records whose problems, environments and variants nobody has seen, in another order in every process."""
    order = list(range(20))
    random.Random(index).shuffle(order)
    with Database.open(url, create=True) as database:
        for attempt in range(3):
            gate.wait()  # type: ignore[attr-defined]
            database.record(
                trial(
                    f"variant_{attempt}_{i % 7}",
                    problem=problem(2 << i % 20, reduction=f"r{attempt}_{i}"),
                    environment=replace(H200, driver=f"{attempt}.{i}"),
                    config={"num_blocks": index},
                )
                for i in order
            )


def test_writers_that_meet_the_same_new_rows_neither_clash_nor_wait_for_each_other(database_url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(3)
    processes = [spawn.Process(target=_add_new_rows, args=(database_url, index, gate)) for index in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3
    with Database.open(database_url, readonly=True) as database:
        stats = database.stats()
    assert (stats["trials"], stats["problems"], stats["environments"], stats["variants"]) == (180, 60, 60, 21)
