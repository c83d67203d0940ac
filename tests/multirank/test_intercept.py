"""Calls of `torch.distributed`, functional collectives and DTensor plans, served with no line of theirs changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from cases import Launched, Ranks, same_bits, spy_on_launches
from harness import run_ranks

import tunedcomm

WORLD_SIZE = 2
NUMEL = 4096
FORCED = {
    "all_reduce": "lamport",
    "all_gather": "lamport",
    "reduce_scatter": "lamport",
    "all_to_all": "lamport",
    "all_to_all_v": "push",
}
launched: list[Launched] = []


def setup(rank: int) -> None:
    for op in FORCED:
        spy_on_launches(launched, op)


RANKS = Ranks(setup=setup)


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Kernels for whatever reaches the dispatcher: on this backend the library is what is fastest."""
    with contextlib.ExitStack() as stack:
        for op, variant in FORCED.items():
            stack.enter_context(tunedcomm.force(op, variant))
        launched.clear()
        yield


@contextlib.contextmanager
def served(*groups: Any, **options: Any) -> Iterator[Any]:
    """Inside of an interception in which kernels are forced."""
    with forced(), tunedcomm.intercept(*groups, **options) as calls:
        yield calls


def equal_to_the_library(call: Callable[[], torch.Tensor], *, times: int = 1, **options: Any) -> None:
    """The same call with and without; small whole numbers, so that every order of summation gives the same bits."""
    with forced():
        expected = call()
    assert launched == [], "outside of an interception the library runs"
    with served(**options) as calls:
        found = call()
    assert same_bits(found.detach(), expected.detach()), (found, expected)
    assert (calls.num_served, calls.num_passed_on) == (times, 0), str(calls)
    assert [seen.variant for seen in launched] == [FORCED[seen.problem.op] for seen in launched]
    assert len(launched) == times


def finished(work: Any) -> None:
    """Wait for a call that was asynchronous."""
    if work is not None:
        work.wait()


def whole(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def test_all_reduce(rank: int) -> None:
    def call(**options: Any) -> torch.Tensor:
        x = whole(rank, 3, 40)
        work = dist.all_reduce(x, **options)
        finished(work)
        assert work is None or work.is_completed()
        return x

    equal_to_the_library(call)
    equal_to_the_library(lambda: call(op=dist.ReduceOp.SUM, group=dist.group.WORLD, async_op=True))

    parameter = torch.nn.Parameter(whole(rank, 8))
    with served() as calls:
        wide = torch.zeros(8, 16)
        wide[:, ::2].copy_(whole(rank, 8, 8))
        dist.all_reduce(wide[:, ::2])
        dist.all_reduce(parameter)
    assert calls.num_served == 2
    assert wide[:, 1::2].count_nonzero() == 0
    assert same_bits(wide[:, ::2], whole(0, 8, 8) + whole(1, 8, 8))
    assert same_bits(parameter.detach(), whole(0, 8) + whole(1, 8))


def test_all_gather(rank: int) -> None:
    def call(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        out = torch.zeros(shape)
        finished(dist.all_gather_into_tensor(out, whole(rank, 6, 4), **options))
        return out

    def parts(**options: Any) -> torch.Tensor:
        found = torch.zeros(2, 6, 8)
        finished(dist.all_gather(list(found[:, :, ::2]), whole(rank, 6, 4), **options))
        return found

    equal_to_the_library(lambda: call((12, 4)))
    equal_to_the_library(lambda: call((12, 4), async_op=True))
    equal_to_the_library(parts)
    equal_to_the_library(lambda: parts(async_op=True))
    expected = call((12, 4))
    with served() as calls:  # NCCL takes these, gloo does not
        assert same_bits(call((2, 6, 4)), expected.view(2, 6, 4))
        wide = torch.zeros(12, 8)
        dist.all_gather_into_tensor(wide[:, ::2], whole(rank, 6, 8)[:, ::2].contiguous())
    assert calls.num_served == 2
    assert wide[:, 1::2].count_nonzero() == 0
    assert same_bits(wide[6 * rank : 6 * rank + 6, ::2], whole(rank, 6, 8)[:, ::2])


def test_reduce_scatter(rank: int) -> None:
    def call(**options: Any) -> torch.Tensor:
        out = torch.zeros(6, 4)
        finished(dist.reduce_scatter_tensor(out, whole(rank, 12, 4), **options))
        return out

    equal_to_the_library(call)
    equal_to_the_library(lambda: call(async_op=True))


def test_all_to_all(rank: int) -> None:
    def call() -> torch.Tensor:
        out = torch.zeros(6, 4)
        dist.all_to_all_single(out, whole(rank, 6, 4))
        return out

    equal_to_the_library(call)


def test_uneven_all_to_all(rank: int) -> None:
    """Rank 0 sends equal numbers of rows and rank 1 does not: whether they are equal must not matter."""
    send = ([2, 2], [0, 3])[rank]
    receive = ([2, 0], [2, 3])[rank]

    def call(**options: Any) -> torch.Tensor:
        out = torch.zeros(sum(receive), 4)
        finished(dist.all_to_all_single(out, whole(rank, sum(send), 4), receive, send, **options))
        return out

    expected = call()
    with served() as calls:
        assert same_bits(call(), expected)
    assert calls.num_served == 0
    assert "max_count" in str(calls)
    equal_to_the_library(call, max_count=4)
    equal_to_the_library(lambda: call(async_op=True), max_count=4)
    group = dist.group.WORLD

    def functional() -> torch.Tensor:
        return funcol.all_to_all_single(whole(rank, sum(send), 4), receive, send, group).clone()

    equal_to_the_library(functional, max_count=4)


def test_functional_collectives(rank: int) -> None:
    group, operators = dist.group.WORLD, torch.ops._c10d_functional
    name = group.group_name
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: funcol.all_reduce(x, "sum", group).clone(),
        lambda x: funcol.all_gather_tensor(x, 0, group).clone(),
        lambda x: funcol.all_gather_tensor(x, 1, group).clone(),
        lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, group).clone(),
        lambda x: funcol.reduce_scatter_tensor(x, "sum", 1, group).clone(),
        lambda x: operators.wait_tensor(operators.all_reduce_(x, "sum", name)),
        lambda x: operators.wait_tensor(operators.all_gather_into_tensor_out(x, 2, name, out=torch.zeros(12, 4))),
        lambda x: operators.wait_tensor(operators.reduce_scatter_tensor_out(x, "sum", 2, name, out=torch.zeros(3, 4))),
    ]
    for call in calls:
        equal_to_the_library(lambda call=call: call(whole(rank, 6, 4)))


def test_coalesced_collectives(rank: int) -> None:
    """Lists are served whole, or left to the library whole."""
    native, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    xs = [whole(rank, 12, 4), whole(rank + 2, 6)]

    def flat(*found: torch.Tensor) -> torch.Tensor:
        return torch.cat([each.reshape(-1) for each in found])

    def coalesced(is_async: bool) -> torch.Tensor:
        summed, shares, gathered = [x.clone() for x in xs], [x.new_empty(len(x) // 2, *x.shape[1:]) for x in xs], []
        finished(dist.all_reduce_coalesced(summed, async_op=is_async))
        with dist.distributed_c10d._coalescing_manager(async_ops=is_async) as works:
            for x, share in zip(xs, shares, strict=True):
                dist.reduce_scatter_tensor(share, x)
        finished(works if is_async else None)
        with dist.distributed_c10d._coalescing_manager(async_ops=is_async) as works:
            for x in xs:
                gathered.append(x.new_empty(2 * len(x), *x.shape[1:]))
                dist.all_gather_into_tensor(gathered[-1], x)
        finished(works if is_async else None)
        return flat(*summed, *shares, *gathered)

    def functional() -> torch.Tensor:
        found = [
            *native.all_reduce_coalesced(xs, "sum", group),
            *native.all_gather_into_tensor_coalesced(xs, 2, group),
            *native.reduce_scatter_tensor_coalesced(xs, "sum", 2, group),
        ]
        return flat(*map(native.wait_tensor, found))

    for call in (lambda: coalesced(False), lambda: coalesced(True), functional):
        equal_to_the_library(call, times=6)
    mixed = [whole(rank, 4), torch.zeros(0)]
    with served() as calls:
        dist.all_reduce_coalesced(mixed)
    assert calls.num_served == 0
    assert same_bits(mixed[0], whole(0, 4) + whole(1, 4))


def test_autograd_forms(rank: int) -> None:
    group = dist.group.WORLD

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            x = whole(rank, 4, 4).requires_grad_()
            y = call(x)
            (y * whole(rank + 7, *y.shape)).sum().backward()
            assert x.grad is not None
            return torch.cat([y.detach().flatten(), x.grad.flatten()])

        return run

    equal_to_the_library(gradient(lambda x: funcol.all_gather_tensor_autograd(x, 0, group)), times=2)
    equal_to_the_library(gradient(lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)), times=2)
    rows = gradient(lambda x: funcol.all_to_all_single_autograd(x, [2, 2], [2, 2], group))
    equal_to_the_library(rows, times=2, max_count=2)


def test_what_goes_to_the_library(rank: int) -> None:
    """Untouched: the library's results, its errors, its work objects."""

    def passed_on(call: Callable[[], Any], *, counted: bool = True) -> str:
        with served() as calls:
            call()
        assert launched == [], launched
        assert calls.num_served == 0
        assert bool(calls.calls()) == counted, str(calls)
        return str(calls)

    x = torch.full((8,), rank + 1)
    passed_on(lambda: dist.scatter(x.clone(), [x, x] if rank == 0 else None, 0), counted=False)
    passed_on(dist.barrier, counted=False)
    product = x.clone()
    assert "'product'" in passed_on(lambda: dist.all_reduce(product, op=dist.ReduceOp.PRODUCT))
    assert torch.equal(product, torch.full((8,), 2))
    flags = torch.ones(8, dtype=torch.bool)
    assert "does not take torch.bool" in passed_on(lambda: dist.all_reduce(flags, op=dist.ReduceOp.MAX))
    assert bool(flags.all())
    assert "no elements" in passed_on(lambda: dist.all_reduce(torch.zeros(0)))
    with served():
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather_into_tensor(torch.zeros(7), torch.zeros(4))
    for dtype in (torch.int64, torch.float64):  # no kernel takes them
        with tunedcomm.intercept() as calls:
            numbers = torch.full((8,), rank + 1, dtype=dtype)
            dist.all_reduce(numbers)
            assert torch.equal(numbers, torch.full((8,), 3, dtype=dtype))
        assert calls.num_passed_on == 1, str(calls)


def test_other_groups_are_untouched(rank: int) -> None:
    other = dist.new_group([0, 1])
    x = torch.full((8,), rank + 1.0)
    with served() as calls:
        dist.all_reduce(x, group=other)
        funcol.all_reduce(x, "sum", other).clone()
        assert launched == []
        assert calls.calls() == {}
    with served(other) as calls:
        dist.all_reduce(x, group=other)
        dist.all_reduce(x)
    assert calls.num_served == 1
    with served(other, None) as calls:
        dist.all_reduce(x, group=other)
        dist.all_reduce(x)
    assert {told.group for told in calls.calls()} == {other.group_name, dist.group.WORLD.group_name}
    assert calls.num_served == 2


def test_passing_on_never_hangs(rank: int) -> None:
    """A group's worker wants the interpreter's lock for old tensors while the next call wants the worker's."""
    x = torch.full((1024,), rank)
    with tunedcomm.intercept() as calls:
        for _ in range(2000):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
    assert calls.num_passed_on == 2000
    assert torch.equal(x, torch.full((1024,), dist.get_world_size() - 1))


def test_nested_blocks_and_exceptions(rank: int) -> None:
    def count() -> int:
        launched.clear()
        dist.all_reduce(torch.ones(8))
        return len(launched)

    assert count() == 0
    with served() as outer:
        assert count() == 1
        with contextlib.suppress(ZeroDivisionError), tunedcomm.intercept() as inner:
            assert count() == 1
            raise ZeroDivisionError
        assert inner.num_served == 1
        assert count() == 1
    assert outer.num_served == 3
    assert inner.num_served == 1
    assert count() == 0
    with tunedcomm.force("all_reduce", "lamport"):
        block = tunedcomm.intercept()
        for _ in range(2):
            with block as seen, block:
                assert count() == 1
            assert seen.num_served == 1
        assert count() == 0
        first = tunedcomm.install()
        tunedcomm.install()
        assert count() == 1
        tunedcomm.uninstall()
        assert count() == 0
        tunedcomm.uninstall()  # a second time does nothing
        assert first.num_served == 1
        with tunedcomm.intercept():
            tunedcomm.install()
            tunedcomm.uninstall()
            assert count() == 1


def test_bad_arguments(rank: int) -> None:
    with pytest.raises(tunedcomm.UnsupportedInputError, match="max_count"):
        with tunedcomm.intercept(max_count=-1):
            pass
    with tunedcomm.intercept(max_count=3):
        with pytest.raises(tunedcomm.UnsupportedInputError, match="max_count=3"):
            tunedcomm.install(max_count=4)
    with pytest.raises(tunedcomm.GroupError):
        tunedcomm.install("tp")


# What is left alone: tunedcomm's own calls, where tensors lie in memory, and groups made later.


def reduced(x: torch.Tensor) -> torch.Tensor:
    """Its sum over the default group, by the functional collective."""
    assert dist.group.WORLD is not None
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + 0


def test_own_calls_are_the_librarys(rank: int) -> None:
    """What a library variant asks `torch.distributed` for is not served by a kernel again."""
    x = torch.full((NUMEL,), rank + 1.0)
    a, b = torch.ones(64, 16), torch.ones(16, 64)
    tunedcomm.all_reduce(x, max_sms=0)  # bound before
    with tunedcomm.intercept() as seen:
        launched.clear()
        for _ in range(2):
            assert torch.equal(tunedcomm.all_reduce(x, max_sms=0), torch.full((NUMEL,), 3.0))
        assert tunedcomm.gemm_ar(a, b)[0, 0] == 16 * WORLD_SIZE
        assert not seen.calls(), str(seen)
        dist.all_reduce(torch.ones(NUMEL))
        assert seen.num_passed_on == 1
    # Without a bound of their own, rows are sent whatever bound the block names for others.
    with tunedcomm.force("all_to_all_v", "push"), tunedcomm.intercept(max_count=4) as seen:
        sent = tunedcomm.all_to_all_v(x.view(-1, 8), [NUMEL // 16] * 2, [NUMEL // 16] * 2)
        assert torch.equal(sent.sum(0), torch.full((8,), 3.0 * NUMEL / 16))
        assert not seen.calls(), str(seen)


def test_symmetric_memory(rank: int) -> None:
    """Legal for `torch.distributed` wherever it begins, on some ranks or on all."""
    shared = tunedcomm.symmetric_empty(NUMEL + 4, dtype=torch.float32)
    plain = torch.zeros(NUMEL + 4)
    for first in (0, 1, 1 + rank, 4 * rank):
        for source in (shared, (plain, shared)[rank]):
            launched.clear()
            source.fill_(rank + 1.0)
            x = source[first : first + NUMEL]
            out = torch.empty(NUMEL * WORLD_SIZE)
            with tunedcomm.force("all_reduce", "two_shot"), tunedcomm.force("all_gather", "pull"):
                with tunedcomm.intercept() as seen:
                    dist.all_gather_into_tensor(out, x)
                    total = reduced(x)
                    dist.all_reduce(x)
                assert seen.num_served == 3
                serving = tunedcomm.ServingAllReduce()
                assert serving.should_use(x)
                assert torch.equal(serving.all_reduce(x, x), torch.full((NUMEL,), 6.0))
            assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
            assert torch.equal(total, torch.full((NUMEL,), 3.0))
            assert torch.equal(x, torch.full((NUMEL,), 6.0))
            assert (source == rank + 1.0).sum() == 4, "what is beside it"
            assert {seen.problem.input_kind for seen in launched} == {"plain"}
    dist.barrier()


def later_groups_body(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    """A group of a destroyed one's name is another group, until it is intercepted itself."""
    with tunedcomm.force("all_reduce", "two_shot"):
        first = tunedcomm.install()
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        assert reduced(torch.ones(NUMEL))[0] == world_size
        tunedcomm.release_communicators()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=world_size)
        assert dist.group.WORLD.group_name == name  # type: ignore[union-attr]
        assert reduced(torch.ones(NUMEL))[0] == world_size
        second = tunedcomm.install()
        assert reduced(torch.ones(NUMEL))[0] == world_size
        return first.num_served, second.num_served


def test_later_groups_of_the_same_name(tmp_path: Path) -> None:
    assert run_ranks(WORLD_SIZE, later_groups_body, str(tmp_path), timeout=60) == [(1, 1)] * WORLD_SIZE


def test_one_tensor_as_input_and_output(rank: int) -> None:
    """Ops that do not work in place get a copy of their input."""
    x = torch.arange(8.0).view(4, 2) + 10 * rank
    expected = x.clone()
    dist.all_to_all_single(expected, x.clone())
    for max_count, sizes in ((None, None), (2, [2, 2])):
        y = x.clone()
        with served(max_count=max_count) as calls:
            dist.all_to_all_single(y, y, sizes, sizes)
        assert torch.equal(y, expected)
        assert calls.num_served == 1, str(calls)
