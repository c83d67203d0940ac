"""`lookup` and `explain` answer for stored hardware on a machine that has none of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.hardware import Environment
from tunedcomm.spec import Problem, get_variant

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
A100 = dataclasses.replace(H200, gpu="NVIDIA A100", num_sms=108, compute_capability=80, fabric="nvswitch-12")
PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 4)
ASK = ("--op", "all_reduce", "--shape", "98304", "--dtype", "bfloat16", "--world-size", "4")


def trial(variant_name: str, latency_us: float, environment: Environment = H200, **changes: Any) -> Trial:
    kernels.discover()
    variant = get_variant("all_reduce", variant_name)
    values: dict[str, Any] = {
        "problem": PROBLEM,
        "environment": environment,
        "variant": variant.name,
        "numerics": variant.numerics,
        "source_hash": kernels.source_hash(variant),
        "config": variant.default(PROBLEM, limits_for(environment, 4)),
        "status": "ok",
        "latency_p10_us": latency_us * 0.99,
        "latency_p50_us": latency_us,
        "latency_p90_us": latency_us * 1.01,
        "samples": 100,
        "baseline_p50_us": 14.0,
        "error": 1e-3,
        "final": True,
        **changes,
    }
    return Trial(**values)


def store(path: Path, trials: Sequence[Trial]) -> str:
    with Database.open(path, create=True) as database:
        database.record(trials)
    return str(path)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    slow = trial("two_shot_lamport", 30.0, status="pruned", reason="30 µs at first look", final=False)
    trials = [trial("library", 14.0), trial("lamport", 4.0), trial("two_shot", 7.0), slow]
    return store(tmp_path / "stored.db", trials)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main.app, list(arguments))


def test_lookup_is_one_line(stored: str) -> None:
    shown = invoke("lookup", *ASK, "--hardware", "H200", "--db", stored)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("lamport(")
    assert shown.stdout.count("\n") == 1


def test_explain_says_on_what_evidence(stored: str) -> None:
    shown = invoke("explain", *ASK, "--hardware", "h200", "--db", stored)
    assert shown.exit_code == 0, shown.output
    for part in ("NVIDIA H200, 132 SMs", "lamport(", "exact", "trial 2", "4.00 µs", "14.0 µs", "3.50x", "two_shot("):
        assert part in shown.stdout


def test_explain_says_where_the_mode_makes_a_call_raise(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_MODE", "force")
    said = "with TUNEDCOMM_MODE=force a call raises InfeasibleError"
    assert said not in invoke("explain", *ASK, "--hardware", "H200", "--db", stored).stdout
    other = ("--op", "all_to_all", "--shape", "98304", "--world-size", "4")
    assert said in invoke("explain", *other, "--hardware", "H200", "--db", stored).stdout


def test_explain_says_why_others_were_passed_over(stored: str) -> None:
    """With --all; but no variant that never runs on that machine."""
    asked = ("explain", *ASK, "--hardware", "H200", "--db", stored)
    few, told = (
        invoke(*asked).stdout.splitlines(),
        dict(str.split(line, maxsplit=1) for line in invoke(*asked, "--all").stdout.splitlines()[3:]),
    )
    assert len(few) == 4
    assert "--all" in few[3]
    assert "14.0 µs" in told["library"]
    assert "pruned" in told["two_shot_lamport"]
    assert "no trial" in told["one_shot"]
    assert {"multimem_two_shot", "torch_one_shot", "host_one_shot"}.isdisjoint(told)


def test_json_of_both_is_the_same(stored: str) -> None:
    answers = [
        json.loads(invoke(verb, *ASK, "--hardware", H200.digest[:10], "--db", stored, "--json").stdout)
        for verb in ("lookup", "explain")
    ]
    assert answers[0] == answers[1]
    assert answers[0]["variant"] == "lamport"
    assert answers[0]["source"] == "exact"
    assert answers[0]["asked_for"]["gpu"] == "NVIDIA H200"
    assert Problem.from_dict(answers[0]["problem"]) == PROBLEM


def test_every_layer_is_searched_for_the_hardware(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", stored)
    answer = json.loads(invoke("explain", *ASK, "--hardware", H200.digest[:10], "--json").stdout)
    assert answer["variant"] == "lamport"
    assert answer["layer"] == "site"


def test_unknown_hardware_names_what_is_stored(stored: str) -> None:
    shown = invoke("lookup", *ASK, "--hardware", "B200", "--db", stored)
    assert "NVIDIA H200" in str(shown.exception)
    assert "'B200'" in str(shown.exception)


def test_ambiguous_hardware_asks_for_a_digest(tmp_path: Path) -> None:
    both = store(tmp_path / "both.db", [trial("lamport", 4.0), trial("two_shot", 9.0, A100)])
    shown = invoke("lookup", *ASK, "--hardware", "NVIDIA", "--db", both)
    assert H200.digest[:8] in str(shown.exception)
    assert A100.digest[:8] in str(shown.exception)
    assert invoke("lookup", *ASK, "--hardware", A100.digest[:8], "--db", both).stdout.startswith("two_shot(")


def test_hardware_without_rows_for_the_world_size_does_not_count(tmp_path: Path) -> None:
    other = dataclasses.replace(PROBLEM, world_size=2)
    both = store(tmp_path / "both.db", [trial("lamport", 4.0), trial("two_shot", 9.0, A100, problem=other)])
    assert invoke("lookup", *ASK, "--hardware", "NVIDIA", "--db", both).stdout.startswith("lamport(")


@pytest.mark.parametrize("verb", ["explain", "lookup"])
def test_calls_in_place_can_be_asked_about(tmp_path: Path, verb: str) -> None:
    in_place = dataclasses.replace(PROBLEM, in_place=True)
    trials = [trial("lamport", 4.0), trial("two_shot", 4.0, problem=in_place), trial("library", 14.0, problem=in_place)]
    asked = (verb, *ASK, "--hardware", "H200", "--db", store(tmp_path / "tuned.db", trials), "--json")
    for option, variant in (((), "lamport"), (("--in-place",), "two_shot")):
        shown = invoke(*asked, *option)
        told = json.loads(shown.stdout)
        assert (shown.exit_code, told["source"], told["variant"]) == (0, "exact", variant)


def test_the_only_stored_dtype_is_meant(tmp_path: Path) -> None:
    half = dataclasses.replace(PROBLEM, dtype="float16")
    other = dataclasses.replace(PROBLEM, world_size=2)
    path = store(tmp_path / "half.db", [trial("lamport", 4.0, problem=half), trial("lamport", 4.0, problem=other)])
    asked = ("lookup", "--op", "all_reduce", "--shape", "98304", "--world-size", "4", "--hardware", "H200", "--json")
    for db, more, dtype in ((path, (), "float16"), (path, ("--dtype", "float32"), "float32")):
        assert json.loads(invoke(*asked, "--db", db, *more).stdout)["problem"]["dtype"] == dtype
    store(Path(path), [trial("lamport", 4.0)])
    assert json.loads(invoke(*asked, "--db", path).stdout)["problem"]["dtype"] == "bfloat16"


def test_other_software_is_said(tmp_path: Path) -> None:
    newer = dataclasses.replace(H200, torch="2.13.0")
    path = store(tmp_path / "drift.db", [trial("library", 14.0), trial("lamport", 4.0), trial("library", 14.0, newer)])
    shown = invoke("explain", *ASK, "--hardware", newer.digest, "--db", path)
    assert "torch 2.11.0 → 2.13.0" in shown.stdout


def test_rows_of_an_older_kernel_are_not_used(tmp_path: Path) -> None:
    trials = [trial("library", 14.0), trial("lamport", 4.0, source_hash="0123456789abcdef")]
    shown = invoke("lookup", *ASK, "--hardware", "H200", "--db", store(tmp_path / "old.db", trials))
    assert shown.stdout == "library()\n"


def test_numerics_policy_narrows(tmp_path: Path) -> None:
    trials = [trial("library", 3.0, baseline_p50_us=3.0), trial("lamport", 4.0, baseline_p50_us=3.0)]
    path = store(tmp_path / "narrow.db", trials)
    assert invoke("lookup", *ASK, "--hardware", "H200", "--db", path).stdout == "library()\n"
    ordered = invoke("lookup", *ASK, "--hardware", "H200", "--db", path, "--numerics", "ordered")
    assert ordered.stdout.startswith("lamport(")


def test_override_is_said(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "two_shot")
    answer = json.loads(invoke("explain", *ASK, "--hardware", "H200", "--db", stored, "--json").stdout)
    assert answer["source"] == "forced"
    assert answer["variant"] == "two_shot"


def test_without_gpus_and_hardware_the_host_is_asked(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = invoke("explain", *ASK, "--db", stored)
    assert shown.exit_code == 0
    assert "host backend" in shown.stdout
    assert "--hardware" in shown.stderr
    assert "host_one_shot(" in shown.stdout.splitlines()[1]


def test_stored_trials_that_decided_nothing_show_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [
        trial("library", 14.0),
        trial("lamport", 4.0),
        trial("lamport", 4.5),
        trial("lamport", 5.0, status="pruned", final=False),
        trial("one_shot", 5.0, status="crashed", final=False),
    ]
    path = store(tmp_path / "tried.db", trials)
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "two_shot")
    left_out = dict(
        json.loads(invoke("explain", *ASK, "--hardware", "H200", "--db", path, "--json").stdout)["left_out"]
    )
    assert left_out["lamport"] == "4.00 µs at best where it was tried"
    assert left_out["one_shot"] == "crashed"
    assert "ok" not in left_out.values()


@pytest.mark.parametrize("verb", ["lookup", "explain"])
def test_without_graphs_it_is_calls_that_are_meant(tmp_path: Path, verb: str) -> None:
    """As `tune` measures them on the host backend."""
    host = dataclasses.replace(
        H200, gpu="host-x86_64", num_sms=1, compute_capability=0, fabric="host", num_links=0, memory_gib=0
    )
    assert host.is_host
    eager = dataclasses.replace(PROBLEM, mode="eager")
    trials = [trial("library", 14.0, host, problem=eager), trial("library", 14.0)]
    path = store(tmp_path / "both.db", trials)
    for hardware, more, mode in (
        ("host", (), "eager"),
        ("host", ("--mode", "graph"), "graph"),
        ("H200", (), "graph"),
        ("H200", ("--mode", "eager"), "eager"),
    ):
        found = json.loads(invoke(verb, *ASK, "--hardware", hardware, "--db", path, *more, "--json").stdout)
        assert found["problem"]["mode"] == mode, (hardware, more)
