from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from db_samples import H200
from typer.testing import CliRunner

from tunedcomm.cli import main
from tunedcomm.cli.stored import winner
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.spec import Problem

A100 = dataclasses.replace(H200, gpu="NVIDIA A100", num_sms=108, compute_capability=80)
PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 4)


def trial(variant: str, latency_us: float | None, *, final: bool = False, **changes: object) -> Trial:
    values = {
        "problem": PROBLEM,
        "environment": H200,
        "variant": variant,
        "numerics": "library" if variant == "library" else "ordered",
        "source_hash": "0123456789abcdef",
        "config": {} if variant == "library" else {"num_blocks": 8, "num_warps": 4},
        "status": "ok",
        "latency_p10_us": latency_us,
        "latency_p50_us": latency_us,
        "latency_p90_us": latency_us,
        "samples": 100,
        "baseline_p50_us": 14.0,
        "error": 1e-3,
        "final": final,
        **changes,
    }
    return Trial(**values)  # type: ignore[arg-type]


HUNG = {"status": "hung", "reason": "no sign of life for 30 s", "samples": 0, "baseline_p50_us": None, "error": None}


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A database with one problem on H200 and one on A100."""
    path = tmp_path / "stored.db"
    with Database.open(path, create=True) as database:
        database.record(
            [
                trial("library", 14.0),
                trial("lamport", 3.5),
                trial("lamport", 4.0, final=True),
                trial("two_shot", 5.0, final=True),
                trial("one_shot", None, **HUNG),
                trial("two_shot", 9.0, environment=A100),
            ]
        )
    return str(path)


def invoke(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main.app, list(arguments))
    return shown.exit_code, shown.stdout


def show(stored: str, *more: str) -> tuple[int, str]:
    problem = ("--op", "all_reduce", "--shape", "98304", "--world-size", "4")
    return invoke("db", "show", *problem, "--db", stored, *more)


def test_winner_is_the_fastest_of_the_finals() -> None:
    trials = [trial("lamport", 3.5), trial("lamport", 4.0, final=True), trial("two_shot", 5.0, final=True)]
    best = winner(trials)
    assert best is not None
    assert (best.variant, best.latency_p50_us) == ("lamport", 4.0)
    assert winner(trials[:1]) is trials[0]
    assert winner([trial("one_shot", None, **HUNG)]) is None


def test_list_marks_what_autotune_made(stored: str) -> None:
    assert "autotune" not in invoke("db", "list", "--db", stored)[1]
    with Database.open(stored) as database:
        run = database.start_run(command="tunedcomm.autotune(budget_s=3)", seed=0, budget="", host="here")
        database.record([trial("lamport", 2.0, environment=A100, run_id=run)])
    code, text = invoke("db", "list", "--db", stored)
    assert code == 0
    assert text.count("autotune") == 1


def test_list_groups_by_environment(stored: str) -> None:
    code, text = invoke("db", "list", "--db", stored)
    assert code == 0
    assert "NVIDIA H200" in text
    assert "NVIDIA A100" in text
    line = next(line for line in text.splitlines() if "lamport" in line)
    for part in ("98304", "192 KiB", "bfloat16", "graph", "num_blocks=8", "4.00", "14.0", "3.50x"):
        assert part in line


def test_a_damaged_layer_is_skipped_and_named(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database at all " * 100)
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", f"{damaged}:{stored}")
    shown = CliRunner().invoke(main.app, ["db", "list"])
    assert shown.exit_code == 0
    assert "H200" in shown.stdout
    assert str(damaged) in shown.stderr


def test_show_prints_every_trial_fastest_first(stored: str) -> None:
    code, text = show(stored, "--hardware", "H200")
    assert code == 0
    lines = [line for line in text.splitlines() if "num_blocks" in line or "library()" in line]
    assert ["lamport" in line for line in lines] == [True, True, False, False, False]
    assert "no sign of life for 30 s" in lines[-1]
    assert "hung" in lines[-1]


def test_show_of_an_unknown_problem_is_exit_code_1(stored: str) -> None:
    code, text = show(stored, "--mode", "eager", "--json")
    assert code == 1
    assert json.loads(text) == []


def told_instead(path: str, *more: str) -> str:
    shown = CliRunner().invoke(
        main.app, ["db", "show", "--op", "all_reduce", "--shape", "98304", "--world-size", "4", *more, "--db", path]
    )
    assert shown.exit_code == 1
    return " ".join(shown.stderr.split())


def test_show_says_what_to_pass_where_the_shape_is_stored_otherwise(stored: str) -> None:
    said = told_instead(stored, "--dtype", "float32")
    assert "no trial of all_reduce 98304 float32 world_size=4 in either mode is stored; 98304 is stored in" in said
    assert "database: pass --dtype bfloat16; `tunedcomm db list`" in said
    said = told_instead(stored, "--mode", "eager")
    assert "world_size=4 eager is stored" in said
    assert "pass --mode graph; `tunedcomm db list`" in said
    said = told_instead(stored, "--in-place", "--reduction", "avg")
    assert "in either mode (avg, in place) is stored" in said
    assert "pass --reduction sum and leave out --in-place;" in said
    assert "database: leave out --in-place;" in told_instead(stored, "--in-place")
