"""The shipped databases: current, complete, and dispatched from on the machines that they were made for."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Limits, Mode, Problem, get_op, get_variant

SHIPPED = packaged_databases()


def test_both_world_sizes_are_shipped() -> None:
    assert [path.name for path in SHIPPED] == ["h200-nvswitch18-x2.db", "h200-nvswitch18-x4.db"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_no_row_is_retired_by_a_changed_kernel(path: Path) -> None:
    kernels.discover()
    with Database.open(path, readonly=True, immutable=True) as database:
        for trial in database.trials(final=True):
            variant = get_variant(trial.problem.op, trial.variant)
            assert trial.source_hash == kernels.source_hash(variant), (
                f"the kernels of {trial.variant} changed since {path.name} was made: tune and export it anew"
            )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_an_export_decides_the_same(path: Path, tmp_path: Path) -> None:
    export = export_database([path], tmp_path / "out.db")
    with Database.open(path, immutable=True) as database:
        (environment,) = database.environments()
    for world_size in (2, 4):
        digests = {
            load_snapshot(environment, world_size, layers=[Layer("packaged", str(file))], strict=True).digest
            for file in (path, tmp_path / "out.db")
        }
        assert len(digests) == 1
    assert export.left_out == 0, "a shipped file is what an export makes of it"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_size_of_the_sweep_is_answered(path: Path, mode: Mode, dtype: str) -> None:
    """By a final of its own."""
    world_size = 4 if "x4" in path.name else 2
    for shape in get_op("all_reduce").default_shapes("cuda", 2):
        assert_won(path, Problem("all_reduce", shape, dtype, world_size, mode=mode))


def assert_won(path: Path, problem: Problem) -> None:
    """By a final of this very problem, which is no slower than the library."""
    snapshot, limits = snapshot_of(path, problem.world_size)
    decision = decide(problem, snapshot, limits)
    assert decision.source == "exact", problem
    assert decision.library_us is not None
    assert decision.latency_us is not None
    assert decision.latency_us <= decision.library_us
    if problem.nbytes <= 64 << 20:
        assert decision.candidate.variant != "library", problem


@functools.cache
def snapshot_of(path: Path, world_size: int) -> tuple[Snapshot, Limits]:
    kernels.discover()
    with Database.open(path, readonly=True, immutable=True) as database:
        (environment,) = database.environments()
    snapshot = load_snapshot(environment, world_size, layers=[Layer("packaged", str(path))], strict=True)
    return snapshot, limits_for(environment, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce_bias", "all_reduce_rms_norm"])
def test_the_other_ops_are_answered(op: str, world_size: int) -> None:
    """By a kernel at every size that was tuned, by its own final."""
    kernels.discover()
    (path,) = [path for path in SHIPPED if f"x{world_size}" in path.name]
    with Database.open(path, readonly=True, immutable=True) as database:
        (environment,) = database.environments()
        asked = {trial.problem for trial in database.trials(op=op, final=True)}
    snapshot = load_snapshot(environment, world_size, layers=[Layer("packaged", str(path))], strict=True)
    limits = limits_for(environment, world_size)
    assert len(asked) >= 5
    for problem in asked:
        decision = decide(problem, snapshot, limits)
        assert decision.source == "exact", problem
        assert decision.candidate.variant != "library", problem
        assert decision.latency_us is not None
        assert decision.library_us is not None
        assert decision.latency_us < decision.library_us
