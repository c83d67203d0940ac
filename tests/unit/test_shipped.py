"""The shipped databases: current, complete, and dispatched from on the machines that they were made for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tunedcomm import kernels
from tunedcomm.communicator import limits_for
from tunedcomm.db.export import export_database
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.store import Database
from tunedcomm.dispatcher import decide
from tunedcomm.spec import Mode, Problem, get_op, get_variant

SHIPPED = packaged_databases()
README = Path(__file__).parents[2] / "tuning_db" / "README.md"


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
def test_the_readme_names_the_file(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"`{path.name}`" in README.read_text(encoding="utf-8")
    assert digest[:16] in README.read_text(encoding="utf-8"), f"{path.name} has the digest {digest}"


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
    """By a final of its own, or, where the file has none (see its README), by the same kernel in bf16 and graphs."""
    kernels.discover()
    has_finals = "x4" in path.name or (mode, dtype) == ("graph", "bfloat16")
    world_size = 4 if "x4" in path.name else 2
    with Database.open(path, readonly=True, immutable=True) as database:
        (environment,) = database.environments()
    snapshot = load_snapshot(environment, world_size, layers=[Layer("packaged", str(path))], strict=True)
    limits = limits_for(environment, world_size)
    for shape in get_op("all_reduce").default_shapes("cuda", 2):
        problem = Problem("all_reduce", shape, dtype, world_size, mode=mode)
        decision = decide(problem, snapshot, limits)
        if has_finals:
            assert decision.source == "exact", problem
            assert decision.library_us is not None
            assert decision.latency_us is not None
            assert decision.latency_us <= decision.library_us
        else:
            assert decision.source == ("heuristic" if mode == "eager" else "interpolated"), problem
        if problem.nbytes <= 64 << 20:
            assert decision.candidate.variant != "library", problem
