"""What runs: the tuned variant with its config, whatever the tensor looks like; else the library, or an error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, logged, report, run_cases, same_bits, settings, spy_on_launches
from harness import run_ranks

import tunedcomm
from tunedcomm import kernels
from tunedcomm.communicator import get_communicator, limits_for
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.select import Snapshot
from tunedcomm.db.store import Database
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, candidates, get_op, get_variant, register_variant, variants
from tunedcomm.symm.layout import LaneLayout

WORLD_SIZE = 2
LIBRARY_US = 100.0
# Number of elements to the fastest variant at it; the others of TUNED are measured there too, and slower.
SMALL, MIDDLE, LARGE, DUBIOUS = 1024, 4096, 16384, 128
TUNED = {SMALL: {"lamport": 10.0}, MIDDLE: {"one_shot": 30.0, "lamport": 35.0}}
TUNED[LARGE] = {"two_shot": 20.0, "one_shot": 90.0, "lamport": 40.0}


def problem(numel: int, **changes: Any) -> Problem:
    return Problem("all_reduce", (numel,), "float32", WORLD_SIZE, mode="eager", **changes)


@functools.cache
def config_of(variant: str, *sizes: int) -> dict[str, Any]:
    """A config that is not the default and that all the sizes allow."""
    kernels.discover()
    limits = limits_for(detect(), WORLD_SIZE, layout=LaneLayout.for_messages(1 << 20))
    found = [{c for c in candidates(problem(n), limits) if c.variant == variant} for n in sizes]
    default = get_variant("all_reduce", variant).default(problem(sizes[0]), limits)
    usable = sorted(set.intersection(*found) - {Candidate.of("all_reduce", variant, default)}, key=str)
    return usable[0].config_dict


def tuned_config(variant: str, numel: int) -> dict[str, Any]:
    alone = (variant, numel) in (("lamport", SMALL), ("two_shot", LARGE))
    return config_of(variant, numel) if alone else config_of(variant, MIDDLE, LARGE)


def trial(variant: str, numel: int, latency_us: float, **changes: Any) -> TrialRecord:
    kernels.discover()
    known = variants("all_reduce").get(variant)
    values: dict[str, Any] = {
        "problem": problem(numel),
        "environment": detect(),
        "variant": variant,
        "numerics": "ordered" if known is None else known.numerics,
        "source_hash": "none" if known is None else kernels.source_hash(known),
        "config": {},
        "status": "ok",
        "latency_p50_us": latency_us,
        "baseline_p50_us": LIBRARY_US,
        "final": True,
        **changes,
    }
    return TrialRecord(**values)


def write_database(path: Path) -> None:
    trials = [trial("library", numel, LIBRARY_US) for numel in (*TUNED, DUBIOUS)]
    for numel, entries in TUNED.items():
        trials += [trial(v, numel, us, config=tuned_config(v, numel)) for v, us in entries.items()]
    lamport = config_of("lamport", DUBIOUS)
    trials += [
        trial("lamport", DUBIOUS, 1.0, config=lamport, source_hash="0" * 16),
        trial("one_shot", DUBIOUS, 2.0, config={"num_blocks": 10**6, "num_warps": 4, "items": 1}),
        trial("one_shot", DUBIOUS, 3.0, config={"num_blocks": 1}),
        trial("warp_drive", DUBIOUS, 4.0),
        trial("two_shot", DUBIOUS, 50.0, config=config_of("two_shot", DUBIOUS)),
    ]
    with Database.open(path, create=True) as database:
        database.record(trials)


launched: list[Launched] = []


def ran(call: Callable[[], torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Name of the one variant that a call launched, and what it returned."""
    launched.clear()
    out = call()
    assert len(launched) == 1, launched
    return launched[0].variant, out


def inputs_of(rank: int, numel: int, seed: int = 0, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input and the bits that ordered variants give."""
    asked = problem(numel, **changes)
    op = get_op("all_reduce")
    everyone = [op.make_inputs(asked, r, seed, "random", "cpu") for r in range(WORLD_SIZE)]
    (expected,) = op.ordered_reference(asked, everyone, rank)
    return everyone[rank][0], expected


def check_tuned(rank: int, numel: int, variant: str, source: str, config: dict[str, Any] | None = None) -> None:
    x, expected = inputs_of(rank, numel)
    for _ in range(2):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == variant
        assert same_bits(out, expected)
        if config is not None:
            assert launched[0].config == config
    plan = get_communicator().plans[numel, torch.float32, "sum", False, "default", False, False]
    assert plan.decision.source == source, plan.decision
    assert plan.decision.candidate == Candidate.of("all_reduce", variant, launched[0].config)
    assert tunedcomm.explain(get_communicator(), problem(numel)) == plan.decision


def the_tuned_variant_runs(rank: int) -> None:
    for numel, entries in TUNED.items():
        best = min(entries, key=entries.__getitem__)
        check_tuned(rank, numel, best, "exact", tuned_config(best, numel))
    decision = tunedcomm.explain(get_communicator(), problem(SMALL))
    assert decision.layer == "user"
    assert decision.trial_id is not None
    assert decision.latency_us == 10.0


def between_sizes(rank: int) -> None:
    """one_shot would take 52 µs there, lamport 37."""
    check_tuned(rank, 8192, "lamport", "interpolated", tuned_config("lamport", MIDDLE))
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
    untuned = torch.ones(SMALL, dtype=torch.bfloat16)
    for tensor, op in ((untuned, "sum"), (x, "max"), (torch.ones(8, dtype=torch.int64), "sum")):
        launched.clear()
        with pytest.raises(tunedcomm.InfeasibleError, match=r"tunedcomm tune.*numerics='default'"):
            tunedcomm.all_reduce(tensor, op=op, numerics="ordered")
        assert launched == []
    with pytest.raises(tunedcomm.InfeasibleError, match=r"policy 'ordered' admits no candidate"):
        tunedcomm.explain(get_communicator(), Problem("all_reduce", (8,), "bfloat16", 2), policy="ordered")


def forced(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    chosen = {"num_blocks": 2, "num_warps": 2, "items": 2}

    def name_of() -> str:
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "library" or same_bits(out, expected)
        return name

    assert name_of() == "lamport"
    with tunedcomm.force("all_reduce", "two_shot"):
        assert name_of() == "two_shot"
        assert tunedcomm.explain(get_communicator(), problem(SMALL)).source == "forced"
        with tunedcomm.force("all_reduce", "one_shot", chosen):
            assert name_of() == "one_shot"
            assert launched[0].config == chosen
            chosen["num_blocks"] = 1  # the caller's dict is the caller's
            assert name_of() == "one_shot"
            with tunedcomm.force("all_reduce", "library"):
                assert name_of() == "library"
            with pytest.raises(ZeroDivisionError), tunedcomm.force("all_reduce", "library"):
                raise ZeroDivisionError
            assert name_of() == "one_shot"
        assert name_of() == "two_shot"
    assert name_of() == "lamport"


def forced_in_vain(rank: int) -> None:
    x = torch.ones(SMALL)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (("all_reduce", "lamprt"), tunedcomm.UnknownNameError, "no variant 'lamprt'; did you mean 'lamport'"),
        (("all_reduse", "lamport"), tunedcomm.UnknownNameError, "unknown op 'all_reduse'; did you mean 'all_reduce'"),
        (("all_reduce", "lamport", {"num_blocks": 3}), tunedcomm.ConfigError, "num_blocks=3 is not in its axis"),
        (("all_reduce", "library", {"num_blocks": 1}), tunedcomm.ConfigError, "unknown axis 'num_blocks'"),
    ]
    for arguments, error, text in wrong:
        with pytest.raises(error, match=text), tunedcomm.force(*arguments):
            raise AssertionError("the block must not be entered")
    # Known, but not for this problem, on this machine, or in this space's point.
    with tunedcomm.force("all_reduce", "torch_one_shot"):
        with pytest.raises(tunedcomm.InfeasibleError, match=r"torch_one_shot.* is forced for .*need GPUs"):
            tunedcomm.all_reduce(x)
    with tunedcomm.force("all_reduce", "multimem_one_shot"):
        with pytest.raises(tunedcomm.InfeasibleError, match=r"multimem_one_shot.* is forced for .*multicast"):
            tunedcomm.all_reduce(x)
    with tunedcomm.force("all_reduce", "lamport"):
        with pytest.raises(tunedcomm.InfeasibleError, match="max goes to the library"):
            tunedcomm.all_reduce(x, op="max")
        with pytest.raises(tunedcomm.InfeasibleError, match="float64 goes to the library"):
            tunedcomm.all_reduce(x.double())
        with pytest.raises(tunedcomm.InfeasibleError, match="exceed a stage"):
            tunedcomm.all_reduce(torch.ones(1 << 20))
    with tunedcomm.force("all_reduce", "one_shot", {"num_blocks": 4, "num_warps": 16, "items": 2}):
        with pytest.raises(tunedcomm.InfeasibleError, match="without work"):
            tunedcomm.all_reduce(x)
    check_tuned(rank, SMALL, "lamport", "exact")


def a_plan_that_cannot_be_bound(rank: int) -> None:
    """What only turns out when the kernel is loaded: the library instead, if the policy allows it."""
    real = get_variant("all_reduce", "lamport")

    def too_large(problem: Problem, config: Any, workspace: Any) -> Any:
        raise tunedcomm.InfeasibleError("4 blocks do not fit on 1 SM")

    register_variant(dataclasses.replace(real, bind=too_large))
    communicator = get_communicator()
    communicator.forget_plans()
    try:
        x, _ = inputs_of(rank, SMALL)
        with logged() as warnings:
            name, _ = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "library"
        assert len(warnings) == 1
        assert "do not fit on 1 SM" in warnings[0]
        plan = communicator.plans[SMALL, torch.float32, "sum", False, "default", False, False]
        assert plan.decision.candidate.variant == "library"
        assert "do not fit on 1 SM" in plan.decision.why
        for policy, context in (("ordered", None), ("default", "lamport")):
            with pytest.raises(tunedcomm.InfeasibleError, match="do not fit on 1 SM"):
                with tunedcomm.force("all_reduce", context) if context else contextlib.nullcontext():
                    tunedcomm.all_reduce(x, numerics=policy)
    finally:
        register_variant(real)
        tunedcomm.release_communicators()
    check_tuned(rank, SMALL, "lamport", "exact")


def mode_off(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_MODE": "off"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"


def mode_force(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_MODE": "force"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"
        with pytest.raises(
            tunedcomm.InfeasibleError,
            match=r"TUNEDCOMM_MODE=force, but no database .*tunedcomm tune --op all_reduce --shape 1024",
        ):
            tunedcomm.all_reduce(x.bfloat16())
        with tunedcomm.force("all_reduce", "library"):
            assert ran(lambda: tunedcomm.all_reduce(x.bfloat16()))[0] == "library"


def forced_by_setting(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_FORCE_ALL_REDUCE": "two_shot_lamport"}):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "two_shot_lamport"
        assert same_bits(out, expected)
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
        with pytest.raises(tunedcomm.InfeasibleError, match="max goes to the library"):
            tunedcomm.all_reduce(x, op="max")
    with settings({"TUNEDCOMM_FORCE_ALL_REDUCE": "lamprt"}):
        with pytest.raises(tunedcomm.UnknownNameError, match=r"TUNEDCOMM_FORCE_ALL_REDUCE='lamprt': .*'lamport'"):
            tunedcomm.all_reduce(x)


def replaced_snapshot(rank: int) -> None:
    communicator = get_communicator()
    tuned = communicator.snapshot
    empty = Snapshot(environment=communicator.environment, world_size=WORLD_SIZE)
    communicator.replace_snapshot(empty)
    x, _ = inputs_of(rank, SMALL)
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
    with pytest.raises(tunedcomm.AgreementError, match="differ in snapshot: digest is"):
        communicator.replace_snapshot((empty, tuned)[rank])
    assert communicator.snapshot is empty, "refused on every rank"
    communicator.replace_snapshot(tuned)
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"


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
    "force": forced,
    "force in vain": forced_in_vain,
    "a plan that cannot be bound": a_plan_that_cannot_be_bound,
    "TUNEDCOMM_MODE=off": mode_off,
    "TUNEDCOMM_MODE=force": mode_force,
    "TUNEDCOMM_FORCE_ALL_REDUCE": forced_by_setting,
    "replace_snapshot": replaced_snapshot,
    "same bits on every rank": same_bits_on_every_rank,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    spy_on_launches(launched)
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    database = tmp_path_factory.mktemp("dispatch") / "tuned.db"
    write_database(database)
    return run_ranks(WORLD_SIZE, body, env={"TEST_DB": str(database)}, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_dispatch(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
