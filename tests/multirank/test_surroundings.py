"""Calls inside of what else there is: tracing, transforms, other tensors, graphs of the group, forks and threads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import Ranks, replaced
from harness import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch import communicator as communicator_module
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common import launch
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.ops import call as call_module
from tunedcomm.spec import register_variant, variants

RANKS = Ranks()


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def test_no_plain_tensors(rank: int) -> None:
    """What has no operator cannot be traced; such tensors have no memory at their address."""
    out = tunedcomm.symmetric_empty((8, 8), dtype=torch.float32)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: tunedcomm.all_to_all_v(x, [2, 2], [2, 2], max_count=2),
        lambda x: tunedcomm.all_gather_with_progress(x, out=out),
    ]
    mesh = init_device_mesh("cpu", (2,))
    for call in calls:
        with refused("takes plain tensors, not DTensor; .* pass .to_local"):
            call(DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)]))
        with refused("cannot be traced and takes plain tensors, not FakeTensor"), FakeTensorMode():
            call(torch.ones(4, 8))
        with refused("torch.func transforms"):
            torch.vmap(call)(torch.ones(2, 4, 8))


def test_an_explained_call_is_the_call(rank: int) -> None:
    """With an op's name and inputs, as the call would be decided; the text is what the command prints."""
    x, a, b = torch.ones(4096), torch.ones(8, 16), torch.ones(16, 24)
    for op, given in (("all_reduce", x), ("reduce_scatter", x), ("gemm_rs", (a, b))):
        told = tunedcomm.explain(op, given)
        assert told.problem is not None
        getattr(tunedcomm, op)(*(given if isinstance(given, tuple) else (given,)))
        plans = get_communicator().plans
        assert told == plans[told.problem, "default", None, False].decide_again()
        head, *lines = str(told).splitlines()
        assert head.startswith(str(told.problem))
        assert lines[0].split(maxsplit=1) == ["runs", str(told.candidate)]
        assert " 0 B" not in str(told.memory), "left out where nothing is held"


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, "SUM"], ids=["ReduceOp", "text"])
def test_reductions_go_by_the_names_of_torch_too(rank: int, op: Any) -> None:
    x, a, b = torch.arange(6.0) + rank, torch.ones(4, 16), torch.ones(16, 3)
    compiled = torch.compile(lambda x: tunedcomm.all_reduce(x, op="SUM"), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(tunedcomm.all_reduce(x, op=op), tunedcomm.all_reduce(x))
        assert torch.equal(tunedcomm.all_reduce_(x.clone(), op=op), tunedcomm.all_reduce(x))
        assert torch.equal(tunedcomm.reduce_scatter(x, op=op), tunedcomm.reduce_scatter(x))
        assert torch.equal(tunedcomm.gemm_rs(a, b, op=op), tunedcomm.gemm_rs(a, b))
        assert torch.equal(compiled(x), tunedcomm.all_reduce(x))
    assert torch.equal(tunedcomm.all_reduce(x, op=dist.ReduceOp.MAX), torch.arange(6.0) + 1)
    with refused("'product' is not a reduction"):
        tunedcomm.all_reduce(x, op=dist.ReduceOp.PRODUCT)


def test_a_variant_that_raises_when_asked(rank: int) -> None:
    """Whether a miss is worth tuning is asked on one rank alone; nobody wanted this variant to run."""
    tunedcomm.release_communicators()
    kernels.discover()

    def asked(*arguments: Any) -> Any:
        raise KeyError("num_pieces")

    held = list(variants("all_gather").values())
    for each in held:
        if not each.is_library:
            register_variant(dataclasses.replace(each, infeasible=asked, default=asked))
    try:
        for size in (64, 1000):
            found = tunedcomm.all_gather(torch.full((size,), rank + 1.0))
            assert torch.equal(found, torch.arange(1.0, 3.0).repeat_interleave(size))
        communicator = tunedcomm.get_communicator()
        told = tunedcomm.explain(communicator, tunedcomm.Problem("all_gather", (64,), "float32", 2, mode="eager"))
        assert (told.candidate.variant, told.source) == ("library", "library")
        named = pytest.raises(tunedcomm.ConfigError, match=r"all_gather.push: its default\(\) raised KeyError")
        with tunedcomm.force("all_gather", "push"), named:
            tunedcomm.all_gather(torch.ones(64))
    finally:
        for each in held:
            register_variant(each)
        tunedcomm.release_communicators()


def test_what_graphs_replay_is_kept(rank: int) -> None:
    """Whoever dispatches anew drops plans, but not those of captured calls: graphs write to their buffers."""
    x, weight = torch.ones(4, 64), torch.ones(64)
    communicator = get_communicator()
    for call in (
        lambda: tunedcomm.all_reduce(x),
        lambda: tunedcomm.all_reduce_rms_norm(x, weight),
        lambda: tunedcomm.all_to_all_v(x, [2, 2], [2, 2], max_count=2),
    ):
        call()
        before = set(communicator._captured)
        warm = {id(plan) for plan in communicator.plans.values()}
        assert not before & warm
        for key, plan in list(communicator.plans.items()):
            communicator.plans[key._replace(capturing=True)] = plan
        communicator.forget_calls()
        with replaced(call_module, "is_capturing", lambda: True):
            call()
        communicator.forget_plans()
        call()
        (kept,) = set(communicator._captured) - before
        assert kept in warm


def test_large_kernels_leave_room_for_graphs(rank: int) -> None:
    """An eager kernel that takes most of the GPU serves until a graph is captured, then is no candidate any more."""

    @contextlib.contextmanager
    def whole(limit: float) -> Iterator[launch.Residency]:
        yield launch.Residency(limit, share=1.0)

    tunedcomm.release_communicators()
    x = torch.ones(256)
    communicator = get_communicator()
    with tunedcomm.force("all_reduce", "two_shot"), replaced(communicator_module, "within", whole):
        tunedcomm.all_reduce(x)
        (plan,) = communicator.plans.values()
        communicator.captured(plan)
        assert not communicator.plans
        with pytest.raises(tunedcomm.InfeasibleError, match=r"two_shot\(.*100% of the GPU; once a group has captured"):
            tunedcomm.all_reduce(x)
    tunedcomm.all_reduce(x)


MAP_FIXED_NOREPLACE = 0x100000
NUM_THREADS, NUM_LAUNCHES = 3, 20


def in_a_child(call: Callable[[], object]) -> str:
    """The name of the error that the call raises in a forked child, or "" if it raises none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = ""
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def test_a_forked_child_is_no_rank(rank: int) -> None:
    """Not of a group that was called before, nor of one that was not, nor through a fast call or an operator."""
    other, x = dist.new_group([0, 1]), torch.ones(64)
    for _ in range(3):
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((64,), 2.0))
    with tunedcomm.intercept():
        dist.all_reduce(torch.ones(64))
        calls: list[Callable[[], object]] = [
            lambda: tunedcomm.all_reduce(x),
            lambda: tunedcomm.all_gather(x),
            lambda: tunedcomm.all_reduce(x, group=other),
            lambda: tunedcomm.all_reduce(torch.ones(64, requires_grad=True)),
            tunedcomm.get_communicator,
            tunedcomm.check_agreement,
        ]
        for call in calls:
            assert in_a_child(call) == "GroupError"
    for group in (None, other):
        assert torch.equal(tunedcomm.all_reduce(x, group=group), torch.full((64,), 2.0)), "the parent goes on"


@triton.jit
def add_kernel(x, bias, rows, BLOCK: tl.constexpr):
    """Add `bias` to every row."""
    offsets = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        p = (x + row * BLOCK * 4).to(tl.pointer_type(tl.float32)) + offsets
        tl.store(p, tl.load(p) + tl.load(bias.to(tl.pointer_type(tl.float32)) + offsets))


def test_threads_that_launch(rank: int) -> None:
    """Kernels that wait for nobody, so that their order does not matter."""
    request = CompileRequest.of(add_kernel, {"BLOCK": 64}, num_warps=1)
    bind = bind_kernel(request, 2, torch.device("cpu")).fix((None,) * 3)
    failures: list[BaseException] = []

    def launch(count: int) -> None:
        bias = torch.full((64,), float(count))
        try:
            for _ in range(NUM_LAUNCHES):
                x = torch.zeros(count, 64)
                bind(0, x.data_ptr(), bias.data_ptr(), count)
                assert (x == count).all()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=launch, args=(number + 1,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def warned_body(rank: int, world_size: int) -> list[str]:
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for op in ("all_gather", "reduce_scatter", "ag_gemm", "gemm_rs"):
            with tunedcomm.force(op, "library"):
                function = getattr(tunedcomm, op)
                _ = function(a, b) if op.endswith(("gemm", "rs")) else function(a)
        with tunedcomm.intercept():
            x = torch.ones(64)
            dist.all_reduce(x)
    assert x[0] == world_size
    return [f"{each.category.__name__}: {each.message}" for each in caught]


def test_no_warning_of_torchs_is_printed() -> None:
    assert run_ranks(2, warned_body, timeout=90, fresh=True) == [[], []]
