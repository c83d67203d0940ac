"""`db pin` and `db unpin`: what is refused, what is stored, and who prints it. That it runs is tested on real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, trial
from typer.testing import CliRunner

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.records import Pin
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.dispatch.dispatcher import source_hash_of
from tunedcomm.hardware import detect
from tunedcomm.spec import Candidate, Problem, candidates, get_variant

PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 4)
ASKED = ("--op", "all_reduce", "--shape", "98304", "--world-size", "4")
ON_H200 = ("--hardware", "H200")
WHY = ("--reason", "ticket 12")
A100 = replace(H200, gpu="NVIDIA A100", num_sms=108, compute_capability=80)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user database, with a trial of the problem on H200."""
    kernels.discover()
    path = tmp_path / "user.db"
    with Database.open(path, create=True) as database:
        database.record([trial("library", 14.0, problem=PROBLEM, final=True)])
    return path


def invoke(*arguments: str) -> tuple[int, str, str]:
    shown = CliRunner().invoke(main.app, list(arguments))
    return shown.exit_code, shown.stdout, shown.stderr


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.run(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def pins_of(path: Path) -> list[Pin]:
    with Database.open(path, readonly=True) as database:
        return database.pins()


def default_of(variant: str) -> dict[str, Any]:
    return get_variant("all_reduce", variant).default(PROBLEM, limits_for(H200, 4))


def test_pin_is_stored_and_explained(path: Path) -> None:
    possible = [c.config_dict for c in candidates(PROBLEM, limits_for(H200, 4)) if c.variant == "two_shot"]
    config = next(other for other in possible if other != default_of("two_shot"))
    text = ",".join(f"{name}={value}" for name, value in config.items())
    code, out, _ = invoke("db", "pin", *ASKED, *ON_H200, *WHY, "--variant", "two_shot", "--config", text, "--json")
    assert code == 0
    (pin,) = pins_of(path)
    assert (pin.problem, pin.candidate) == (PROBLEM, Candidate.of("all_reduce", "two_shot", config))
    assert pin.environment.hard_key == H200.hard_key
    assert pin.reason == "ticket 12"
    answer = json.loads(out)
    assert (answer["variant"], answer["config"], answer["database"]) == ("two_shot", config, str(path))
    _, out, _ = invoke("explain", *ASKED, *ON_H200)
    assert "it is pinned in the user layer" in out
    assert "pinned in the user layer: ticket 12" in out


@pytest.mark.parametrize("numel", [PROBLEM.numel, 2 * PROBLEM.numel])
def test_what_failed_is_not_pinned(path: Path, numel: int) -> None:
    """Not even at another size of its family; a pin that was made before is not followed."""
    asked = ("db", "pin", *ASKED, *ON_H200, *WHY, "--variant", "lamport")
    assert "it runs unchecked" in invoke(*asked)[2]
    assert "it is pinned in the user layer" in invoke("explain", *ASKED, *ON_H200)[1]
    there = replace(PROBLEM, shape=(numel,))
    failed = trial("lamport", None, config=default_of("lamport"), status="incorrect", problem=there)
    with Database.open(path) as database:
        database.record([replace(failed, source_hash=source_hash_of("all_reduce", "lamport") or "")])
    code, _, errors = invoke(*asked)
    assert code == 2
    assert f"was incorrect at {there}" in " ".join(errors.replace("│", " ").split())
    out = invoke("explain", *ASKED, *ON_H200, "--all")[1]
    assert "it is pinned in the user layer" not in out
    assert "pinned, but was incorrect" in " ".join(out.split())


def test_pin_for_this_machine(path: Path) -> None:
    options = ("--op", "all_reduce", "--shape", "512", "--world-size", "2", "--dtype", "float32", "--mode", "eager")
    code, _, errors = invoke("db", "pin", *options, *WHY, "--variant", "one_shot", "--in-place", "--reduction", "avg")
    assert code == 0
    assert "host backend" in errors
    (pin,) = pins_of(path)
    assert pin.environment == detect(None)
    assert pin.problem == Problem("all_reduce", (512,), "float32", 2, "avg", in_place=True, mode="eager")


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
        ("--variant", "torch_one_shot", *WHY),  # nothing would end its waits
        ("--variant", "lamport"),
        ("--variant", "lamport", "--reason", "  "),
        ("--variant", "lamport", *WHY, "--dtype", "int3"),
        ("--variant", "lamport", *WHY, "--shape", "8x8"),
        ("--variant", "lamport", *WHY, "--hardware", "B200"),
    ],
    ids=" ".join,
)
def test_what_could_not_run_is_refused(
    path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("db", "pin", *ASKED, *ON_H200, *options) == 2
    assert capsys.readouterr().err.strip()
    assert pins_of(path) == []


def test_unpin(path: Path) -> None:
    assert invoke("db", "unpin", *ASKED, *ON_H200)[0] == 1
    assert invoke("db", "pin", *ASKED, *ON_H200, *WHY, "--variant", "lamport")[0] == 0
    code, out, _ = invoke("db", "unpin", *ASKED, *ON_H200, "--json")
    assert code == 0
    assert json.loads(out)["removed"] is True
    assert pins_of(path) == []
    code, out, errors = invoke("db", "unpin", *ASKED, *ON_H200, "--json")
    assert code == 1
    assert json.loads(out)["removed"] is False
    assert "db list" in errors


def test_pins_are_listed_and_shown(path: Path) -> None:
    other = ("--op", "all_reduce", "--shape", "4096", "--world-size", "4")
    for asked in (ASKED, other):
        assert invoke("db", "pin", *asked, *ON_H200, *WHY, "--variant", "lamport")[0] == 0
    _, out, _ = invoke("db", "list", "--db", str(path))
    assert "pins in the user database" in out
    assert out.count("ticket 12") == 2
    entries = json.loads(invoke("db", "list", "--db", str(path), "--json")[1])
    by_shape = {entry["problem"]["shape"][0]: entry for entry in entries}
    assert by_shape[98304]["pin"]["reason"] == "ticket 12"
    assert by_shape[98304]["trials"] == 1
    # Pinned without ever having been measured.
    assert by_shape[4096]["pin"]["variant"] == "lamport"
    assert (by_shape[4096]["trials"], by_shape[4096]["winner"]) == (0, None)
    _, out, _ = invoke("db", "show", *ASKED, "--db", str(path))
    assert out.count("ticket 12") == 1
    assert "ticket 12" not in invoke("db", "list", "--db", str(path), "--hardware", "A100")[1]


def test_unordered_variant_is_said_to_serve_few(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tunedcomm import spec

    known = get_variant("all_reduce", "lamport")
    monkeypatch.setitem(spec._variants, ("all_reduce", "loose"), replace(known, name="loose", numerics="unordered"))
    code, _, errors = invoke("db", "pin", *ASKED, *ON_H200, *WHY, "--variant", "loose")
    assert code == 0
    assert "numerics='any'" in errors
