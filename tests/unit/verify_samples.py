"""Recorded winners, and a machine that answers as recorded but for what is planted, to verify them against."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay import recorded as recorded_sweep
from replay import stand_in, write_recording
from spec_samples import spec_with

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.kernels import source_hash_of
from tunedcomm.spec import Candidate, Problem
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.machine import backend_settings
from tunedcomm.tuner.verify import VerifyOutcome, VerifySpec, Winner, stored_winners, verify

# Three neighbours, then two more; all have several finals.
SIZES = (16384, 32768, 65536, 8388608, 33554432)
Change = Callable[[Trial], Trial]


def problem_of(numel: int) -> Problem:
    return Problem("all_reduce", (numel,), "bfloat16", 4)


@functools.cache
def recorded() -> tuple[Trial, ...]:
    """As if the kernels of today had been measured."""
    wanted = {problem_of(numel) for numel in SIZES}
    found = [r for r in recorded_sweep() if r.problem in wanted]
    return tuple(replace(r, source_hash=source_hash_of("all_reduce", r.variant) or "") for r in found)


def here() -> Environment:
    return recorded()[0].environment


def known(path: Path, **selected: Any) -> dict[Problem, tuple[Winner, ...]]:
    snapshot = load_snapshot(here(), 4, layers=[Layer("user", str(path))], strict=True)
    return stored_winners(snapshot, limits_for(here(), 4), source_hash_of, **selected)


@functools.cache
def tuned() -> tuple[bytes, dict[int, Candidate]]:
    """A database of what was recorded, and the winner of every size in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.db"
        with Database.open(path, create=True) as database:
            database.record(recorded())
        winners = {problem.shape[0]: won[0].candidate for problem, won in known(path).items()}
        return path.read_bytes(), winners


def tuned_copy(folder: Path) -> Path:
    copy = folder / "tuned.db"
    copy.write_bytes(tuned()[0])
    return copy


def run(
    path: Path, tmp_path: Path, changes: Mapping[tuple[int, Candidate], Change] | None = None, **options: Any
) -> VerifyOutcome:
    """Verify against a machine that answers as recorded but for `changes`; `store=False` keeps nothing.

    `extra` are all answers for their variants.
    """
    planted = changes or {}
    extra: list[Trial] = options.pop("extra", [])
    kept = [r for r in recorded() if r.variant not in {e.variant for e in extra}]
    answers = [planted.get((r.problem.shape[0], r.candidate), lambda record: record)(r) for r in kept] + extra
    recording = tmp_path / "machine.jsonl"
    environment = options.pop("environment", here())
    write_recording(recording, [replace(r, environment=environment) for r in answers])
    values: dict[str, Any] = {"layers": (Layer("user", str(path)),), "command": "pytest"}
    values["stand_in"] = stand_in(recording, options.pop("replay_trial_s", 0.0))
    store, progress = options.pop("store", True), options.pop("progress", None)
    spec = spec_with(VerifySpec, backend_settings("cuda", 4), **{**values, **options})
    if not store:
        return verify(spec, None, progress)
    with Database.open(path) as database:
        return verify(spec, database, progress)


def at_ratio(ratio: float) -> Change:
    """So long against the library, whatever it was."""
    return lambda record: replace(record, **all_of((record.baseline_p50_us or 0.0) * ratio))


def all_of(us: float | None) -> dict[str, Any]:
    """Measured without a spread."""
    return dict.fromkeys(("latency_p10_us", "latency_p50_us", "latency_p90_us"), us)


def at(candidate: Candidate, size: int) -> dict[str, Any]:
    """Fields of a trial of `candidate` that nothing beats."""
    return {
        "problem": problem_of(size),
        "variant": candidate.variant,
        "config": candidate.config_dict,
        "numerics": "ordered",
        "source_hash": source_hash_of("all_reduce", candidate.variant),
        "reason": "",
        **all_of(1.0),
        "samples": 20,
        "baseline_p50_us": 20.0,
    }
