"""Measuring: the judge lets no wrong result pass and no right one fail; times are taken and summed up as promised."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tunedcomm import kernels
from tunedcomm.kernels.common.reference import fill_sentinel
from tunedcomm.spec import Problem, get_op
from tunedcomm.tuner.gang.group import Trouble, Vote, combine
from tunedcomm.tuner.gang.protocol import TrialResult
from tunedcomm.tuner.measure import correctness as check
from tunedcomm.tuner.measure import timing as measure
from tunedcomm.tuner.measure.correctness import (
    LARGE_BYTES,
    Case,
    Judgement,
    judge,
    make_case,
    odd_problems,
    plan_cases,
)
from tunedcomm.tuner.measure.timing import TimedRun
from tunedcomm.tuner.measure.trial import ProblemTensors, TrialRunner, _sentence

Tensors = tuple[torch.Tensor, ...]
DTYPES = ("bfloat16", "float16", "float32")


kernels.discover()
SPEC = get_op("all_reduce")


def problem_of(numel: int = 257, dtype: str = "float32", reduction: str = "sum") -> Problem:
    return Problem(op="all_reduce", shape=(numel,), dtype=dtype, world_size=3, reduction=reduction)


def judged(problem: Problem, kind: str, change: Callable[[torch.Tensor], Any], *, ordered: bool = False) -> Judgement:
    """Of what an ordered variant gives, changed in place."""
    case = make_case(SPEC, problem, 1, kind=kind, seed=5, device=torch.device("cpu"))
    out = case.bits[0].clone()
    change(out)
    return judge(SPEC, problem, case, (out,), ordered=ordered)


def set_at(place: int, value: float | torch.Tensor) -> Callable[[torch.Tensor], None]:
    return lambda out: out.__setitem__(place, value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "integers"])
@pytest.mark.parametrize("ordered", [True, False])
def test_right_result_passes_and_an_untouched_one_does_not(dtype: str, kind: str, ordered: bool) -> None:
    problem = problem_of(dtype=dtype)
    found = judged(problem, kind, lambda out: None, ordered=ordered)
    assert found.right, found.reason
    assert found.error <= SPEC.tolerance[dtype]
    assert not judged(problem, kind, lambda out: fill_sentinel([out]), ordered=ordered).right


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_of_whole_numbers_is_found_and_named(dtype: str) -> None:
    found = judged(problem_of(100_003, dtype), "integers", lambda out: out[70_001].add_(1))
    assert "1 of 100003 elements" in found.reason
    assert "70001" in found.reason


def test_single_nan_is_wrong_though_the_rest_is_right() -> None:
    assert "nan" in judged(problem_of(4096), "random", set_at(-1, math.nan)).reason


def test_last_bit_counts_for_ordered_variants_alone() -> None:
    def nudge(out: torch.Tensor) -> None:
        out[3] = torch.nextafter(out[3], torch.tensor(1e9))

    assert judged(problem_of(), "random", nudge).right
    assert "bits" in judged(problem_of(), "random", nudge, ordered=True).reason


def zeros(numel: int) -> Case:
    values = torch.zeros(numel)
    return Case("integers", (values,), (values.double(),), exact=True, bits=(values,))


def test_zeros_must_be_written_too_and_plus_is_not_minus_to_an_ordered_variant() -> None:
    problem, case, untouched, minus = problem_of(8), zeros(8), torch.empty(8), torch.zeros(8)
    fill_sentinel([untouched])
    minus[2] = -0.0
    for ordered in (True, False):
        assert judge(SPEC, problem, case, (torch.zeros(8),), ordered=ordered).right
        assert not judge(SPEC, problem, case, (untouched,), ordered=ordered).right
        assert judge(SPEC, problem, case, (minus,), ordered=ordered).right is not ordered


def test_whole_numbers_that_the_dtype_cannot_hold_are_judged_by_tolerance() -> None:
    problem = problem_of(reduction="avg")
    case = make_case(SPEC, problem, 1, kind="integers", seed=5, device=torch.device("cpu"))
    assert not case.exact
    out = case.expected[0].float() * (1 + 1e-7)
    assert judge(SPEC, problem, case, (out,), ordered=False).right
    assert not judge(SPEC, problem, case, (out * 1.01,), ordered=False).right


def test_wrong_shape_and_missing_output_are_wrong() -> None:
    assert "shape" in judge(SPEC, problem_of(), zeros(257), (torch.zeros(4),), ordered=False).reason
    assert "outputs" in judge(SPEC, problem_of(), zeros(257), (), ordered=False).reason


def test_odd_sizes_lie_next_to_the_shape_and_large_messages_are_spared() -> None:
    assert [p.shape for p in odd_problems(SPEC, problem_of(1024))] == [(1023,), (1027,)]
    assert [p.shape for p in odd_problems(SPEC, problem_of(1))] == [(4,)]
    large = problem_of((LARGE_BYTES // 4) + 1)
    assert odd_problems(SPEC, large) == []
    for problem, full, kinds in (
        (large, True, ["random"]),
        (problem_of(), True, ["random", "integers"]),
        (problem_of(), False, ["random"]),
    ):
        assert [kind for kind, _ in plan_cases(problem, full=full)] == kinds


def test_candidate_that_leaves_packets_in_an_arena_is_wrong() -> None:
    runner: Any = TrialRunner.__new__(TrialRunner)
    communicator = SimpleNamespace(workspace=SimpleNamespace(rearm=lambda mode: 4))
    runner._gang = SimpleNamespace(communicator=communicator, synchronize=bool, barrier=bool, vote=Vote)
    runner._tensors = []
    found = runner._left_clean(problem_of(), TrialResult(status="ok"))
    assert (found.status, "4 words" in found.reason) == ("incorrect", True)


def test_leaks_are_those_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take all of the GPU meanwhile."""
    free, taken = iter((1 << 40, 0)), iter((0, 0, 1 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(taken))
    before, beside, after = (check.memory_bytes(torch.device("cuda", 0)) for _ in range(3))
    assert beside - before < check.LEAK_BYTES < after - beside


def test_latency_is_the_slowest_ranks_of_each_round() -> None:
    latency = measure.summarise([[1.0, 9.0, 3.0, 2.0, 5.0], [4.0, 1.0, 8.0, 2.0, 6.0]])
    assert (latency.p50_us, latency.samples) == (6.0, 5)
    assert (latency.p10_us, latency.p90_us) == pytest.approx((2.8, 8.6))  # rounds: 4, 9, 8, 2, 6


def test_vote_names_the_ranks_with_the_heaviest_trouble() -> None:
    verdict = combine([(0, ""), (int(Trouble.HUNG), "waited"), (int(Trouble.CRASHED), "boom")])
    assert verdict.trouble == Trouble.CRASHED
    assert "rank 2 of 3: boom" in verdict.reason
    assert combine([(2, "no ptx"), (2, "no ptx")]).reason == "no ptx"
    assert (Trouble.CRASHED.status, Trouble.NONE.status) == ("crashed", "ok")


def test_reason_of_an_error_says_where_it_was_raised() -> None:
    with pytest.raises(ValueError, match="planted") as caught:
        exec(compile("\nraise ValueError('planted')", "/somewhere/my_variant.py", "exec"))
    assert _sentence(caught.value) == "ValueError: planted at my_variant.py:2"
    assert _sentence(ValueError("never raised")) == "ValueError: never raised"


@pytest.mark.parametrize(
    "like",
    [torch.empty(5), torch.empty(4, 3, dtype=torch.bfloat16).t(), torch.empty(0), torch.empty(7, dtype=torch.uint8)],
    ids=["vector", "transposed", "empty", "bytes"],
)
@pytest.mark.parametrize("is_input", [False, True])
def test_bytes_around_a_tensor_are_watched(like: torch.Tensor, is_input: bool) -> None:
    guarded = check.guard(like, "it", is_input=is_input)
    tensor = guarded.tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    assert tensor.data_ptr() % 16 == 0
    tensor.fill_(3)
    assert not check.find_damage([guarded])
    guarded.before[-20:-16] = 1
    guarded.behind[9] = 2
    said = check.find_damage([guarded])
    assert "4 bytes before it, up to 20 bytes away" in said
    assert "1 bytes behind it, up to 10 bytes away" in said
    assert not check.find_damage([guarded]), "damage is told once"


# Replays of graphs, by a stand-in that replays on the CPU what was captured


class Gang:
    """One rank of two, whose peers' inputs are known from the seed."""

    rank, device = 0, torch.device("cpu")

    def __init__(self) -> None:
        self.communicator = self
        self.synchronize = self.check_peers = bool

    def symmetric_rooms(self, problem: Problem, sizes: list[int], slot: int) -> list[torch.Tensor | None]:
        return [None] * len(sizes)


STREAM: Any = SimpleNamespace(cuda_stream=5)


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(run: Callable[[], None], stream: Any) -> Any:
        assert stream is STREAM
        run()
        return SimpleNamespace(replay=run)

    monkeypatch.setattr(measure, "capture", capture)


PLAN = [("integers", 0), ("random", 0)]


def bench_of(plan: Any = PLAN, slot: int = 0, **of_problem: Any) -> ProblemTensors:
    values = {"shape": (64,), "mode": "graph", **of_problem}
    bench = ProblemTensors(Gang(), Problem("all_reduce", dtype="float32", world_size=2, **values), 3, STREAM, slot=slot)
    bench.make_cases(plan)
    bench.make_buffers()
    return bench


def in_place(inputs: Tensors, outputs: Tensors) -> bool:
    """True if results overwrite inputs, which then are no case any more."""
    return inputs[0].data_ptr() == outputs[0].data_ptr()


class Sum:
    """A launch that is right, or gives what the launch before it should have given."""

    def __init__(self, bench: ProblemTensors, *, stale: bool) -> None:
        self._cases = [bench.case("random", 0), bench.case("integers", 0)]
        self._stale = stale
        self._last = self._cases[0].expected[0].clone()

    def __call__(self, inputs: Tensors, outputs: Tensors, stream: int) -> None:
        assert stream == 5
        asked = [case for case in self._cases if torch.equal(case.inputs[0], inputs[0])]
        assert asked or in_place(inputs, outputs), "inputs that are no case, where indices might be any"
        result = asked[0].expected[0] if asked else torch.zeros(64)
        outputs[0].copy_(self._last if self._stale else result)
        self._last = result


@pytest.mark.usefixtures("_captures")
@pytest.mark.parametrize("in_place", [False, True])
def test_what_the_launch_before_left_is_found(in_place: bool) -> None:
    bench = bench_of(in_place=in_place)
    for stale in (False, True):
        launch = Sum(bench, stale=stale)
        bench.load(bench.case("random", 0))
        timed = TimedRun(lambda launch=launch: launch(bench.inputs, bench.outputs, 5), 1, eager=False)
        found = bench.check_replay(timed, launch, ordered=False)
        assert found.right is not stale
        assert ("wrong at launch 1" in found.reason) is stale


@pytest.mark.usefixtures("_captures")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_launch_that_changes_its_inputs_is_wrong(in_place: bool) -> None:
    bench = bench_of(in_place=in_place)
    good = Sum(bench, stale=False)

    def changes(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        good(inputs, outputs, stream)
        if not in_place:
            inputs[0][-1] += 1

    assert bench.check(good, PLAN, ordered=False).right
    found = bench.check(changes, PLAN, ordered=False)
    assert found.right is in_place
    assert ("changed its inputs" in found.reason) is not in_place


@pytest.mark.usefixtures("_captures")
def test_second_memory_is_taken_for_small_graphs_of_the_shape_alone() -> None:
    assert bench_of()._second is not None
    for other in ({"mode": "eager"}, {"shape": (LARGE_BYTES // 4 + 1,)}, {"slot": 1}):
        assert bench_of([], **other)._second is None


# Times are µs a call, each with the contender and the round that took it

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
    return machine


def contenders_on(machine: Machine, *, eager: bool) -> list[measure.TimedRun]:
    """Launches of the n-th run of a contender take what `TAKES` has for the n-th round."""

    def one(index: int) -> measure.TimedRun:
        numbers = iter(range(ROUNDS))

        def run() -> None:
            machine.ran.append(index)
            us = TAKES[index][next(numbers)]
            for _ in range(CALLS[index]):
                machine.work(us)

        return measure.TimedRun(run, CALLS[index], eager=eager)

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
        measure.make_run(lambda i, o, s, n=name: seen.append(n), (), (), calls=2, graph=True, stream=None)
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
    contender = measure.make_run(
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
