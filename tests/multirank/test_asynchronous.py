"""Asynchronous and functional collectives on CPUs: every order that is legal for `torch.distributed` ends well."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import HOST, PEER_TIMEOUT_S, Ranks

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator

# One pass of a slot; several steps of a ring; more chunks than the ring has slots.
SIZES = (240, 120_000, 3_000_000)
RANKS = Ranks(2, env={**HOST, "TUNEDCOMM_PEER_TIMEOUT_S": "20"}, timeout=400, forget=False)
HOST_ALL_TO_ALL = ("all_to_all", "host_one_shot")  # by rule of thumb the library serves large messages
sizes = pytest.mark.parametrize("numel", SIZES)
worlds = pytest.mark.parametrize("world_size", [2, 3])


def ones(rank: int, numel: int) -> torch.Tensor:
    return torch.full((numel,), rank + 1.0)


def total(world_size: int) -> float:
    return world_size * (world_size + 1) / 2


def is_all(x: torch.Tensor, value: float) -> bool:
    return bool((x == value).all())


def let_go(rank: int, world_size: int) -> None:
    """Rank 0 lets the others go on; they wait for it in `hold`."""
    assert rank == 0
    for peer in range(1, world_size):
        dist.send(torch.zeros(1), peer)


def hold() -> None:
    dist.recv(torch.zeros(1), 0)


def all_reduce(rank: int, numel: int, group: Any) -> tuple[Any, Callable[[], bool]]:
    x, size = ones(rank, numel), group.size()
    return dist.all_reduce(x, group=group, async_op=True), lambda: is_all(x, total(size))


def all_gather(rank: int, numel: int, group: Any) -> tuple[Any, Callable[[], bool]]:
    size = group.size()
    out = torch.zeros(size * numel)
    expected = torch.arange(1.0, size + 1).repeat_interleave(numel)
    return dist.all_gather_into_tensor(out, ones(rank, numel), group=group, async_op=True), lambda: torch.equal(
        out, expected
    )


def reduce_scatter(rank: int, numel: int, group: Any) -> tuple[Any, Callable[[], bool]]:
    size, out = group.size(), torch.zeros(numel)
    work = dist.reduce_scatter_tensor(out, ones(rank, size * numel), group=group, async_op=True)
    return work, lambda: is_all(out, total(size))


def all_to_all(rank: int, numel: int, group: Any) -> tuple[Any, Callable[[], bool]]:
    size, out = group.size(), torch.zeros(group.size() * numel)
    expected = torch.arange(1.0, size + 1).repeat_interleave(numel)
    work = dist.all_to_all_single(out, ones(rank, size * numel), group=group, async_op=True)
    return work, lambda: torch.equal(out, expected)


def uneven_all_to_all(rank: int, numel: int, group: Any) -> tuple[Any, Callable[[], bool]]:
    """Rank r sends r + 1 rows to every rank, into every other column."""
    size, columns = group.size(), 8
    receive = [sender + 1 for sender in range(size)]
    wide = torch.zeros(sum(receive), 2 * columns)
    x = torch.full((size * (rank + 1), columns), rank + 1.0)
    expected = torch.tensor(receive, dtype=torch.float32).repeat_interleave(torch.tensor(receive))[:, None]
    work = dist.all_to_all_single(wide[:, ::2], x, receive, [rank + 1] * size, group=group, async_op=True)
    return work, lambda: bool((wide[:, ::2] == expected).all()) and is_all(wide[:, 1::2], 0)


def functional(rank: int, numel: int, group: Any) -> tuple[Any, Callable[[], bool]]:
    size, found = group.size(), funcol.all_reduce(ones(rank, numel), "sum", group)
    return found, lambda: is_all(found, total(size))


CALLS = (all_reduce, all_gather, reduce_scatter, all_to_all, uneven_all_to_all, functional)


@worlds
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@sizes
def test_two_groups_in_opposite_orders(rank: int, world_size: int, call: Any, numel: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    with tunedcomm.force(*HOST_ALL_TO_ALL), tunedcomm.intercept(*groups, max_count=world_size) as calls:
        for turn in range(3):
            begun = [call(rank, numel, group) for group in (groups if (rank + turn) % 2 else groups[::-1])]
            for work, is_right in begun:
                work.wait()
                assert is_right()
    assert calls.num_served == 6, str(calls)


@worlds
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@sizes
def test_a_message_or_another_groups_broadcast_before_the_wait(
    rank: int, world_size: int, call: Any, numel: int
) -> None:
    other = dist.new_group()  # of one group all ranks call in one order
    with tunedcomm.force(*HOST_ALL_TO_ALL), tunedcomm.intercept(max_count=world_size) as calls:
        for blocks in (let_go, lambda *_: dist.broadcast(torch.zeros(1), 0, group=other)):
            if rank != 0:
                (hold if blocks is let_go else lambda: dist.broadcast(torch.zeros(1), 0, group=other))()
            work, is_right = call(rank, numel, dist.group.WORLD)
            if rank == 0:
                if call is not functional:
                    assert not work.is_completed()
                blocks(rank, world_size)
            work.wait()
            assert is_right()
    assert calls.num_served == 2, str(calls)


@worlds
@sizes
def test_one_rank_is_asynchronous(rank: int, world_size: int, numel: int) -> None:
    with tunedcomm.intercept() as calls:
        for turn in range(3 * world_size):
            x = ones(rank, numel)
            work = dist.all_reduce(x, async_op=turn % world_size == rank)
            if work is not None:
                work.wait()
            assert is_all(x, total(world_size))
    assert calls.num_passed_on == 0


@worlds
def test_many_wait(rank: int, world_size: int) -> None:
    """More than the ring has slots; inputs of calls that wait are kept, and come in order."""
    numels = [1 + 997 * turn % 5000 for turn in range(100)]
    with tunedcomm.intercept() as calls:
        if rank != 0:
            hold()
        outs = [torch.zeros(world_size * numel) for numel in numels]
        works = []
        for turn, (out, numel) in enumerate(zip(outs, numels, strict=True)):
            works.append(dist.all_gather_into_tensor(out, ones(rank, numel) + turn, async_op=True))
            gc.collect(0)
            ones(7, numel)  # takes the place of an input that was freed
        if rank == 0:
            assert not any(work.is_completed() for work in works)
            let_go(rank, world_size)
        for turn in reversed(range(len(works))):
            works[turn].wait()
            expected = torch.arange(1.0, world_size + 1).repeat_interleave(numels[turn]) + turn
            assert torch.equal(outs[turn], expected), turn
    assert calls.num_passed_on == 0


@worlds
@pytest.mark.parametrize("way", ["direct", "policy", "synchronous", "operator"])
def test_other_calls_follow_those_that_wait(rank: int, world_size: int, way: str) -> None:
    """Also those that a fast call would serve. The peers make all calls synchronously, so the order must be theirs."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if way == "synchronous":
            dist.all_reduce(x)
            return x
        if way == "operator":
            group = dist.group.WORLD
            return torch.ops.tunedcomm.all_reduce(x, "sum", group.size(), group.group_name, None, None)
        return tunedcomm.all_reduce(x)

    with tunedcomm.intercept():
        with tunedcomm.numerics("ordered" if way == "policy" else "default"):
            for _ in range(3):
                call(ones(rank, 500))
        x = ones(rank, 500)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            assert not work.is_completed()
            let_go(rank, world_size)
        else:
            hold()
            dist.all_reduce(x)
        with tunedcomm.numerics("ordered" if way == "policy" else "default"):
            assert is_all(call(torch.full((500,), 10.0 + rank)), 10 * world_size + total(world_size) - world_size)
        assert is_all(x, total(world_size)), "the call before has ended"
        if rank == 0:
            assert work.is_completed()


def test_a_plan_is_that_of_the_call(rank: int) -> None:
    """Rank 0's call waits while the policy and what is forced change."""
    group = dist.new_group()
    with tunedcomm.intercept(group):
        x = ones(rank, 5000)
        with tunedcomm.force("all_reduce", "host_two_shot"):
            if rank == 0:
                work = dist.all_reduce(x, group=group, async_op=True)
                assert not work.is_completed()
        if rank == 0:
            let_go(rank, 2)
            work.wait()
        else:
            hold()
            with tunedcomm.force("all_reduce", "host_two_shot"):
                dist.all_reduce(x, group=group)
        assert is_all(x, 3.0)
        dist.all_reduce(x, group=group)
        assert is_all(x, 6.0)


def test_the_state_of_the_caller(rank: int) -> None:
    """Inference tensors may be written in inference mode alone."""
    seen = []
    with tunedcomm.intercept(), torch.inference_mode():
        if rank != 0:
            hold()
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        wide = torch.zeros(2, 300, 2)
        work = dist.all_gather_into_tensor(wide[:, :, 0], ones(rank, 300), async_op=True)
        future = work.get_future().then(
            lambda done: (seen.append((torch.is_inference_mode_enabled(), torch.get_num_threads())), done.value())[1]
        )
        torch.set_num_threads(threads)
        if rank == 0:
            assert not work.is_completed()
            assert not future.done()
            let_go(rank, 2)
        (found,) = future.wait()
        assert torch.equal(found, wide[:, :, 0])
        assert torch.equal(wide[:, 7, 0], torch.tensor([1.0, 2.0]))
        assert is_all(wide[:, :, 1], 0)
        assert wide.is_inference()
    if rank == 0:
        assert seen[0][1] == threads + 1


def test_a_callback_makes_further_calls(rank: int) -> None:
    """As PowerSGD's: it waits for a call of the same group, on the thread that makes the group's calls."""
    with tunedcomm.intercept():
        for synchronous in (True, False):
            if rank != 0:
                hold()
            x, y = ones(rank, 100), ones(rank, 50)

            def then(done: Any, y: torch.Tensor = y, synchronous: bool = synchronous) -> torch.Tensor:
                if synchronous:
                    dist.all_reduce(y)
                    return y
                return dist.all_reduce(y, async_op=True).get_future().wait()[0]

            future = dist.all_reduce(x, async_op=True).get_future().then(then)
            if rank == 0:
                let_go(rank, 2)
            assert is_all(future.wait(), 3.0)
            assert is_all(x, 3.0)


def test_a_thread_that_waits_sleeps(rank: int) -> None:
    with tunedcomm.intercept():
        x = ones(rank, 5000)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            spent = []
            for _ in range(6):  # at first it prepares the call
                begin = time.process_time()
                time.sleep(0.5)
                spent.append(time.process_time() - begin)
            let_go(rank, 2)
            assert min(spent) < 0.15, spent
            work.wait()
        else:
            hold()
            dist.all_reduce(x)
        assert is_all(x, 3.0)


def test_debugging_and_checking_run_at_once(rank: int) -> None:
    """They make calls of the library, which would mix with those of the program."""
    for name in ("TUNEDCOMM_DEBUG", "TUNEDCOMM_CHECK"):
        group = dist.new_group()
        os.environ[name] = "1"
        try:
            with tunedcomm.intercept(group):
                for _ in range(3):
                    time.sleep(0.1 * rank)
                    x = ones(rank, 700)
                    work = dist.all_reduce(x, group=group, async_op=True)
                    assert work.is_completed()
                    assert is_all(x, 3.0)
        finally:
            del os.environ[name]


def test_a_forked_child_leaves_waiting_calls_alone(rank: int) -> None:
    with tunedcomm.intercept():
        if rank != 0:
            hold()
        x = ones(rank, 5000)
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            assert not work.is_completed()
            child = os.fork()
            if child == 0:
                try:
                    dist.all_reduce(ones(rank, 10), async_op=True)
                except tunedcomm.GroupError:
                    os._exit(7)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            let_go(rank, 2)
        work.wait()
        assert is_all(x, 3.0)


def test_ddp_with_ranks_that_come_late(rank: int) -> None:
    """Gradients equal the library's, bit by bit: of two ranks there is one order of summation."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64) for _ in range(8)]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
        for step in range(4):
            if step % 2 == rank:
                time.sleep(0.05)
            model(torch.full((4, 64), rank + 0.5)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with tunedcomm.intercept() as calls:
        found = gradients()
    assert calls.num_served > 8, str(calls)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@worlds
def test_compiled_code_with_ranks_that_come_late(rank: int, world_size: int) -> None:
    first, second = dist.new_group(), dist.new_group()

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", first)
        z = funcol.all_gather_tensor(x + 1, 0, second)
        return z.sum() + y

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = [layer(ones(rank, 64) + turn) for turn in range(4)]
    with tunedcomm.intercept(first, second) as calls:
        for turn in range(4):
            if rank == turn % world_size:
                time.sleep(0.05)
            assert torch.equal(compiled(ones(rank, 64) + turn), expected[turn])
    assert calls.num_served == 8, str(calls)


def test_a_peer_that_does_not_come(rank: int) -> None:
    """The error comes at the wait, and the group's next call raises it, too."""
    group = dist.new_group()
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    try:
        with tunedcomm.intercept(group):
            if rank == 0:
                works = [dist.all_reduce(ones(rank, numel), group=group, async_op=True) for numel in SIZES]
                with pytest.raises(TimeoutError):
                    works[-1].wait(timedelta(milliseconds=100))
                for work in works:
                    with pytest.raises(tunedcomm.PeerTimeoutError, match="missed rank 1"):
                        work.wait()
                    assert work.is_completed()
                    for _ in range(2):
                        with pytest.raises(RuntimeError, match="TimeoutError"):
                            work.get_future().wait()
                with pytest.raises(tunedcomm.PeerTimeoutError):
                    dist.all_reduce(ones(rank, 10), group=group)
                get_communicator(group).queue.join()
    finally:
        os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = "20"
    dist.barrier()
    x = ones(rank, 10)
    with tunedcomm.intercept():
        dist.all_reduce(x, async_op=True).wait()
    assert is_all(x, 3.0)


_PROGRAM = """
import multiprocessing, os, sys, time
import torch
import torch.distributed as dist
import tunedcomm

def main():
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tunedcomm.install()
    x = torch.full((200_000,), rank + 1.0)
    dist.barrier()
    if rank == 1:
        time.sleep(1)
        for turn in range(3):
            dist.all_reduce(y := x + turn)
            assert torch.equal(y, torch.full_like(x, 3.0 + 2 * turn))
        print("right", flush=True)
        return
    for turn in range(3):
        assert not dist.all_reduce(x + turn, async_op=True).is_completed()
    print("begun", flush=True)
    if sys.argv[3] == "raise":
        raise KeyError("ends")

if sys.argv[3] == "child":
    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    sys.exit(child.exitcode)
main()
"""


@pytest.mark.parametrize("end", ["return", "raise", "child"])
def test_a_program_that_ends_without_waiting(end: str, tmp_path: Path) -> None:
    """Its calls are finished, for peers that make them later, and the interpreter ends by itself."""
    environment = {**os.environ, **HOST, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), str(tmp_path / "store"), end],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in outputs] == [b"begun\n", b"right\n"], outputs
    assert [rank.returncode for rank in ranks] == [int(end == "raise"), 0], outputs
