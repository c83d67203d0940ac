"""Times are µs a call, each with the contender and the round that took it."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from tunedcomm.tuner.measure import timing as measure

ROUNDS = 5
CALLS = (2, 5, 3)
# What one launch of a contender takes in each round, in µs: no two are equal.
TAKES = [[10.0 * (index + 1) + number for number in range(ROUNDS)] for index in range(len(CALLS))]
ORDER = [*(0, 1, 2), *(1, 2, 0), *(2, 0, 1), *(0, 2, 1), *(1, 0, 2)]


class Machine:
    """A host and a device with a clock each, in s: the device lags behind, and the host waits where it says so."""

    def __init__(self, *, has_device: bool) -> None:
        self.host = self.device = 1000.0
        self._has_device = has_device
        self.ran: list[int] = []
        self.device_barrier = lambda: self.work(700)
        self.perf_counter = lambda: self.host

    def work(self, us: float) -> None:
        """A launch."""
        self.device = max(self.device, self.host) + us * 1e-6
        self.host = self.host + 1e-6 if self._has_device else self.device

    def synchronize(self) -> None:
        self.host = max(self.host, self.device) + 1e-9


def with_device(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One whose device torch.cuda drives, with its units: seconds of the host, milliseconds between two events."""
    machine = Machine(has_device=True)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream is machine
            self._at = max(machine.device, machine.host)

        def elapsed_time(self, end: Event) -> float:
            assert machine.host >= end._at, "CUDA raises: the device has not come to this event"
            return (end._at - self._at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: machine.work(cycles / 1e3))
    monkeypatch.setattr(measure, "time", machine)
    return machine


def contenders_on(machine: Machine, *, eager: bool) -> list[measure.Contender]:
    """Launches of the n-th run of a contender take what `TAKES` has for the n-th round."""

    def one(index: int) -> measure.Contender:
        numbers = iter(range(ROUNDS))

        def run() -> None:
            machine.ran.append(index)
            us = TAKES[index][next(numbers)]
            for _ in range(CALLS[index]):
                machine.work(us)

        return measure.Contender(run, CALLS[index], eager=eager)

    return [one(index) for index in range(len(CALLS))]


@pytest.mark.parametrize("where", ["host", "eager on a device", "replays on a device"])
def test_times(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    machine: Any = with_device(monkeypatch) if where != "host" else Machine(has_device=False)
    monkeypatch.setattr(measure, "time", machine)
    contenders = contenders_on(machine, eager="replays" not in where)
    stream = None if where == "host" else machine
    times = measure.take_rounds(machine.device_barrier, contenders, ROUNDS, stream)
    assert times == [pytest.approx(row, rel=1e-3) for row in TAKES]
    assert machine.ran == ORDER


def test_rounds_change_the_order_of_contenders_behind_a_barrier() -> None:
    seen: list[str] = []
    contenders = [
        measure.contend(lambda i, o, s, n=name: seen.append(n), (), (), calls=2, graph=True, stream=None)  # type: ignore[misc]
        for name in "abc"
    ]
    times = measure.take_rounds(lambda: seen.append("|"), contenders, 3, None)
    assert "".join(seen) == "|aa|bb|cc" + "|bb|cc|aa" + "|cc|aa|bb"
    assert [len(row) for row in times] == [3, 3, 3]
    seen.clear()
    measure.take_rounds(lambda: seen.append("|"), contenders, 1, None, first=4)
    assert "".join(seen) == "|bb|aa|cc"


def test_a_lead_brings_the_ranks_together_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(has_device=False)
    monkeypatch.setattr(measure, "time", machine)
    late_us = iter([900.0, 5.0, 5.0])  # the first launch behind a barrier waits for a peer
    contender = measure.contend(
        lambda i, o, s: machine.work(next(late_us)), (), (), calls=2, graph=False, stream=None, lead=True
    )
    assert measure.take_rounds(machine.device_barrier, [contender], 1, None) == [[pytest.approx(5.0)]]


def test_launches_a_round_take_about_a_millisecond() -> None:
    """From µs."""
    for us in (12.0, 50.0, 95.0):
        assert measure.calls_for(us) * us == pytest.approx(1000, rel=0.06)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_everyone_is_at_each_place_and_behind_each_other_equally_often(count: int) -> None:
    orders = [measure.order_of_round(number, count) for number in range(2 * count)]
    assert [order[0] for order in orders] == [*range(count)] * 2
    assert all(sorted(order) == [*range(count)] for order in orders)
    for place in range(count):
        assert Counter(order[place] for order in orders) == dict.fromkeys(range(count), 2)
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert behind == dict.fromkeys(itertools.permutations(range(count), 2), 2)
    assert measure.order_of_round(2 * count, count) == orders[0]
