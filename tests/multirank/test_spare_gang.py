"""A gang that stands by: it has done its imports, takes no device, and comes up when it is wanted."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tunedcomm.tuner.gang.process import GangProcess
from tunedcomm.tuner.gang.protocol import Settings

SETTINGS = Settings(backend="host", world_size=2, trials=1)


@pytest.fixture
def spare() -> Iterator[GangProcess]:
    with selectors.DefaultSelector() as selector:
        gang = GangProcess(0, SETTINGS, selector)
        try:
            yield gang
        finally:
            gang.finish()


def wait_until(true: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not come to pass"
        time.sleep(0.02)


def ranks() -> list[int]:
    """Live ranks of this process's gangs."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"tunedcomm.tuner.gang.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_imported() -> bool:
    """True once every rank has Triton's library mapped, which comes late among its imports."""
    maps = []
    for pid in ranks():
        with suppress(OSError):
            maps.append(Path(f"/proc/{pid}/maps").read_text())
    return len(maps) == SETTINGS.world_size and all("libtriton" in text for text in maps)


@pytest.mark.slow
def test_spare_waits_and_then_comes_up(spare: GangProcess) -> None:
    wait_until(has_imported)
    time.sleep(1.0)
    assert spare.read() == []
    assert spare.step == "starting"
    assert spare.loss() is None
    spare.go()
    wait_until(lambda: "ready" in [name for name, _ in spare.read()])
    assert spare.step == "waiting"
    assert spare.loss() is None


@pytest.mark.slow
def test_spare_that_is_not_wanted_ends_without_a_trace(spare: GangProcess) -> None:
    wait_until(has_imported)
    assert len(ranks()) == SETTINGS.world_size
    spare.finish()
    assert not ranks()
    assert spare.step == "ending"
