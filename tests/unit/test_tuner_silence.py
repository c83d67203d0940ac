"""When a gang that says nothing is given up, and what it is said to have done."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunedcomm.tuner.gang import process
from tunedcomm.tuner.gang.process import GangProcess
from tunedcomm.tuner.gang.protocol import Command, Settings

# Launches what it was told to, and is silent from then on; or waits for a command.
CHILD = """
import sys, time
from multiprocessing.connection import Connection
failed_at, launches, _, line = sys.argv[1:5]
line = Connection(int(line))
line.recv_bytes(), line.recv_bytes()
line.send(("ready", None))
if launches == "True":
    line.recv_bytes()
    if failed_at:
        line.send(("failure", (float(failed_at), "ValueError: planted")))
    line.send(("run", None))
time.sleep(60)
"""
BEGIN = 1000.0


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the supervisor alone."""
    (tmp_path / "silent_gang.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    made = SimpleNamespace(now=BEGIN, sleep=time.sleep)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(process, "time", made)
    return made


@contextmanager
def silent_gang(trial_s: float, *, launches: bool = True, failed_at: float | None = None) -> Iterator[GangProcess]:
    """A gang that said its last word when the clock began."""
    stand_in = ("silent_gang", "" if failed_at is None else str(failed_at), str(launches))
    settings = Settings(backend="host", world_size=2, trials=1, trial_timeout_s=trial_s, stand_in=stand_in)
    with selectors.DefaultSelector() as selector:
        gang = GangProcess(0, settings, selector)
        try:
            gang.go()
            if launches:
                gang.send(Command(kind="trial"))
            while gang.step != ("running" if launches else "waiting"):
                assert selector.select(60)
                gang.read()
            yield gang
        finally:
            gang.finish()


@pytest.mark.parametrize(
    ("silent_s", "failed_s", "trial_s", "expected"),
    [
        (1, None, 60, None),
        (59, None, 60, None),
        (61, None, 60, "hung"),
        (3, 2, 60, None),  # the other ranks may still say what became of theirs
        (20, 2, 60, None),
        (8, 7, 60, "crashed"),
        (61, 1, 60, "crashed"),
        (3, 2, 2, "crashed"),  # a limit that is shorter than that
        (3, None, 2, "hung"),
    ],
)
def test_a_raise_on_one_rank_ends_a_gang_early(
    clock: SimpleNamespace, silent_s: float, failed_s: float | None, trial_s: float, expected: str | None
) -> None:
    failed_at = None if failed_s is None else BEGIN + silent_s - failed_s
    with silent_gang(trial_s, failed_at=failed_at) as gang:
        clock.now += silent_s
        loss = gang.loss()
    assert (None if loss is None else loss.status) == expected
    if loss is not None and failed_s is not None:
        assert loss.reason.startswith("rank 0: ValueError: planted; the other ranks waited for it for ")
    assert gang.step == "ending"


def test_who_waits_for_a_command_may_be_silent(clock: SimpleNamespace) -> None:
    with silent_gang(60, launches=False) as gang:
        clock.now += 1000
        assert gang.loss() is None
