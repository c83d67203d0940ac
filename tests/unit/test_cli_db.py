from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunedcomm.cli import main
from tunedcomm.cli.stored import winner
from tunedcomm.cli.tune import show_command
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.spec import Problem

H200 = Environment(
    gpu="NVIDIA H200",
    num_sms=132,
    compute_capability=90,
    memory_gib=140,
    fabric="nvswitch-18",
    num_links=18,
    multicast=False,
    nodes=1,
    driver="570.1",
    cuda="12.8",
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.9",
    tunedcomm="0.1.0",
)
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


def test_winner_is_the_fastest_beside_the_library_of_its_run() -> None:
    busy = dataclasses.replace(trial("lamport", 9.0, final=True), baseline_p50_us=18.0)
    idle = dataclasses.replace(trial("two_shot", 5.0, final=True), baseline_p50_us=6.0)
    alone = dataclasses.replace(trial("library", 4.0, final=True), config={}, baseline_p50_us=None)
    assert winner([idle, busy, alone]) is busy
    assert winner([dataclasses.replace(busy, baseline_p50_us=6.0), alone]) is alone
    assert winner([dataclasses.replace(idle, baseline_p50_us=None), busy]).latency_p50_us == 5.0  # type: ignore[union-attr]


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
    for part in ("98304", "192 KiB", "bfloat16", "graph", "num_blocks=8", "4.00", "14.00", "3.50x"):
        assert part in line


def test_list_by_hardware(stored: str) -> None:
    for hardware in ("h200", H200.digest[:8]):
        _, text = invoke("db", "list", "--db", stored, "--hardware", hardware)
        assert "H200" in text
        assert "A100" not in text


def test_list_as_json(stored: str) -> None:
    code, text = invoke("db", "list", "--db", stored, "--json")
    assert code == 0
    entries = {entry["environment"]["gpu"]: entry for entry in json.loads(text)}
    assert entries["NVIDIA H200"]["trials"] == 5
    assert entries["NVIDIA H200"]["winner"]["variant"] == "lamport"
    assert entries["NVIDIA H200"]["problem"] == PROBLEM.to_dict()


def test_list_of_nothing_says_so(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    with Database.open(path, create=True):
        pass
    code, text = invoke("db", "list", "--db", str(path))
    assert code == 0
    assert "tunedcomm tune" in text


def test_list_reads_every_layer(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", stored)
    _, text = invoke("db", "list", "--hardware", "A100")
    assert "site database" in text


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


def test_show_prints_either_mode_unless_one_is_asked_for(stored: str) -> None:
    eager = dataclasses.replace(PROBLEM, mode="eager")
    with Database.open(stored) as database:
        database.record([trial("lamport", 7.0, problem=eager)])
    for more, modes in (((), {"graph", "eager"}), (("--mode", "eager"), {"eager"}), (("--mode", "graph"), {"graph"})):
        code, text = show(stored, "--json", *more)
        assert code == 0
        assert {entry["problem"]["mode"] for entry in json.loads(text)} == modes


def test_show_as_json(stored: str) -> None:
    _, text = show(stored, "--json")
    trials = json.loads(text)
    assert len(trials) == 6
    assert {entry["gpu"] for entry in trials} == {"NVIDIA H200", "NVIDIA A100"}
    assert trials[0]["config"] == {"num_blocks": 8, "num_warps": 4}


def test_show_limit(stored: str) -> None:
    code, text = show(stored, "--limit", "1")
    assert code == 0
    assert text.count("num_blocks=8") == 2  # one a table, one table an environment


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


def test_show_names_the_nearest_problems_of_a_shape_first(tmp_path: Path) -> None:
    path = tmp_path / "several.db"
    others = [
        dataclasses.replace(PROBLEM, world_size=2, dtype="float32", mode="eager"),
        dataclasses.replace(PROBLEM, dtype="float16", in_place=True, mode="eager"),
        dataclasses.replace(PROBLEM, dtype="float32", mode="eager"),
        dataclasses.replace(PROBLEM, dtype="float32", mode="graph"),
        dataclasses.replace(PROBLEM, shape=(98305,)),
    ]
    with Database.open(path, create=True) as database:
        database.record([trial("library", 9.0, problem=problem) for problem in others])
    said = told_instead(str(path))
    ways = ("pass --dtype float32", "pass --dtype float16 --in-place", "pass --dtype float32 --world-size 2")
    assert f"database: {' or '.join(ways)}; `tunedcomm db list`" in said


def test_show_names_a_nearest_shape_of_both_modes_once(tmp_path: Path) -> None:
    path = tmp_path / "both.db"
    shapes = [(1024,), (2048,), (4096,), (1 << 20,)]
    every = [dataclasses.replace(PROBLEM, shape=shape, mode=mode) for shape in shapes for mode in ("graph", "eager")]
    with Database.open(path, create=True) as database:
        database.record([trial("library", 9.0, problem=problem) for problem in every])
    assert "in either mode is stored; the nearest shapes stored are 1048576, 4096, 2048;" in told_instead(str(path))
    assert "eager is stored; the nearest shapes stored are 1048576" in told_instead(str(path), "--mode", "eager")


def test_show_command_names_the_whole_problem(tmp_path: Path) -> None:
    """Of a fused GEMM in a layout that is not the default one, and of a call in place."""
    fp8 = Problem("gemm_rs", (4096, 8192, 3584), "float8_e4m3fn", 4, reduction="sum", layout="kn", scaling="tensorwise")
    in_place = dataclasses.replace(PROBLEM, in_place=True, mode="eager")
    path = tmp_path / "several.db"
    with Database.open(path, create=True) as database:
        database.record([trial("library", 9.0, problem=problem) for problem in (fp8, in_place, PROBLEM)])
    for problem in (fp8, in_place, PROBLEM):
        code, text = invoke(*shlex.split(show_command(problem, str(path)))[1:], "--json")
        assert code == 0, text
        assert [entry["problem"] for entry in json.loads(text)] == [problem.to_dict()]
