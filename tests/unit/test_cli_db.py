"""`db list`, `db show`, `db pin` and `db unpin`. That a pin runs is tested on real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import PROBLEM, Ended, asked, real_trial, record, refused, run
from db_samples import H200

from tunedcomm import spec
from tunedcomm.db.records import Pin
from tunedcomm.db.store import Database
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, candidates, get_variant
from tunedcomm.symm.layout import limits_for

A100 = replace(H200, gpu="NVIDIA A100", num_sms=108, compute_capability=80)
ASKED = asked(PROBLEM)
ON_H200 = ("--hardware", "H200")
WHY = ("--reason", "ticket 12")
SEARCHED = real_trial("lamport", 3.5, final=False)
LAMPORT, TWO_SHOT = real_trial("lamport", 4.0), real_trial("two_shot", 5.0)
HUNG = real_trial("one_shot", None, status="hung", reason="no sign of life", final=False)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """The user database, with one problem on H200 and on A100."""
    elsewhere = real_trial("two_shot", 9.0, A100, final=False)
    return record(
        tmp_path / "user.db", real_trial("library", 14.0, final=False), SEARCHED, LAMPORT, TWO_SHOT, HUNG, elsewhere
    )


def test_list_groups_by_environment_and_marks_what_autotune_made(stored: str) -> None:
    shown = run("db", "list", "--db", stored)
    assert shown.code == 0
    assert "NVIDIA A100" in shown.out
    for part in ("98304", "192 KiB", "bfloat16", "graph", "num_blocks=", "4.00", "14.0", "3.50x"):
        assert part in shown.line("lamport")
    assert "autotune" not in shown.out
    with Database.open(stored) as database:
        made = database.start_run(command="tunedcomm.autotune(budget_s=3)", seed=0, budget="", host="here")
        database.record([real_trial("lamport", 2.0, A100, run_id=made)])
    assert run("db", "list", "--db", stored).out.count("autotune") == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_tables_say_that_the_library_copies_out_of_place(tmp_path: Path, in_place: bool) -> None:
    problem = replace(PROBLEM, in_place=in_place)
    trials = [real_trial(name, us, problem=problem) for name, us in (("library", 14.0), ("lamport", 4.0))]
    stored = record(tmp_path / "one.db", *trials)
    place = ["--in-place"] if in_place else []
    explained = ("explain", *ASKED, *place, "--hardware", "H200")
    for verb in (("db", "list"), ("db", "show", *ASKED, *place), explained):
        assert ("copy" in run(*verb, "--db", stored).out) is not in_place, verb
    assert "copy" in run("db", "stats", "--db", stored).out  # of both kinds together
    lookup = run("lookup", *explained[1:], "--db", stored, "--json").json
    assert (lookup["latency_us"], lookup["library_us"]) == (4.0, 14.0)


def test_a_damaged_layer_is_skipped_and_named(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database at all " * 100)
    monkeypatch.setenv("TUNEDCOMM_DB_PATH", str(damaged))
    shown = run("db", "list", "--all")
    assert shown.code == 0
    assert "H200" in shown.out
    assert str(damaged) in shown.err


def test_show_prints_every_trial_fastest_first(stored: str) -> None:
    shown = run("db", "show", *ASKED, *ON_H200, "--db", stored)
    assert shown.code == 0
    lines = [line for line in shown.out.splitlines() if "num_blocks" in line or "library()" in line]
    assert ["lamport" in line for line in lines] == [True, True, False, False, False]
    assert "no sign of life" in lines[-1]
    assert "hung" in lines[-1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--dtype float32", "pass --dtype bfloat16;"),
        ("--mode eager", "pass --mode graph;"),
        ("--in-place --reduction avg", "pass --reduction sum and leave out --in-place;"),
        ("--in-place", "leave out --in-place;"),
    ],
)
def test_show_of_an_unknown_problem_names_the_one_that_is_stored(stored: str, options: str, told: str) -> None:
    asked = ("db", "show", *ASKED, *options.split(), "--db", stored)
    shown = run(*asked)
    assert shown.code == 1
    assert told in " ".join(shown.err.split())
    assert run(*asked, "--json").json == []


@pytest.mark.parametrize("verb", [("list",), ("stats",), ("show", *ASKED)], ids=lambda verb: verb[0])
def test_rows_of_this_machine_by_default_and_others_when_they_are_named(tmp_path: Path, verb: tuple[str, ...]) -> None:
    path = record(tmp_path / "user.db", LAMPORT, real_trial("two_shot", 5.0, detect(None)))
    named = {(): False, ("--all",): True, ("--hardware", "H200"): True, ("--db", path): True}
    for options, with_others in named.items():
        shown = run("db", *verb, *options)
        assert (shown.code, "H200" in shown.out) == (0, with_others), options
        assert (detect(None).gpu in shown.out) == ("H200" not in options), options
        assert ("H200" in str(run("db", *verb, *options, "--json").json)) == with_others


def test_show_says_that_other_hardware_has_trials(stored: str) -> None:
    shown = run("db", "show", *ASKED)
    assert shown.code == 1
    assert "--all" in shown.err


def pins_of(path: str) -> list[Pin]:
    with Database.open(path, readonly=True) as database:
        return database.pins()


def pin(*options: str) -> Ended:
    return run("db", "pin", *ASKED, *ON_H200, *WHY, *options)


def explained(*options: str) -> str:
    return " ".join(run("explain", *ASKED, *ON_H200, *options).out.split())


def test_pin_is_stored_and_explained(stored: str) -> None:
    limits = limits_for(H200, 4)
    default = get_variant("all_reduce", "two_shot").default(PROBLEM, limits)
    possible = [c.config_dict for c in candidates(PROBLEM, limits) if c.variant == "two_shot"]
    config = next(other for other in possible if other != default)
    text = ",".join(f"{name}={value}" for name, value in config.items())
    done = pin("--variant", "two_shot", "--config", text, "--json")
    assert done.code == 0
    (found,) = pins_of(stored)
    assert (found.problem, found.candidate) == (PROBLEM, Candidate.of("all_reduce", "two_shot", config))
    assert (found.environment.hard_key, found.reason) == (H200.hard_key, "ticket 12")
    assert (done.json["variant"], done.json["config"], done.json["database"]) == ("two_shot", config, stored)
    assert "pinned in the user layer: ticket 12" in explained()


@pytest.mark.parametrize("numel", [PROBLEM.numel, 2 * PROBLEM.numel])
def test_what_failed_is_not_pinned(tmp_path: Path, numel: int) -> None:
    """Not even at another size of its family; a pin that was made before is not followed."""
    path = record(tmp_path / "user.db", real_trial("library", 14.0))
    assert "unchecked" in pin("--variant", "lamport").err
    assert "it is pinned" in explained()
    there = replace(PROBLEM, shape=(numel,))
    config = get_variant("all_reduce", "lamport").default(PROBLEM, limits_for(H200, 4))
    failed = real_trial("lamport", None, problem=there, status="incorrect", config=config, final=False)
    record(Path(path), failed)
    assert f"was incorrect at {there}" in refused("db", "pin", *ASKED, *ON_H200, *WHY, "--variant", "lamport")
    assert "it is pinned" not in explained("--all")
    assert "pinned, but was incorrect" in explained("--all")


def test_pin_for_this_machine(tmp_path: Path) -> None:
    options = "--op all_reduce --shape 512 --world-size 2 --dtype float32 --mode eager --in-place --reduction avg"
    done = run("db", "pin", *options.split(), *WHY, "--variant", "one_shot")
    assert done.code == 0
    assert "host backend" in done.err
    (found,) = pins_of(str(tmp_path / "user.db"))
    assert found.environment == detect(None)
    assert found.problem == Problem("all_reduce", (512,), "float32", 2, "avg", in_place=True, mode="eager")


@pytest.mark.parametrize(
    "options",
    [
        ("--variant", "two_shoot", *WHY),
        ("--variant", "two_shot", "--config", "num_blocks=7", *WHY),
        ("--variant", "two_shot", "--config", "num_blocks", *WHY),
        ("--variant", "two_shot", "--config", "num_blocks=8,num_blocks=8", *WHY),
        ("--variant", "two_shot", "--config", "colour=blue", *WHY),
        ("--variant", "library", "--config", "num_blocks=8", *WHY),
        ("--variant", "multimem_one_shot", *WHY),  # H200 without multicast
        ("--variant", "spinning", *WHY),  # nothing would end its waits
        ("--variant", "lamport"),
        ("--variant", "lamport", "--reason", "  "),
        ("--variant", "lamport", *WHY, "--hardware", "B200"),
    ],
    ids=" ".join,
)
def test_what_could_not_run_is_not_pinned(
    stored: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    spinning = replace(get_variant("all_reduce", "lamport"), name="spinning", waits_time_out=False)
    monkeypatch.setitem(spec._variants, ("all_reduce", "spinning"), spinning)
    refused("db", "pin", *ASKED, *(() if "--hardware" in options else ON_H200), *options)
    assert pins_of(stored) == []


def test_unpin(stored: str) -> None:
    for made in (True, False):
        assert not made or pin("--variant", "lamport").code == 0
        done = run("db", "unpin", *ASKED, *ON_H200, "--json")
        assert (done.code, done.json["removed"]) == (int(not made), made)
        assert pins_of(stored) == []
    assert "db list" in done.err


def test_pins_are_listed_and_shown(stored: str) -> None:
    other = asked(replace(PROBLEM, shape=(4096,)))
    for one in (ASKED, other):
        assert run("db", "pin", *one, *ON_H200, *WHY, "--variant", "lamport").code == 0
    assert run("db", "list", "--db", stored).out.count("ticket 12") == 2
    entries = run("db", "list", "--db", stored, *ON_H200, "--json").json
    by_shape: dict[int, Any] = {entry["problem"]["shape"][0]: entry for entry in entries}
    assert by_shape[98304]["pin"]["reason"] == "ticket 12"
    # Pinned without ever having been measured.
    assert by_shape[4096]["pin"]["variant"] == "lamport"
    assert (by_shape[4096]["trials"], by_shape[4096]["winner"]) == (0, None)
    assert run("db", "show", *ASKED, "--db", stored).out.count("ticket 12") == 1
    assert "ticket 12" not in run("db", "list", "--db", stored, "--hardware", "A100").out


def test_an_empty_database_is_told_how_to_be_filled(tmp_path: Path) -> None:
    shown = run("db", "list", "--db", record(tmp_path / "empty.db"))
    assert (shown.code, "tunedcomm tune" in shown.out) == (0, True)


@pytest.mark.parametrize("verb", ["list", "stats"])
def test_unknown_names_are_refused_and_known_ones_without_rows_are_not(stored: str, verb: str) -> None:
    assert "unknown op 'nope'" in refused("db", verb, "--op", "nope")
    assert "--hardware 'B200'" in refused("db", verb, "--hardware", "B200", "--db", stored)
    assert run("db", verb, "--op", "all_gather", "--hardware", "H200", "--db", stored).code == 0


def test_unordered_variant_is_said_to_serve_few(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = get_variant("all_reduce", "lamport")
    monkeypatch.setitem(spec._variants, ("all_reduce", "loose"), replace(known, name="loose", numerics="unordered"))
    done = pin("--variant", "loose")
    assert done.code == 0
    assert "numerics='any'" in done.err


def test_one_is_no_plural(tmp_path: Path) -> None:
    shown = run("db", "stats", "--db", record(tmp_path / "one.db", LAMPORT))
    assert "1 trial, 1 problem, 1 environment, 0 runs, 0 pins" in shown.out
