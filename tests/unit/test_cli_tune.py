"""`tunedcomm tune`, with a sweep that only keeps what it was asked for."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from cli_samples import Ended, Sweep, outcome, real_trial, record, refused, run
from db_samples import H200, START
from rich.console import Console

from tunedcomm import hardware, spec
from tunedcomm.cli.models import catalog
from tunedcomm.cli.progress import JsonLines, PlainLines, describe, live_view
from tunedcomm.cli.tune import show_command
from tunedcomm.db.misses import Miss, append, read
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.db.values import Status
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment, detect
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.tuner.gang.supervisor import GangProgress
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.search.summary import (
    ProblemResult,
    VariantSummary,
    summarise_problem,
    summarise_variants,
)

PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 2, mode="eager")
OTHER = Problem("all_reduce", (512,), "float16", 2, mode="eager", in_place=True)


def best(**changes: Any) -> Trial:
    values = {"environment": detect(None), "problem": PROBLEM, "config": {"num_blocks": 8}, **changes}
    return replace(real_trial("lamport", 4.0, baseline_p50_us=14.0), **values)


def result(**changes: Any) -> ProblemResult:
    failures = {"hung": 1, "compile_error": 2}
    values = {"problem": PROBLEM, "best": best(), "library_us": 14.0, "num_trials": 17, "failures": failures}
    return ProblemResult(**{**values, **changes})


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of GPUs that are found here, none."""
    found = [0]
    monkeypatch.setattr(hardware, "num_gpu_ranks", lambda: found[0])
    return found


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    stand_in = Sweep()
    stand_in.result = outcome(result())
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", stand_in)
    return stand_in


def tune(options: str = "") -> Ended:
    return run("tune", "--op", "all_reduce", *options.split())


# What reaches the sweep


def test_no_option_is_the_sensible_thing(sweep: Sweep, gpus: list[int], tmp_path: Path) -> None:
    gpus[0] = 4
    assert tune().code == 0
    (spec,) = sweep.specs
    assert sweep.path == tmp_path / "user.db"
    assert sweep.path.exists()
    assert (spec.shapes, spec.modes, spec.budget_s, spec.settings.gangs) == ((), (), None, 1)
    assert (spec.dtypes, spec.reductions, spec.settings.world_size) == (("bfloat16",), ("sum",), 4)
    assert spec.command.startswith("tunedcomm")


def test_without_gpus_the_host_is_tuned_with_a_note(sweep: Sweep) -> None:
    assert "nothing about GPUs" in tune().err
    assert (sweep.specs[0].settings.backend, sweep.specs[0].settings.world_size) == ("host", 2)


@pytest.mark.parametrize("mode", ["graph", "both"])
def test_without_gpus_graphs_are_said_to_be_left_out(sweep: Sweep, mode: str) -> None:
    assert tune(f"--mode {mode}").err.count("no CUDA graphs") == 1
    assert sweep.specs[0].modes == ()
    assert "no CUDA graphs" not in tune("--mode eager").err


def test_options_reach_the_sweep(sweep: Sweep, gpus: list[int], tmp_path: Path) -> None:
    gpus[0] = 4
    path = tmp_path / "cluster.db"
    problems = "--shape 512,1024 --shape 98304 --dtype bfloat16,float16 --mode both --reduction avg --input-kind both"
    search = f"--world-size 2 --variants lamport,two_shot --budget 10m --trials 30 --gangs 2 --seed 7 --db {path}"
    assert tune(f"{problems} {search} --retry").code == 0
    (spec,) = sweep.specs
    assert sweep.path == path
    assert spec.shapes == ((512,), (1024,), (98304,))
    assert (spec.dtypes, spec.modes, spec.reductions) == (("bfloat16", "float16"), ("graph", "eager"), ("avg",))
    settings = spec.settings
    assert (spec.input_kinds, settings.variants) == (("plain", "symmetric"), ("lamport", "two_shot"))
    assert (settings.world_size, settings.trials, settings.seed, settings.retry, settings.gangs) == (2, 30, 7, True, 2)
    assert spec.budget_s == 600.0


@pytest.mark.parametrize(
    ("options", "op", "found"),
    [
        (
            "llama3-70b --tp 2 --tokens 1,8,64 --tokens 4096",
            "all_reduce",
            {"shapes": ((8192,), (65536,), (524288,), (33554432,)), "world_size": 2, "dtypes": ("bfloat16",)},
        ),
        ("llama3-8b --tp 8 --tokens 1 --backend host", "all_reduce", {"backend": "host", "world_size": 8}),
        ("llama3-8b --tokens 1 --backend host", "all_reduce", {"world_size": 2}),
        (
            "deepseek-v3 --tp 4 --tokens 1",
            "all_reduce_rms_norm",
            {"scalings": ("", "group128"), "shapes": ((1, 7168),)},
        ),
        ("llama3-70b --tp 4 --tokens 1", "all_reduce_rms_norm", {"scalings": (), "shapes": ((1, 8192),)}),
        ("deepseek-v3 --tp 4 --tokens 1", "all_reduce", {"scalings": (), "shapes": ((7168,),)}),
        (
            "deepseek-v3 --scaling token,fp8+norm --tp 4 --tokens 1",
            "all_reduce_rms_norm",
            {"scalings": ("token", "fp8+norm")},
        ),
    ],
)
def test_a_model_gives_shapes_ranks_and_scalings(
    sweep: Sweep, gpus: list[int], options: str, op: str, found: dict[str, object]
) -> None:
    gpus[0] = 4
    ended = run("tune", "--op", op, "--model", *options.split())
    assert ended.code == 0, ended.err
    spec = sweep.specs[0]
    assert {name: getattr(spec, name, getattr(spec.settings, name, None)) for name in found} == found


def test_models_are_listed_without_an_op() -> None:
    ended = run("tune", "--list-models")
    line = ended.line("llama3-70b")
    for part in ("llama3.3-70b", "80", "8192", "28672", "64", "128256", "meta-llama/Meta-Llama-3-70B"):
        assert part in line
    assert len(ended.out.splitlines()) == 2 + len(catalog())


@pytest.mark.parametrize(
    ("variables", "spare"),
    [
        ({}, False),
        ({"LOCAL_RANK": "3"}, True),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, True),
        ({"LOCAL_RANK": ""}, False),
    ],
)
def test_one_copy_a_host_tunes(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], spare: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = tune()
    assert ended.code == 0
    assert (not sweep.specs, "another copy" in ended.err, not (tmp_path / "user.db").exists()) == (spare, spare, spare)


def test_a_dry_run_lists_problems_candidates_and_an_estimate(sweep: Sweep, gpus: list[int], tmp_path: Path) -> None:
    asked = "--shape 512,98304 --dtype float32 --trials 3"
    found = tune(f"{asked} --dry-run --json").json
    assert [one["problem"]["shape"] for one in found["problems"]] == [[512], [98304]]
    assert all(one["candidates"]["library"] == 1 and len(one["candidates"]) > 1 for one in found["problems"])
    assert [one["trials"] for one in found["problems"]] == [3, 3]
    assert found["trials"] == 6
    assert found["seconds"] > 0  # as the sweeps of the packaged databases
    assert tune(f"{asked} --dry-run --budget 1s --json").json["seconds"] <= 1
    text = tune(f"{asked} --dry-run")
    assert "host_one_shot" in text.line("98304")
    assert "at most 6 trials" in text.out
    assert not sweep.specs
    assert not (tmp_path / "user.db").exists()


# What is printed, and the exit code


def test_summary_names_winner_speed_up_and_place(sweep: Sweep, tmp_path: Path) -> None:
    sweep.result = outcome(result(), dropped=("one_shot",))
    ended = tune()
    for part in ("98304", "192 KiB", "eager", "4.00", "14.0", "3.50x", "17", "2 compile_error, 1 hung"):
        assert part in ended.line("lamport(num_blocks=8)")
    assert f"17 trials in 12 s, stored in {tmp_path / 'user.db'} (run 3)" in ended.out
    assert "one_shot" in ended.err
    assert "compiler" not in ended.out


def test_json_on_stdout_and_stderr(sweep: Sweep) -> None:
    compiled = replace(outcome().progress, num_compiled=7, bind_share=0.0625)
    sweep.result = outcome(result(), progress=compiled, compiled_ahead=100, compile_share=0.031)
    ended = tune("--json")
    found = ended.json
    assert (found["run_id"], found["problems"][0]["variant"], found["problems"][0]["speedup"]) == (3, "lamport", 3.5)
    assert (found["num_compiled"], found["bind_share"], found["compile_share"]) == (7, 0.0625, 0.031)
    events = [json.loads(line) for line in ended.err.splitlines()]
    assert {event["event"] for event in events} == {"note"}
    assert "7 trials had to wait for the compiler, 3.1% of the time; 6.2%" in tune().out


def test_a_problem_without_a_candidate_or_a_baseline_is_exit_code_1(sweep: Sweep) -> None:
    sweep.result = outcome(result(best=None, library_us=None))
    ended = tune()
    assert ended.code == 1
    assert "(none runs)" in ended.out
    assert str(PROBLEM) in ended.err
    crashed = best(variant="library", config={}, status="crashed", reason="planted", final=False)
    sweep.result = outcome(result(library_failure=crashed))
    ended = tune()
    assert ended.code == 1
    assert f"no baseline at {PROBLEM}" in ended.err


def test_gains_are_over_the_librarys_best_form_and_say_which(sweep: Sweep) -> None:
    sweep.result = outcome(result(in_place_us=6.0), result(problem=OTHER, in_place_us=15.0))
    first, second = (line.split() for line in tune().out.splitlines() if "lamport" in line)
    assert first[first.index("6.00") :][:4] == ["6.00", "in", "place", "1.50x"]
    assert second[second.index("14.0") :][:2] == ["14.0", "3.50x"]
    assert [one["in_place_us"] for one in json.loads(tune("--json").out)["problems"]] == [6.0, 15.0]


def test_the_library_is_compared_with_itself_in_one_form() -> None:
    library = best(variant="library", config={}, final=False)
    rows = [library, best(final=False)]
    assert summarise_problem(PROBLEM, rows, library.candidate, in_place_share=0.5).best_library_us == 4.0
    assert summarise_problem(PROBLEM, rows, rows[1].candidate, in_place_share=0.5).best_library_us == 7.0


def test_a_problem_that_the_library_wins_is_solved() -> None:
    """Also where dispatch takes a variant by rule of thumb, since `--variants` left it out."""
    unmeasured = Candidate.of("all_reduce", "host_one_shot", {})
    library = best(variant="library", config={}, final=False)
    result = summarise_problem(PROBLEM, [library, best(final=False)], unmeasured)
    assert (result.best, result.speedup) == (library, 1.0)


def test_a_problem_that_the_budget_did_not_reach_is_named_and_no_failure(sweep: Sweep) -> None:
    missing = result(problem=OTHER, best=None, library_us=None, num_trials=0, failures={}, reached=False)
    sweep.result = outcome(result(), missing)
    ended = tune()
    assert ended.code == 0
    assert "(not reached)" in ended.out
    assert str(OTHER) in ended.err
    assert [one["reached"] for one in json.loads(tune("--json").out)["problems"]] == [True, False]


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [(KeyboardInterrupt(), 130, "same command goes on"), (TuningError("gangs die"), 1, "TuningError: gangs die")],
)
def test_a_sweep_that_ends_early(sweep: Sweep, error: BaseException, code: int, part: str) -> None:
    sweep.result = error
    ended = tune()
    assert ended.code == code
    assert part in ended.err


def fate(variant: str = "lamport", *, num_ran: int = 0, infeasible: str = "", **failures: int) -> VariantSummary:
    firsts = tuple(
        best(variant=variant, status=cast("Status", status), reason=f"planted {status}", final=False)
        for status in failures
    )
    return VariantSummary(variant=variant, num_ran=num_ran, failures=failures, firsts=firsts, infeasible=infeasible)


@pytest.mark.parametrize(
    ("summaries", "options", "code", "said", "unsaid"),
    [
        ([fate(incorrect=4, compile_error=1)], "", 0, ["none of 5"], []),
        (
            [fate(incorrect=4, compile_error=1)],
            "--variants lamport --db my.db",
            1,
            ["none of 5", "planted incorrect", "planted compile_error", "--mode eager --db my.db"],
            [],
        ),
        ([fate(num_ran=1, incorrect=3)], "--variants lamport", 0, ["planted incorrect"], ["none of"]),
        ([fate(num_ran=1, incorrect=3)], "", 0, [], ["planted"]),
        ([fate(infeasible="needs NVLink")], "--variants lamport", 0, ["needs NVLink"], []),
        ([fate("multimem_one_shot", num_ran=1)], "--variants multimem_one_shot", 0, ['numerics="any"'], []),
        ([fate("spinning", num_ran=1)], "--variants spinning", 0, ["only when it is forced"], []),
        ([fate("spinning", num_ran=1)], "", 0, [], ["was measured"]),
        ([fate(num_ran=1)], "--variants lamport", 0, [], ["was measured", "--retry"]),
    ],
)
def test_what_became_of_variants_is_told(
    sweep: Sweep,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    summaries: list[VariantSummary],
    options: str,
    code: int,
    said: list[str],
    unsaid: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    spinning = replace(get_variant("all_reduce", "lamport"), name="spinning", waits_time_out=False)
    monkeypatch.setitem(spec._variants, ("all_reduce", "spinning"), spinning)
    sweep.result = outcome(result(), variants=tuple(summaries))
    ended = tune(options)
    assert ended.code == code
    assert [part for part in said if part not in ended.err] == []
    assert [part for part in unsaid if part in ended.err] == []
    assert [found["variant"] for found in tune(f"{options} --json").json["variants"]] == [summaries[0].variant]


def test_what_failed_before_is_not_tried_again(sweep: Sweep) -> None:
    for skipped, said in ((4, "4 candidates failed"), (1, "1 candidate failed")):
        sweep.result = outcome(result(), num_skipped=skipped)
        ended = tune()
        assert said in ended.err
        assert "--retry" in ended.err


def test_command_that_shows_all_is_one_that_db_show_takes(tmp_path: Path) -> None:
    path = record(tmp_path / "my.db", *fate(incorrect=1).firsts)
    ended = run(*shlex.split(show_command(PROBLEM, path))[1:])
    assert ended.code == 0
    assert "planted incorrect" in ended.out
    gather = Problem("all_gather", (64,), "bfloat16", 2, reduction="", input_kind="symmetric")
    assert show_command(gather, None).endswith("--mode graph --input-kind symmetric")
    assert show_command(replace(PROBLEM, reduction="max"), None).endswith("--mode eager --reduction max")


def test_summaries_count_the_last_trial_of_each_candidate() -> None:
    (failed,) = fate(incorrect=1).firsts
    mended = replace(failed, status="pruned", reason="")
    elsewhere = replace(failed, problem=OTHER, status="infeasible", reason="too small")
    (found,) = summarise_variants([failed, elsewhere])
    assert (found.num_ran, found.failures, found.is_broken, found.infeasible) == (0, {"incorrect": 1}, True, "")
    assert found.num_failed == 1
    (found,) = summarise_variants([failed, mended])
    assert (found.num_ran, found.failures, found.is_broken) == (1, {}, False)
    (found,) = summarise_variants([elsewhere])
    assert (found.is_broken, found.infeasible) == (False, "too small")


# Progress


def gang(problem: Problem | None, slot: int = 0) -> GangProgress:
    if problem is None:
        return GangProgress(slot=slot, phase="starting")
    candidate = Candidate.of("all_reduce", "lamport", {"num_blocks": 8})
    return GangProgress(slot=slot, phase="running", problem=problem, candidate=candidate, best_us=4.0, library_us=14.0)


def progress(*problems: Problem | None, **changes: Any) -> Progress:
    gangs = tuple(gang(problem, slot) for slot, problem in enumerate(problems))
    values = {"problems": 2, "problems_done": 0, "trials": 5, "failures": {"hung": 1}, "gangs": gangs, "elapsed_s": 1.0}
    return replace(outcome().progress, **{**values, **changes})


def viewed(progress: Progress) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(live_view(progress))
    return console.export_text()


def test_line_says_where_the_sweep_stands() -> None:
    text = describe(progress(PROBLEM, problems_done=1), gang(PROBLEM))
    for part in ("[1/2]", "98304", "best 4.00 µs", "library 14.0 µs", "3.50x", "5 trials", "1 hung"):
        assert part in text
    assert "starting" in describe(progress(None), gang(None))


def test_progress_says_what_is_waited_for_and_for_how_long() -> None:
    binding = replace(gang(PROBLEM), phase="binding", silent_s=60.2, patience_s=120.0)
    text = "waiting for lamport(num_blocks=8) to bind, 60 of 120 s"
    assert text in describe(progress(PROBLEM), binding)
    assert "waiting for" not in describe(progress(PROBLEM), replace(binding, silent_s=1.0))
    started = replace(gang(None), silent_s=7.0, patience_s=240.0)
    shown = viewed(progress(gangs=(binding, started)))
    assert text in shown
    assert "7 of 240 s" in shown


def test_plain_lines_one_a_problem_of_each_gang_and_life_in_a_long_search() -> None:
    left, other = replace(gang(OTHER), best_us=None, num_trials=8), replace(gang(PROBLEM, 1), best_us=3.0, num_trials=2)
    for steps, parts in (
        ([progress(OTHER), progress(PROBLEM, left=(left,))], ["nothing was timed, 8 trials; 5 trials in all"]),
        ([progress(OTHER, OTHER, left=(left, other))], ["512", "best 3.00 µs"]),
        ([progress(PROBLEM, elapsed_s=elapsed_s) for elapsed_s in (1.0, 29.0, 31.0, 40.0, 62.0)], ["98304"] * 2),
    ):
        written: list[str] = []
        lines = PlainLines(written.append)
        for step in steps:
            lines(step)
        assert len(written) == len(parts)
        assert all(part in line for part, line in zip(parts, written, strict=True))


def test_json_lines_once_a_second_and_at_the_end() -> None:
    written: list[str] = []
    lines = JsonLines(written.append)
    for elapsed_s in (0.0, 0.3, 0.9, 1.1, 1.4):
        lines(progress(PROBLEM, None, elapsed_s=elapsed_s, seconds_left=20.0, num_compiled=2, bind_share=0.125))
    lines.finish()
    events = [json.loads(line) for line in written]
    assert [(e["event"], e["elapsed_s"]) for e in events] == [("progress", 0.0), ("progress", 1.1), ("end", 1.4)]
    event = events[1]
    assert (event["num_compiled"], event["bind_share"], event["seconds_left"]) == (2, 0.125, 20.0)
    assert event["trials_per_minute"] == 272.7
    found = [(g["slot"], g["step"], g["best_us"]) for g in event["gangs"]]
    assert found == [(0, "running", 4.0), (1, "starting", None)]
    assert Problem.from_dict(event["gangs"][0]["problem"]) == PROBLEM


def test_live_view_has_a_line_a_gang() -> None:
    text = viewed(progress(PROBLEM, None, problems_done=1, elapsed_s=60.0, seconds_left=3700.0))
    for part in ("1/2 problems", "5 trials, 5/min", "1:00, about 1:01:40 left", "failed: 1 hung", "gang 1: starting"):
        assert part in text
    (line,) = [line for line in text.splitlines() if line.startswith("gang 0")]
    assert "98304" in line
    assert "(3.50x); running lamport(num_blocks=8)" in line


# From misses


def miss(problem: Problem, count: int = 1, environment: Environment | None = None) -> Miss:
    key = (environment or detect(None)).hard_key
    return Miss(problem=problem, hard_key=key, count=count, source="library", last_seen=START)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "misses.jsonl"
    append(path, [miss(OTHER, 3), miss(PROBLEM, 900)])
    return path


def from_misses(options: str = "") -> Ended:
    return run("tune", "--from-misses", *options.split())


def tuned(variant: str, **changes: Any) -> Trial:
    return real_trial(variant, 5.0, **{"environment": detect(None), "problem": PROBLEM, **changes})


def test_what_was_missed_is_tuned_most_called_first(sweep: Sweep, log: Path, tmp_path: Path) -> None:
    ended = from_misses("--budget 10m --trials 5 --variants lamport --seed 3 --retry")
    assert ended.code == 0, ended.err
    (spec,) = sweep.specs
    assert spec.problems == (PROBLEM, OTHER)
    assert (spec.op, spec.settings.world_size, spec.budget_s) == ("all_reduce", 2, 600.0)
    assert (spec.settings.trials, spec.settings.seed, spec.settings.retry) == (5, 3, True)
    assert (spec.settings.variants, sweep.path) == (("lamport",), tmp_path / "user.db")
    assert f"900 calls  {PROBLEM}" in ended.err


def test_thousands_of_misses_are_not_all_printed(sweep: Sweep, log: Path) -> None:
    append(log, [miss(replace(PROBLEM, shape=(1024 + number,))) for number in range(50)])
    problems = [replace(PROBLEM, shape=(number,)) for number in range(1, 53)]
    sweep.result = outcome(result(), *(result(problem=one, best=None, reached=False) for one in problems))
    for ended in (from_misses(), from_misses("--dry-run")):
        assert ended.code == 0
        assert len(ended.out.splitlines()) < 30
        assert "more" in ended.line("… and 3")
    assert len(json.loads(from_misses("--dry-run --json").out)["problems"]) == 52


def test_misses_of_several_ops_are_one_sweep_within_one_budget(sweep: Sweep, log: Path) -> None:
    """A sweep for each op would start its processes anew, and the budget would not count that."""
    other = replace(PROBLEM, op="all_gather", reduction="")
    append(log, [miss(other, 1000)])
    sweep.result = outcome(result(), result(problem=other))
    ended = from_misses("--budget 10s")
    assert ended.code == 0, ended.err
    (spec,) = sweep.specs
    assert (spec.problems, spec.budget_s) == ((other, PROBLEM, OTHER), 10.0)
    for op in ("all_gather, 2 ranks", "all_reduce, 2 ranks"):
        assert op in ended.out
    assert ended.out.count("trials in") == 1


def test_what_is_tuned_by_now_is_left_alone_and_out_of_the_log(sweep: Sweep, log: Path, tmp_path: Path) -> None:
    record(tmp_path / "user.db", tuned("lamport"), tuned("library"))
    assert from_misses().code == 0
    assert [spec.problems for spec in sweep.specs] == [(OTHER,)]
    assert [m.problem for m in read(log)[0]] == [OTHER]


@pytest.mark.parametrize(
    "changes",
    [{"final": False}, {"source_hash": "0123456789abcdef"}, {"environment": H200}],
    ids=["sweep not ended", "another kernel", "other hardware"],
)
def test_what_is_half_tuned_is_taken_again(sweep: Sweep, log: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    record(tmp_path / "user.db", tuned("lamport", **changes), tuned("library", **changes))
    from_misses()
    assert sweep.specs[0].problems == (PROBLEM, OTHER)


def test_pinned_problems_are_left_alone(sweep: Sweep, log: Path, tmp_path: Path) -> None:
    with Database.open(tmp_path / "user.db", create=True) as database:
        database.pin(PROBLEM, Candidate.of("all_reduce", "library", {}), environment=detect(None), reason="")
    from_misses()
    assert sweep.specs[0].problems == (OTHER,)


def test_gpus_are_asked_for_their_own_misses(
    sweep: Sweep, log: Path, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, [miss(replace(PROBLEM, shape=(1026,), mode="graph", world_size=4), 7, H200)])
    gpus[0] = 4
    monkeypatch.setattr("tunedcomm.tuner.machine._DETECT", f"print({json.dumps(H200.to_dict())!r})")
    assert from_misses().code == 0
    assert [p.shape for p in sweep.specs[0].problems] == [(1026,)]
    from_misses("--backend host")
    assert sweep.specs[1].problems == (PROBLEM, OTHER)
    monkeypatch.setattr("tunedcomm.tuner.machine._DETECT", "raise RuntimeError('no driver')")
    assert "no driver" in from_misses().err


def test_what_no_kernel_can_run_is_left_alone(sweep: Sweep, log: Path) -> None:
    """Calls count what they missed unasked."""
    append(log, [miss(replace(PROBLEM, **changes), 1000) for changes in ({"dtype": "int64"}, {"shape": (0,)})])
    assert from_misses().code == 0
    assert sweep.specs[0].problems == (PROBLEM, OTHER)


@pytest.mark.parametrize("made", [True, False], ids=["all tuned", "no log"])
def test_nothing_to_do(sweep: Sweep, log: Path, tmp_path: Path, made: bool) -> None:
    if made:
        record(tmp_path / "user.db", tuned("lamport"), tuned("lamport", problem=OTHER))
    else:
        log.unlink()
    ended = from_misses()
    assert (ended.code, ended.out, sweep.specs) == (0, "", [])
    assert "nothing to do" in ended.err
    assert from_misses("--json").json == []


def test_an_op_limits_misses_and_must_exist(sweep: Sweep, log: Path) -> None:
    assert from_misses("--op all_reduce").code == 0
    assert "'all_reduce'" in refused("tune", "--from-misses", "--op", "all_reduse")
    assert len(sweep.specs) == 1


def test_a_log_that_cannot_be_read_is_bad_usage(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "misses.jsonl").mkdir()
    assert "TUNEDCOMM_MISS_LOG" in refused("tune", "--from-misses")
