"""What runs: the tuned variant, whatever the tensor looks like; what is forced, set or pinned; else the library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, inputs_of, logged, replaced, same_bits, settings, spy_on_launches
from typer.testing import CliRunner

import tunedcomm
from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.misses import read
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.hardware import detect
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, candidates, get_variant, register_variant, variants
from tunedcomm.symm.layout import LaneLayout, limits_for

# A tuning table for two ranks.
WORLD_SIZE = 2
LIBRARY_US = 100.0
# Number of elements to the fastest variant at it; the others of TUNED are measured there too, and slower.
SMALL, MIDDLE, LARGE, DUBIOUS = 1024, 4096, 16384, 128
TUNED = {SMALL: {"lamport": 10.0}, MIDDLE: {"one_shot": 30.0, "lamport": 35.0}}
TUNED[LARGE] = {"two_shot": 20.0, "one_shot": 90.0, "lamport": 40.0}


def problem(numel: int, **changes: Any) -> Problem:
    return replace(Problem("all_reduce", (numel,), "float32", WORLD_SIZE, mode="eager"), **changes)


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


def trial(variant: str, numel: int, latency_us: float, **changes: Any) -> Trial:
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
    return Trial(**values)


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


def check_tuned(rank: int, numel: int, variant: str, source: str, config: dict[str, Any] | None = None) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, numel)
    for _ in range(2):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == variant
        assert same_bits(out, expected)
        if config is not None:
            assert launched[0].config == config
    plan = get_communicator().plans[problem(numel), "default", None, False]
    assert plan.decide_again().source == source, plan.decide_again()
    assert plan.decide_again().candidate == Candidate.of("all_reduce", variant, launched[0].config)
    assert tunedcomm.explain(get_communicator(), problem(numel)) == plan.decide_again()


def make_table(folder: Path) -> dict[str, str]:
    """Write the table where ranks find their user database."""
    write_database(folder / "tuned.db")
    return {"TEST_DB": str(folder / "tuned.db")}


REASON = "until the switch is replaced"
PINNED = 512  # elements


def command(verb: str, numel: int, *more: str, database: str) -> tuple[int, str]:
    shape = ("--shape", str(numel), "--world-size", str(WORLD_SIZE), "--dtype", "float32", "--mode", "eager")
    shown = CliRunner().invoke(main.app, [*verb.split(), "--op", "all_reduce", *shape, *more, "--db", database])
    return shown.exit_code, shown.output


def pinned_config() -> dict[str, object]:
    """Not the default, nor what wins there."""
    return dict(config_of("two_shot", PINNED))


def prepare(folder: Path) -> dict[str, str]:
    """The table with a pin, made and read by commands."""
    variables = make_table(folder)
    database, config = variables["TEST_DB"], ",".join(f"{name}={value}" for name, value in pinned_config().items())
    pin = ("--variant", "two_shot", "--config", config, "--reason", REASON)
    code, text = command("db pin", PINNED, *pin, database=database)
    assert code == 0, text
    code, text = command("explain", PINNED, database=database)
    assert code == 0
    assert REASON in text
    return variables


RANKS = Ranks(prepare=prepare, setup=lambda rank: spy_on_launches(launched))


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
    x, expected = inputs_of(rank, WORLD_SIZE, SMALL)
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
    x, expected = inputs_of(rank, WORLD_SIZE, MIDDLE)
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
    x, expected = inputs_of(rank, WORLD_SIZE, SMALL)
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
    x, expected = inputs_of(rank, WORLD_SIZE, SMALL, reduction="avg")
    name, out = ran(lambda: tunedcomm.all_reduce(x, op="avg"))
    assert name == "lamport"
    assert same_bits(out, expected)
    everyone = [inputs_of(r, WORLD_SIZE, SMALL)[0] for r in range(WORLD_SIZE)]
    for op, wanted in (("max", torch.maximum(*everyone)), ("min", torch.minimum(*everyone))):
        name, out = ran(lambda op=op: tunedcomm.all_reduce(x, op=op))
        assert name == "library"
        assert same_bits(out, wanted)


def test_other_dtypes(rank: int) -> None:
    exact = torch.full((3,), 2.0**-40 * (rank + 1), dtype=torch.float64) + 1
    assert torch.equal(tunedcomm.all_reduce(exact), torch.full((3,), 2 + 3 * 2.0**-40, dtype=torch.float64))
    for dtype in (torch.float64, torch.int32, torch.bfloat16):
        name, out = ran(lambda dtype=dtype: tunedcomm.all_reduce(torch.ones(SMALL, dtype=dtype)))
        assert name == "library", "only float32 is tuned here"
        assert torch.equal(out, torch.full((SMALL,), 2, dtype=dtype))


def test_numerics_policies(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, SMALL)
    for policy in ("ordered", "any"):
        name, out = ran(lambda policy=policy: tunedcomm.all_reduce(x, numerics=policy))
        assert name == "lamport"
        assert same_bits(out, expected)
    far, wanted = inputs_of(rank, WORLD_SIZE, LARGE * 3)
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
                x = inputs_of(rank, WORLD_SIZE, 1001)[0].to(dtype)
                with tunedcomm.force("all_reduce", name) if name != "default" else contextlib.nullcontext():
                    out = tunedcomm.all_reduce(x, op=op)
                everyone = [torch.empty_like(out.view(torch.uint8)) for _ in range(WORLD_SIZE)]
                dist.all_gather(everyone, out.view(torch.uint8))
                assert torch.equal(everyone[0], everyone[1]), (name, dtype, op)


# Overridden


def test_forced_variant_runs(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, SMALL)
    chosen = {"num_blocks": 2, "num_warps": 2, "items": 2}

    def name_of() -> str:
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "library" or same_bits(out, expected)
        return name

    assert name_of() == "lamport"
    again = tunedcomm.force("all_reduce", "one_shot")
    for _ in range(2):
        with again:
            assert name_of() == "one_shot"
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
    few = {"num_blocks": 4, "num_warps": 16, "items": 2}
    # Known, but not for this problem, on this machine, or in this space's point.
    for variant, config, tensor, op, text in (
        ("multimem_one_shot", None, x, "sum", "multimem_one_shot.* is forced for .*multicast"),
        ("lamport", None, x, "max", "max goes to the library"),
        ("lamport", None, x.double(), "sum", "float64 goes to the library"),
        ("lamport", None, torch.ones(1 << 20), "sum", "exceed a stage"),
        ("one_shot", few, x, "sum", "without work"),
    ):
        with tunedcomm.force("all_reduce", variant, config):
            with pytest.raises(tunedcomm.InfeasibleError, match=text):
                tunedcomm.all_reduce(tensor, op=op)
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
        x, _ = inputs_of(rank, WORLD_SIZE, SMALL)
        with logged() as warnings:
            name, _ = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "library"
        assert len(warnings) == 1
        assert "do not fit on 1 SM" in warnings[0]
        plan = communicator.plans[Problem("all_reduce", (SMALL,), "float32", 2, mode="eager"), "default", None, False]
        assert plan.decide_again().candidate.variant == "library"
        assert "do not fit on 1 SM" in plan.decide_again().why
        assert "do not fit on 1 SM" in tunedcomm.explain(communicator, plan.problem).why
        for policy, context in (("ordered", None), ("default", "lamport")):
            with pytest.raises(tunedcomm.InfeasibleError, match="do not fit on 1 SM"):
                with tunedcomm.force("all_reduce", context) if context else contextlib.nullcontext():
                    tunedcomm.all_reduce(x, numerics=policy)
    finally:
        register_variant(real)
        tunedcomm.release_communicators()
    check_tuned(rank, SMALL, "lamport", "exact")


def test_a_grid_that_does_not_fit_gives_way_to_a_smaller_one(rank: int) -> None:
    """Where the policy does not admit the library."""
    real = get_variant("all_reduce", "lamport")
    assert int(tuned_config(real.name, MIDDLE)["num_blocks"]) > 1

    def bind(problem: Problem, config: Any, workspace: Any) -> Any:
        if config["num_blocks"] > 1:
            raise tunedcomm.InfeasibleError("its blocks do not fit on 2 SMs")
        return real.bind(problem, config, workspace)

    register_variant(dataclasses.replace(real, bind=bind))
    communicator = get_communicator()
    communicator.forget_plans()
    communicator.limits = dataclasses.replace(communicator.limits, num_sms=2)
    rows = [row for row in communicator.snapshot.rows if row.candidate.variant == real.name]
    communicator.snapshot = Snapshot(environment=communicator.environment, world_size=WORLD_SIZE, rows=tuple(rows))
    try:
        x, expected = inputs_of(rank, WORLD_SIZE, MIDDLE)
        with logged() as warnings:
            name, out = ran(lambda: tunedcomm.all_reduce(x, numerics="ordered"))
        assert name != "library"
        assert same_bits(out, expected)
        assert "do not fit on 2 SMs" in str(warnings)
    finally:
        register_variant(real)
        tunedcomm.release_communicators()
    check_tuned(rank, SMALL, "lamport", "exact")


def test_few_sms(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, MIDDLE)
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
    x, _ = inputs_of(rank, WORLD_SIZE, SMALL)
    with settings({"TUNEDCOMM_MODE": "off"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
        assert "by TUNEDCOMM_MODE=off" in str(tunedcomm.explain("all_reduce", x))
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
            assert "by tunedcomm.force()" in str(tunedcomm.explain("all_reduce", x))
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"


def test_mode_force(rank: int) -> None:
    x, _ = inputs_of(rank, WORLD_SIZE, SMALL)
    with settings({"TUNEDCOMM_MODE": "force"}):
        assert ran(lambda: tunedcomm.all_reduce(x))[0] == "lamport"
        for call, options in (
            (lambda: tunedcomm.all_reduce(x.bfloat16()), "--dtype bfloat16 --mode eager"),
            (lambda: tunedcomm.all_reduce_(x.half(), op="avg"), "--reduction avg --in-place yes"),
        ):
            with pytest.raises(tunedcomm.InfeasibleError, match="TUNEDCOMM_MODE=force, but no database") as caught:
                call()
            words = str(caught.value).split("`")[1]
            assert words.startswith("tunedcomm tune --op all_reduce --shape 1024 --world-size 2")
            assert options in words
            planned = CliRunner().invoke(main.app, [*words.split()[1:], "--dry-run"])
            assert planned.exit_code == 0, planned.output
        for untuned in (lambda: tunedcomm.all_reduce(x.double()), lambda: tunedcomm.all_reduce(x, op="max")):
            with pytest.raises(tunedcomm.InfeasibleError, match="cannot be tuned"):
                untuned()
        with tunedcomm.force("all_reduce", "library"):
            assert ran(lambda: tunedcomm.all_reduce(x.bfloat16()))[0] == "library"


def test_forced_by_setting(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, SMALL)
    with settings({"TUNEDCOMM_FORCE_ALL_REDUCE": "two_shot_lamport"}):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "two_shot_lamport"
        assert same_bits(out, expected)
        assert "by TUNEDCOMM_FORCE_ALL_REDUCE" in str(tunedcomm.explain("all_reduce", x))
        with tunedcomm.force("all_reduce", "one_shot"):
            assert ran(lambda: tunedcomm.all_reduce(x))[0] == "one_shot"
        with pytest.raises(tunedcomm.InfeasibleError, match="max goes to the library"):
            tunedcomm.all_reduce(x, op="max")
    with settings({"TUNEDCOMM_FORCE_ALL_REDUCE": "lamprt"}):
        with pytest.raises(tunedcomm.UnknownNameError, match=r"TUNEDCOMM_FORCE_ALL_REDUCE='lamprt': .*'lamport'"):
            tunedcomm.all_reduce(x)


# Pinned


def test_pinned_variant_runs(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, PINNED)
    for _ in range(3):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "two_shot"
        assert launched[0].config == pinned_config()
        assert same_bits(out, expected)
    decision = tunedcomm.explain(get_communicator(), problem(PINNED))
    assert (decision.source, decision.candidate.variant, decision.layer) == ("pin", "two_shot", "user")
    assert REASON in decision.why


def test_measurements_decide_again_once_it_is_unpinned(rank: int) -> None:
    x, expected = inputs_of(rank, WORLD_SIZE, PINNED)
    if rank == 0:
        code, text = command("db unpin", PINNED, database=os.environ["TEST_DB"])
        assert code == 0, text
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "two_shot", "a group keeps to what it agreed on"
    dist.barrier()
    with settings({}):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "lamport"
        assert same_bits(out, expected)


def counts_its_calls(numel: int, group: Any = None) -> bool:
    plan = get_communicator(group).plans[problem(numel), "default", None, False]
    return "count_and_launch" in getattr(plan.launch, "by_address", plan.launch).__qualname__


def test_launches_are_in_nvtx_ranges_on_the_ranks_that_ask_for_it(rank: int) -> None:
    events: list[str] = []
    calls = [lambda: tunedcomm.all_reduce(torch.ones(SMALL)), lambda: tunedcomm.all_reduce(torch.ones(SMALL).long())]
    with (
        replaced(torch.backends.cuda, "is_built", lambda: True),
        replaced(torch.cuda.nvtx, "range_push", events.append),
        replaced(torch.cuda.nvtx, "range_pop", lambda: events.append("pop")),
    ):
        with settings({"TUNEDCOMM_NVTX": "1" if rank == 0 else None}):
            for call in calls * 2:
                call()
        marked, again = events[:], [call() for call in calls]
    assert again[0][0] == WORLD_SIZE
    assert events == marked
    assert len(marked) == (8 if rank == 0 else 0)
    assert marked[1::2] == ["pop"] * (len(marked) // 2)
    assert all("all_reduce" in name for name in marked[::2])
    assert all("lamport" in name for name in marked[::4])
    assert all("library" in name for name in marked[2::4])


def test_what_was_not_tuned_is_counted_on_rank_0(rank: int) -> None:
    """Of every group, a line a problem and communicator; what was tuned knows nothing of it."""
    log, between = Path(os.environ["TEST_FOLDER"], "misses.jsonl"), 8192
    with settings({"TUNEDCOMM_MISS_LOG": str(log)}):
        for numel in (SMALL, MIDDLE, LARGE):
            tunedcomm.all_reduce(inputs_of(rank, WORLD_SIZE, numel)[0])
            assert not counts_its_calls(numel)
        x, expected = inputs_of(rank, WORLD_SIZE, between)
        for group in (None, dist.new_group([0, 1])):
            for _ in range(4):
                assert same_bits(ran(lambda group=group: tunedcomm.all_reduce(x, group=group))[1], expected)
            assert counts_its_calls(between, group) == (rank == 0)
        strided = torch.ones(2 * SMALL, dtype=torch.bfloat16)[::2]  # through the slow path, each time
        for _ in range(5):
            assert torch.equal(tunedcomm.all_reduce(strided), torch.full((SMALL,), 2.0, dtype=torch.bfloat16))
        tunedcomm.all_reduce(torch.ones(SMALL, dtype=torch.int64))  # no kernel could run: left to the log's readers
        with tunedcomm.force("all_reduce", "one_shot"):
            tunedcomm.all_reduce(torch.ones(3 * SMALL))
    dist.barrier()
    misses, skipped = read(log)
    untuned, hopeless = problem(SMALL, dtype="bfloat16"), problem(SMALL, dtype="int64")
    assert [(m.problem, m.count, m.source) for m in misses] == [
        (problem(between), 8, "interpolated"),
        (untuned, 5, "library"),
        (hopeless, 1, "library"),
    ]
    assert skipped == 0
    assert {m.hard_key for m in misses} == {detect().hard_key}
