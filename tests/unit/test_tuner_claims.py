"""Claims of supervisors on one database: alone, beside each other, killed, cut off."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from db_samples import H200, trial
from postgres import PostgresServer
from sqlalchemy import select, update

from tunedcomm.db.schema import ClaimRow
from tunedcomm.db.store import Database
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.search.claims import Claim, Claims, owner_id, owner_lives

PROBLEM = Problem("all_reduce", (1024,), "bfloat16", 2)


FIRST, SECOND = (
    Candidate.of("all_reduce", "lamport", {"num_blocks": 1, "num_warps": 1, "launch_pdl": pdl}) for pdl in (False, True)
)


PAST = datetime(2020, 1, 1, tzinfo=timezone.utc)


MADE: list[Claims] = []  # the fixture `database` closes them


def claims_of(database: Database, host: str = "", **options: Any) -> Claims:
    """Claims of a supervisor on this host, or of one that passes for a supervisor on another."""
    owner = owner_id(host=host, kernel=host) if host else ""
    MADE.append(Claims(database, H200.digest, lambda op: "sources of " + op, owner=owner, **options))
    return MADE[-1]


def acquire(claims: Claims, candidate: Candidate = FIRST, *, final: bool = False) -> Claim | None:
    return claims.acquire(PROBLEM, candidate, final=final)


def flying(claims: Claims, *, final: bool = False) -> set[Candidate]:
    return set(claims.in_flight(PROBLEM, final=final))


def stays_flying(owner: Claims, seconds: float) -> None:
    """For so long, nobody else gets what another one claimed."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        assert acquire(owner) is None
        assert flying(owner) == {FIRST}
        time.sleep(0.2)


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for it; returns how long that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.05)
    return time.monotonic() - begin


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with Database.open(database_url, create=True, patience_s=30) as opened:
        yield opened
        while MADE:
            MADE.pop().close()


def rows(database: Database) -> int:
    return len(database.ask(lambda connection, _: connection.execute(select(ClaimRow.key)).all()))


def test_one_of_two_gets_a_candidate_and_may_ask_again(database: Database) -> None:
    """The answer of the first attempt may get lost."""
    one, two = claims_of(database, "a"), claims_of(database, "b")
    mine = acquire(one)
    assert acquire(one) == mine
    assert (mine.problem, mine.candidate, mine.final) == (PROBLEM, FIRST, False)
    assert acquire(two) is None
    assert (flying(one), flying(two)) == (set(), {FIRST})
    assert acquire(two, SECOND) is not None
    assert flying(one) == {SECOND}
    assert one.holds(mine)
    assert rows(database) == 2


def test_released_candidates_are_free_and_closing_releases_all(database: Database) -> None:
    one, two = claims_of(database, "a"), claims_of(database, "b")
    mine = acquire(one)
    one.release([mine])
    one.release([mine])
    assert flying(two) == set()
    assert acquire(two) is not None
    one.release([mine])  # of another supervisor by now
    assert flying(one) == {FIRST}
    assert acquire(two, SECOND)
    assert rows(database) == 2
    two.close()
    assert rows(database) == 0


def test_finals_sources_environments_and_problems_are_apart(database: Database) -> None:
    one, two = claims_of(database, "a"), claims_of(database, "b")
    assert acquire(one) is not None
    assert acquire(two, final=True) is not None
    assert (flying(one), flying(one, final=True)) == (set(), {FIRST})
    assert two.acquire(replace(PROBLEM, shape=(2048,)), FIRST, final=False) is not None
    for environment, sources in (("x" * 32, "sources of all_reduce"), (H200.digest, "changed")):
        other = Claims(database, environment, lambda op, text=sources: text)
        assert acquire(other) is not None
        other.close()


def test_the_dead_of_this_host_are_noticed_at_once(database: Database) -> None:
    ghost = Claims(database, H200.digest, lambda op: "sources of " + op, owner=owner_id(pid=2**22 + 1))
    assert acquire(ghost) is not None
    living, elsewhere = claims_of(database), claims_of(database, "a")
    assert flying(living) == set()
    mine = acquire(living)
    assert acquire(elsewhere) is None
    ghost.close()
    assert living.holds(mine)
    assert flying(elsewhere) == {FIRST}


def test_an_owner_is_a_process_and_not_its_number() -> None:
    here = owner_id()
    assert owner_lives(here) is True
    assert here != owner_id()
    host, kernel, pid, start, nonce = json.loads(here)
    assert owner_lives(json.dumps([host, kernel, pid, start - 1, nonce])) is False
    assert owner_lives(json.dumps([host, "another kernel", pid, start, nonce])) is None


def test_what_others_store_is_told_and_ends_their_claims(database: Database) -> None:
    runs = [database.start_run(command=name, seed=None, budget="", host="h") for name in ("mine", "theirs")]
    config = FIRST.config_dict
    database.record([trial("lamport", 1.0, problem=PROBLEM, config=config, run_id=runs[1])])
    one = claims_of(database, "a", run_id=runs[0], known=database.trials())
    two = claims_of(database, "b", run_id=runs[1])
    theirs = acquire(two)
    assert acquire(one) is None
    assert one.news(PROBLEM) == []
    for run_id in runs:
        two.record([trial("lamport", 2.0, problem=PROBLEM, config=config, run_id=run_id)], [theirs])
    two.record([trial("lamport", 3.0, problem=replace(PROBLEM, shape=(2048,)), config=config, run_id=runs[1])], [])
    assert one.news(PROBLEM) == []  # nobody has looked since
    assert acquire(one)
    assert [(t.run_id, t.latency_p50_us) for t in one.news(PROBLEM)] == [(runs[1], 2.0)]
    assert one.news(PROBLEM) == []
    assert flying(one) == set()
    assert one.news(PROBLEM) == []


@pytest.mark.slow
def test_a_host_without_heartbeats_is_given_up(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # On 2 cores with 12 busy loops beside, up to 1.3 s were seen between two heartbeats that should be 1 s apart.
    one, two = (claims_of(database, host, heartbeat_s=1, grace_s=3) for host in "ab")
    mine = acquire(one)
    # Neither process's clock has a say: they jump, in opposite directions, while both live.
    real = time.time
    for jump in (86_400, -86_400):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        stays_flying(two, 3)
    monkeypatch.undo()
    one._closing.set()  # as if it were cut off
    assert until(lambda: acquire(two) is not None, 15) > 2
    until(lambda: not one.holds(mine), 5)
    assert flying(one) == {FIRST}
    one.release([mine])
    assert flying(one) == {FIRST}


@pytest.mark.slow
def test_a_jump_of_the_clock_takes_no_claim_away(database: Database) -> None:
    one, two = (claims_of(database, host, heartbeat_s=beat, grace_s=3) for host, beat in (("a", 1), ("b", 2)))
    assert acquire(one) is not None
    for hours in range(2):
        old = update(ClaimRow).values(heartbeat_at=PAST + timedelta(hours=hours))
        database.change(lambda connection, old=old: connection.execute(old))
        stays_flying(two, 5)


@pytest.mark.slow
def test_a_restart_of_the_server_gives_no_claim_back(postgres_server: PostgresServer, postgres_url: str) -> None:
    with Database.open(postgres_url, create=True, patience_s=60) as database:
        # A heartbeat is tried again after up to 2 s: the suspicion must last longer.
        one, two = (claims_of(database, host, heartbeat_s=2, grace_s=3) for host in ("a", "b"))
        mine = acquire(one)
        postgres_server.stop()
        time.sleep(5)  # longer than the grace
        postgres_server.start()
        stays_flying(two, 5)
        assert one.holds(mine)
        while MADE:
            MADE.pop().close()
