"""What a graph's replays are judged by; a stand-in replays on the CPU what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tunedcomm import kernels
from tunedcomm.spec import Problem
from tunedcomm.tuner.measure import timing as measure
from tunedcomm.tuner.measure.correctness import LARGE_BYTES
from tunedcomm.tuner.measure.timing import Contender
from tunedcomm.tuner.measure.trial import Bench

Tensors = tuple[torch.Tensor, ...]


class Gang:
    """One rank of two, whose peers' inputs are known from the seed."""

    rank, device = 0, torch.device("cpu")

    def __init__(self) -> None:
        self.communicator = self

    def symmetric_rooms(self, problem: Problem, sizes: list[int], slot: int) -> list[torch.Tensor | None]:
        return [None] * len(sizes)

    def synchronize(self) -> None:
        """All is done."""

    def check_peers(self) -> None:
        """All have come."""


class Stream:
    cuda_stream = 5


class Graph:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()

    def capture(run: Callable[[], None], stream: Any) -> Graph:
        assert stream.cuda_stream == 5
        run()
        return Graph(run)

    monkeypatch.setattr(measure, "capture", capture)


def bench_of(**of_problem: Any) -> Bench:
    problem = Problem("all_reduce", (64,), "float32", 2, **{"mode": "graph", **of_problem})
    bench = Bench(Gang(), problem, 3, Stream())  # type: ignore[arg-type]
    bench.make_cases([("random", 0), ("integers", 0)])
    bench.make_buffers()
    return bench


class Sum:
    """A launch that is right, or gives what the launch before it should have given."""

    def __init__(self, bench: Bench, *, stale: bool) -> None:
        self._cases = [bench.case("random", 0), bench.case("integers", 0)]
        self._stale = stale
        self._last = self._cases[0].expected[0].clone()

    def __call__(self, inputs: Tensors, outputs: Tensors, stream: int) -> None:
        assert stream == 5
        asked = [case for case in self._cases if torch.equal(case.inputs[0], inputs[0])]
        result = asked[0].expected[0] if asked else torch.zeros(64)  # the upload reads what happens to be there
        outputs[0].copy_(self._last if self._stale else result)
        self._last = result


def timed(bench: Bench, launch: Sum) -> Contender:
    bench.load(bench.case("random", 0))
    return Contender(lambda: launch(bench.inputs, bench.outputs, 5), 1, eager=False)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_the_launch_before_left_is_found(in_place: bool) -> None:
    bench = bench_of(in_place=in_place)
    good, stale = (Sum(bench, stale=stale) for stale in (False, True))
    assert bench.check_replay(timed(bench, good), good, ordered=False).right
    found = bench.check_replay(timed(bench, stale), stale, ordered=False)
    assert not found.right
    assert "wrong at launch 1" in found.reason


@pytest.mark.parametrize("in_place", [False, True])
def test_a_launch_that_changes_its_inputs_is_wrong(in_place: bool) -> None:
    bench = bench_of(in_place=in_place)
    good = Sum(bench, stale=False)

    def changes(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        good(inputs, outputs, stream)
        if not in_place:
            inputs[0][-1] += 1

    plan = [("integers", 0), ("random", 0)]
    assert bench.check(good, plan, ordered=False).right
    found = bench.check(changes, plan, ordered=False)
    assert found.right == in_place
    assert found.reason == ("" if in_place else "a launch of shape (64,) changed its inputs, which it may only read")


@pytest.mark.parametrize("of_problem", [{"mode": "eager"}, {"shape": (LARGE_BYTES // 4 + 1,)}])
def test_memory_is_taken_for_small_graphs_alone(of_problem: dict[str, Any]) -> None:
    problem = Problem("all_reduce", of_problem.pop("shape", (64,)), "float32", 2, **{"mode": "graph", **of_problem})
    bench = Bench(Gang(), problem, 3, Stream())  # type: ignore[arg-type]
    bench.make_cases([])
    bench.make_buffers()
    assert bench._second is None


def test_odd_shapes_are_not_replayed() -> None:
    bench = bench_of()
    assert bench._second is not None
    odd = Bench(Gang(), bench.problem, 3, Stream(), slot=1)  # type: ignore[arg-type]
    odd.make_cases([])
    odd.make_buffers()
    assert odd._second is None
