from __future__ import annotations

import json
from pathlib import Path

import pytest
from db_samples import problem, trial
from typer.testing import CliRunner

from tunedcomm.cli import main
from tunedcomm.db.store import Database


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Two databases, each with one final; the first has trials that nobody needs."""
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for number, path in enumerate(paths):
        with Database.open(path, create=True) as database:
            database.record([trial("one_shot", 5.0, final=True, problem=problem(4096 << number))])
    with Database.open(paths[0]) as database:
        slower = [trial("one_shot", 6.0 + n, config={"num_blocks": 8 << n}) for n in range(3)]
        database.record(slower)
    return [str(path) for path in paths]


def export(*arguments: str) -> tuple[int, str, str]:
    shown = CliRunner().invoke(main.app, ["db", "export", *arguments])
    return shown.exit_code, shown.stdout, shown.stderr


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main.run(["db", "export", *arguments])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_prints_counts_and_digest(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    code, text, _ = export("--db", sources[0], str(out))
    assert code == 0
    assert "4 trials in 1 database; 3 left out as not needed" in text
    rows = dict(line.split() for line in text.splitlines()[1:] if len(line.split()) == 2)
    assert (rows["trials"], rows["finals"], rows["problems"]) == ("1", "1", "1")
    assert f"{out}: " in text
    assert len(text.split("SHA-256 ")[1].strip()) == 64


def test_merges_as_json(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    code, text, _ = export("--db", sources[0], "--db", sources[1], "--db", sources[0], str(out), "--json")
    assert code == 0
    shown = json.loads(text)
    assert shown["sources"] == [
        {"source": sources[0], "trials": 4, "known": 0},
        {"source": sources[1], "trials": 1, "known": 0},
        {"source": sources[0], "trials": 4, "known": 4},
    ]
    assert shown["path"] == str(out)
    assert shown["num_bytes"] == out.stat().st_size
    assert shown["left_out"] == 3
    with Database.open(out, immutable=True) as database:
        assert database.stats() == shown["rows"]
        assert database.stats()["finals"] == 2


def test_overwrites_only_if_told_to(sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.db")
    assert export("--db", sources[0], out)[0] == 0
    text = refused("--db", sources[1], out, capsys=capsys)
    assert text.startswith("tunedcomm: DatabaseAccessError: ")
    assert "--force" in text
    code, shown, _ = export("--db", sources[1], out, "--force", "--json")
    assert code == 0
    assert json.loads(shown)["rows"]["trials"] == 1
