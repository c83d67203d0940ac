"""Turns of graphs and eager calls: which events are waited for and recorded, and when turns begin."""

from __future__ import annotations

import weakref

import pytest
import torch

from tunedcomm.dispatch.launches import LaneOrder


class Event:
    made: list[Event] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, *, external: bool) -> None:
        assert external
        self.name = ("graphs", "eager")[len(Event.made)]
        Event.made.append(self)

    def record(self) -> None:
        LOG.append(f"record {self.name}")

    def wait(self) -> None:
        LOG.append(f"wait {self.name}")


LOG: list[str] = []


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    state = [False]
    Event.made.clear()
    LOG.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


class Owner:
    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin(self) -> None:
        self.begun.append(len(LOG))


def launch(inputs: object, outputs: object, stream: int) -> None:
    LOG.append(f"launch {stream}")


def test_turns_begin_with_the_first_capture_and_not_before(capturing: list[bool]) -> None:
    owner = Owner()
    order = LaneOrder(weakref.WeakMethod(owner.begin))
    run = order.captured(launch)
    assert LOG == ["record graphs", "record eager"]
    LOG.clear()
    run((), (), 3)
    assert LOG == ["launch 3"]
    assert not order.taken
    LOG.clear()
    capturing[0] = True
    run((), (), 4)
    run((), (), 5)
    assert order.taken
    assert owner.begun == [0]
    assert LOG == ["wait eager", "launch 4", "record graphs", "wait eager", "launch 5", "record graphs"]


def test_eager_calls_wait_for_the_graph_and_tell_it_when_they_are_done(capturing: list[bool]) -> None:
    owner = Owner()
    order = LaneOrder(weakref.WeakMethod(owner.begin))
    order.captured(launch)
    order.captured(launch)
    assert len(Event.made) == 2
    LOG.clear()
    order.eager(launch)((), (), 7)
    assert LOG == ["wait graphs", "launch 7", "record eager"]
