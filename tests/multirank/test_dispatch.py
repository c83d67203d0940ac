"""What runs: the tuned variant, whatever the tensor looks like; what is forced, set or pinned; else the library."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import logged, same_bits, settings
from dispatch_table import (
    DUBIOUS,
    LARGE,
    MIDDLE,
    ON_TABLE,
    SMALL,
    TUNED,
    WORLD_SIZE,
    check_tuned,
    config_of,
    inputs_of,
    launched,
    make_table,
    problem,
    ran,
    tuned_config,
)
from typer.testing import CliRunner

import tunedcomm
from tunedcomm.cli import main
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import Problem, get_variant, register_variant

REASON = "until the switch is replaced"
PINNED, TO_LIBRARY = 512, 640  # elements


def command(verb: str, numel: int, *more: str, database: str) -> tuple[int, str]:
    shape = ("--shape", str(numel), "--world-size", str(WORLD_SIZE), "--dtype", "float32", "--mode", "eager")
    shown = CliRunner().invoke(main.app, [*verb.split(), "--op", "all_reduce", *shape, *more, "--db", database])
    return shown.exit_code, shown.output


def pinned_config() -> dict[str, object]:
    """Not the default, nor what wins there."""
    return dict(config_of("two_shot", PINNED))


def prepare(folder: Path) -> dict[str, str]:
    """The table with two pins, made and read by commands."""
    variables = make_table(folder)
    database, config = variables["TEST_DB"], ",".join(f"{name}={value}" for name, value in pinned_config().items())
    for numel, pin in ((PINNED, ("two_shot", "--config", config)), (TO_LIBRARY, ("library",))):
        code, text = command("db pin", numel, "--variant", *pin, "--reason", REASON, database=database)
        assert code == 0, text
    code, text = command("explain", PINNED, database=database)
    assert code == 0
    assert REASON in text
    return variables


RANKS = dataclasses.replace(ON_TABLE, prepare=prepare)


def test_the_tuned_variant_runs(rank: int) -> None:
    for numel, entries in TUNED.items():
        best = min(entries, key=entries.__getitem__)
        check_tuned(rank, numel, best, "exact", tuned_config(best, numel))
    decision = tunedcomm.explain(get_communicator(), problem(SMALL))
    assert decision.layer == "user"
    assert decision.trial_id is not None
    assert decision.latency_us == 10.0


def test_between_sizes(rank: int) -> None:
    """What two_shot takes at the larger size, 20 µs, is less than what the others would take here."""
    check_tuned(rank, 8192, "two_shot", "interpolated", tuned_config("two_shot", LARGE))
    check_tuned(rank, SMALL - 3, "lamport", "interpolated", tuned_config("lamport", SMALL))
    check_tuned(rank, LARGE * 8, "library", "library")


def test_dubious_rows(rank: int) -> None:
    """Rows of other sources, unknown variants and impossible configs are never launched, however fast they say."""
    check_tuned(rank, DUBIOUS, "two_shot", "exact")
    reasons = dict(tunedcomm.explain(get_communicator(), problem(DUBIOUS)).passed_over)
    found = " | ".join(f"{name}: {reason}" for name, reason in reasons.items())
    for text in ("source has changed", "is not in its axis", "lacks axis", "has no source here"):
        assert text in found, found


def test_any_strides(rank: int) -> None:
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


def test_in_place(rank: int) -> None:
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


def test_given_out(rank: int) -> None:
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


def test_reductions(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL, reduction="avg")
    name, out = ran(lambda: tunedcomm.all_reduce(x, op="avg"))
    assert name == "lamport"
    assert same_bits(out, expected)
    everyone = [inputs_of(r, SMALL)[0] for r in range(WORLD_SIZE)]
    for op, wanted in (("max", torch.maximum(*everyone)), ("min", torch.minimum(*everyone))):
        name, out = ran(lambda op=op: tunedcomm.all_reduce(x, op=op))
        assert name == "library"
        assert same_bits(out, wanted)


def test_other_dtypes(rank: int) -> None:
    for dtype in (torch.float64, torch.int32, torch.int64, torch.uint8, torch.bfloat16, torch.float16):
        x = torch.arange(SMALL).remainder(50).to(dtype) * (rank + 1)
        name, out = ran(lambda x=x: tunedcomm.all_reduce(x))
        assert name == "library", "only float32 is tuned here"
        assert out.dtype == dtype
        assert torch.equal(out, (torch.arange(SMALL).remainder(50) * 3).to(dtype))
    exact = torch.full((3,), 2.0**-40 * (rank + 1), dtype=torch.float64) + 1
    assert torch.equal(tunedcomm.all_reduce(exact), torch.full((3,), 2 + 3 * 2.0**-40, dtype=torch.float64))


def test_numerics_policies(rank: int) -> None:
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


def test_same_bits_on_every_rank(rank: int) -> None:
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


# Overridden


def test_forced_variant_runs(rank: int) -> None:
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


def test_forced_in_vain(rank: int) -> None:
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


def test_a_plan_that_cannot_be_bound(rank: int) -> None:
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
        plan = communicator.plans[Problem("all_reduce", (SMALL,), "float32", 2, mode="eager"), "default", None, False]
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


def test_few_sms(rank: int) -> None:
    x, expected = inputs_of(rank, MIDDLE)
    blocks = {name: int(tuned_config(name, MIDDLE)["num_blocks"]) for name in TUNED[MIDDLE]}
    most = max(blocks.values())
    for _ in range(2):  # the second time from the cache, in turn with calls of other limits
        for limit in (None, 512, most, 1, 0):
            name, out = ran(lambda limit=limit: tunedcomm.all_reduce(x, max_sms=limit))  # type: ignore[misc]
            fitting = [v for v in blocks if limit is None or blocks[v] <= limit]
            assert (name in fitting) if fitting else name == "library"
            assert name == "library" or same_bits(out, expected)
    assert "max_sms=0" in str(tunedcomm.explain(get_communicator(), problem(MIDDLE), max_sms=0).passed_over)


def test_mode_off(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_MODE": "off"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"


def test_mode_force(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    with settings({"TUNEDCOMM_MODE": "force"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"
        with pytest.raises(
            tunedcomm.InfeasibleError,
            match=r"TUNEDCOMM_MODE=force, but no database .*tunedcomm tune --op all_reduce --shape 1024",
        ):
            tunedcomm.all_reduce(x.bfloat16())
        asked = dataclasses.replace(problem(SMALL), dtype="bfloat16")
        said = "with TUNEDCOMM_MODE=force a call raises InfeasibleError"
        assert tunedcomm.explain(get_communicator(), asked).why.endswith(said)
        assert said not in tunedcomm.explain(get_communicator(), problem(SMALL)).why
        with tunedcomm.force("all_reduce", "library"):
            assert ran(lambda: tunedcomm.all_reduce(x.bfloat16()))[0] == "library"


def test_forced_by_setting(rank: int) -> None:
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


# Pinned


def test_pinned_variant_runs(rank: int) -> None:
    x, expected = inputs_of(rank, PINNED)
    for _ in range(3):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "two_shot"
        assert launched[0].config == pinned_config()
        assert same_bits(out, expected)
    decision = tunedcomm.explain(get_communicator(), problem(PINNED))
    assert (decision.source, decision.candidate.variant, decision.layer) == ("pin", "two_shot", "user")
    assert REASON in decision.why


def test_library_can_be_pinned(rank: int) -> None:
    x, _ = inputs_of(rank, TO_LIBRARY)
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
    assert tunedcomm.explain(get_communicator(), problem(TO_LIBRARY)).source == "pin"


def test_other_problems_are_left_alone(rank: int) -> None:
    x, _ = inputs_of(rank, PINNED)
    in_place = problem(PINNED, in_place=True)
    assert tunedcomm.explain(get_communicator(), in_place).source == "interpolated"
    assert ran(lambda: tunedcomm.all_reduce_(x))[0] == "lamport"


def test_measurements_decide_again_once_it_is_unpinned(rank: int) -> None:
    x, expected = inputs_of(rank, PINNED)
    if rank == 0:
        code, text = command("db unpin", PINNED, database=os.environ["TEST_DB"])
        assert code == 0, text
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "two_shot", "a group keeps to what it agreed on"
    dist.barrier()
    with settings({}):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "lamport"
        assert same_bits(out, expected)


def test_missing_pin_is_exit_code_1(tmp_path: Path) -> None:
    code, text = command("db unpin", PINNED, database=make_table(tmp_path)["TEST_DB"])
    assert code == 1
    assert "no pin" in text
