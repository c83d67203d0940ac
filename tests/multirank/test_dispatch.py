"""What runs: the tuned variant with its config, whatever the tensor looks like; else the library."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from cases import report, same_bits
from dispatch_table import (
    DUBIOUS,
    LARGE,
    MIDDLE,
    SMALL,
    TUNED,
    WORLD_SIZE,
    check_tuned,
    inputs_of,
    launched,
    problem,
    ran,
    run_on_table,
    run_with_table,
    tuned_config,
)

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import get_variant


def the_tuned_variant_runs(rank: int) -> None:
    for numel, entries in TUNED.items():
        best = min(entries, key=entries.__getitem__)
        check_tuned(rank, numel, best, "exact", tuned_config(best, numel))
    decision = tunedcomm.explain(get_communicator(), problem(SMALL))
    assert decision.layer == "user"
    assert decision.trial_id is not None
    assert decision.latency_us == 10.0


def between_sizes(rank: int) -> None:
    """What two_shot takes at the larger size, 20 µs, is less than what the others would take here."""
    check_tuned(rank, 8192, "two_shot", "interpolated", tuned_config("two_shot", LARGE))
    check_tuned(rank, SMALL - 3, "lamport", "interpolated", tuned_config("lamport", SMALL))
    check_tuned(rank, LARGE * 8, "library", "library")


def dubious_rows(rank: int) -> None:
    """Rows of other sources, unknown variants and impossible configs are never launched, however fast they say."""
    check_tuned(rank, DUBIOUS, "two_shot", "exact")
    reasons = dict(tunedcomm.explain(get_communicator(), problem(DUBIOUS)).passed_over)
    found = " | ".join(f"{name}: {reason}" for name, reason in reasons.items())
    for text in ("source has changed", "is not in its axis", "lacks axis", "has no source here"):
        assert text in found, found


def any_strides(rank: int) -> None:
    """How one rank's tensor lies in memory is no matter of the problem: the same variant runs."""
    x, expected = inputs_of(rank, SMALL)
    wide = torch.zeros(32, 64)
    wide[:, ::2] = x.view(32, 32)
    shifted = torch.zeros(SMALL + 1)[1:].copy_(x)
    assert shifted.data_ptr() % 16 == 4
    turned = x.view(32, 32).t().contiguous().t()
    for view in (wide[:, ::2], shifted, turned, x.view(4, 1, 256), x.view(1, SMALL)):
        name, out = ran(lambda view=view: tunedcomm.all_reduce(view))
        assert name == "lamport"
        assert out.shape == view.shape
        assert out.is_contiguous()
        assert same_bits(out.view(-1), expected), view.stride()
    other = (wide[:, ::2], x.view(32, 32))[rank]  # strided on one rank only
    name, out = ran(lambda: tunedcomm.all_reduce(other))
    assert name == "lamport"
    assert same_bits(out.view(-1), expected)
    name, out = ran(lambda: tunedcomm.all_reduce(torch.tensor(rank + 1.0)))
    assert out.shape == ()
    assert out.item() == 3.0


def in_place(rank: int) -> None:
    x, expected = inputs_of(rank, MIDDLE)
    for held in (x.clone(), torch.zeros(MIDDLE + 1)[1:].copy_(x), x.clone().view(64, 64).t().contiguous().t()):
        for call in (tunedcomm.all_reduce_, lambda t: tunedcomm.all_reduce(t, out=t)):
            held.view(-1).copy_(x) if held.is_contiguous() else held.copy_(x.view(64, 64))
            name, out = ran(lambda call=call, held=held: call(held))
            assert name == "one_shot"
            assert out is held
            assert same_bits(held.reshape(-1), expected)
            assert launched[0].problem.in_place
    alias = x.clone()
    out = alias[:]
    name, _ = ran(lambda: tunedcomm.all_reduce(alias, out=out))
    assert launched[0].problem.in_place
    assert same_bits(alias, expected)


def given_out(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    kept = x.clone()
    whole = torch.full((SMALL + 8,), 7.0)
    outs = [torch.empty(SMALL), whole[1:-7], torch.empty(SMALL, 3)[:, 1], torch.empty(SMALL, requires_grad=True)]
    for out in outs:
        with torch.no_grad():
            name, got = ran(lambda out=out: tunedcomm.all_reduce(x, out=out))
        assert got is out
        assert name == "lamport"
        assert same_bits(out.detach(), expected)
        assert same_bits(x, kept)
    assert whole[0] == 7.0
    assert torch.equal(whole[-7:], torch.full((7,), 7.0))
    halves = torch.cat([x, torch.zeros(SMALL)])
    tunedcomm.all_reduce(halves[:SMALL], out=halves[SMALL:])
    assert same_bits(halves[SMALL:], expected)
    assert same_bits(halves[:SMALL], kept)


def reductions(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL, reduction="avg")
    name, out = ran(lambda: tunedcomm.all_reduce(x, op="avg"))
    assert name == "lamport"
    assert same_bits(out, expected)
    everyone = [inputs_of(r, SMALL)[0] for r in range(WORLD_SIZE)]
    for op, wanted in (("max", torch.maximum(*everyone)), ("min", torch.minimum(*everyone))):
        name, out = ran(lambda op=op: tunedcomm.all_reduce(x, op=op))
        assert name == "library"
        assert same_bits(out, wanted)


def other_dtypes(rank: int) -> None:
    for dtype in (torch.float64, torch.int32, torch.int64, torch.uint8, torch.bfloat16, torch.float16):
        x = torch.arange(SMALL).remainder(50).to(dtype) * (rank + 1)
        name, out = ran(lambda x=x: tunedcomm.all_reduce(x))
        assert name == "library", "only float32 is tuned here"
        assert out.dtype == dtype
        assert torch.equal(out, (torch.arange(SMALL).remainder(50) * 3).to(dtype))
    exact = torch.full((3,), 2.0**-40 * (rank + 1), dtype=torch.float64) + 1
    assert torch.equal(tunedcomm.all_reduce(exact), torch.full((3,), 2 + 3 * 2.0**-40, dtype=torch.float64))


def numerics_policies(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    for policy in ("ordered", "any"):
        name, out = ran(lambda policy=policy: tunedcomm.all_reduce(x, numerics=policy))
        assert name == "lamport"
        assert same_bits(out, expected)
    far, wanted = inputs_of(rank, LARGE * 3)
    name, _ = ran(lambda: tunedcomm.all_reduce(far))
    assert name == "library"
    name, out = ran(lambda: tunedcomm.all_reduce(far, numerics="ordered"))
    assert get_variant("all_reduce", name).numerics == "ordered"
    assert same_bits(out, wanted)
    name, out = ran(lambda: tunedcomm.all_reduce(torch.ones(SMALL, dtype=torch.bfloat16), numerics="ordered"))
    assert get_variant("all_reduce", name).numerics == "ordered"
    assert (out == WORLD_SIZE).all()
    for tensor, op in ((x, "max"), (torch.ones(8, dtype=torch.int64), "sum")):
        name, out = ran(lambda tensor=tensor, op=op: tunedcomm.all_reduce(tensor, op=op, numerics="ordered"))
        assert name == "in_order"
        assert torch.equal(out, tunedcomm.all_reduce(tensor, op=op))


def same_bits_on_every_rank(rank: int) -> None:
    """Also where rounding depends on the order of summation, and whatever runs."""
    for name in ("default", "library", "lamport", "one_shot", "two_shot", "two_shot_lamport"):
        for dtype in (torch.float32, torch.bfloat16):
            for op in ("sum", "avg"):
                x = inputs_of(rank, 1001, seed=3)[0].to(dtype)
                with tunedcomm.force("all_reduce", name) if name != "default" else contextlib.nullcontext():
                    out = tunedcomm.all_reduce(x, op=op)
                everyone = [torch.empty_like(out.view(torch.uint8)) for _ in range(WORLD_SIZE)]
                dist.all_gather(everyone, out.view(torch.uint8))
                assert torch.equal(everyone[0], everyone[1]), (name, dtype, op)


CASES = {
    "the tuned variant runs": the_tuned_variant_runs,
    "between tuned sizes": between_sizes,
    "dubious rows": dubious_rows,
    "any strides": any_strides,
    "in place": in_place,
    "out": given_out,
    "reductions": reductions,
    "other dtypes": other_dtypes,
    "numerics policies": numerics_policies,
    "same bits on every rank": same_bits_on_every_rank,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_on_table(CASES, rank)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_with_table(body, tmp_path_factory.mktemp("dispatch"))


@pytest.mark.parametrize("name", CASES)
def test_dispatch(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
