"""Claims: one candidate runs once, whoever asks and whoever dies."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from db_samples import H200
from ledger_bodies import CANDIDATES, FIRST, OP, PROBLEM, SECOND, claim, flying, open_as, variants

from tunedcomm import spec
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAwayError
from tunedcomm.tuner import studies
from tunedcomm.tuner.board import StorageBoard
from tunedcomm.tuner.ledger import OptunaLedger, open_ledger, study_name
from tunedcomm.tuner.owners import Owner

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


def losing_the_first_answer(ledger: OptunaLedger, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The next claim is written, and the answer lost; returns the list of answers."""
    write, calls = ledger._board.claim, []

    def lose(*arguments: Any, **named: Any) -> Any:
        calls.append(write(*arguments, **named))
        if len(calls) == 1:
            raise DatabaseAwayError("server closed the connection unexpectedly")
        return calls[-1]

    monkeypatch.setattr(ledger._board, "claim", lose)
    return calls


def test_a_lost_answer_makes_one_claim(opened: Callable[..., OptunaLedger], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = opened("a"), opened("b")
    assert claim(one, SECOND) is not None
    calls = losing_the_first_answer(one, monkeypatch)
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
    calls = losing_the_first_answer(two, monkeypatch)
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
