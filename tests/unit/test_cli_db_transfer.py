"""`db import`, `db merge` and the formats of `db export` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from db_samples import problem, trial
from transfer_samples import H100, everything, store, sweep
from typer.testing import CliRunner

from tunedcomm.cli import main


def db(*arguments: str) -> tuple[int, str, str]:
    shown = CliRunner().invoke(main.app, ["db", *arguments])
    return shown.exit_code, shown.stdout, shown.stderr


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main.run(["db", *arguments])
    shown = capsys.readouterr()
    assert caught.value.code == 2, shown
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return " ".join(shown.err.replace("│", " ").split())


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(store(tmp_path / "source.db", sweep()))


def test_lines_on_stdout_are_imported_again(source: str, tmp_path: Path) -> None:
    code, text, err = db("export", "--format", "jsonl", "--all", "-", "--db", source)
    assert code == 0
    assert err == ""
    path = tmp_path / "sent.jsonl"
    path.write_text(text)
    target = str(tmp_path / "target.db")
    for added in (len(sweep()), 0):
        code, text, _ = db("import", str(path), "--db", target)
        assert code == 0
        assert f"{added} trials added to {target}, which had {len(sweep()) - added} of them" in text
    assert everything(Path(target)) == everything(Path(source))


def test_import_names_the_line(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sent.jsonl"
    assert db("export", "--format", "jsonl", str(path), "--db", source)[0] == 0
    lines = path.read_text().splitlines(keepends=True)
    (tmp_path / "sent.jsonl.manifest.json").unlink()
    lines[40] = lines[40].replace('"status":"', '"status":"not ')
    path.write_text("".join(lines))
    text = refused("import", str(path), capsys=capsys)
    assert text.startswith(f"tunedcomm: DatabaseCorruptError: {path}, line 41: unknown status 'not ")
    assert not (tmp_path / "user.db").exists()


def test_merge_counts_what_is_answered_otherwise(tmp_path: Path) -> None:
    target = str(store(tmp_path / "all.db", [trial("one_shot", 5.0, final=True)]))
    hosts = tmp_path / "hosts"
    store(hosts / "a.db", [trial("lamport", 4.0, final=True, after=5)])
    store(hosts / "b.db", [trial("one_shot", 4.0, final=True, environment=H100, problem=problem(8192))])
    code, text, _ = db("merge", str(hosts), "--into", target)
    assert code == 0
    assert f"2 trials added to {target}, which had 0 of them" in text
    rows = [line.split() for line in text.splitlines() if "NVIDIA" in line]
    # ranks, problems, new, another winner, another latency
    assert {row[1]: row[-5:] for row in rows} == {
        "H200,": ["4", "1", "0", "1", "0"],
        "H100,": ["4", "1", "1", "0", "0"],
    }
    _, text, _ = db("merge", str(hosts), "--into", target, "--json")
    shown = json.loads(text)
    assert shown["added"] == 0
    assert [entry["winner_changed"] for entry in shown["environments"]] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["export"], "name the file to write, or a cluster"),
        (["export", "-"], "SQLite file cannot go to stdout"),
        (["export", "-", "--format", "jsonl", "--json"], "the rows or the JSON, not both"),
        (["export", "out.csv", "--format", "csv"], "'csv' is not one of"),
        (["export", "out.db", "--hardware", "H200"], "only --format nccl-csv"),
        (["export", "--cluster", "H200!"], "cannot name a cluster"),
        (["export", "--cluster", "h200", "--format", "jsonl"], "dispatch reads SQLite files only"),
        (["export", "--cluster", "h200", "/dev/null"], "/dev/null cannot be made"),
        (["import"], "Missing argument 'SRC...'"),
        (["import", "absent.jsonl"], "does not exist"),
        (["merge", "absent.db"], "Missing option '--into'"),
        (["merge", "absent.db", "--into", "out.db"], "does not exist"),
        (["diff", "absent.db"], "Missing argument 'B'"),
        (["diff", "absent.db", "absent.db"], "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint in refused(*arguments, capsys=capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["import", "merge", "diff", "export"])
def test_needs_no_torch(verb: str, source: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.db")
    arguments = {
        "import": [source, "--db", out],
        "merge": [source, "--into", out],
        "diff": [source, source],
        "export": [out, "--db", source],
    }
    code = (
        "import sys\n"
        "from tunedcomm.cli import main\n"
        f"try: main.run(['db', *{[verb, *arguments[verb]]!r}])\n"
        "except SystemExit as error: assert error.code == 0\n"
        "sys.stderr.write(repr(sorted({'torch', 'triton', 'optuna'} & set(sys.modules))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("[]")
