"""A tuning table for two ranks, with what the tests of dispatch ask about it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import Launched, Ranks, same_bits, spy_on_launches

import tunedcomm
from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import get_communicator, limits_for
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, candidates, get_op, get_variant, variants
from tunedcomm.symm.layout import LaneLayout

__all__ = [
    "DUBIOUS",
    "LARGE",
    "MIDDLE",
    "ON_TABLE",
    "SMALL",
    "TUNED",
    "WORLD_SIZE",
    "check_tuned",
    "inputs_of",
    "launched",
    "problem",
    "ran",
    "tuned_config",
    "write_database",
]


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
    plan = get_communicator().plans[problem(numel), "default", None, False]
    assert plan.decision.source == source, plan.decision
    assert plan.decision.candidate == Candidate.of("all_reduce", variant, launched[0].config)
    assert tunedcomm.explain(get_communicator(), problem(numel)) == plan.decision


def make_table(folder: Path) -> dict[str, str]:
    """Write the table where ranks find their user database."""
    write_database(folder / "tuned.db")
    return {"TEST_DB": str(folder / "tuned.db")}


ON_TABLE = Ranks(WORLD_SIZE, prepare=make_table, setup=lambda rank: spy_on_launches(launched))
