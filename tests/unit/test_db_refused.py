"""Lines, rows and files that make no sense, brought from elsewhere: named, and nothing of them believed."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, candidate, problem, trial
from transfer_samples import digests, everything, lines_of, store

from tunedcomm.db.store import Database
from tunedcomm.db.transfer import import_databases, merge_databases
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseError, DatabaseVersionError


def refused(
    error: type[DatabaseError], source: Path, target: Path, bring: Callable[..., Any] = import_databases
) -> str:
    before = everything(target) if target.exists() else None
    with pytest.raises(error) as caught:
        bring([source], target)
    assert (everything(target) if target.exists() else None) == before
    return str(caught.value)


def kind_of(line: str) -> str:
    return str(json.loads(line).get("kind"))


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("trial", {"latency_p50_us": -1.0}, "latency_p50_us is not a time in µs: -1.0"),
    ("trial", {"latency_p50_us": None}, "an ok trial without latency_p50_us"),
    ("trial", {"status": "splendid"}, "unknown status 'splendid'"),
    ("trial", {"samples": 2**40}, "samples is not an integer >= 0 of 32 bits"),
    ("trial", {"created_at": "yesterday"}, "yesterday"),
    ("trial", {"error": "NaN"}, "error is not a number: 'NaN'"),
    ("trial", {"reason": "\x00"}, "reason holds a NUL"),
    ("trial", {"reason": "x" * 200_000}, "reason is too long"),
    ("trial", {"config": {"num_blocks": [1]}}, "config is not a flat JSON object"),
    ("trial", {"environment": "0" * 32}, "gives environment"),
    ("trial", {"problem": {}}, "op is missing"),
    ("trial", {"id": 7}, "unknown field 'id'"),
    ("trial", {"kind": "trail"}, "kind is 'trail', not one of environment, run"),
    ("environment", {"num_sms": 131}, "that of its fields is"),
    ("run", {"seed": 2**63}, "seed is not an integer"),
    ("variant", {"numerics": "sloppy"}, "unknown numerics class 'sloppy'"),
    ("pin", {"environment": "0" * 32}, "gives environment"),
    ("end", {"lines": 1}, "does not count the lines"),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of a database with something of every kind."""
    here = tmp_path_factory.mktemp("exported")
    source = store(here / "source.db", [trial(), trial("lamport", 4.0, final=True, after=1)])
    with Database.open(source) as database:
        database.pin(problem(), candidate("two_shot"), environment=H200, reason="known good")
    return lines_of(source, here / "source.jsonl").decode().splitlines()


@pytest.mark.parametrize(("kind", "change", "complaint"), CHANGES, ids=lambda value: str(value)[:40])
def test_a_line_that_makes_no_sense_is_named(
    exported: list[str], tmp_path: Path, kind: str, change: dict[str, Any], complaint: str
) -> None:
    number = next(number for number, line in enumerate(exported) if kind_of(line) == kind)
    lines = list(exported)
    lines[number] = json.dumps({**json.loads(lines[number]), **change})
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    target = store(tmp_path / "target.db", [trial("lamport")])
    text = refused(DatabaseCorruptError, path, target)
    assert text.startswith(f"{path}, line {number + 1}: "), text
    assert complaint in text
    assert "nothing was imported" in text


BROKEN: list[tuple[str, Callable[[list[str]], str], str]] = [
    ("cut off", lambda lines: "\n".join(lines)[:-20], "line {last}: it is cut off"),
    ("lines missing", lambda lines: "\n".join(lines[:-3]) + "\n", "does not count the lines"),
    ("no header", lambda lines: "\n".join(lines[1:]) + "\n", "line 1: the first line must begin"),
    ("nested", lambda lines: "\n".join([lines[0], '{"a":' * 5000 + "1" + "}" * 5000, ""]), "line 2: "),
    ("NaN", lambda lines: "\n".join([lines[0], '{"kind":NaN}', ""]), "line 2: NaN is not JSON"),
    ("very long", lambda lines: "\n".join([lines[0], '{"a":"' + "x" * (1 << 20) + '"}', ""]), "line 2: it is longer"),
    ("not UTF-8", lambda lines: lines[0] + '\n{"a":"\udcff"}\n', "line 2: "),
]


@pytest.mark.parametrize(("broken", "complaint"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_file_that_makes_no_sense_is_refused(
    exported: list[str], tmp_path: Path, broken: Callable[[list[str]], str], complaint: str
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(broken(exported).encode(errors="surrogateescape"))
    text = refused(DatabaseCorruptError, path, tmp_path / "target.db")
    assert complaint.format(last=len(exported)) in text
    assert not (tmp_path / "target.db").exists()


def test_lines_of_a_later_version_are_refused(exported: list[str], tmp_path: Path) -> None:
    for change in ({"version": 2}, {"schema": "9999"}, {"schema": []}):
        path = tmp_path / "later.jsonl"
        header = json.dumps({**json.loads(exported[0]), **change})
        path.write_text("\n".join([header, *exported[1:]]) + "\n")
        assert "upgrade tunedcomm" in refused(DatabaseVersionError, path, tmp_path / "target.db")


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        (
            "UPDATE trial SET latency_p50_us = 'fast' WHERE id = 1",
            "trial 1: latency_p50_us is not a time in µs: 'fast'",
        ),
        ("UPDATE trial SET status = '''; DROP TABLE trial; --' WHERE id = 2", "trial 2: unknown status"),
        ("UPDATE trial SET config = '{\"num_blocks\":8}' WHERE id = 1", "trial 1: its config_digest is"),
        ("UPDATE trial SET created_at = 'soon' WHERE id = 1", "trial 1: "),
        ("UPDATE trial SET samples = 99999999999 WHERE id = 1", "trial 1: samples is not an integer"),
        ("UPDATE trial SET variant_id = 99 WHERE id = 1", "trial 1: it refers to variant 99"),
        ("UPDATE trial SET run_id = 99 WHERE id = 1", "trial 1: it refers to run 99"),
        ("UPDATE environment SET gpu = 'another'", "environment 1: its digest is"),
        ("UPDATE problem SET shape = '77'", "problem 1: its digest is"),
        ("DELETE FROM problem", "trial 1: it refers to problem 1"),
        ("UPDATE run SET seed = 'x'", "run 1: seed is not an integer"),
        ("UPDATE variant SET numerics = 'sloppy' WHERE id = 1", "variant 1: unknown numerics class"),
    ],
)
def test_a_row_that_makes_no_sense_is_named(tmp_path: Path, statement: str, complaint: str) -> None:
    source = store(tmp_path / "source.db", [trial(), trial("lamport", 4.0, final=True, after=1)])
    with sqlite3.connect(source) as plain:
        plain.execute(statement)
    target = store(tmp_path / "target.db", [trial("two_shot", 3.0)])
    for bring in (import_databases, merge_databases):
        assert f"{source}, {complaint}" in refused(DatabaseCorruptError, source, target, bring)


def test_other_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("neither of them")
    target = tmp_path / "target.db"
    assert "is not a SQLite database" in refused(DatabaseCorruptError, text, target)
    assert "does not exist" in refused(DatabaseAccessError, tmp_path / "absent.db", target)
    assert "directory" in refused(DatabaseAccessError, tmp_path, target)
    source = store(tmp_path / "source.db", [trial()])
    assert "both source and target" in refused(DatabaseAccessError, source, source)
    link = tmp_path / "link.db"
    link.symlink_to(source)
    assert "both source and target" in refused(DatabaseAccessError, link, source, merge_databases)
    with pytest.raises(ValueError, match="at least one"):
        import_databases([], target)
    assert not target.exists()


def test_sources_that_contradict_bring_nothing(database_url: str, tmp_path: Path) -> None:
    good = store(tmp_path / "good.db", [trial(final=True)])
    import_databases([good], database_url)
    for statement, complaint in (
        ("UPDATE problem SET shape = '77'", "its digest is"),
        ("DELETE FROM variant", "refers to variant"),
    ):
        forged = tmp_path / f"{complaint.split()[0]}.db"  # one each: what a log beside a file says is part of it
        shutil.copy(good, forged)
        with Database.open(forged) as database:
            database.record([trial("two_shot", 1.0, after=5)])
        with sqlite3.connect(forged) as plain:
            plain.execute(statement)
        before = digests(database_url)
        with pytest.raises(DatabaseCorruptError, match=complaint):
            merge_databases([forged], database_url)
        assert digests(database_url) == before
