"""When a gang that says nothing is given up, and what it is said to have done."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunedcomm.tuner.gang.process import GangProcess
from tunedcomm.tuner.gang.protocol import Settings, write_failure


def silent_gang(folder: Path, silent_s: float, trial_s: float, **changes: Any) -> Any:
    """A gang that has launched and said nothing since, without a process behind it."""
    gang: Any = GangProcess.__new__(GangProcess)
    gang._settings = replace(Settings(backend="host", world_size=2, trials=1), trial_timeout_s=trial_s)
    gang._folder, gang._channel = folder, SimpleNamespace(closed=False)
    gang._heard = time.monotonic() - silent_s
    gang.ready, gang.begun, gang.launched, gang.waiting = True, None, True, False
    for name, value in changes.items():
        setattr(gang, name, value)
    return gang


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
    tmp_path: Path, silent_s: float, failed_s: float | None, trial_s: float, expected: str | None
) -> None:
    if failed_s is not None:
        write_failure(tmp_path, 1, "ValueError: planted")
        then = time.time() - failed_s
        os.utime(tmp_path / "failure-1.json", (then, then))
    found = silent_gang(tmp_path, silent_s, trial_s).silence()
    assert (None if found is None else found[0]) == expected
    if expected == "crashed":
        assert found[1].startswith("rank 1: ValueError: planted; the other ranks waited for it for ")


def test_who_waits_for_a_command_may_be_silent(tmp_path: Path) -> None:
    assert silent_gang(tmp_path, 1000, 60, waiting=True).silence() is None
    gone = silent_gang(tmp_path, 1000, 60, waiting=True, _channel=SimpleNamespace(closed=True))
    assert gone.silence() == ("hung", "no sign of life for 1000 s while launching")
