"""One numerics policy for all calls: blocks of `tunedcomm.numerics`, TUNEDCOMM_NUMERICS and the integrations."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, inputs_of, replaced, same_bits, settings, spy_on_launches
from fusion_samples import compiled
from slices import OPS, database, some_candidates
from test_models import TOKENS, WIDTH, local, step, tensor_parallel_layers, x_of
from torch.distributed.device_mesh import init_device_mesh

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.all_reduce_rms_norm.op import given_of, ordered_norm
from tunedcomm.kernels.common import in_order
from tunedcomm.ops.call import CallPath
from tunedcomm.spec import Problem, get_op

WORLD_SIZE = 2
NUMEL = 40
MIXED = (("float64", "sum"), ("float64", "avg"), ("int64", "sum"), ("float32", "max"))
ROWS = ("all_reduce_bias", "all_reduce_rms_norm")
launched: list[Launched] = []


def watch(rank: int) -> None:
    for op in (*OPS, "all_gather"):
        spy_on_launches(launched, op)


RANKS = Ranks(setup=watch)


def ran(call: object) -> str:
    launched.clear()
    assert callable(call)
    call()
    (seen,) = launched
    return seen.variant


def test_a_calls_own_policy_wins(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, NUMEL)
    asked = Problem("all_reduce", (NUMEL,), "float32", WORLD_SIZE, mode="eager")
    for _ in range(2):
        assert ran(lambda: tunedcomm.all_reduce(x)) == "library"
        with tunedcomm.numerics("ordered"):
            assert ran(lambda: tunedcomm.all_reduce(x)) != "library"
            assert same_bits(tunedcomm.all_reduce(x), expected)
            assert ran(lambda: tunedcomm.all_reduce(x, numerics="default")) == "library"
            with tunedcomm.numerics("default"):
                assert ran(lambda: tunedcomm.all_reduce(x)) == "library"
                assert ran(lambda: tunedcomm.all_reduce(x, numerics="ordered")) != "library"
            assert tunedcomm.explain(get_communicator(), asked).candidate.variant != "library"
        assert tunedcomm.explain(get_communicator(), asked).candidate.variant == "library"
    for wrong in ("exact", None):
        with pytest.raises(tunedcomm.UnsupportedInputError), tunedcomm.numerics(wrong):  # type: ignore[arg-type]
            raise AssertionError


def test_repeated_calls_ask_no_more_than_before(rank: int) -> None:
    """Every policy keeps its own fast calls, so that blocks which come and go cost repeated calls nothing."""
    x = torch.ones(NUMEL)
    blocks = [contextlib.nullcontext, lambda: tunedcomm.numerics("ordered"), lambda: tunedcomm.numerics("any")]

    def each_block() -> None:
        for block in blocks:
            with block():
                tunedcomm.all_reduce(x)

    for _ in range(2):
        each_block()

    def serve(*arguments: object) -> None:
        raise AssertionError("a repeated call was looked up")

    with replaced(CallPath, "serve", serve):
        for _ in range(3):
            each_block()
    get_communicator().forget_plans()
    each_block()


def test_gradients_follow_the_policy(rank: int) -> None:
    x = torch.ones(NUMEL, requires_grad=True)
    total = tunedcomm.all_reduce(x).sum()
    with tunedcomm.numerics("ordered"):
        assert ran(total.backward) != "library"
        y = tunedcomm.all_gather(torch.ones(4, requires_grad=True)).sum()
        y.backward()


def test_the_variable(rank: int) -> None:
    x = torch.ones(NUMEL)
    with settings({"TUNEDCOMM_NUMERICS": "ordered"}):
        assert ran(lambda: tunedcomm.all_reduce(x)) != "library"
        with tunedcomm.numerics("default"):
            assert ran(lambda: tunedcomm.all_reduce(x)) == "library"
    with settings({"TUNEDCOMM_NUMERICS": "ordered", "TUNEDCOMM_MODE": "off"}):
        with pytest.raises(tunedcomm.InfeasibleError, match="TUNEDCOMM_MODE=off"):
            tunedcomm.all_reduce(x)


def test_ranks_must_agree(rank: int) -> None:
    mine = "ordered" if rank else "default"
    with settings({"TUNEDCOMM_NUMERICS": mine}), pytest.raises(tunedcomm.AgreementError, match="numerics"):
        tunedcomm.all_reduce(torch.ones(4))
    tunedcomm.release_communicators()
    with tunedcomm.numerics(mine), pytest.raises(tunedcomm.AgreementError, match=r"tunedcomm\.numerics"):
        tunedcomm.all_reduce(torch.ones(4))
    with settings({"TUNEDCOMM_DEBUG": "1"}):
        tunedcomm.all_reduce(torch.ones(4))
        with tunedcomm.numerics(mine), pytest.raises(tunedcomm.AgreementError, match="numerics"):
            tunedcomm.all_reduce(torch.ones(4))


def test_interception(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, NUMEL)
    with tunedcomm.intercept(numerics="ordered") as calls:
        y = x.clone()
        dist.all_reduce(y)
        assert same_bits(y, expected)
        assert (calls.num_served, calls.num_passed_on) == (1, 0)
        with pytest.raises(tunedcomm.UnsupportedInputError, match="numerics"), tunedcomm.intercept():
            raise AssertionError
        with pytest.raises(tunedcomm.InfeasibleError, match="float8"):
            dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))
    with tunedcomm.intercept() as calls:
        dist.all_reduce(x.clone())
        with tunedcomm.numerics("ordered"):
            dist.all_reduce(x.clone())
        assert (calls.num_served, calls.num_passed_on) == (1, 1)


def test_serving(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, NUMEL)
    adapter = tunedcomm.ServingAllReduce(numerics="ordered")
    assert adapter.should_use(x)
    assert same_bits(adapter.all_reduce(x), expected)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="max_bytes"):
        tunedcomm.ServingAllReduce(numerics="ordered", max_bytes=64)


def test_inputs_that_no_kernel_takes(rank: int) -> None:
    """fp64, integers, max, rows that are no whole packets, pieces: the bits of the rule, and never the library."""
    with tunedcomm.numerics("ordered"), replaced(in_order, "_PIECE_BYTES", 256):
        calls: list[tuple[str, dict[str, Any]]] = [
            *(("all_reduce", {"dtype": dtype, "reduction": how}) for dtype, how in MIXED),
            *(("reduce_scatter", {"dtype": dtype, "reduction": how}) for dtype, how in MIXED),
            *((op, {"shape": (5, 67), "dtype": dtype}) for op in ROWS for dtype in ("bfloat16", "float64")),
        ]
        for op, changes in calls:
            asked = dataclasses.replace(Problem(op, (131,), "float64", WORLD_SIZE, mode="eager"), **changes)
            everyone = [get_op(op).make_inputs(asked, peer, 1, "random", "cpu") for peer in range(WORLD_SIZE)]
            launched.clear()
            got = getattr(tunedcomm, op)(*everyone[rank], **({"op": asked.reduction} if op not in ROWS else {}))
            assert [seen.variant for seen in launched] == ["in_order"], asked
            for out, due in zip(got if isinstance(got, tuple) else (got,), due_of(asked, everyone, rank), strict=True):
                assert same_bits(out, due), asked


def due_of(asked: Problem, everyone: list[tuple[torch.Tensor, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    """The op's rule; in fp64, of which two summands have one sum and one rounding, that of float64 references."""
    spec = get_op(asked.op)
    if asked.dtype != "bfloat16" and "rms_norm" not in asked.op:
        return tuple(each.to(getattr(torch, asked.dtype)) for each in spec.reference(asked, everyone, rank))
    if asked.dtype == "bfloat16" and asked.reduction == "sum":
        assert spec.ordered_reference is not None
        return spec.ordered_reference(asked, everyone, rank)
    if asked.op == "all_reduce_rms_norm":
        h = everyone[0][0] + everyone[1][0]
        return ordered_norm(h, given_of(asked, everyone[rank])), h
    return spec.reference(asked, everyone, rank)


def variants_of(ops: Sequence[str]) -> None:
    """Of what was launched: nothing by the library, and all of these ops."""
    assert {seen.problem.op for seen in launched} == set(ops)
    assert "library" not in {seen.variant for seen in launched}, launched


def whatever_is_tuned(run: Callable[[], torch.Tensor], ops: Sequence[str]) -> None:
    """A decode step is the same, bit by bit, from each of several databases, and without one."""
    communicator, shuffle, chosen = get_communicator(), random.Random(3), set()
    before, expected = communicator.snapshot, run()
    problems = list({seen.problem: None for seen in launched})
    candidates = []
    for op in ops:
        candidates += some_candidates(communicator, [each for each in problems if each.op == op], shuffle, 8)
    for _ in range(4):
        communicator.replace_snapshot(database(communicator, problems, candidates, shuffle))
        launched.clear()
        assert same_bits(run(), expected)
        variants_of(ops)
        chosen.add(tuple((seen.variant, *seen.config.items()) for seen in launched))
    assert len(chosen) > 1, "the databases differ in nothing"
    communicator.replace_snapshot(before)


def test_a_block_fused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model, x = tensor_parallel_layers(mesh).bfloat16(), x_of(rank, TOKENS, WIDTH, same=True).bfloat16()

    def fused() -> Any:
        return compiled(model, tunedcomm.fusion_pass(mesh.get_group(), when="always", numerics="ordered"))

    with tunedcomm.intercept(numerics="ordered") as calls:  # for what the pass leaves
        launched.clear()
        step(model, fused(), x)
        variants_of(["all_reduce", "gemm_ar"])
        with torch.no_grad():
            decode = fused()
            launched.clear()
            whatever_is_tuned(lambda: local(decode(x[:2])), ["all_reduce", "all_reduce_rms_norm", "gemm_ar"])
        assert calls.num_passed_on == 0, str(calls)
