"""Claims of supervisors on one database: alone, beside each other, killed, cut off."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claim_samples import CANDIDATES, FIRST, PROBLEM, SECOND, acquire, claims_of, flying, work
from db_samples import H200
from sqlalchemy import select

from tunedcomm.db.schema import ClaimRow
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.claims import Claims, owner_id

PATIENCE_S = 180  # for processes that import beside others


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with Database.open(database_url, create=True, patience_s=30) as opened:
        yield opened


@pytest.fixture
def opened(database: Database) -> Iterator[Callable[..., Claims]]:
    """Makes claims of one database, as supervisors on other hosts if they are given a name."""
    made: list[Claims] = []

    def open_one(host: str = "", **options: Any) -> Claims:
        made.append(claims_of(database, host, **options))
        return made[-1]

    yield open_one
    for claims in made:
        claims.close()


def rows(database: Database) -> int:
    return len(database.ask(lambda connection, _: connection.execute(select(ClaimRow.key)).all()))


def test_one_of_two_gets_a_candidate(opened: Callable[..., Claims], database: Database) -> None:
    one, two = opened("a"), opened("b")
    mine = acquire(one)
    assert mine is not None
    assert (mine.problem, mine.candidate, mine.final) == (PROBLEM, FIRST, False)
    assert acquire(two) is None
    assert (flying(one), flying(two)) == (set(), {FIRST})
    assert acquire(two, SECOND) is not None
    assert flying(one) == {SECOND}
    assert one.holds(mine)
    assert rows(database) == 2


def test_a_released_candidate_is_free(opened: Callable[..., Claims], database: Database) -> None:
    one, two = opened("a"), opened("b")
    mine = acquire(one)
    assert mine is not None
    one.release([mine])
    one.release([mine])
    assert flying(two) == set()
    assert acquire(two) is not None
    one.release([mine])  # of another supervisor by now
    assert flying(one) == {FIRST}
    assert rows(database) == 1


def test_finals_sources_environments_and_problems_are_apart(opened: Callable[..., Claims], database: Database) -> None:
    one, two = opened("a"), opened("b")
    assert acquire(one) is not None
    assert acquire(two, final=True) is not None
    assert (flying(one), flying(one, final=True)) == (set(), {FIRST})
    assert two.acquire(replace(PROBLEM, shape=(2048,)), FIRST, final=False) is not None
    for environment, sources in (("x" * 32, "sources of all_reduce"), (H200.digest, "changed")):
        other = Claims(database, environment, lambda op, text=sources: text)  # type: ignore[misc]
        assert acquire(other) is not None
        other.close()


def test_the_dead_of_this_host_are_noticed_at_once(opened: Callable[..., Claims], database: Database) -> None:
    ghost = Claims(database, H200.digest, lambda op: "sources of " + op, owner=owner_id(pid=2**22 + 1))
    assert acquire(ghost) is not None
    living, elsewhere = opened(), opened("elsewhere")
    assert flying(living) == set()
    mine = acquire(living)
    assert mine is not None
    assert acquire(elsewhere) is None
    ghost.close()
    assert living.holds(mine)
    assert flying(elsewhere) == {FIRST}


@contextlib.contextmanager
def _hammer(url: str, log: Path, hosts: list[str], run_s: float) -> Iterator[list[Any]]:
    Database.open(url, create=True).close()
    spawn = multiprocessing.get_context("spawn")
    gate = spawn.Barrier(len(hosts))
    arguments = [(url, index, str(log), host, run_s, gate) for index, host in enumerate(hosts)]
    processes = [spawn.Process(target=work, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()


def _lines(log: Path) -> list[tuple[int, str]]:
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
    return [(int(pid), candidate) for pid, candidate in lines]


def check_rows(url: str) -> None:
    with Database.open(url, readonly=True) as database:
        assert Counter(record.candidate for record in database.trials()) == Counter(CANDIDATES)
        assert rows(database) == 0


@pytest.mark.slow
def test_eight_processes_run_every_candidate_once(database_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _hammer(database_url, log, [""] * 8, 0.003) as processes:
        pass
    assert [process.exitcode for process in processes] == [0] * 8
    runs = _lines(log)
    assert Counter(name for _, name in runs) == Counter(map(str, CANDIDATES))
    assert len({pid for pid, _ in runs}) >= 4, "the work was not shared"
    check_rows(database_url)
