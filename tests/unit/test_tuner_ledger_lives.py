"""Claims of processes that are killed, hosts that fall silent and servers that restart."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_bodies import CANDIDATES, FIRST, SECOND, claim, flying, open_as, variants, work
from postgres import PostgresServer
from sqlalchemy import make_url

from tunedcomm import spec
from tunedcomm.db.store import Database

# Who lives is given up after a silence of the grace and two heartbeats. On 2 cores with 12 busy loops beside, up to
# 1.3 s were seen between two heartbeats that should be 1 s apart.
QUICK: dict[str, Any] = {"heartbeat_s": 1, "grace_s": 3}
# Where heartbeats are made out of date, the two alone must be long.
STURDY: dict[str, Any] = {"heartbeat_s": 2, "grace_s": 3}
PATIENCE_S = 180  # for processes that import beside others


pytestmark = pytest.mark.usefixtures("pretended_op")


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for it; returns how long that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - begin


@pytest.mark.slow
def test_a_host_without_heartbeats_is_given_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (open_as(postgres_url, host, **QUICK) for host in ("a", "b"))
    assert claim(one) is not None
    # Neither process's clock has a say: they jump, in opposite directions, while both live.
    real = time.time
    for jump in (86_400, -86_400):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        begin = time.monotonic()
        while time.monotonic() - begin < 3:
            assert flying(two) == {FIRST}
            assert claim(two) is None
            time.sleep(0.2)
    monkeypatch.undo()
    for key, variant in variants().items():
        monkeypatch.setitem(spec._variants, key, variant)
    one._ending.set()  # as if it were cut off
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        waited = until(lambda: flying(two) == set(), 15)
    assert waited > 2
    assert [record.message for record in caplog.records if "given up" in record.message] != []
    assert claim(two) is None
    assert claim(two, again=True) is not None
    until(lambda: not one.holds(next(iter(one._held.values()))), 5)
    two.close()
    one.close()


@pytest.mark.slow
def test_a_jump_of_the_servers_clock_takes_no_claim_away(postgres_server: PostgresServer, postgres_url: str) -> None:
    one, two = (open_as(postgres_url, host, **STURDY) for host in ("a", "b"))
    assert claim(one) is not None
    name = str(make_url(postgres_url).database)
    for _ in range(2):
        postgres_server.execute(
            "UPDATE optuna.trial_heartbeats SET heartbeat = heartbeat - interval '1 hour'", database=name
        )
        begin = time.monotonic()
        while time.monotonic() - begin < 6:
            assert flying(two) == {FIRST}
            time.sleep(0.1)
    one.close()
    two.close()


def test_who_was_taken_for_dead_learns_it_and_goes_on(postgres_server: PostgresServer, postgres_url: str) -> None:
    one, two = (open_as(postgres_url, host, **QUICK) for host in ("a", "b"))
    mine = claim(one)
    seat = one._presence.mark()["seat"]
    postgres_server.execute(
        f"UPDATE optuna.trials SET state = 'FAIL' WHERE trial_id = {seat}",
        database=str(make_url(postgres_url).database),
    )
    until(lambda: one._presence.mark()["seat"] != seat, 10)
    until(lambda: flying(two) == set(), 10)
    theirs = claim(two, again=True)
    assert theirs is not None
    one.tell(mine, 4.0)  # too late; the row was stored or dropped by then
    assert flying(one) == {FIRST}
    assert claim(one, SECOND) is not None
    assert flying(two) == {SECOND}
    one.close()
    two.close()


@contextlib.contextmanager
def _hammer(url: str, log: Path, hosts: list[str | None], run_s: float) -> Iterator[list[Any]]:
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


@pytest.mark.slow
def test_eight_processes_run_every_candidate_once(database_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _hammer(database_url, log, [None] * 8, 0.003) as processes:
        pass
    assert [process.exitcode for process in processes] == [0] * 8
    runs = _lines(log)
    assert Counter(name for _, name in runs) == Counter(map(str, CANDIDATES))
    assert len({pid for pid, _ in runs}) >= 4, "the work was not shared"
    with Database.open(database_url, readonly=True) as database:
        assert Counter(record.candidate for record in database.trials()) == Counter(CANDIDATES)


@pytest.mark.slow
@pytest.mark.parametrize("far", [False, True], ids=["one host", "many hosts"])
def test_what_the_killed_have_left_is_run_by_others(
    request: pytest.FixtureRequest, tmp_path: Path, far: bool, database_url: str
) -> None:
    if far and "://" not in database_url:
        pytest.skip("a journal is for one host")
    log = tmp_path / "log"
    choose = random.Random(5)
    with _hammer(database_url, log, [f"host{i}" if far else None for i in range(8)], 0.06) as processes:
        for victim in processes[:4]:
            until(lambda pid=victim.pid: any(runner == pid for runner, _ in _lines(log)), PATIENCE_S)
            time.sleep(choose.uniform(0, 0.07))
            os.kill(victim.pid, signal.SIGKILL)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 4 + [0] * 4
    with Database.open(database_url, readonly=True) as database:
        assert Counter(record.candidate for record in database.trials()) == Counter(CANDIDATES)
    killed = {process.pid for process in processes[:4]}
    again = {name: count for name, count in Counter(name for _, name in _lines(log)).items() if count > 1}
    assert sum(count - 1 for count in again.values()) <= len(killed)


@pytest.mark.slow
def test_a_restart_of_the_server_gives_no_claim_back(
    postgres_server: PostgresServer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (open_as(postgres_url, host, **STURDY, patience_s=60) for host in ("a", "b"))
    mine = claim(one)
    postgres_server.stop()
    timer = threading.Timer(4.0, postgres_server.start)  # longer than the grace
    timer.start()
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        assert claim(two) is None
    timer.join()
    assert len([r for r in caplog.records if "Waiting for it" in r.message]) == 1
    begin = time.monotonic()
    while time.monotonic() - begin < 5:
        assert flying(two) == {FIRST}
        time.sleep(0.2)
    one.tell(mine, 3.0)
    assert claim(two) is None
    one.close()
    two.close()
