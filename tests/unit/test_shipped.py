"""The shipped databases: current, complete, and dispatched from on the machines that they were made for."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import run
from quick import some

from tunedcomm import kernels, spec
from tunedcomm.bench.csv import floor_us, sent_bytes
from tunedcomm.db.layers import Layer, load_snapshot, packaged_databases
from tunedcomm.db.maintenance import collect_stats
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database
from tunedcomm.dispatch.decide import decide
from tunedcomm.kernels import source_hash_of
from tunedcomm.report.data import StoredDispatch
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, get_op, get_variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.verify import stored_winners

SHIPPED = packaged_databases()
README = Path(__file__).parents[2] / "tuning_db" / "README.md"
# Of an H100 and an H200 SXM by their data sheets: 18 links of 25e9 bytes/s in each direction, dense tensor cores in
# flop/µs.
LINK_GB_S = 450.0
FLOP_A_US = {"bfloat16": 989e6, "float16": 989e6, "float8_e4m3fn": 1979e6}
# The best of these rows take 1.7 µs: no launch that waits for a peer ends within this.
LAUNCH_US = 0.5
# Variants that never won; their rows stay, and readers skip them.
GONE = {
    *(("all_reduce", name) for name in ("torch_one_shot", "torch_two_shot")),
    *((op, "unfused") for op in ("all_reduce_bias", "all_reduce_rms_norm")),
    ("all_reduce_rms_norm", "unfused_quantized"),
    *(("gemm_rs", name) for name in ("reduce_add", "torch_fused")),
    ("ag_gemm", "torch_fused"),
}


PATHS = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)


@functools.cache
def trials_of(path: Path, *, final: bool | None = None) -> tuple[Trial, ...]:
    kernels.discover()
    with Database.open(path, readonly=True, immutable=True) as database:
        return tuple(trial for trial in database.trials() if final in (None, trial.final))


@functools.cache
def snapshot_of(path: Path, world_size: int) -> Snapshot:
    environment = trials_of(path)[0].environment
    return load_snapshot(environment, world_size, layers=[Layer("packaged", str(path))], strict=True)


def decided(problem: Problem, path: Path | None = None) -> Decision:
    """The answer of a database, by default the H200's for this many ranks."""
    path = path or next(path for path in SHIPPED if path.name == f"h200-nvswitch18-x{problem.world_size}.db")
    snapshot = snapshot_of(path, problem.world_size)
    return decide(problem, snapshot, limits_for(snapshot.environment, problem.world_size))


def test_what_is_shipped() -> None:
    assert [path.name for path in SHIPPED] == [
        "h100-nvswitch18-x2.db",
        "h200-nvswitch18-x2.db",
        "h200-nvswitch18-x4.db",
    ]


@PATHS
def test_no_row_is_retired_by_a_changed_kernel(path: Path) -> None:
    for trial in trials_of(path, final=True):
        if (trial.problem.op, trial.variant) in GONE:
            continue
        assert trial.source_hash == kernels.source_hash(get_variant(trial.problem.op, trial.variant)), (
            f"the kernels of {trial.variant} changed since {path.name} was made: tune and export it anew"
        )


@PATHS
def test_the_readme_names_the_file_and_its_digest(path: Path) -> None:
    readme = README.read_text(encoding="utf-8")
    assert f"`{path.name}`" in readme
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] in readme


@PATHS
def test_an_export_decides_the_same(path: Path, tmp_path: Path) -> None:
    export = export_database([path], tmp_path / "out.db")
    for world_size in (2, 4):
        assert snapshot_of(path, world_size).digest == snapshot_of(tmp_path / "out.db", world_size).digest
    assert export.left_out == 0, "a shipped file is what an export makes of it"


@PATHS
def test_every_reader_names_the_winner_of_dispatch(path: Path) -> None:
    """`db list`, `db stats`, `db verify` and the report, at every problem of the file."""
    listed = {
        Problem.from_dict(each["problem"]): each["winner"] for each in run("db", "list", "--db", path, "--json").json
    }
    world_size, environment = next(iter(listed)).world_size, trials_of(path)[0].environment
    snapshot, limits = snapshot_of(path, world_size), limits_for(environment, world_size)
    decisions = {problem: decide(problem, snapshot, limits) for problem in listed}
    assert len(decisions) > 100
    for problem, decision in decisions.items():
        named = (listed[problem]["variant"], listed[problem]["config"], listed[problem]["latency_p50_us"])
        assert named == (decision.candidate.variant, decision.candidate.config_dict, decision.latency_us), problem
    with Database.open(path, immutable=True) as database:
        groups = collect_stats(database, source_hash_of).groups
    wins = Counter(decision.candidate.variant for decision in decisions.values())
    assert sum((group.winners for group in groups), Counter[str]()) == wins
    for problem, (first, *_) in stored_winners(snapshot, limits, source_hash_of).items():
        if decisions[problem].source == "heuristic":  # the kernels that were measured here have changed since
            continue
        assert (first.candidate, first.policies[0]) == (decisions[problem].candidate, "default"), problem
    report = StoredDispatch([Layer("packaged", str(path))])
    assert {p: report.decide(p, environment)[0] for p in some(sorted(decisions), 20)}.items() <= decisions.items()


@pytest.mark.parametrize(
    "changes",
    [{"dtype": d, "mode": m} for d in ("bfloat16", "float16") for m in ("graph", "eager")] + [{"in_place": True}],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_size_of_the_sweep_is_answered(world_size: int, changes: dict[str, Any]) -> None:
    """By a final of this very problem, which is no slower than the library."""
    kernels.discover()
    for shape in get_op("all_reduce").default_shapes("cuda", 2):
        problem = replace(Problem("all_reduce", shape, "bfloat16", world_size), **changes)
        decision = decided(problem)
        assert decision.source == "exact", problem
        assert decision.latency_us <= decision.library_us
        if problem.nbytes <= 64 << 20:
            assert decision.candidate.variant != "library", problem


def test_an_odd_size_runs_in_one_round() -> None:
    """169 packets of 16 bytes: both neighbours' winners have 128 threads or cannot run."""
    decision = decided(Problem("all_reduce", (1349,), "bfloat16", 2))
    assert decision.source == "interpolated"
    config = decision.candidate.config_dict
    assert (decision.candidate.variant, config["num_blocks"], config["num_warps"]) == ("lamport", 2, 4)


@PATHS
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce_bias", "all_reduce_rms_norm"])
def test_the_other_ops_are_answered(op: str, path: Path) -> None:
    """By a kernel at every size that was tuned in graphs, by its own final."""
    finals = trials_of(path, final=True)
    asked = {trial.problem for trial in finals if trial.problem.op == op and trial.problem.mode == "graph"}
    assert len(asked) >= 5
    for problem in asked:
        decision = decided(problem, path)
        assert decision.source == "exact", problem
        assert decision.candidate.variant != "library", problem
        assert decision.latency_us < decision.library_us


def test_experts_are_served_wherever_something_near_was_tuned() -> None:
    """Between tuned numbers of tokens, in the other layout and in fp8, and at other models' sizes."""
    kernels.discover()
    counts = (1, 3, 24, 64, 100, 200, 700, 1024, 1500, 3000, 4096, 7000)
    ways = [(layout, scaling) for layout in ("padded", "contiguous") for scaling in ("", "token", "group128")]
    asked = [("ep_dispatch", (tokens, 7168, 8, 256), *way) for tokens in counts for way in ways]
    asked += [("ep_combine", (tokens, 7168, 8, 256), "", "") for tokens in counts]
    sizes = [(64, 6144, 8, 160), (64, 2880, 4, 128), (128, 7168, 8, 384), (2048, 5120, 8, 128)]
    asked += [
        (op, shape, "padded" if op == "ep_dispatch" else "", "")
        for op in ("ep_dispatch", "ep_combine")
        for shape in sizes
    ]
    for op, shape, layout, scaling in asked:
        decision = decided(Problem(op, shape, "bfloat16", 4, "", layout=layout, scaling=scaling))
        assert decision.candidate.variant in ("lamport", "push", "two_phase"), (op, shape, layout, scaling, decision)


def possible_us(trial: Trial) -> float:
    """The least time in µs in which the hardware can do what the trial did.

    Links carry what must leave a rank where no switch adds anything up; what is sent rounded to fp8 is not known here.
    """
    problem, op = trial.problem, get_op(trial.problem.op)
    assert trial.environment.gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    assert trial.environment.num_links == 18
    assert not trial.environment.multicast
    assert problem.scaling != "fp8"
    sent = sent_bytes(op.message_bytes(problem), problem.dtype, problem.scaling)
    links = floor_us(op, sent, problem.world_size, LINK_GB_S)
    assert links is not None, f"what {problem.op} sends is not known"
    if "gemm" not in problem.op:
        return max(links, LAUNCH_US)
    return max(links, LAUNCH_US, 2.0 * problem.numel / FLOP_A_US[problem.dtype])


def impossible(trials: Iterable[Trial]) -> list[str]:
    """Sentences about `ok` rows with a time, their own or the library's, that is less than possible."""
    return [
        f"{trial.problem} {trial.variant}: {us:.2f} µs, and no less than {possible_us(trial):.2f} µs is possible"
        for trial in trials
        if trial.status == "ok"
        for us in (trial.latency_p10_us, trial.latency_p50_us, trial.latency_p90_us, trial.baseline_p50_us)
        if us is not None and us <= possible_us(trial)
    ]


@PATHS
def test_every_time_is_possible(path: Path) -> None:
    """Rows of half of the least time would be found, whatever their op, and rows a tenth above it would not."""
    assert impossible(trials_of(path)) == []
    of_each_op = {trial.problem.op: trial for trial in trials_of(path) if trial.status == "ok"}
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
    assert possible_us(replace(trials_of(SHIPPED[0])[0], problem=problem)) == pytest.approx(us, abs=0.01)


def test_a_spinning_variant_is_not_chosen_however_fast_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends its waits: it is measured, and runs by name only."""
    path, problem = SHIPPED[2], Problem("all_reduce", (65536,), "bfloat16", 4)
    snapshot, lamport = snapshot_of(path, 4), get_variant("all_reduce", "lamport")
    spinning = replace(lamport, name="spinning", waits_time_out=False)
    monkeypatch.setitem(spec._variants, ("all_reduce", "spinning"), spinning)
    library = next(row for row in snapshot.family_rows(problem) if row.problem == problem and row.is_library)
    candidate, times = (
        Candidate.of("all_reduce", spinning.name, lamport.default(problem, limits_for(snapshot.environment, 4))),
        ("latency_p10_us", "latency_p50_us", "latency_p90_us"),
    )
    row = replace(library, candidate=candidate, source_hash=kernels.source_hash(spinning), **dict.fromkeys(times, 0.1))
    richer, limits = replace(snapshot, rows=(*snapshot.rows, row)), limits_for(snapshot.environment, 4)
    chosen = decide(problem, richer, limits)
    assert chosen.candidate != candidate
    assert "for ever" in dict(chosen.passed_over)[str(candidate)]
    assert decide(problem, richer, limits, forced=candidate).candidate == candidate
