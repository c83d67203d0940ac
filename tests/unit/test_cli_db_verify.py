"""`tunedcomm db verify`: what it prints, what it passes on and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cli_samples import Ended
from cli_samples import run as run_command
from verify_samples import SIZES, Change, at_ratio, run, tuned, tuned_copy

from tunedcomm import hardware
from tunedcomm.db.layers import Layer
from tunedcomm.db.store import Database
from tunedcomm.spec import Candidate
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.verify import VerifyOutcome, VerifySpec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of one's own."""
    return tuned_copy(tmp_path)


class Verify:
    """Stands in for `verify`, with the answers of a recording."""

    def __init__(self, path: Path, tmp_path: Path, changes: Mapping[tuple[int, Candidate], Change]) -> None:
        self.arguments = path, tmp_path, changes
        self.spec: VerifySpec | None = None
        self.stored = False

    def __call__(
        self, spec: VerifySpec, database: Database | None, progress: Callable[[Progress], None] | None = None
    ) -> VerifyOutcome:
        self.spec, self.stored = spec, database is not None
        return run(*self.arguments, tolerance=spec.tolerance, store=False, progress=progress)


def start(stand_in: Verify, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Ended:
    monkeypatch.setattr("tunedcomm.tuner.verify.verify", stand_in)
    monkeypatch.setattr(hardware, "num_gpu_ranks", lambda: 4)
    return run_command("db", "verify", *arguments)


def test_verb_prints_what_drifted(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Verify(path, tmp_path, {(SIZES[1], tuned()[1][SIZES[1]]): at_ratio(1.5)})
    shown = start(stand_in, monkeypatch, "--db", str(path), "--no-store")
    assert shown.code == 1
    assert "slower: all_reduce 32768" in shown.out
    assert "1.50x the library's time" in shown.out
    assert "nothing was stored" in shown.out
    assert not stand_in.stored
    line = next(line for line in shown.out.splitlines() if line.lstrip().startswith("32768 "))
    assert "0.67x" in line
    assert line.endswith("slower")


def test_verb_as_json(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Verify(path, tmp_path, {})
    options = "--op all_reduce --dtype bfloat16 --mode graph --limit 7 --tolerance 5% --world-size 2 --gangs 2 --json"
    shown = start(stand_in, monkeypatch, "--db", str(path), *options.split())
    assert shown.code == 0, shown.err
    answer = shown.json
    assert answer["num_wrong"] == 0
    assert {entry["verdict"] for entry in answer["winners"]} == {"ok"}
    assert answer["winners"][0]["stored"]["changes"] == []
    spec = stand_in.spec
    assert spec is not None
    assert (spec.ops, spec.dtypes, spec.modes) == (("all_reduce",), ("bfloat16",), ("graph",))
    assert (spec.limit, spec.tolerance, spec.settings.gangs, spec.settings.world_size) == (7, 0.05, 2, 2)
    assert spec.layers == (Layer("user", str(path)),)
    assert stand_in.stored
