"""Several processes on one database: no error, no lost row, one schema."""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import replace

from db_samples import H200, problem, trial

from tunedcomm.db.store import Database


def _add_new_rows(url: str, index: int, gate: object) -> None:
    """Records whose problems, environments and variants nobody has seen, in another order in every process."""
    order = list(range(40))
    random.Random(index).shuffle(order)
    with Database.open(url, create=True) as database:
        for attempt in range(5):
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
    gate = spawn.Barrier(4)
    processes = [spawn.Process(target=_add_new_rows, args=(database_url, index, gate)) for index in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    with Database.open(database_url, readonly=True) as database:
        stats = database.stats()
    assert (stats["trials"], stats["problems"], stats["environments"], stats["variants"]) == (800, 200, 200, 35)
