"""The shipped databases: current, complete, and dispatched from on the machines that they were made for."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from tunedcomm import kernels
from tunedcomm.bench.csv import floor_us
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Limits, Mode, Problem, get_op, get_variant

SHIPPED = packaged_databases()
README = Path(__file__).parents[2] / "tuning_db" / "README.md"
# Of an H200 SXM by its data sheet: 18 links of 25e9 bytes/s in each direction, dense tensor cores in flop/µs.
LINK_GB_S = 450.0
FLOP_A_US = {"bfloat16": 989e6, "float16": 989e6, "float8_e4m3fn": 1979e6}
# The best of these rows take 1.7 µs: no launch that waits for a peer ends within this.
LAUNCH_US = 0.5


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
    """By a final of its own."""
    world_size = 4 if "x4" in path.name else 2
    for shape in get_op("all_reduce").default_shapes("cuda", 2):
        assert_won(path, Problem("all_reduce", shape, dtype, world_size, mode=mode))


@pytest.mark.parametrize("world_size", [2, 4])
def test_calls_in_place_are_answered_by_what_was_tuned_in_place(world_size: int) -> None:
    path = next(path for path in SHIPPED if f"x{world_size}" in path.name)
    for shape in get_op("all_reduce").default_shapes("cuda", 2):
        assert_won(path, Problem("all_reduce", shape, "bfloat16", world_size, in_place=True))


def test_an_odd_size_runs_in_one_round() -> None:
    """169 packets of 16 bytes: both neighbours' winners have 128 threads or cannot run."""
    path = next(path for path in SHIPPED if "x2" in path.name)
    snapshot, limits = snapshot_of(path, 2)
    decision = decide(Problem("all_reduce", (1349,), "bfloat16", 2), snapshot, limits)
    assert decision.source == "interpolated"
    config = decision.candidate.config_dict
    assert (decision.candidate.variant, config["num_blocks"], config["num_warps"]) == ("lamport", 2, 4)


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


def possible_us(trial: Trial) -> float:
    """The least time in µs in which the hardware can do what the trial did.

    Links carry what must leave a rank where no switch adds anything up; what is sent rounded to fp8 is not known here.
    """
    problem, op = trial.problem, get_op(trial.problem.op)
    assert (trial.environment.gpu, trial.environment.num_links) == ("NVIDIA H200", 18)
    assert not trial.environment.multicast
    assert problem.scaling != "fp8"
    links = floor_us(problem.op, op.message_bytes(problem), problem.world_size, LINK_GB_S)
    assert links is not None, f"what {problem.op} sends is not known"
    if "gemm" not in problem.op:
        return max(links, LAUNCH_US)
    return max(links, LAUNCH_US, 2.0 * problem.numel / FLOP_A_US[problem.dtype])


def impossible(trials: list[Trial]) -> list[str]:
    """Sentences about `ok` rows with a time, their own or the library's, that is less than possible."""
    return [
        f"{trial.problem} {trial.variant}: {us:.2f} µs, and no less than {possible_us(trial):.2f} µs is possible"
        for trial in trials
        if trial.status == "ok"
        for us in (trial.latency_p10_us, trial.latency_p50_us, trial.latency_p90_us, trial.baseline_p50_us)
        if us is not None and us <= possible_us(trial)
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_time_is_possible(path: Path) -> None:
    """Rows of half of the least time would be found, whatever their op, and rows a tenth above it would not."""
    kernels.discover()
    with Database.open(path, readonly=True, immutable=True) as database:
        trials = list(database.trials())
    assert impossible(trials) == []
    of_each_op = {trial.problem.op: trial for trial in trials if trial.status == "ok"}
    assert len(of_each_op) >= 9
    for trial in of_each_op.values():
        for share, is_found in ((0.5, True), (1.1, False)):
            us = share * possible_us(trial)
            times = {"latency_p10_us": us, "latency_p50_us": us, "latency_p90_us": us}
            assert bool(impossible([replace(trial, baseline_p50_us=None, **times)])) == is_found, trial
            assert bool(impossible([replace(trial, baseline_p50_us=us)])) == is_found, trial


@pytest.mark.parametrize(
    ("problem", "us"),
    [
        # 3/4 of 128 MiB twice, 3 x 128 MiB, 3 x 32 MiB, half of 64 MiB, over 450e9 bytes/s.
        (Problem("all_reduce", (64 << 20,), "bfloat16", 4), 447.39),
        (Problem("all_gather", (64 << 20,), "bfloat16", 4), 894.78),
        (Problem("all_to_all", (16 << 20,), "bfloat16", 4), 223.70),
        (Problem("reduce_scatter", (16 << 20,), "bfloat16", 2), 74.57),
        # 2 x 4096 x 8192 x 14336 flop over 989e12 flop/s; half of 4096 rows of 8192, twice.
        (Problem("gemm_ar", (4096, 8192, 14336), "bfloat16", 2, layout="nk"), 972.77),
        (Problem("gemm_ar", (4096, 8192, 512), "bfloat16", 2, layout="nk"), 149.13),
        (Problem("ag_gemm", (16384, 256, 8192), "bfloat16", 4, layout="nk"), 447.39),
        (Problem("gemm_rs", (4096, 8192, 14336), "float8_e4m3fn", 2, layout="nk", scaling="rowwise"), 486.14),
    ],
    ids=str,
)
def test_the_least_time_by_hand(problem: Problem, us: float) -> None:
    kernels.discover()
    with Database.open(SHIPPED[0], readonly=True, immutable=True) as database:
        trial = next(iter(database.trials(final=True)))
    assert possible_us(replace(trial, problem=problem)) == pytest.approx(us, abs=0.01)
