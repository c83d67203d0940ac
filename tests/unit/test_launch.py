"""Launches: what reaches Triton's C function in each layout, and the turns of graphs and eager calls."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunedcomm import cache
from tunedcomm.dispatch.launches import LaneOrder
from tunedcomm.kernels.common import launch

TAIL = (4, "bfloat16")


class Run:
    """A stand-in of Triton's launcher object."""

    def __init__(self, **attributes: Any) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.__dict__.update(attributes)

    def launch(self, *arguments: Any) -> None:
        self.seen.append(arguments)

    def __call__(self, *arguments: Any) -> None:
        self.seen.append(("called", *arguments))


# What a layout's launcher object has, and the arguments before a kernel's own.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "own": ({}, (8, 1, 1, 99, 5, False, True, "memory", None, ("m",), None, None, None)),
    "shared": (
        {"arg_annotations": "annotations", "kernel_signature": "signature"},
        (8, 1, 1, 99, 5, False, True, ("m",), None, None, None, "memory", None, "annotations", "signature"),
    ),
    "profile": ({"profile_scratch_size": 16}, ("called", 8, 1, 1, 99, 5, ("m",), None, None, None)),
}


@pytest.mark.parametrize(
    ("arguments", "varying"),
    [((None, None, 10, 11), (1, 2)), ((None,) * 4, (1, 2, 10, 11)), ((None, 2, None, 11), (1, 10))],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gets_every_argument(layout: str, arguments: tuple[Any, ...], varying: tuple[int, ...]) -> None:
    attributes, before = LAYOUTS[layout]
    run = Run(**attributes)
    compiled = SimpleNamespace(run=run, function=5, packed_metadata=("m",))
    launch._through_triton(compiled, 8, TAIL, "memory", arguments)(99, *varying)
    payload = (1, 2, 10, 11, *TAIL)
    assert run.seen == [(*before, payload) if layout == "shared" else (*before, *payload)]


def test_the_hash_of_triton_is_made_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process makes it where none is kept, or where a file of Triton changed since; others take it as it is."""
    import triton.runtime.cache

    made: list[str] = []

    def make() -> str:
        made.append("made")
        return "of Triton"

    def found_by_a_process() -> str:
        monkeypatch.setattr(triton.runtime.cache, "triton_key", make)
        launch.keep_triton_key.cache_clear()
        launch.keep_triton_key()
        return triton.runtime.cache.triton_key()  # type: ignore[no-any-return]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        assert found_by_a_process() == "of Triton"
        in_first = len(made)
        assert found_by_a_process() == "of Triton"
        assert len(made) == in_first
        monkeypatch.setattr(cache, "state_of", lambda paths: str(len(list(paths))))  # as after a change
        assert found_by_a_process() == "of Triton"
        assert len(made) > in_first
    finally:
        launch.keep_triton_key.cache_clear()


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [(32, 0, 1024, 2 * 132), (255, 0, 512, 0), (128, 0, 512, 132), (72, 0, 512, 132), (16, 0, 32, 32 * 132)],
)
def test_resident_blocks(registers: int, shared: int, threads: int, expected: int) -> None:
    assert launch.resident_blocks(registers, shared, threads, 132) == expected


# Turns of graphs and eager calls: which events are waited for and recorded, and when turns begin


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(said=[], capturing=False, begun=[], names=iter(("graphs", "eager")))

    class Event:
        def __init__(self, *, external: bool) -> None:
            assert external
            self.name = next(state.names)  # a third one would raise

        def record(self) -> None:
            state.said.append(f"record {self.name}")

        def wait(self) -> None:
            state.said.append(f"wait {self.name}")

    class Owner:
        def begin(self) -> None:
            state.begun.append(len(state.said))

    state.owner = Owner()
    state.order = LaneOrder(weakref.WeakMethod(state.owner.begin))
    state.launch = lambda inputs, outputs, stream: state.said.append(f"launch {stream}")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def test_turns_begin_with_the_first_capture_and_not_before(log: SimpleNamespace) -> None:
    run = log.order.captured(log.launch)
    assert log.said == ["record graphs", "record eager"]
    run((), (), 3)
    assert log.said.pop() == "launch 3"
    assert not log.order.taken
    log.said.clear()
    log.capturing = True
    run((), (), 4)
    run((), (), 5)
    assert (log.order.taken, log.begun) == (True, [0])
    assert log.said == ["wait eager", "launch 4", "record graphs", "wait eager", "launch 5", "record graphs"]


def test_eager_calls_wait_for_the_graph_and_tell_it_when_they_are_done(log: SimpleNamespace) -> None:
    for _ in range(2):
        log.order.captured(log.launch)
    log.said.clear()
    log.order.eager(log.launch)((), (), 7)
    assert log.said == ["wait graphs", "launch 7", "record eager"]
