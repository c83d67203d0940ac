"""A gang that stands by: it has done its imports, takes no device, and comes up when it is wanted."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tunedcomm.tuner.gang.process import GangProcess, is_alive
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


def has_imported(gang: GangProcess) -> bool:
    """True once every rank has Triton's library mapped, which comes late among its imports."""
    maps = []
    for pid in gang._pids():
        with suppress(OSError):
            maps.append(Path(f"/proc/{pid}/maps").read_text())
    return len(maps) == SETTINGS.world_size and all("libtriton" in text for text in maps)


@pytest.mark.slow
def test_spare_waits_and_then_comes_up(spare: GangProcess) -> None:
    wait_until(lambda: has_imported(spare))
    time.sleep(1.0)
    assert spare.read() == []
    assert not spare.ready
    assert spare.start_s == 0.0
    spare.go()
    wait_until(lambda: "ready" in [name for name, _ in spare.read()])
    assert spare.ready
    assert 0 < spare.start_s < 60
    assert spare.silence() is None


@pytest.mark.slow
def test_spare_that_is_not_wanted_ends_without_a_trace(spare: GangProcess) -> None:
    wait_until(lambda: has_imported(spare))
    pids, folder = spare._pids(), spare._folder
    assert len(pids) == SETTINGS.world_size
    spare.finish()
    assert not any(is_alive(pid) for pid in pids)
    assert not folder.exists()
    assert not spare.ready
