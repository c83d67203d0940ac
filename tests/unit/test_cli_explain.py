"""`lookup` and `explain` answer for stored hardware on a machine that has none of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import PROBLEM, Ended, asked, real_trial, record, refused, run
from db_samples import H200

from tunedcomm.cli.explain import decide_offline
from tunedcomm.cli.options import CallOptions
from tunedcomm.db.records import Trial
from tunedcomm.spec import Problem

A100 = replace(H200, gpu="NVIDIA A100", num_sms=108, compute_capability=80, fabric="nvswitch-12")
ASK = asked(PROBLEM)
ON_H200 = ("--hardware", "H200")
LIBRARY, LAMPORT = real_trial("library", 14.0), real_trial("lamport", 4.0)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    slow = real_trial("two_shot_lamport", 30.0, status="pruned", reason="30 µs at first look", final=False)
    return record(tmp_path / "stored.db", LIBRARY, LAMPORT, real_trial("two_shot", 7.0), slow)


@pytest.fixture
def lookup(tmp_path: Path) -> Any:
    """A function that looks the problem up in a database of given trials."""

    def found(trials: list[Trial], *options: str) -> Any:
        path = tmp_path / "lookup.db"
        path.unlink(missing_ok=True)
        return run("explain", *ASK, *options, "--db", record(path, *trials), "--json").json

    return found


def explain(stored: str, *options: str) -> Ended:
    usual = (*ASK, *ON_H200, "--db", stored)
    kept = [word for index, word in enumerate(usual) if usual[index - index % 2] not in options]
    ended = run("explain", *kept, *options)
    assert ended.code == 0, ended
    return ended


def test_lookup_is_one_line(stored: str) -> None:
    shown = run("lookup", *ASK, *ON_H200, "--db", stored)
    assert shown.code == 0
    assert shown.out.startswith("lamport(")
    assert shown.out.count("\n") == 1


def test_explain_says_on_what_evidence(stored: str) -> None:
    text = explain(stored).out
    for part in ("NVIDIA H200, 132 SMs", "lamport(", "exact", "trial 2", "4.00 µs", "14.0 µs", "3.50x", "two_shot("):
        assert part in text
    assert "tunedcomm.kernels.all_reduce.lamport" in text


def test_explain_says_what_a_wire_costs(tmp_path: Path) -> None:
    """In accuracy, beside the time; nothing where the library runs."""
    wire, path = ("--scaling", "fp8_group128"), tmp_path / "wires.db"
    assert "nothing is quantised" in explain(record(path, LIBRARY), *wire).out
    assert "quantised" not in explain(str(path)).out
    problem = replace(PROBLEM, scaling="fp8_group128")
    record(
        path, *(real_trial(name, us, problem=problem) for name, us in (("library", 14.0), ("one_shot_quantized", 4.0)))
    )
    assert "is 2.6%, and 3.6% from two_shot_quantized" in explain(str(path), *wire).out


def test_explain_says_where_the_mode_makes_a_call_raise(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_MODE", "force")
    assert "InfeasibleError" not in explain(stored).out
    assert "InfeasibleError" in explain(stored, "--op", "all_to_all").out


def test_lookup_refuses_what_a_call_refuses(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mode `off`, where the policy leaves out the library."""
    monkeypatch.setenv("TUNEDCOMM_MODE", "off")
    asked = ("lookup", *ASK, *ON_H200, "--db", stored)
    assert run(*asked).out.startswith("library")
    refused = run(*asked, "--numerics", "ordered")
    assert refused.code != 0
    assert "TUNEDCOMM_MODE=off" in refused.err


def test_explain_says_what_the_same_bits_cost(tmp_path: Path) -> None:
    """Where an ordered variant is measured, and something else runs."""
    times = {"library": 3.0, "lamport": 4.0, "two_shot": 7.0}
    stored = record(tmp_path / "near.db", *(real_trial(name, us, baseline_p50_us=3.0) for name, us in times.items()))
    (line,) = (line for line in explain(stored).out.splitlines() if line.split()[0] == "ordered")
    assert line.split()[1].startswith("lamport(")
    assert line.endswith("4.00 µs, +33%")
    for policy, variant, ordered_us in (("default", "library", 4.0), ("ordered", "lamport", None)):
        answer = explain(stored, "--json", "--numerics", policy).json
        assert (answer["variant"], answer["ordered_us"]) == (variant, ordered_us)
        assert (answer["ordered"] is None) == (ordered_us is None)


def test_explain_says_why_others_were_passed_over(stored: str) -> None:
    """With --all; but no variant that never runs on that machine."""
    few = explain(stored).out.splitlines()
    assert len(few) == 5
    assert "--all" in few[4]
    told = dict(line.split(maxsplit=1) for line in explain(stored, "--all").out.splitlines()[4:])
    assert "14.0 µs" in told["library"]
    assert "pruned" in told["two_shot_lamport"]
    assert "no trial" in told["one_shot"]
    assert {"multimem_two_shot", "host_one_shot"}.isdisjoint(told)


def test_json_of_lookup_is_short_and_every_layer_is_searched(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", stored)
    short, long = (run(verb, *ASK, "--hardware", H200.digest[:10], "--json").json for verb in ("lookup", "explain"))
    assert list(short) == ["variant", "config", "source", "latency_us", "library_us"]
    assert short == {name: long[name] for name in short}
    names = ("variant", "source", "layer")
    assert {name: long[name] for name in names} == {"variant": "lamport", "source": "exact", "layer": "site"}
    assert long["asked_for"]["gpu"] == "NVIDIA H200"
    assert Problem.from_dict(long["problem"]) == PROBLEM
    assert {"candidate", "reason"} == set(long["passed_over"][0])
    assert {"variant", "reason"} == set(long["left_out"][0])


def test_a_printed_decision_reads_as_the_command_prints_it(stored: str) -> None:
    options = CallOptions(op="all_reduce", shape=ASK[3], world_size=4, hardware="H200", db=stored)
    assert explain(stored).out.splitlines()[:-1] == str(decide_offline(options)).splitlines()


def test_hardware_that_is_unknown_or_ambiguous(stored: str) -> None:
    assert "NVIDIA H200" in refused("lookup", *ASK, "--hardware", "B200", "--db", stored)
    record(Path(stored), real_trial("two_shot", 9.0, A100))
    said = refused("lookup", *ASK, "--hardware", "NVIDIA", "--db", stored)
    assert H200.digest[:8] in said
    assert A100.digest[:8] in said
    assert run("lookup", *ASK, "--hardware", A100.digest[:8], "--db", stored).out.startswith("two_shot(")


def test_hardware_without_rows_for_the_world_size_does_not_count(lookup: Any) -> None:
    elsewhere = real_trial("two_shot", 9.0, A100, problem=replace(PROBLEM, world_size=2))
    assert lookup([LAMPORT, elsewhere], "--hardware", "NVIDIA")["variant"] == "lamport"


def test_calls_in_place_can_be_asked_about(lookup: Any) -> None:
    here = {"problem": replace(PROBLEM, in_place=True)}
    trials = [LAMPORT, real_trial("two_shot", 4.0, **here), real_trial("library", 14.0, **here)]
    for option, variant in (((), "lamport"), (("--in-place",), "two_shot")):
        told = lookup(trials, *ON_H200, *option)
        assert (told["source"], told["variant"]) == ("exact", variant)


def test_the_only_stored_dtype_is_meant(lookup: Any) -> None:
    half = real_trial("lamport", 4.0, problem=replace(PROBLEM, dtype="float16"))
    trials = [half, real_trial("lamport", 4.0, problem=replace(PROBLEM, world_size=2))]
    for found, options, dtype in (
        (trials, (), "float16"),
        (trials, ("--dtype", "float32"), "float32"),
        ([*trials, LAMPORT], (), "bfloat16"),
    ):
        assert lookup(found, *ON_H200, *options)["problem"]["dtype"] == dtype


def test_other_software_is_said(tmp_path: Path) -> None:
    newer = replace(H200, torch="2.13.0")
    path = record(tmp_path / "drift.db", LIBRARY, LAMPORT, real_trial("library", 14.0, newer))
    assert "torch 2.11.0 → 2.13.0" in explain(path, "--hardware", newer.digest).out


def test_without_gpus_and_hardware_the_host_is_asked(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = run("explain", *ASK, "--db", stored)
    assert shown.code == 0
    assert "--hardware" in shown.err
    assert "host_one_shot(" in shown.out.splitlines()[1]


def test_an_override_is_named_and_trials_that_decided_nothing_show_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = real_trial("lamport", 5.0, status="pruned", final=False)
    crashed = real_trial("one_shot", 5.0, status="crashed", final=False)
    path = record(tmp_path / "tried.db", LIBRARY, LAMPORT, real_trial("lamport", 4.5), searched, crashed)
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "two_shot")
    answer = explain(path, "--json").json
    assert (answer["source"], answer["variant"]) == ("forced", "two_shot")
    left_out = {one["variant"]: one["reason"] for one in answer["left_out"]}
    assert "4.00 µs" in left_out["lamport"]
    assert left_out["one_shot"] == "crashed"
    assert "ok" not in left_out.values()


def test_without_graphs_it_is_calls_that_are_meant(tmp_path: Path) -> None:
    """As `tune` measures them on the host backend."""
    no_gpu = {"num_sms": 1, "compute_capability": 0, "num_links": 0, "memory_gib": 0}
    host = replace(H200, gpu="host-x86_64", fabric="host", **no_gpu)
    eager = real_trial("library", 14.0, host, problem=replace(PROBLEM, mode="eager"))
    path = record(tmp_path / "both.db", eager, LIBRARY)
    for hardware, more, mode in (
        ("host", (), "eager"),
        ("host", ("--mode", "graph"), "eager"),
        ("H200", (), "graph"),
        ("H200", ("--mode", "eager"), "eager"),
    ):
        shown = run("explain", *ASK, "--hardware", hardware, "--db", path, *more)
        assert f" {mode} " in shown.out.splitlines()[0], (hardware, more)
        assert ("no CUDA graphs" in shown.err) == ("graph" in more)
