"""Seats of supervisors: who is out of date is given up after two looks with nothing between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from optuna.storages import InMemoryStorage

from tunedcomm.tuner import owners
from tunedcomm.tuner.owners import Owner, Seats

HEARTBEAT_S, GRACE_S = 10.0, 60.0


class Silent(InMemoryStorage):
    """A storage that says of whom nothing has been heard for the grace."""

    def __init__(self) -> None:
        super().__init__()
        self.stale: list[int] = []

    def record_heartbeat(self, trial_id: int) -> None: ...

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        return self.stale


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=1000.0, monotonic=lambda: found.now, clock_gettime=lambda which: found.now)
    found.CLOCK_BOOTTIME = 0
    monkeypatch.setattr(owners, "time", found)
    return found


def seats(storage: Silent, host: str) -> Seats:
    return Seats(storage, Owner(name=host, kernel=host, pid=1, started=0), heartbeat_s=HEARTBEAT_S, grace_s=GRACE_S)


def test_a_silence_that_a_disturbance_explains_gives_nobody_up(clock: Any) -> None:
    storage = Silent()
    mine, other = seats(storage, "here"), seats(storage, "there")
    mark = other.mark()
    storage.stale = [mark["seat"]]

    def lives_after(seconds: float) -> bool:
        clock.now += seconds
        return mine.lives(mark)

    assert lives_after(0)
    assert lives_after(1.5 * HEARTBEAT_S)
    mine.disturbed()
    assert lives_after(1.5 * HEARTBEAT_S), "the count begins anew"
    assert lives_after(1.5 * HEARTBEAT_S)
    assert not lives_after(1.5 * HEARTBEAT_S)
    storage.stale = []
    assert not lives_after(HEARTBEAT_S), "once and for all"


def test_a_heartbeat_between_two_looks_ends_the_suspicion(clock: Any) -> None:
    storage = Silent()
    mine, other = seats(storage, "here"), seats(storage, "there")
    mark = other.mark()
    for stale in ([mark["seat"]], [], [mark["seat"]]):
        storage.stale = stale
        assert mine.lives(mark)
        clock.now += 1.5 * HEARTBEAT_S
    assert mine.lives(mark)
