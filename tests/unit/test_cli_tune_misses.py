"""`tunedcomm tune --from-misses`, with a sweep that only keeps what it was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, START
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import main, options
from tunedcomm.db.misses import Miss, append, read
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.errors import DatabaseAccessError
from tunedcomm.hardware import Environment, detect
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.tuner.search.sweep import ProblemResult, Progress, SweepOutcome, SweepSpec

OFTEN = Problem("all_reduce", (98304,), "bfloat16", 2, mode="eager")
RARE = Problem("all_reduce", (512,), "float16", 2, mode="eager", in_place=True)


class Sweeps:
    """Stands in for `sweep`."""

    def __init__(self) -> None:
        self.specs: list[SweepSpec] = []
        self.paths: list[Path | None] = []
        self.unsolved = False

    def __call__(
        self, spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None
    ) -> SweepOutcome:
        self.specs.append(spec)
        self.paths.append(database.path)
        best = None if self.unsolved else trial("library", spec.problems[0])
        return SweepOutcome(
            run_id=1,
            environment=detect(None),
            problems=tuple(
                ProblemResult(problem=p, best=best, library_us=9.0, num_trials=3, failures={}) for p in spec.problems
            ),
            reason="done",
            progress=Progress(
                problems=1,
                problems_done=1,
                trials=3,
                trials_planned=0,
                failures={},
                gangs=(),
                num_gangs=1,
                elapsed_s=1.0,
            ),
            dropped=(),
            start_s=3.5,
            compiled_ahead=0,
        )


def trial(variant: str, problem: Problem, **changes: Any) -> Trial:
    kernels.discover()
    known = get_variant("all_reduce", variant)
    values: dict[str, Any] = {
        "problem": problem,
        "environment": detect(None),
        "variant": variant,
        "numerics": known.numerics,
        "source_hash": kernels.source_hash(known),
        "config": known.default(problem, limits_for(detect(None), problem.world_size)),
        "status": "ok",
        "latency_p50_us": 5.0,
        "baseline_p50_us": 9.0,
        "final": True,
    }
    return Trial(**{**values, **changes})


def miss(problem: Problem, count: int = 1, environment: Environment | None = None) -> Miss:
    key = (environment or detect(None)).hard_key
    return Miss(problem=problem, hard_key=key, count=count, source="library", last_seen=START)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "misses.jsonl"
    append(path, [miss(RARE, 3), miss(OFTEN, 900)])
    return path


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    found = Sweeps()
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", found)
    monkeypatch.setattr(options, "num_gpus", lambda: 0)
    return found


def start(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, ["tune", "--from-misses", *arguments])


def store(path: Path, trials: Sequence[Trial]) -> None:
    with Database.open(path, create=True) as database:
        database.record(trials)


def test_what_was_missed_is_tuned_most_called_first(sweeps: Sweeps, log: Path, tmp_path: Path) -> None:
    shown = start("--budget", "10m", "--trials", "5", "--variants", "lamport", "--seed", "3", "--retry")
    assert shown.exit_code == 0, shown.output
    (spec,) = sweeps.specs
    assert spec.problems == (OFTEN, RARE)
    assert (spec.op, spec.world_size, spec.budget_s, spec.trials, spec.seed) == ("all_reduce", 2, 600.0, 5, 3)
    assert (spec.variants, spec.retry) == (("lamport",), True)
    assert sweeps.paths == [tmp_path / "user.db"]
    lines = shown.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if f"900 calls  {OFTEN}, served by library" in line)
    assert f"3 calls  {RARE}" in lines[first + 1]
    assert "2 untuned problems for 2 ranks on host" in lines[first - 1]


def test_what_is_tuned_by_now_is_left_alone_and_out_of_the_log(sweeps: Sweeps, log: Path, tmp_path: Path) -> None:
    store(tmp_path / "user.db", [trial("lamport", OFTEN), trial("library", OFTEN)])
    assert start().exit_code == 0
    assert [spec.problems for spec in sweeps.specs] == [(RARE,)]
    assert [m.problem for m in read(log)[0]] == [RARE]


@pytest.mark.parametrize(
    "changes",
    [{"final": False}, {"source_hash": "0123456789abcdef"}, {"environment": H200}],
    ids=["sweep not ended", "another kernel", "other hardware"],
)
def test_what_is_half_tuned_is_taken_again(
    sweeps: Sweeps, log: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    store(tmp_path / "user.db", [trial("lamport", OFTEN, **changes), trial("library", OFTEN, **changes)])
    start()
    assert sweeps.specs[0].problems == (OFTEN, RARE)


def test_pinned_problems_are_left_alone(sweeps: Sweeps, log: Path, tmp_path: Path) -> None:
    with Database.open(tmp_path / "user.db", create=True) as database:
        database.pin(OFTEN, Candidate.of("all_reduce", "library", {}), environment=detect(None), reason="")
    start()
    assert sweeps.specs[0].problems == (RARE,)


def test_gpus_are_asked_for_their_own_misses(sweeps: Sweeps, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, [miss(replace(OFTEN, shape=(1026,), mode="graph", world_size=4), 7, H200)])
    monkeypatch.setattr(options, "num_gpus", lambda: 4)
    monkeypatch.setattr("tunedcomm.tuner.search.sweep._DETECT", f"print({json.dumps(H200.to_dict())!r})")
    assert start().exit_code == 0
    assert [p.shape for p in sweeps.specs[0].problems] == [(1026,)]
    start("--backend", "host")
    assert sweeps.specs[1].problems == (OFTEN, RARE)
    monkeypatch.setattr("tunedcomm.tuner.search.sweep._DETECT", "raise RuntimeError('no driver')")
    assert "no driver; run `tunedcomm doctor`" in str(start().exception)


@pytest.mark.parametrize("made", [True, False], ids=["all tuned", "no log"])
def test_nothing_to_do(sweeps: Sweeps, log: Path, tmp_path: Path, made: bool) -> None:
    if made:
        store(tmp_path / "user.db", [trial("lamport", OFTEN), trial("lamport", RARE)])
    else:
        log.unlink()
    shown = start()
    assert (shown.exit_code, shown.stdout, sweeps.specs) == (0, "", [])
    assert "nothing to do" in shown.stderr
    assert json.loads(start("--json").stdout) == []


def test_an_op_limits_and_must_exist(sweeps: Sweeps, log: Path) -> None:
    assert start("--op", "all_reduce").exit_code == 0
    assert "did you mean 'all_reduce'" in str(start("--op", "all_reduse").exception)
    assert len(sweeps.specs) == 1


def test_a_log_that_cannot_be_read(sweeps: Sweeps, tmp_path: Path) -> None:
    (tmp_path / "misses.jsonl").mkdir()
    error = start().exception
    assert isinstance(error, DatabaseAccessError)
    assert "misses.jsonl: not a regular file; check it, or set TUNEDCOMM_MISS_LOG" in str(error)
