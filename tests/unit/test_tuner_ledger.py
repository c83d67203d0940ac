"""Claims: one candidate runs once, whoever asks and whoever dies."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from db_samples import H200
from ledger_bodies import CANDIDATES, FIRST, OP, PROBLEM, SECOND, claim, flying, open_as, variants, work
from postgres import PostgresServer
from sqlalchemy import make_url

from tunedcomm import spec
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAwayError
from tunedcomm.tuner import studies
from tunedcomm.tuner.board import StorageBoard
from tunedcomm.tuner.ledger import OptunaLedger, open_ledger, study_name
from tunedcomm.tuner.owners import Owner

QUICK: dict[str, Any] = {"heartbeat_s": 1, "grace_s": 2}


pytestmark = pytest.mark.usefixtures("pretended_op")


@pytest.fixture
def opened(database_url: str) -> Iterator[Callable[..., OptunaLedger]]:
    """Opens ledgers of one database, as processes on other hosts if they are given a name."""
    Database.open(database_url, create=True).close()
    ledgers: list[OptunaLedger] = []

    def open_one(host: str | None = None, **options: Any) -> OptunaLedger:
        ledgers.append(open_as(database_url, host, **{"patience_s": 30, **options}))
        return ledgers[-1]

    yield open_one
    for ledger in ledgers:
        ledger.close()


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for it; returns how long that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - begin


def dead(host: str) -> Owner:
    """A process on this host that has ended."""
    return replace(Owner.here(), name=host, pid=2**22 + 1)


def test_one_of_two_gets_a_candidate(opened: Callable[..., OptunaLedger]) -> None:
    one, two = opened("a"), opened("b")
    mine = claim(one)
    assert (mine.problem, mine.candidate, mine.final) == (PROBLEM, FIRST, False)
    assert claim(two) is None
    assert (flying(one), flying(two)) == (set(), {FIRST})
    assert claim(two, SECOND) is not None
    assert flying(one) == {SECOND}
    assert one.holds(mine)


def test_what_was_told_is_refused_unless_it_is_wanted_again(opened: Callable[..., OptunaLedger]) -> None:
    one, two = opened("a"), opened("b")
    one.tell(claim(one), 4.5)
    one.tell(claim(one, SECOND), None)
    for ledger in (one, two):
        assert (claim(ledger), claim(ledger, SECOND)) == (None, None)
        assert flying(ledger) == set()
    mine = claim(two, again=True)
    assert mine is not None
    assert claim(one, again=True) is None
    two.tell(mine, None)


def test_what_was_given_back_is_free(opened: Callable[..., OptunaLedger]) -> None:
    one, two = opened("a"), opened("b")
    one.give_back(claim(one))
    assert flying(two) == set()
    mine = claim(two)
    assert mine is not None
    two.tell(mine, 1.0)
    two.tell(mine, 1.0)  # an answer may get lost
    two.give_back(mine)
    assert claim(one) is None


def test_closing_gives_everything_back(opened: Callable[..., OptunaLedger]) -> None:
    one, two = opened("a"), opened("b")
    assert claim(one)
    assert claim(one, SECOND)
    one.close()
    assert flying(two) == set()
    assert claim(two) is not None


def test_finals_sources_environments_and_problems_are_apart(
    opened: Callable[..., OptunaLedger], database_url: str
) -> None:
    one, two = opened("a"), opened("b")
    assert claim(one) is not None
    assert claim(two, final=True) is not None
    assert (flying(one), flying(one, final=True)) == (set(), {FIRST})
    assert two.claim(replace(PROBLEM, shape=(2048,)), FIRST, final=False) is not None
    for environment, sources in (("x" * 32, "sources of pretended"), (H200.digest, "changed")):
        other = open_ledger(database_url, environment, lambda op, text=sources: text)
        assert claim(other) is not None
        other.close()
    names = {study_name(PROBLEM, H200.digest, text, final=final) for text in ("a", "b") for final in (True, False)}
    assert len(names) == 4
    assert all(name.startswith("pretended 1024 bfloat16 world_size=2") for name in names)


def test_the_dead_of_this_host_are_noticed_at_once(database_url: str, opened: Callable[..., OptunaLedger]) -> None:
    ghost = open_ledger(database_url, H200.digest, lambda op: "sources of " + op, owner=dead("ghost"))
    assert claim(ghost) is not None
    living, elsewhere = opened(), opened("elsewhere")
    assert flying(living) == set()
    for ledger in (living, elsewhere):
        assert claim(ledger) is None, "its owner may have stored the row; who finds none asks again"
    mine = claim(living, again=True)
    assert mine is not None
    assert claim(elsewhere, again=True) is None
    assert flying(elsewhere) == {FIRST}
    assert claim(living, SECOND, again=True) is not None


def _claim_and_wait(url: str, claimed: Any) -> None:
    spec._variants.update(variants())
    ledger = open_as(url, "another container")
    assert claim(ledger) is not None
    claimed.set()
    time.sleep(600)


def test_the_dead_of_another_container_are_noticed(tmp_path: Path) -> None:
    """Its process numbers mean nothing here; that it lives is seen by its lock."""
    url = str(tmp_path / "tuned.db")
    Database.open(url, create=True).close()
    here, context = open_as(url, None), multiprocessing.get_context("spawn")
    claimed = context.Event()
    process = context.Process(target=_claim_and_wait, args=(url, claimed))
    process.start()
    assert claimed.wait(60)
    assert flying(here) == {FIRST}
    assert claim(here, again=True) is None
    process.kill()
    process.join()
    assert flying(here) == set()
    assert claim(here, again=True) is not None
    here.close()


def test_a_recycled_process_number_is_not_taken_for_the_owner() -> None:
    here = Owner.here()
    assert here.lives() is True
    assert replace(here, started=here.started - 1).lives() is False
    assert replace(here, pid=2**22 + 1).lives() is False
    assert replace(here, kernel="another host").lives() is None


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
    assert waited > 1.5
    assert [record.message for record in caplog.records if "given up" in record.message] != []
    assert claim(two) is None
    assert claim(two, again=True) is not None
    until(lambda: not one.holds(next(iter(one._held.values()))), 5)
    two.close()
    one.close()


def test_a_jump_of_the_servers_clock_takes_no_claim_away(postgres_server: PostgresServer, postgres_url: str) -> None:
    one, two = (open_as(postgres_url, host, **QUICK) for host in ("a", "b"))
    assert claim(one) is not None
    name = str(make_url(postgres_url).database)
    for _ in range(2):
        postgres_server.execute(
            "UPDATE optuna.trial_heartbeats SET heartbeat = heartbeat - interval '1 hour'", database=name
        )
        begin = time.monotonic()
        while time.monotonic() - begin < 4:
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
            process.join(120)
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
@pytest.mark.parametrize("far", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one host", "many hosts"])
def test_what_the_killed_have_left_is_run_by_others(
    request: pytest.FixtureRequest, tmp_path: Path, far: bool, database_url: str
) -> None:
    if far and "://" not in database_url:
        pytest.skip("a journal is for one host")
    log = tmp_path / "log"
    choose = random.Random(5)
    with _hammer(database_url, log, [f"host{i}" if far else None for i in range(8)], 0.06) as processes:
        for victim in processes[:4]:
            until(lambda pid=victim.pid: any(runner == pid for runner, _ in _lines(log)), 60)
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
    one, two = (open_as(postgres_url, host, **QUICK, patience_s=60) for host in ("a", "b"))
    mine = claim(one)
    postgres_server.stop()
    timer = threading.Timer(4.0, postgres_server.start)  # longer than the grace
    timer.start()
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        assert claim(two) is None
    timer.join()
    assert len([r for r in caplog.records if "Waiting for it" in r.message]) == 1
    begin = time.monotonic()
    while time.monotonic() - begin < 4:
        assert flying(two) == {FIRST}
        time.sleep(0.2)
    one.tell(mine, 3.0)
    assert claim(two) is None
    one.close()
    two.close()


def test_a_lost_answer_makes_one_claim(opened: Callable[..., OptunaLedger]) -> None:
    one, two = opened("a"), opened("b")
    assert claim(one, SECOND) is not None
    write, calls = one._board.claim, []

    def lose(*arguments: Any, **named: Any) -> Any:
        calls.append(write(*arguments, **named))
        if len(calls) == 1:
            raise DatabaseAwayError("server closed the connection unexpectedly")
        return calls[-1]

    one._board.claim = lose  # type: ignore[method-assign]
    mine = claim(one)
    assert calls == [(mine.key, [])] * 2
    one.give_back(mine)
    assert flying(two) == {SECOND}, "the second attempt is not left behind"


def test_the_dashboard_sees_parameters_and_latencies(postgres_url: str) -> None:
    ledger = open_as(postgres_url, "node7")
    ledger.tell(claim(ledger), 4.25)
    study = optuna.load_study(study_name=study_name(PROBLEM, H200.digest, "sources of pretended", final=False),
                              storage=f"{postgres_url}&options=-csearch_path%3Doptuna")  # fmt: skip
    (trial,) = study.trials
    assert (trial.value, trial.state.name) == (4.25, "COMPLETE")
    assert trial.params == {"variant": "one", "one.num_blocks": 1, "one.num_warps": 1}
    assert trial.user_attrs["owner"]["name"] == "node7"
    ledger.close()


def test_tables_of_a_later_optuna_are_used_through_optuna(
    opened: Callable[..., OptunaLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are other servers': slower, with the same answers, also side by side with our own statements."""
    fast = opened("fast")
    monkeypatch.setattr(studies, "REVISION", "another")
    one, two = opened("a"), opened("b")
    assert isinstance(one._board, StorageBoard)
    mine = claim(one)
    assert mine is not None
    assert [claim(ledger) for ledger in (two, fast)] == [None, None]
    theirs = claim(fast, SECOND)
    assert theirs is not None
    assert [flying(ledger) for ledger in (one, two, fast)] == [{SECOND}, {FIRST, SECOND}, {FIRST}]
    assert one.holds(mine)
    assert one._board.is_running(mine.key)
    one.tell(mine, 3.0)
    fast.tell(theirs, 3.5)
    assert not one._board.is_running(mine.key)
    for ledger in (one, two, fast):
        assert [claim(ledger, candidate) for candidate in (FIRST, SECOND)] == [None, None]
    again = claim(two, again=True)
    assert again is not None
    two.give_back(again)
    write, calls = two._board.claim, []

    def lose(*arguments: Any, **named: Any) -> Any:
        calls.append(write(*arguments, **named))
        if len(calls) == 1:
            raise DatabaseAwayError("server closed the connection unexpectedly")
        return calls[-1]

    two._board.claim = lose  # type: ignore[method-assign]
    third = claim(two, CANDIDATES[2])
    assert third.key == calls[0][0] == calls[1][0]
    two.give_back(third)
    assert flying(fast) == set()


def test_supervisors_that_know_other_variants_share_their_work(
    opened: Callable[..., OptunaLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = opened("a"), opened("b")
    assert claim(one) is not None
    extra = replace(spec._variants[OP, "one"], name="another")
    monkeypatch.setitem(spec._variants, (OP, "another"), extra)
    assert claim(two) is None
    assert claim(two, SECOND) is not None
    assert flying(one) == {SECOND}
