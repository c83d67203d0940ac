"""Rows of other hardware that the user lets stand in: which may, when they serve, and what is said of them."""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, OLDER, SampleCatalog, candidate, decide, problem, row, snapshot, trial
from typer.testing import CliRunner

from tunedcomm import kernels, settings
from tunedcomm.cli import main
from tunedcomm.cli.doctor import check_borrowing, check_this_machine
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.decide import MISSES
from tunedcomm.hardware import Environment
from tunedcomm.selection.interpolate import related_problems
from tunedcomm.selection.select import choose
from tunedcomm.selection.snapshot import Check, CheckStatus, Row, Snapshot, is_sibling, matches, why_not_borrowed
from tunedcomm.spec import Problem, get_variant
from tunedcomm.symm.layout import limits_for

H100 = replace(H200, gpu="NVIDIA H100 80GB HBM3", memory_gib=80)
GH200 = replace(H200, gpu="NVIDIA GH200 480GB", fabric="nvswitch-12")
A100 = replace(H200, gpu="NVIDIA A100-SXM4-80GB", num_sms=108, compute_capability=80, fabric="nvswitch-12")


def lent(variant: str, latency_us: float, message_bytes: int = 4096, **changes: Any) -> Row:
    return row(variant, latency_us, message_bytes, environment=H100, borrowed=True, **changes)


# Which hardware


@pytest.mark.parametrize("name", ["H100", "nvidia h100 80gb hbm3", "NVIDIA H?00*", H100.digest[:8]])
def test_names(name: str) -> None:
    assert matches(name, H100)
    assert not matches(name, A100)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "NVIDIA H100", "num_sms": 114, "memory_gib": 80, "fabric": "nvswitch-8", "num_links": 8}, ""),
        ({"driver": "1", "cuda": "1", "torch": "1", "triton": "1", "nccl": "1", "gpu": "x"}, ""),
        ({"compute_capability": 100}, "compute capability is 90 here and 100 there"),
        ({"fabric": "nvswitch-18-mig"}, "nvswitch here and nvswitch-mig there"),
        ({"fabric": "pcie"}, "nvswitch here and pcie there"),
        ({"multicast": True}, "multicast is off here and on there"),
        ({"nodes": 2, "multicast": True}, "number of hosts"),
    ],
)
def test_what_may_stand_in(changes: dict[str, Any], reason: str) -> None:
    found = why_not_borrowed(H200, replace(H200, **changes))
    assert (found is None) == (reason == "")
    assert reason in (found or "")


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({"gpu": "NVIDIA H100", "memory_gib": 80, "driver": "1", "torch": "1"}, True),
        ({}, False),
        ({"gpu": "NVIDIA H100", "num_sms": 114}, False),
        ({"gpu": "NVIDIA H100", "fabric": "nvswitch-8"}, False),
        ({"gpu": "NVIDIA H100", "multicast": True}, False),
        ({"gpu": "NVIDIA H100", "nodes": 2}, False),
        ({"gpu": "NVIDIA B200", "compute_capability": 100}, False),
    ],
)
def test_siblings_differ_in_the_models_name_alone(changes: dict[str, Any], is_one: bool) -> None:
    assert is_sibling(H200, replace(H200, **changes)) is is_one
    assert not is_sibling(Environment("host-a"), Environment("host-b")), "times of CPUs say too little"


# What is loaded


def stored(path: Path, *records: Trial) -> Layer:
    with Database.open(path, create=True) as database:
        database.record(records)
    return Layer(path.stem, str(path))


def loaded(*layers: Layer, borrow: tuple[str, ...] = ("H100",), world_size: int = 4) -> dict[str, tuple[bool, float]]:
    found = load_snapshot(H200, world_size, layers=layers, borrow=borrow)
    return {r.candidate.variant: (r.borrowed, r.latency_p50_us) for r in found.rows}


def test_siblings_serve_unasked_and_others_if_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = stored(tmp_path / "user.db", trial("one_shot", environment=H100), trial("two_shot", environment=GH200))
    assert loaded(layer, borrow=()) == loaded(layer, borrow=("A100",)) == {}
    assert loaded(layer, borrow=settings.borrow()) == {"one_shot": (True, 5.0)}
    monkeypatch.setenv("TUNEDCOMM_BORROW", "no")
    assert loaded(layer, borrow=settings.borrow()) == {}
    monkeypatch.setenv("TUNEDCOMM_BORROW", "GH200")
    assert set(loaded(layer, borrow=settings.borrow())) == {"one_shot", "two_shot"}
    assert loaded(layer) == {"one_shot": (True, 5.0)}
    assert loaded(layer, world_size=2) == {}, "of this world size alone"


def test_own_rows_replace_borrowed_ones_in_every_layer(tmp_path: Path) -> None:
    user = stored(tmp_path / "user.db", trial("one_shot", 3.0, environment=H100, final=True, after=9))
    packaged = stored(tmp_path / "packaged.db", trial("one_shot", 6.0, environment=OLDER), trial("two_shot", 7.0))
    assert loaded(user, packaged) == {"one_shot": (False, 6.0), "two_shot": (False, 7.0)}


def test_what_failed_anywhere_is_not_borrowed(tmp_path: Path) -> None:
    """In the whole family: what is borrowed is a guess at every size."""
    there = {"environment": H100}
    records = [trial(v, problem=problem(n), **there) for v in ("one_shot", "two_shot", "lamport") for n in (64, 4096)]
    records += [trial("one_shot", None, status="hung", problem=problem(8192), after=5)]
    records += [trial("two_shot", None, status="crashed", problem=problem(8192), after=5, **there)]
    records += [trial("lamport", None, status="hung", problem=problem(8192), after=5, **there)]
    records += [trial("lamport", problem=problem(8192), after=6, **there)]
    found = load_snapshot(H200, 4, layers=[stored(tmp_path / "user.db", *records)], borrow=["H100"])
    assert {r.candidate.variant for r in found.rows} == {"lamport"}
    assert [f.candidate.variant for f in found.failures] == ["one_shot"], "failures elsewhere rule out nothing here"
    own = [trial("two_shot", problem=problem(n), after=1) for n in (64, 4096)]
    assert loaded(stored(tmp_path / "own.db", *records, *own))["two_shot"] == (False, 5.0)


def test_it_is_said_once_what_is_borrowed_and_what_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = stored(tmp_path / "user.db", trial(environment=H100), trial(environment=A100), trial("two_shot"))
    with caplog.at_level(logging.WARNING, "tunedcomm"):
        for _ in range(2):
            found = load_snapshot(H200, 4, layers=[layer], borrow=["H100", "A100", "B300"])
    assert [record.getMessage() for record in caplog.records] == list(found.notes)
    tokens = ("1 rows are borrowed from NVIDIA H100", "compute capability is 90 here and 80 there", "'B300'")
    assert all(token in note for token, note in zip(tokens, found.notes, strict=True))


# What is decided


def test_borrowed_rows_rank_candidates_and_predict_nothing() -> None:
    found = decide([lent("lamport", 3.0), lent("two_shot", 4.0), lent("library", 10.0)])
    assert (found.candidate, found.source, found.environment) == (candidate("lamport"), "borrowed", H100)
    assert "NVIDIA H100 80GB HBM3" in found.why
    assert (found.latency_us, found.library_us, found.runner_up_us) == (None, None, None)
    assert found.runner_up == candidate("two_shot")
    assert "borrowed" in MISSES, "it is worth tuning"
    assert found.to_dict()["environment"]["gpu"] == H100.gpu


@pytest.mark.parametrize("asked", [4096, 8192, 5000])
def test_any_answer_of_this_hardware_comes_first(asked: int) -> None:
    own = [row("two_shot", 8.0, 4096), row("two_shot", 9.0, 16384)]
    borrowed = [lent("lamport", 1.0, n) for n in (4096, 5000, 8192)]
    found = decide([*own, *borrowed], problem(asked))
    assert found.candidate == candidate("two_shot")
    assert found.source == ("exact" if asked == 4096 else "interpolated")
    assert "NVIDIA H100" in dict(found.passed_over)["lamport(num_blocks=4)"]
    assert decide(own, problem(asked)).latency_us == found.latency_us


def test_where_this_hardware_has_no_answer_both_rules_serve() -> None:
    rows = [row("two_shot", 8.0, 1 << 20), lent("lamport", 2.0, 4096), lent("lamport", 3.0, 16384)]
    for asked in (problem(4096), problem(8192), problem(4096, dtype="float16")):
        found = decide(rows, asked)
        assert (found.candidate, found.source) == (candidate("lamport"), "borrowed")
    assert "dtype=bfloat16" in found.why
    assert decide(rows, problem(1 << 20)).source == "exact"
    assert decide(rows, problem(1 << 25)).source == "library"


def test_borrowed_rows_must_fit_this_hardware_and_its_kernels() -> None:
    stale = lent("two_shot", 2.0, source_hash="before")
    rows = [lent("lamport", 1.0), stale, lent("one_shot", 3.0), lent("atomic", 0.5)]
    found = decide(rows, feasible=lambda c: "132 SMs do not hold it" if c.variant == "lamport" else None)
    assert (found.candidate, found.source) == (candidate("one_shot"), "borrowed")
    reasons = dict(found.passed_over)
    for variant, token in (("lamport", "132 SMs"), ("two_shot", "source has changed"), ("atomic", "policy 'default'")):
        assert token in reasons[f"{variant}(num_blocks=4)"]
    assert decide([stale]).source == "library"


def test_exact_borrowed_rows_go_before_own_rows_that_merely_reach() -> None:
    own = [row("two_shot", 8.0, 4096)]
    found = decide([*own, lent("lamport", 5.0, 8192)], problem(8192))
    assert (found.candidate, found.source) == (candidate("lamport"), "borrowed")
    assert decide([*own, lent("lamport", 5.0, 6144)], problem(8192)).candidate == candidate("two_shot")
    assert decide([*own, lent("lamport", 9.8, 8192)], problem(8192)).candidate == candidate("two_shot")


def test_a_borrowed_candidate_beats_the_librarys_best_form_by_a_margin() -> None:
    assert decide([lent("lamport", 9.4)]).candidate == candidate("lamport")
    assert decide([lent("lamport", 9.6)]).candidate.variant == "library"
    assert decide([row("lamport", 9.6)]).candidate == candidate("lamport"), "own rows win by more than the noise"
    in_place = lent("one_shot", 9.0, like={"in_place": True}, baseline_p50_us=8.0)
    assert decide([lent("lamport", 7.5), in_place]).candidate == candidate("lamport")
    assert decide([lent("lamport", 7.8), in_place]).candidate.variant == "library"


def test_eager_calls_take_borrowed_rows_of_graphs() -> None:
    asked = problem(mode="eager")
    found = decide([lent("lamport", 5.0)], asked)
    assert (found.candidate, found.source) == (candidate("lamport"), "borrowed")
    both = [lent("lamport", 5.0), lent("two_shot", 5.0, like={"mode": "eager"})]
    assert decide(both, asked).candidate == candidate("two_shot")
    assert decide([*both[:1], row("one_shot", 5.0)], asked).source == "heuristic", "this hardware's graphs come first"


def checked(status: CheckStatus, asked: Problem, variant: str = "lamport") -> Check:
    return Check(problem=asked, candidate=candidate(variant), source_hash="current", status=status, why=f"it {status}")


def test_checks_decide_what_is_borrowed() -> None:
    """A failure counts at every problem of the dtype, the library's lead at its own problem."""
    sizes = (4096, 8192)
    rows = [lent(v, us, n) for v, us in (("lamport", 5.0), ("two_shot", 6.0)) for n in sizes]
    here, there = map(problem, sizes)

    def chosen(asked: Problem, status: CheckStatus, **options: Any) -> str:
        found = snapshot(rows).with_checks(checked(status, here))
        return choose(found, asked, SampleCatalog(), **options).candidate.variant

    assert [chosen(asked, "passed") for asked in (here, there)] == ["lamport", "lamport"]
    assert [chosen(asked, "slower") for asked in (here, there)] == ["library", "lamport"]
    assert [chosen(asked, "skipped") for asked in (here, there)] == ["library", "lamport"]
    assert [chosen(asked, "failed") for asked in (here, there)] == ["library", "library"]
    assert chosen(replace(here, dtype="float16"), "failed") == "lamport"
    assert [chosen(here, status, policy="ordered") for status in ("failed", "slower")] == ["two_shot", "lamport"]
    own = snapshot([*rows, row("lamport", 5.0)]).with_checks(checked("failed", here))
    assert choose(own, here, SampleCatalog()).source == "exact", "rows of this hardware need no check"
    reason = choose(snapshot(rows).with_checks(checked("failed", here)), here, SampleCatalog()).why
    assert "it failed" in reason


def test_programs_whose_sizes_never_repeat_do_not_pay_for_ever() -> None:
    asked, lamport = problem(4096 * 100), candidate("lamport")
    held = snapshot([lent("lamport", 5.0)]).with_checks(*[checked("passed", problem(4096 * n)) for n in (1, 2)])
    assert held.is_unchecked(asked, lamport, "current")
    passed = held.with_checks(checked("passed", problem(4096 * 3)))
    assert not passed.is_unchecked(asked, lamport, "current")
    for other in (replace(asked, dtype="float16"), replace(asked, mode="eager"), replace(asked, in_place=True)):
        assert passed.is_unchecked(other, lamport, "current")
    held = held.with_checks(*[checked("slower", problem(4096 * n)) for n in range(3, 64)])
    assert held.is_unchecked(asked, lamport, "current")
    held = held.with_checks(checked("slower", problem(4096 * 64)))
    assert not held.is_unchecked(asked, lamport, "current")


def test_checks_are_part_of_a_snapshots_digest() -> None:
    plain, check = snapshot([lent("lamport", 5.0)]), checked("passed", problem())
    made = plain.with_checks(check)
    assert len({plain.digest, made.digest, plain.with_checks(replace(check, status="slower")).digest}) == 3
    assert made.digest == snapshot([lent("lamport", 5.0)], checks=(check,)).digest
    sent: Snapshot = pickle.loads(pickle.dumps(made))
    assert (sent.digest, sent.checks) == (made.digest, (check,))
    assert made.was_checked(*check.key)
    assert not plain.was_checked(*check.key)


# The command line

ASK = ("--op", "all_reduce", "--shape", "98304", "--world-size", "4")


@pytest.fixture
def _databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H100 measured, and of the H200 only another world size."""
    kernels.discover()
    variant, asked = get_variant("all_reduce", "lamport"), problem(196608)
    config, source_hash = variant.default(asked, limits_for(H100, 4)), kernels.source_hash(variant)
    stored(
        tmp_path / "site.db",
        trial("lamport", 4.0, environment=H100, problem=asked, source_hash=source_hash, config=config, final=True),
        trial(environment=A100),
        trial("library", 10.0, problem=problem(64, world_size=2), final=True),
    )
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(tmp_path / "site.db"))
    monkeypatch.setattr("tunedcomm.db.layers.packaged_databases", list)


def _json(*arguments: str) -> Any:
    shown = CliRunner().invoke(main.app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


@pytest.mark.usefixtures("_databases")
@pytest.mark.parametrize("verb", ["lookup", "explain"])
def test_borrow_on_the_command_line(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    ask = (verb, *ASK, "--hardware", H200.digest)
    answers = [_json(*ask, "--borrow", "no"), _json(*ask), _json(*ask, "--borrow", "A100")]
    monkeypatch.setenv("TUNEDCOMM_BORROW", "no")
    answers.append(_json(*ask))
    assert [answer["source"] for answer in answers] == ["library", "borrowed", "borrowed", "library"]
    for answer in answers[1:3]:
        assert (answer["variant"], answer["latency_us"]) == ("lamport", None)
        assert verb == "lookup" or answer["environment"]["gpu"] == H100.gpu


@pytest.mark.usefixtures("_databases")
def test_doctor_knows_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, level, token in (
        ({"driver": "999"}, "warn", "no op at its default sizes"),
        ({"multicast": True}, "warn", "multicast is True here and False there"),
        ({"gpu": "NVIDIA H800"}, "ok", "served by rows of NVIDIA H100 80GB HBM3, NVIDIA H200, checked at first use"),
    ):
        monkeypatch.setattr("tunedcomm.cli.doctor.environment_here", lambda changes=changes: replace(H200, **changes))
        (line,) = check_this_machine()
        assert line.level == level
        assert token in line.detail
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", "")
    (line,) = check_this_machine()
    assert "no database" in line.detail


@pytest.mark.usefixtures("_databases")
def test_doctor_says_what_may_be_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunedcomm.cli.doctor.environment_here", lambda: H200)
    checks = list(check_borrowing(["B300", "H100", "A100"]))
    tokens = ("'B300'", "NVIDIA H100", "90 here and 80 there")
    assert [check.level for check in checks] == ["warn", "ok", "warn"]
    assert all(token in check.detail for check, token in zip(checks, tokens, strict=True))
    shown = CliRunner().invoke(main.app, ["doctor", "--borrow", "B300", "--json"])
    assert "borrowing" in {check["name"] for check in json.loads(shown.stdout)}


def test_norms_that_quantise_borrow_from_each_other_alone() -> None:
    """Their kernels are variants of their own; the basic forms have others."""

    def borrowed(layout: str, scaling: str) -> set[str]:
        problem = Problem("all_reduce_rms_norm", (8, 1024), "bfloat16", 4, layout=layout, scaling=scaling)
        return {like.scaling for like, _ in related_problems(problem)}

    assert borrowed("residual", "fp8") == {"fp8", ""}
    assert borrowed("residual", "token") == {"token", "group128"}
    assert borrowed("residual", "group128+columns+norm") == {"group128+columns+norm", "group128", "token"}
    assert borrowed("residual+offset", "") == {"", "token", "group128"}


def test_tiers() -> None:
    best = [
        row("lamport", 1.0, final=False, drift=True, layer_rank=9),
        lent("lamport", 1.0),
        lent("lamport", 1.0, layer_rank=1),
        lent("lamport", 1.0, drift=True),
        lent("lamport", 1.0, final=False),
    ]
    assert [r.tier for r in best] == sorted(r.tier for r in best)
