from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tunedcomm.cli import main, options
from tunedcomm.cli.progress import JsonLines, PlainLines, describe, live_view
from tunedcomm.cli.tune import show_command
from tunedcomm.db.records import Status, Trial
from tunedcomm.db.store import Database
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment, detect
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang.supervisor import GangProgress
from tunedcomm.tuner.search.sweep import (
    ProblemResult,
    Progress,
    SweepOutcome,
    SweepSpec,
    VariantSummary,
    summarise_variants,
)

PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 2, mode="eager")
OTHER = Problem("all_reduce", (512,), "bfloat16", 2, mode="eager")


def best(environment: Environment) -> Trial:
    return Trial(
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
        progress=Progress(
            problems=1,
            problems_done=1,
            trials=17,
            trials_planned=0,
            failures={"hung": 1, "compile_error": 2},
            gangs=(),
            num_gangs=2,
            elapsed_s=12.3,
        ),
        dropped=("one_shot",),
        start_s=3.5,
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
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", sweep)
    monkeypatch.setattr(options, "num_gpus", lambda: gpus)
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
    for part in ("98304", "192 KiB", "eager", "4.00", "14.0", "3.50x", "17", "2 compile_error, 1 hung"):
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


def test_problem_without_a_baseline_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    done = outcome()
    crashed = replace(best(detect(None)), variant="library", config={}, status="crashed", reason="planted")
    done = replace(done, problems=(replace(done.problems[0], library_failure=crashed),))
    shown = start(Sweep(done), monkeypatch)
    assert shown.exit_code == 1
    assert f"no baseline at {PROBLEM}" in shown.stderr


def test_interrupted_sweep_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(Sweep(KeyboardInterrupt()), monkeypatch)
    assert shown.exit_code == 130
    assert "same command goes on" in shown.stderr


def test_failed_sweep_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", Sweep(TuningError("gangs die")))
    with pytest.raises(SystemExit) as caught:
        main.run(["tune", "--op", "all_reduce", "--backend", "host"])
    assert caught.value.code == 1
    assert "TuningError: gangs die" in capsys.readouterr().err


def test_directory_as_database_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run(["tune", "--op", "all_reduce", "--backend", "host", "--db", str(tmp_path)])
    assert caught.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err


def gang(problem: Problem | None, *, slot: int = 0, final: bool = False) -> GangProgress:
    if problem is None:
        return GangProgress(slot=slot, step="starting")
    return GangProgress(
        slot=slot,
        step="running",
        problem=problem,
        candidate=Candidate.of("all_reduce", "lamport", {"num_blocks": 8}),
        final=final,
        best_us=4.0,
        library_us=14.0,
    )


def progress(
    *problems: Problem | None, done: int = 0, elapsed_s: float = 1.0, final: bool = False, **changes: Any
) -> Progress:
    values: dict[str, Any] = {
        "problems": 2,
        "problems_done": done,
        "trials": 5,
        "trials_planned": 3,
        "failures": {"hung": 1},
        "gangs": tuple(gang(problem, slot=slot, final=final) for slot, problem in enumerate(problems)),
        "num_gangs": 1,
        "elapsed_s": elapsed_s,
    }
    return Progress(**{**values, **changes})


def test_line_says_where_the_sweep_stands() -> None:
    text = describe(progress(PROBLEM, done=1), gang(PROBLEM))
    for part in ("[1/2]", "98304", "best 4.00 µs", "library 14.0 µs", "3.50x", "5 trials", "1 hung"):
        assert part in text
    assert "starting" in describe(progress(None), gang(None))


def test_progress_says_what_is_waited_for_and_for_how_long() -> None:
    binding = replace(gang(PROBLEM), step="binding", silent_s=60.2, patience_s=120.0)
    text = "waiting for bind of lamport(num_blocks=8), 60 of 120 s"
    assert text in describe(progress(PROBLEM), binding)
    assert "waiting for" not in describe(progress(PROBLEM), replace(binding, silent_s=1.0))
    console = Console(width=200, record=True, file=io.StringIO())
    started = replace(gang(None), silent_s=7.0, patience_s=240.0)
    console.print(live_view(replace(progress(), gangs=(binding, started))))
    shown = console.export_text()
    assert text in shown
    assert "waiting for a gang to start, 7 of 240 s" in shown


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


def test_plain_lines_tell_gangs_apart() -> None:
    written: list[str] = []
    lines = PlainLines(written.append)
    for step in (progress(OTHER, PROBLEM), progress(OTHER, PROBLEM), progress(OTHER, OTHER, done=1)):
        lines(step)
    assert len(written) == 1
    assert "98304" in written[0]


def test_json_lines_once_a_second_and_at_the_end() -> None:
    written: list[str] = []
    lines = JsonLines(written.append)
    for elapsed_s in (0.0, 0.3, 0.9, 1.1, 1.4):
        lines(progress(PROBLEM, None, elapsed_s=elapsed_s, seconds_left=20.0, num_compiled=2, bind_share=0.125))
    lines.finish()
    events = [json.loads(line) for line in written]
    assert [(event["event"], event["elapsed_s"]) for event in events] == [
        ("progress", 0.0),
        ("progress", 1.1),
        ("end", 1.4),
    ]
    assert (events[1]["num_compiled"], events[1]["bind_share"], events[1]["seconds_left"]) == (2, 0.125, 20.0)
    assert events[1]["trials_per_minute"] == 272.7
    assert [(g["slot"], g["step"], g["best_us"]) for g in events[1]["gangs"]] == [
        (0, "running", 4.0),
        (1, "starting", None),
    ]
    assert Problem.from_dict(events[1]["gangs"][0]["problem"]) == PROBLEM


def test_live_view_has_a_line_a_gang() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(live_view(progress(PROBLEM, None, done=1, elapsed_s=60.0, seconds_left=3700.0)))
    text = console.export_text()
    for part in ("1/2 problems", "5 trials, 5/min", "1:00, about 1:01:40 left", "failed: 1 hung", "gang 1: starting"):
        assert part in text
    (line,) = [line for line in text.splitlines() if line.startswith("gang 0")]
    assert "98304" in line
    assert "best 4.00 µs, library 14.0 µs (3.50x); running lamport(num_blocks=8)" in line


def test_gangs_reach_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, expected in (((), None), (("--gangs", "auto"), None), (("--gangs", "3"), 3)):
        sweep = Sweep(outcome())
        assert start(sweep, monkeypatch, *arguments, gpus=4).exit_code == 0
        assert sweep.spec is not None
        assert sweep.spec.gangs == expected
    for wrong in ("0", "many", "-1", "1.5"):
        shown = start(Sweep(outcome()), monkeypatch, "--gangs", wrong)
        assert shown.exit_code == 2
        assert "neither auto nor a whole number" in shown.stderr


def test_summary_says_how_long_the_compiler_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = replace(outcome().progress, num_compiled=7, bind_share=0.0625)
    compiled = replace(outcome(), progress=done, compiled_ahead=100, compile_share=0.031)
    said = "7 trials had to wait for the compiler, 3.1% of the time; 6.2% of it went into binding in all"
    assert said in start(Sweep(compiled), monkeypatch).stdout
    summary = json.loads(start(Sweep(compiled), monkeypatch, "--json").stdout)
    assert (summary["num_compiled"], summary["bind_share"], summary["compile_share"]) == (7, 0.0625, 0.031)
    assert "compiler" not in start(Sweep(outcome()), monkeypatch).stdout


def test_json_progress_is_json_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(Sweep(outcome()), monkeypatch, "--json")
    events = [json.loads(line) for line in shown.stderr.splitlines()]
    assert {event["event"] for event in events} == {"note"}
    assert "tuning all_reduce" in events[-1]["text"]


def fate(variant: str = "lamport", *, num_ran: int = 0, infeasible: str = "", **failures: int) -> VariantSummary:
    firsts = tuple(
        Trial(
            problem=PROBLEM,
            environment=detect(None),
            variant=variant,
            numerics="ordered",
            source_hash="0123456789abcdef",
            config={"num_blocks": 8},
            status=cast("Status", status),
            reason=f"planted {status}",
        )
        for status in failures
    )
    return VariantSummary(variant=variant, num_ran=num_ran, failures=failures, firsts=firsts, infeasible=infeasible)


def swept(*fates: VariantSummary, skipped: int = 0) -> Sweep:
    return Sweep(replace(outcome(), fates=fates, num_skipped=skipped))


def test_what_failed_before_and_is_not_tried_again_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = start(swept(skipped=4), monkeypatch).stderr
    assert "4 candidates failed in an earlier sweep and are not tried again" in said
    assert "`version`, or pass --retry" in said
    assert "1 candidate failed in an earlier sweep and is not" in start(swept(skipped=1), monkeypatch).stderr
    assert "--retry" not in start(swept(), monkeypatch).stderr


def test_named_variant_of_which_nothing_runs_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = swept(fate(incorrect=4, compile_error=1))
    shown = start(bad, monkeypatch, "--variants", "lamport", "--db", str(tmp_path / "my.db"))
    assert shown.exit_code == 1
    assert "lamport: none of 5 that were tried works" in shown.stderr
    assert "lamport: 4 incorrect, the first lamport(num_blocks=8): planted incorrect" in shown.stderr
    assert "lamport: 1 compile_error, the first lamport(num_blocks=8): planted compile_error" in shown.stderr
    command = "tunedcomm db show --op all_reduce --shape 98304 --world-size 2 --dtype bfloat16 --mode eager --db "
    assert f"{command}{tmp_path / 'my.db'}" in shown.stderr
    # Not asked for by name: said, but other variants serve.
    shown = start(bad, monkeypatch)
    assert shown.exit_code == 0
    assert "none of 5" in shown.stderr


def test_named_variant_that_runs_somewhere_is_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    some = swept(fate(num_ran=1, incorrect=3))
    shown = start(some, monkeypatch, "--variants", "lamport")
    assert shown.exit_code == 0
    assert "planted incorrect" in shown.stderr
    assert "none of" not in shown.stderr
    assert "planted" not in start(some, monkeypatch).stderr


def test_infeasible_everywhere_is_said_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(swept(fate(infeasible="needs NVLink")), monkeypatch, "--variants", "lamport")
    assert shown.exit_code == 0
    assert "lamport is infeasible for every problem of this sweep: needs NVLink" in shown.stderr


def test_named_variant_that_dispatch_will_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in (
        ("multimem_one_shot", 'runs only in calls with numerics="any", of ops that take it, or if forced: its'),
        ("torch_one_shot", "runs only when it is forced"),
        ("lamport", ""),
    ):
        told = start(swept(fate(name, num_ran=1)), monkeypatch, "--variants", name).stderr
        assert said in told
        assert ("was measured" in told) == bool(said)
        assert "was measured" not in start(swept(fate(name, num_ran=1)), monkeypatch).stderr


def test_failures_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(swept(fate(incorrect=4), skipped=4), monkeypatch, "--variants", "lamport", "--json")
    assert shown.exit_code == 1
    summary = json.loads(shown.stdout)
    assert summary["num_skipped"] == 4
    assert summary["variants"][0]["reasons"] == {"incorrect": "planted incorrect"}
    assert {json.loads(line)["event"] for line in shown.stderr.splitlines()} == {"note"}


def test_command_that_shows_all_is_one_that_db_show_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "my.db"
    failed = fate(incorrect=1)
    with Database.open(path, create=True) as database:
        database.record(failed.firsts)
    shown = CliRunner().invoke(main.app, shlex.split(show_command(PROBLEM, str(path)))[1:])
    assert shown.exit_code == 0, shown.output
    assert "planted incorrect" in shown.stdout


def test_command_that_shows_all_names_what_is_not_the_default() -> None:
    gather = Problem("all_gather", (64,), "bfloat16", 2, reduction="", input_kind="symmetric")
    assert show_command(gather, None).endswith("--mode graph --input-kind symmetric")
    assert show_command(replace(PROBLEM, reduction="max"), None).endswith("--mode eager --reduction max")


def test_fates_count_the_last_trial_of_each_candidate() -> None:
    (failed,) = fate(incorrect=1).firsts
    mended = replace(failed, status="pruned", reason="", latency_p50_us=4.0)
    elsewhere = replace(failed, problem=OTHER, status="infeasible", reason="too small")
    (found,) = summarise_variants([failed, elsewhere])
    assert (found.num_ran, found.failures, found.is_broken, found.infeasible) == (0, {"incorrect": 1}, True, "")
    assert found.num_failed == 1
    (found,) = summarise_variants([failed, mended])
    assert (found.num_ran, found.failures, found.is_broken) == (1, {}, False)
    (found,) = summarise_variants([elsewhere])
    assert (found.is_broken, found.infeasible) == (False, "too small")
