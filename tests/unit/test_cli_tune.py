from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunedcomm.cli import _gang, main, tune
from tunedcomm.cli._progress import PlainLines, describe
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment, detect
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.sweep import ProblemResult, Progress, SweepOutcome, SweepSpec

PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 2, mode="eager")
OTHER = Problem("all_reduce", (512,), "bfloat16", 2, mode="eager")


def best(environment: Environment) -> TrialRecord:
    return TrialRecord(
        problem=PROBLEM,
        environment=environment,
        variant="lamport",
        numerics="ordered",
        source_hash="0123456789abcdef",
        config={"num_blocks": 8},
        status="ok",
        latency_p50_us=4.0,
        baseline_p50_us=14.0,
    )


def outcome(*, solved: bool = True) -> SweepOutcome:
    here = detect(None)
    result = ProblemResult(
        problem=PROBLEM,
        best=best(here) if solved else None,
        library_us=14.0 if solved else None,
        num_trials=17,
        failures={"hung": 1, "compile_error": 2},
    )
    return SweepOutcome(
        run_id=3,
        environment=here,
        problems=(result,),
        reason="done",
        num_trials=17,
        failures={"hung": 1, "compile_error": 2},
        dropped=("one_shot",),
        num_gangs=2,
        seconds=12.3,
        compiled_ahead=0,
    )


class Sweep:
    """Stands in for `sweep`: keeps what it was asked for."""

    def __init__(self, result: SweepOutcome | BaseException) -> None:
        self.result = result
        self.spec: SweepSpec | None = None
        self.path: Path | None = None

    def __call__(
        self, spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None
    ) -> SweepOutcome:
        self.spec, self.path = spec, database.path
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def start(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 0) -> Any:
    monkeypatch.setattr("tunedcomm.tuner.sweep.sweep", sweep)
    monkeypatch.setattr(_gang, "num_gpus", lambda: gpus)
    monkeypatch.setattr(tune, "num_gpus", lambda: gpus)
    return CliRunner().invoke(main.app, ["tune", "--op", "all_reduce", *arguments])


def test_no_option_is_the_sensible_thing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sweep = Sweep(outcome())
    shown = start(sweep, monkeypatch, gpus=4)
    assert shown.exit_code == 0, shown.output
    assert sweep.spec is not None
    assert sweep.path == tmp_path / "user.db"
    assert sweep.path.exists()
    assert (sweep.spec.shapes, sweep.spec.modes, sweep.spec.budget_s) == ((), (), None)
    assert sweep.spec.dtypes == ("bfloat16",)
    assert sweep.spec.reductions == ("sum",)
    assert sweep.spec.world_size == 4
    assert sweep.spec.command.startswith("tunedcomm")


def test_without_gpus_the_host_is_tuned_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(outcome())
    shown = start(sweep, monkeypatch)
    assert sweep.spec is not None
    assert (sweep.spec.backend, sweep.spec.world_size) == ("host", 2)
    assert "nothing about GPUs" in shown.stderr


def test_options_reach_the_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sweep = Sweep(outcome())
    path = tmp_path / "cluster.db"
    options = "--shape 512,1024 --shape 98304 --dtype bfloat16,float16 --mode both --world-size 2 --reduction avg"
    more = f"--input-kind both --variants lamport,two_shot --budget 10m --trials 30 --seed 7 --retry --db {path}"
    shown = start(sweep, monkeypatch, *options.split(), *more.split(), gpus=4)
    assert shown.exit_code == 0, shown.output
    assert sweep.spec is not None
    assert sweep.path == path
    assert sweep.spec.shapes == ((512,), (1024,), (98304,))
    assert sweep.spec.dtypes == ("bfloat16", "float16")
    assert sweep.spec.modes == ("graph", "eager")
    assert sweep.spec.world_size == 2
    assert sweep.spec.reductions == ("avg",)
    assert sweep.spec.input_kinds == ("plain", "symmetric")
    assert sweep.spec.variants == ("lamport", "two_shot")
    assert (sweep.spec.budget_s, sweep.spec.trials, sweep.spec.seed, sweep.spec.retry) == (600.0, 30, 7, True)


def test_summary_names_winner_speed_up_and_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = start(Sweep(outcome()), monkeypatch)
    line = next(line for line in shown.stdout.splitlines() if "lamport(num_blocks=8)" in line)
    for part in ("98304", "192 KiB", "eager", "4.00", "14.00", "3.50x", "17", "2 compile_error, 1 hung"):
        assert part in line
    assert f"17 trials in 12 s, stored in {tmp_path / 'user.db'} (run 3)" in shown.stdout
    assert "one_shot" in shown.stderr


def test_summary_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = json.loads(start(Sweep(outcome()), monkeypatch, "--json").stdout)
    assert summary["problems"][0]["variant"] == "lamport"
    assert summary["problems"][0]["speedup"] == 3.5
    assert summary["run_id"] == 3


def test_problem_without_a_candidate_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(Sweep(outcome(solved=False)), monkeypatch)
    assert shown.exit_code == 1
    assert "(none runs)" in shown.stdout
    assert str(PROBLEM) in shown.stderr


def test_interrupted_sweep_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(Sweep(KeyboardInterrupt()), monkeypatch)
    assert shown.exit_code == 1
    assert "same command goes on" in shown.stderr


def test_failed_sweep_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tunedcomm.tuner.sweep.sweep", Sweep(TuningError("gangs die")))
    with pytest.raises(SystemExit) as caught:
        main.run(["tune", "--op", "all_reduce", "--backend", "host"])
    assert caught.value.code == 1
    assert "TuningError: gangs die" in capsys.readouterr().err


def test_directory_as_database_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run(["tune", "--op", "all_reduce", "--backend", "host", "--db", str(tmp_path)])
    assert caught.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err


def progress(problem: Problem | None, *, done: int = 0, elapsed_s: float = 1.0, final: bool = False) -> Progress:
    return Progress(
        problems=2,
        problems_done=done,
        trials=5,
        trials_planned=3,
        problem=problem,
        candidate=Candidate.of("all_reduce", "lamport", {"num_blocks": 8}),
        final=final,
        best_us=4.0,
        library_us=14.0,
        failures={"hung": 1},
        gangs=1,
        elapsed_s=elapsed_s,
    )


def test_line_says_where_the_sweep_stands() -> None:
    text = describe(progress(PROBLEM, done=1))
    for part in ("[1/2]", "98304", "best 4.00 µs", "library 14.00 µs", "3.50x", "5 trials", "1 hung"):
        assert part in text
    assert "starting" in describe(progress(None))


def test_plain_lines_one_a_problem() -> None:
    written: list[str] = []
    lines = PlainLines(written.append)
    for step in (progress(None), progress(OTHER), progress(OTHER), progress(PROBLEM, done=1)):
        lines(step)
    assert len(written) == 1
    assert " 512 " in written[0]
    lines.finish()
    assert "98304" in written[1]


def test_plain_lines_show_life_in_a_long_search() -> None:
    written: list[str] = []
    lines = PlainLines(written.append)
    for elapsed_s in (1.0, 29.0, 31.0, 40.0, 62.0):
        lines(progress(PROBLEM, elapsed_s=elapsed_s))
    assert len(written) == 2
