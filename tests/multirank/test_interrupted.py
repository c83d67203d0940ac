"""An exception between an op's entry and its return ends the group on every rank at once: never wrong numbers.

The exception is put into one rank at a line of the package, chosen among all that a call runs through, so that it comes
anywhere from entry to return. It is what a signal handler would raise.
"""

from __future__ import annotations

import linecache
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import random_programs
import torch
import torch.distributed as dist
from cases import HOST, Ranks
from quick import FULL, QUICK
from test_unequal import as_tuple, drawn, same, sent_to

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.ops.call import paths
from tunedcomm.ops.gemm import list_path
from tunedcomm.spec import variants

PACKAGE = str(Path(tunedcomm.__file__).parent)
WORLD_SIZE = 2
RANKS = Ranks(WORLD_SIZE, env={**HOST, "TUNEDCOMM_PEER_TIMEOUT_S": "60"}, timeout=500, forget=False)
LOOPS = ("_await", "poll_from", "_polls_again")  # they take as many turns as the peer is late
AT_ONCE_S = 10.0  # two seconds, and what a busy machine adds


class Interrupt(KeyboardInterrupt):
    """What the tests raise in the midst of a call."""


class Interrupter:
    """Raises `Interrupt` at the n-th line that the package runs on this thread; counts them where n is 0.

    The first line is an op's `try:`, where the call has not begun and no signal is handled.

    Args:
        at: n.
        again: raise once more so many lines after the first time; 0: do not.
        spares_library: see `_may_raise`.
    """

    def __init__(self, at: int = 0, *, again: int = 0, spares_library: bool = False) -> None:
        self.at, self.again, self.count, self.spares_library = at, again, 0, spares_library
        self.place = ""

    def _may_raise(self, frame: FrameType) -> bool:
        """Not between the word that sends the peers into the library and the library's own: nothing ends their wait."""
        code = frame.f_code
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        if self.place and (line in ("try:", "raise") or ".left(" in line or line.startswith("except ")):
            return False  # the few instructions from the first exception to where a second one is met
        last = (
            "/kernels/" in code.co_filename,
            "/symm/" in code.co_filename,
            code.co_name == "meet_and_launch",
        )
        return not (self.spares_library and any(last))

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith(PACKAGE) or name == "<tunedcomm fast call>") or frame.f_code.co_name in LOOPS:
            return None
        if event == "line":
            self.count += 1
            if self.count >= self.at > 0 and self._may_raise(frame):
                self.at = self.count + self.again if self.again else 0
                self.again = 0
                self.place += f"{name}:{frame.f_lineno} "
                raise Interrupt(self.place)
        return self._trace

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def lines_of(call: Callable[[], Any]) -> int:
    with Interrupter() as counter:
        call()
    return counter.count


def ones(numel: int, group: Any, **options: Any) -> Callable[[], torch.Tensor]:
    x = torch.full((numel,), dist.get_rank() + 1.0)
    return lambda: tunedcomm.all_reduce(x, group=group, **options)


def check_ended(
    group: Any, interrupted: int, call: Callable[[], Any], other: Any = None, *, wires: bool = False
) -> None:
    """Every rank refuses at once, with the reason; then the group comes back, and no other group has noticed.

    With `wires` the forced variant serves nothing else, and another one makes the sums.
    """
    begin = time.monotonic()
    with pytest.raises(tunedcomm.GroupAbortedError, match=f"rank {interrupted} left .*Interrupt"):
        call()
    assert time.monotonic() - begin < AT_ONCE_S
    with pytest.raises(tunedcomm.GroupAbortedError, match="release_communicator"):
        call()
    with tunedcomm.force("all_reduce", "host_one_shot") if wires else nullcontext():
        for again in (ones(6000, group), ones(5000, group, op="avg")):
            with pytest.raises(tunedcomm.GroupAbortedError, match="release_communicator"):
                again()
        dist.barrier()
        assert torch.equal(ones(6000, other)(), torch.full((6000,), 3.0)), "another group"
        tunedcomm.release_communicator(group)
        assert torch.equal(ones(6000, group)(), torch.full((6000,), 3.0))


def outcome_of(call: Callable[[], Any], expected: Any, place: int, variant: str, again: int) -> str:
    """The call's outcome on this rank, interrupted at a place unless that is 0."""
    try:
        if place:
            with Interrupter(place, again=again, spares_library=variant == "library"):
                found = call()
        else:
            found = call()
    except Interrupt:
        return "interrupted"
    except tunedcomm.GroupAbortedError:
        return "aborted"
    return "right" if same(as_tuple(found), as_tuple(expected)) else "WRONG"


def outcomes_of(
    call: Callable[[], Any], expected: Any, place: int, victim: int, variant: str = "", again: int = 0
) -> list[str]:
    """The call's outcome by rank where `victim` is interrupted at a place; the others end at once after it."""
    dist.barrier()
    late(dist.get_rank() == victim)
    what = outcome_of(call, expected, place if dist.get_rank() == victim else 0, variant, again)
    found = exchanged((what, time.monotonic()))
    if found[victim][0] != "right":
        assert max(end_s for _, end_s in found) - found[victim][1] < AT_ONCE_S
    return [what for what, _ in found]


def exchanged(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, value)
    return everyone


def late(is_late: bool) -> None:
    if is_late:
        time.sleep(0.05)


NUM_PLACES = 24 if FULL else 3 if QUICK else 6
CASES = [("host_one_shot", 256), ("host_one_shot", 500_000), ("host_two_shot", 2_000_000), ("library", 256)]
KERNELS = [("lamport", 256), ("two_shot", 4096)]


@pytest.mark.parametrize(("variant", "numel"), [*CASES, *KERNELS])
def test_an_exception_anywhere_in_a_call(rank: int, variant: str, numel: int) -> None:
    group, expected = dist.new_group(), torch.full((numel,), 3.0)
    with tunedcomm.force("all_reduce", variant):
        call = ones(numel, group)
        for _ in range(3):
            assert torch.equal(call(), expected)
        dist.barrier()
        late(rank == 0)  # whose waits are short, so that the number of lines is always about the same
        count = exchanged(lines_of(call))[0]
        interrupted = 0
        for number, place in enumerate(sorted({round(2 + (count - 2) * k / NUM_PLACES) for k in range(NUM_PLACES)})):
            victim = number % WORLD_SIZE
            outcomes = outcomes_of(call, expected, place, victim, variant)
            assert outcomes[victim] in ("interrupted", "right")  # a wait may have taken fewer lines this time
            if outcomes[victim] == "right":
                assert outcomes == ["right"] * WORLD_SIZE
                continue
            interrupted += 1
            assert set(outcomes) <= {"interrupted", "aborted", "right"}
            check_ended(group, victim, call)
            for _ in range(2):
                assert torch.equal(call(), expected)
        assert interrupted >= NUM_PLACES // 2


def public_calls(rank: int) -> dict[str, Callable[[], Any]]:
    """Operator to a public call of it."""
    x, row, ids = drawn(rank, 4, 16), drawn(0, 16), torch.tensor([[0, 3], [2, 1], [1, -1]])
    wide, b, few, narrow = drawn(rank, 4, 128), drawn(0, 16, 8), drawn(rank, 2, 8), [drawn(0, 8, 8), drawn(0, 8, 4)]
    large = drawn(rank, 60_000)
    rows, experts, sent = drawn(rank, 3, 32), 2 * WORLD_SIZE, sent_to(rank, WORLD_SIZE, ids)

    def dispatch() -> Any:
        found = tunedcomm.ep_dispatch(rows, ids, num_experts=experts, capacity=12)
        return found.counts, found.offsets, found.rows  # no token has a place behind the counts

    def by_token() -> Any:
        return tunedcomm.ep_dispatch(rows, ids, num_experts=experts, layout="tokens")

    def dispatch_by_token() -> Any:
        found = by_token()
        return found.expert_ids, found.tokens[(found.expert_ids >= 0).any(1)]  # others are not written

    kept = by_token()
    return {
        "all_reduce": lambda: tunedcomm.all_reduce(large),
        "all_gather": lambda: tunedcomm.all_gather(x),
        "reduce_scatter": lambda: tunedcomm.reduce_scatter(x),
        "all_reduce_fp32": lambda: tunedcomm.all_reduce(x.bfloat16(), out_dtype=torch.float32),
        "reduce_scatter_fp32": lambda: tunedcomm.reduce_scatter(x.bfloat16(), out_dtype=torch.float32),
        "all_reduce_wire": lambda: tunedcomm.all_reduce(x, wire="fp8_group128"),
        "all_gather_wire": lambda: tunedcomm.all_gather(x, wire="fp8_group128"),
        "reduce_scatter_wire": lambda: tunedcomm.reduce_scatter(x, wire="fp8_group128"),
        "all_to_all": lambda: tunedcomm.all_to_all(x),
        "all_to_all_v": lambda: tunedcomm.all_to_all_v(x, [2, 2], [2, 2], max_count=4),
        "broadcast": lambda: tunedcomm.broadcast(x, 1),
        "all_gather_list_3": lambda: tunedcomm.all_gather([x, row, ids]),
        "all_gather_v": lambda: tunedcomm.all_gather_v(x[: 1 + rank], [1, 2], max_count=4),
        "reduce_scatter_v": lambda: tunedcomm.reduce_scatter_v(x, [0, 4], max_count=4),
        "dcp_combine": lambda: tunedcomm.dcp_combine(x.view(2, 4, 8), row.view(2, 8)[:, :4], return_lse=True),
        "ulysses_scatter": lambda: tunedcomm.ulysses_scatter(x.view(1, 2, 4, 8)),
        "ulysses_gather": lambda: tunedcomm.ulysses_gather(x.view(1, 4, 2, 8)),
        "all_reduce_bias": lambda: tunedcomm.all_reduce_bias(x, row),
        "all_reduce_rms_norm": lambda: tunedcomm.all_reduce_rms_norm(x, row),
        "all_reduce_rms_norm_quantized": lambda: tunedcomm.all_reduce_rms_norm(wide, drawn(0, 128), quantize="token"),
        "ag_gemm": lambda: tunedcomm.ag_gemm(x, b),
        "ag_gemm_gathered": lambda: tunedcomm.ag_gemm(x, b, return_gathered=True),
        "ag_gemm_list": lambda: tunedcomm.ag_gemm(few, narrow),
        "gemm_rs": lambda: tunedcomm.gemm_rs(x, b),
        "gemm_ar": lambda: tunedcomm.gemm_ar(x, b),
        "ep_dispatch": dispatch,
        "ep_combine": lambda: tunedcomm.ep_combine(sent.tokens, sent, torch.ones(3, 2)),
        "ep_combine_rank": lambda: tunedcomm.ep_combine(sent.tokens, sent, torch.ones(3, 2), reduce="rank"),
        "ep_dispatch_tokens": dispatch_by_token,
        "ep_combine_tokens": lambda: tunedcomm.ep_combine(kept.tokens, kept),
    }


def op_calls() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """(operator, variant, call) of every operator on its host variants, an interpreted kernel and the library."""
    for operator, call in public_calls(dist.get_rank()).items():
        known = variants(paths[operator].adapter.op)
        kernels = [name for name in ("lamport", "push", "one_shot") if name in known][:1]
        for name in [*(name for name in known if name.startswith("host_")), *kernels, "library"]:
            yield operator, name, call


def test_an_exception_anywhere_in_any_op(rank: int) -> None:
    """Every operator, the exception once and twice within some lines (an impatient user's second Ctrl-C)."""
    list_path(2)
    other, num_places, interrupted = dist.new_group(), 12 if FULL else 1, 0
    everything = list(op_calls())
    assert {operator for operator, _, _ in everything} == set(paths), "an operator is missing here"
    assert sum(variant.startswith("host_") for _, variant, _ in everything) >= 9
    for index, (operator, variant, call) in enumerate(everything):
        with tunedcomm.force(paths[operator].adapter.op, variant):
            try:
                expected = call()
            except tunedcomm.InfeasibleError:  # host variants of experts serve the layout tokens alone
                others = ("ep_dispatch", "ep_combine", "ep_combine_rank")
                others += ("all_reduce_fp32",) if variant == "host_two_shot" else ()
                others += (operator,) if ("_wire" in operator) != ("_quantized" in variant) else ()
                assert not variant.startswith("host_") or operator in others, (operator, variant)
                continue
            call()
            dist.barrier()
            late(rank == 0)
            count = exchanged(lines_of(call))[0]
            for number in range(num_places):
                victim, place = (number + index) % WORLD_SIZE, 2 + round((count - 3) * (number + 0.5) / num_places)
                again = (0, 1, 3, 9, 27)[(number + index) % 5]
                outcomes = outcomes_of(call, expected, place, victim, variant, again)
                assert set(outcomes) <= {"interrupted", "aborted", "right"}, (operator, variant, place, outcomes)
                if outcomes[victim] == "right":
                    assert outcomes == ["right"] * WORLD_SIZE
                    continue
                interrupted += 1
                check_ended(dist.group.WORLD, victim, call, other, wires=operator == "all_reduce_wire")
                assert same(as_tuple(call()), as_tuple(expected)), (operator, variant)
    assert interrupted > len(everything) * num_places // 2


@contextmanager
def handling(handler: Callable[[], object], after_s: float, *, here: bool) -> Iterator[None]:
    """Inside the block a signal handler runs once on this rank, if `here`."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    if here:
        signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("variant", ["host_one_shot", "lamport"])
def test_a_signal_in_a_wait(rank: int, variant: str) -> None:
    """The rank that waits is interrupted; the one that comes later is refused."""

    def interrupt() -> None:
        raise RuntimeError("the watchdog of the test")

    group = dist.new_group()
    with tunedcomm.force("all_reduce", variant):
        call = ones(6000, group)
        assert torch.equal(call(), torch.full((6000,), 3.0))
        dist.barrier()
        if rank == 0:
            with handling(interrupt, 0.2, here=True), pytest.raises(RuntimeError, match="the watchdog of the test"):
                call()
        dist.barrier()
        with pytest.raises(tunedcomm.GroupAbortedError, match=r"rank 0 left .* RuntimeError: the watchdog"):
            call()
        dist.barrier()
        tunedcomm.release_communicator(group)
        assert torch.equal(call(), torch.full((6000,), 3.0))


@pytest.mark.parametrize("catches", [True, False])
@pytest.mark.parametrize("variant", ["host_one_shot", "host_two_shot", "lamport", "library"])
def test_a_call_within_a_waiting_call(rank: int, variant: str, catches: bool) -> None:
    """It is refused, and the call that waits goes on, unless the handler lets the error through."""
    group, said = dist.new_group(), []
    with tunedcomm.force("all_reduce", variant):
        call = ones(6000, group)
        assert torch.equal(call(), torch.full((6000,), 3.0))

        def handler() -> None:
            try:
                call()
            except tunedcomm.GroupError as error:
                said.append(str(error))
                if not catches:
                    raise

        dist.barrier()
        with handling(handler, 0.2, here=rank == 0):
            if rank == 1:
                time.sleep(0.6)
            if catches:
                assert torch.equal(call(), torch.full((6000,), 3.0))
            else:
                with pytest.raises(tunedcomm.GroupError if rank == 0 else tunedcomm.GroupAbortedError):
                    call()
        assert len(said) == (rank == 0)
        dist.barrier()
        if catches:
            assert torch.equal(call(), torch.full((6000,), 3.0))
        else:
            with pytest.raises(tunedcomm.GroupAbortedError):
                call()
        dist.barrier()


def test_threads_take_turns(rank: int) -> None:
    """Calls on several threads are not calls within calls."""
    group, turns, found = dist.new_group(), threading.Barrier(2), []

    def work(numel: int, first: bool) -> None:
        call = ones(numel, group)
        for _ in range(30):
            if not first:
                turns.wait()
            found.append(torch.equal(call(), torch.full((numel,), 3.0)))
            if first:
                turns.wait()
            turns.wait()

    threads = [threading.Thread(target=work, args=each) for each in ((6000, True), (500, False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 60


def test_release_is_local_and_leaves_other_groups_alone(rank: int) -> None:
    group, other = dist.new_group(), dist.new_group()
    calls = [ones(600, group), ones(600, other)]
    for call in calls:
        assert torch.equal(call(), torch.full((600,), 3.0))
    kept, before = get_communicator(other), get_communicator(group)
    tunedcomm.release_communicator(group)
    tunedcomm.release_communicator(group)  # nothing is there any more
    assert torch.equal(calls[0](), torch.full((600,), 3.0))
    assert get_communicator(other) is kept
    assert get_communicator(group) is not before
    with pytest.raises(tunedcomm.GroupError, match="released"):
        before.check_peers()
    assert torch.equal(calls[1](), torch.full((600,), 3.0))


@pytest.mark.parametrize("first", [0, 10])
def test_random_programs(first: int) -> None:
    """A sample of what `random_programs.py` runs, on 2 and on 3 ranks."""
    faults, counts = random_programs.run(2 if QUICK else 10, first)
    assert not faults, "\n".join(faults)
    assert counts["right"] > 0
    assert counts["refused"] > 0 or QUICK
