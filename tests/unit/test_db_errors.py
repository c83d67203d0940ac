"""Databases, files and rows that make no sense: a named error that says what to do, and nothing of them is believed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import record
from db_samples import H200, OLDER, candidate, problem, trial
from quick import some
from sqlalchemy import Text
from transfer_samples import change, everything, lines_of, rows_of, store

from tunedcomm.cli.stored import read_layers
from tunedcomm.db.layers import Layer, is_absent, load_snapshot
from tunedcomm.db.maintenance import check_database
from tunedcomm.db.schema import Base
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database, import_databases, merge_databases
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError, DatabaseError, DatabaseVersionError

GOOD = trial("two_shot", problem=problem(1 << 20), environment=OLDER, final=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a trial (id 1), another one of which nothing is shared with it, and a pin."""
    file = tmp_path / "tuned.db"
    with Database.open(file, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
        database.record([trial(final=True, run_id=run), GOOD])
        database.pin(problem(), candidate("one_shot"), environment=H200, reason="")
    return file


def drop_privileges() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


# Targets that are no database


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("none.db", DatabaseAccessError, "correct the path"),
        (".", DatabaseAccessError, "directory"),
        ("tuned.db/below.db", DatabaseAccessError, "check"),
        ("tuned.db/deeper/below.db", DatabaseAccessError, "check"),
        ("fifo.db", DatabaseAccessError, "special file"),
        ("/dev/zero", DatabaseAccessError, "special file"),
        ("loop.db", DatabaseAccessError, "check"),
        ("table.csv", DatabaseCorruptError, "is not a SQLite database"),
        ("header.db", DatabaseCorruptError, "is not a SQLite database"),
        ("zeros.db", DatabaseCorruptError, "is not a SQLite database"),
        ("bookmarks.db", DatabaseCorruptError, "another program"),
    ],
)
def test_what_is_no_database_is_refused_and_left_alone(
    path: Path, target: str, error: type[DatabaseError], said: str
) -> None:
    folder = path.parent
    os.mkfifo(folder / "fifo.db")
    (folder / "loop.db").symlink_to(folder / "loop.db")
    (folder / "table.csv").write_bytes(b"gpu,latency\nH200,2.9\n")
    (folder / "header.db").write_bytes(b"SQLite format 3")
    (folder / "zeros.db").write_bytes(bytes(4096))
    change(folder / "bookmarks.db", "CREATE TABLE bookmarks (url TEXT)")
    before = {entry: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    for options in ({"readonly": True}, {}, {"create": True}):
        if options.get("create") and target == "none.db":
            continue
        with pytest.raises(error, match=None if "readonly" in options else said):
            Database.open(folder / target, **options)  # type: ignore[arg-type]
    after = {entry: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
    assert set(after) == set(before)
    assert all(after[entry] == content for entry, content in before.items() if entry.name != "bookmarks.db")
    assert load_snapshot(H200, 4, layers=[Layer("user", str(folder / target))]).rows == (), "dispatch does without it"


@pytest.mark.parametrize("url", ["nosuchdialect://host/name", "sqlite+nosuch:///x", "", "a\x00b"])
def test_not_a_usable_target(url: str) -> None:
    with pytest.raises(DatabaseAccessError):
        Database.open(url)


def test_passwords_stay_out_of_messages() -> None:
    with pytest.raises(DatabaseAccessError) as caught:
        Database.open("postgresql+nosuchdriver://user:secret@localhost/name")
    assert "secret" not in str(caught.value)


def test_create_needs_a_writable_database(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="create=True"):
        Database.open(tmp_path / "x.db", create=True, readonly=True)


def test_files_that_may_not_be_read_or_written(ordinary_user: Path) -> None:
    closed, fixed = ordinary_user / "closed.db", ordinary_user / "fixed.db"
    for file, mode in ((closed, 0), (fixed, stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)):
        record(file, trial())
        file.chmod(mode)
    drop_privileges()
    with pytest.raises(DatabaseAccessError, match="check the permissions"):
        Database.open(closed)
    with Database.open(fixed, readonly=True) as database:
        assert len(database.trials()) == 1
    with pytest.raises(DatabaseAccessError), Database.open(fixed) as database:
        database.record([trial()])
    with pytest.raises(DatabaseAccessError, match="set TUNEDCOMM_DB"):
        Database.open(ordinary_user / "deeper" / "tuned.db", create=True)


def test_truncated_or_damaged(path: Path) -> None:
    record(path, *(trial(config={"num_blocks": i}, latency_us=5 + i) for i in range(300)))
    content = path.read_bytes()
    for keep in (100, 4096, len(content) // 2, len(content) - 4096):
        path.write_bytes(content[:keep])
        with pytest.raises(DatabaseCorruptError, match="move it away and tune again"):
            Database.open(path)
    path.write_bytes(content[:4096] + b"\x55" * (len(content) - 4096))  # all but the header and the schema's page
    with pytest.raises(DatabaseCorruptError), Database.open(path) as database:
        database.trials()


def test_an_empty_file_becomes_a_database_only_where_that_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "tuned.db"
    file.touch()
    for readonly in (False, True):
        with pytest.raises(DatabaseCorruptError, match="no tunedcomm tables"):
            Database.open(file, readonly=readonly)
    with Database.open(file, create=True) as database:
        assert database.trials() == []


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_schema_or_missing_tables(path: Path, readonly: bool) -> None:
    change(path, "UPDATE tunedcomm_version SET version_num = '0999'")
    with pytest.raises(DatabaseVersionError, match=r"0999.*upgrade tunedcomm"):
        Database.open(path, readonly=readonly)
    assert load_snapshot(H200, 4, layers=[Layer("user", str(path))]).rows == (), "dispatch does without it"
    change(path, "UPDATE tunedcomm_version SET version_num = '0003'")
    with Database.open(path, readonly=readonly) as database:
        assert len(database.trials()) == 2
    change(path, "DROP TABLE trial")
    with pytest.raises(DatabaseCorruptError, match="tables"), Database.open(path, readonly=readonly) as database:
        database.trials()


# Rows that make no sense: each is left out with one warning

HOSTILE = [
    *(
        f"trial SET config = {config}"
        for config in (
            "'{\"num_blocks\": '",
            "'[1, 2]'",
            '\'{"num_blocks": {"a": 1}}\'',
            "'{\"num_blocks\": NaN}'",
            "x'ff00fe'",
            f"'{'[' * 9000}'",
            f"'{{\"num_blocks\": {'9' * 6000}}}'",
        )
    ),
    *(f"trial SET latency_p50_us = {value}" for value in ("'fast'", "-1.0", "9e999", "NULL")),
    "trial SET baseline_p50_us = 0",
    "trial SET samples = 'many'",
    "trial SET created_at = 'yesterday'",
    "trial SET created_at = 12345678901234567890",
    "trial SET status = 'ok; DROP TABLE trial'",
    "trial SET variant_id = 99",
    "trial SET problem_id = 99",
    "variant SET numerics = 'exact'",
    "variant SET op = 'all_gather'",
    *(f"problem SET shape = '{shape}'" for shape in ("2048xbig", "9" * 30, "2x" * 99 + "2")),
    "problem SET dtype = 'float3'",
    "problem SET world_size = 'four'",
    "problem SET mode = x'00'",
    "problem SET in_place = 7",
    "problem SET layout = 'other'",
    "environment SET nodes = 'one'",
    "environment SET driver = x'00ff'",
    "environment SET driver = driver || '1'",  # a row that is not that of its digest is another one
]


@pytest.mark.parametrize("changes", HOSTILE)
def test_a_hostile_row_is_left_out_and_reported(path: Path, changes: str, caplog: pytest.LogCaptureFixture) -> None:
    change(path, f"PRAGMA foreign_keys=OFF; UPDATE {changes} WHERE id = 1")
    assert [row.problem for row in rows_of(path)] == [GOOD.problem]
    assert len([r for r in caplog.records if "invalid rows" in r.message]) <= 1
    with Database.open(path) as database:
        assert [stored.variant for stored in database.trials()] == ["two_shot"]
        assert len(database.environments()) + len(database.problems()) >= 2
        assert len(database.pins()) <= 1
        assert database.stats()["trials"] == 2
    findings = check_database(path, lambda op, variant: None)
    assert "fail" in {finding.level for finding in findings}


TEXTS = [(table.name, c.name) for table in Base.metadata.sorted_tables for c in table.columns if type(c.type) is Text]


@pytest.mark.parametrize(("table", "column"), some(TEXTS))
def test_a_byte_that_is_no_text_costs_no_other_row(path: Path, table: str, column: str) -> None:
    """Also not where `db check` looks at each row."""
    broken = f"CAST(CAST(\"{column}\" AS BLOB) || x'ff' AS TEXT)"
    change(path, f'UPDATE {table} SET "{column}" = {broken} WHERE id = 1')
    assert GOOD.problem in {row.problem for row in rows_of(path)}
    with Database.open(path, readonly=True) as database:
        assert GOOD.problem in {stored.problem for stored in database.trials()}
        assert OLDER in database.environments()
        assert len(database.runs()) == 1
        assert len(database.pins()) <= 1
    assert {"trials", "pins"} <= {finding.name for finding in check_database(path, lambda op, variant: None)}


def test_what_is_skipped_is_said_once_and_is_printable(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(path, trial("lamport", environment=replace(OLDER, torch="2\x1b[2J\u202e")))
    change(path, "UPDATE trial SET status = 'great' WHERE id = 1; UPDATE variant SET numerics = 'exact' WHERE id = 1")
    with Database.open(path, readonly=True) as database:
        database.trials()
        change(path, "UPDATE variant SET numerics = 'ordered' WHERE id = 1")
        database.trials()
    rows_of(path)
    assert len([said for said in caplog.messages if "skipped" in said]) == 1
    assert any("torch" in said for said in caplog.messages), "other software is told of"
    assert all(said.isprintable() for said in caplog.messages)


# Layers


def test_a_user_database_in_an_unreadable_directory_is_not_taken_for_absent(
    ordinary_user: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = ordinary_user / "closed"
    Database.open(closed / "tuned.db", create=True).close()
    closed.chmod(0)
    drop_privileges()
    inside, outside = Layer("user", str(closed / "tuned.db")), Layer("user", str(ordinary_user / "none.db"))
    assert (is_absent(inside), is_absent(outside)) == (False, True)
    load_snapshot(H200, 4, layers=[inside, outside])
    (said,) = caplog.messages
    assert "Permission denied" in said
    monkeypatch.setenv("TUNEDCOMM_DB", inside.target)
    assert inside in read_layers(None)
    monkeypatch.setenv("TUNEDCOMM_DB", outside.target)
    assert outside not in read_layers(None)


# What is brought from elsewhere


def refused(
    error: type[DatabaseError], source: Path, target: Path, bring: Callable[..., Any] = import_databases
) -> str:
    before = everything(target) if target.exists() else None
    with pytest.raises(error) as caught:
        bring([source], target)
    assert (everything(target) if target.exists() else None) == before
    return str(caught.value)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of a database with something of every kind."""
    here = tmp_path_factory.mktemp("exported")
    source = store(here / "source.db", [trial(), trial("lamport", 4.0, final=True, after=1)])
    with Database.open(source) as database:
        database.pin(problem(), candidate("two_shot"), environment=H200, reason="known good")
    return lines_of(source, here / "source.jsonl").decode().splitlines()


LINES: list[tuple[str, dict[str, Any], str]] = [
    ("trial", {"latency_p50_us": -1.0}, "latency_p50_us"),
    ("trial", {"latency_p50_us": None}, "without latency_p50_us"),
    ("trial", {"status": "splendid"}, "'splendid'"),
    ("trial", {"samples": 2**40}, "samples"),
    ("trial", {"created_at": "yesterday"}, "yesterday"),
    ("trial", {"error": "NaN"}, "'NaN'"),
    ("trial", {"reason": "\x00"}, "NUL"),
    ("trial", {"reason": "x" * 200_000}, "too long"),
    ("trial", {"config": {"num_blocks": [1]}}, "config"),
    ("trial", {"environment": "0" * 32}, "gives environment"),
    ("trial", {"problem": {}}, "op is missing"),
    ("trial", {"id": 7}, "'id'"),
    ("trial", {"kind": "trail"}, "'trail'"),
    ("environment", {"num_sms": 131}, "have the digest"),
    ("run", {"seed": 2**63}, "seed"),
    ("variant", {"numerics": "sloppy"}, "'sloppy'"),
    ("pin", {"environment": "0" * 32}, "gives environment"),
    ("end", {"lines": 1}, "does not count"),
]


@pytest.mark.parametrize(("kind", "changes", "said"), LINES, ids=lambda value: str(value)[:40])
def test_a_line_that_makes_no_sense_is_named(
    exported: list[str], tmp_path: Path, kind: str, changes: dict[str, Any], said: str
) -> None:
    number = next(number for number, line in enumerate(exported) if json.loads(line).get("kind") == kind)
    lines = list(exported)
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    text = refused(DatabaseCorruptError, path, store(tmp_path / "target.db", [trial("lamport")]))
    assert text.startswith(f"{path}, line {number + 1}: "), text
    assert said in text


FILES: dict[str, Callable[[list[str]], str]] = {
    "cut off": lambda lines: "\n".join(lines)[:-20],
    "does not count the lines": lambda lines: "\n".join(lines[:-3]) + "\n",
    "line 1: ": lambda lines: "\n".join(lines[1:]) + "\n",
    "recursion": lambda lines: "\n".join([lines[0], '{"a":' * 5000 + "1" + "}" * 5000, ""]),
    "NaN": lambda lines: "\n".join([lines[0], '{"kind":NaN}', ""]),
    "line 2: it is longer": lambda lines: "\n".join([lines[0], '{"a":"' + "x" * (1 << 20) + '"}', ""]),
    "line 2: ": lambda lines: lines[0] + '\n{"a":"\udcff"}\n',
}


@pytest.mark.parametrize("said", FILES)
def test_a_file_of_lines_that_makes_no_sense_is_refused(exported: list[str], tmp_path: Path, said: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(FILES[said](exported).encode(errors="surrogateescape"))
    assert said in refused(DatabaseCorruptError, path, tmp_path / "target.db")
    assert not (tmp_path / "target.db").exists()


def test_lines_of_a_later_version_are_refused(exported: list[str], tmp_path: Path) -> None:
    for changes in ({"version": 2}, {"schema": "9999"}, {"schema": []}):
        path = tmp_path / "later.jsonl"
        header = json.dumps({**json.loads(exported[0]), **changes})
        path.write_text("\n".join([header, *exported[1:]]) + "\n")
        assert "upgrade tunedcomm" in refused(DatabaseVersionError, path, tmp_path / "target.db")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE trial SET latency_p50_us = 'fast' WHERE id = 1", "trial 1: latency_p50_us"),
        ("UPDATE trial SET status = '''; DROP TABLE trial; --' WHERE id = 2", "trial 2: unknown status"),
        ("UPDATE trial SET config = '{\"num_blocks\":8}' WHERE id = 1", "trial 1: its config_digest"),
        ("UPDATE trial SET created_at = 'soon' WHERE id = 1", "trial 1: "),
        ("UPDATE trial SET samples = 99999999999 WHERE id = 1", "trial 1: samples"),
        ("UPDATE trial SET run_id = 99 WHERE id = 1", "trial 1: it refers to run 99"),
        ("UPDATE environment SET gpu = 'another'", "environment 1: its digest"),
        ("UPDATE problem SET shape = '77'", "problem 1: its digest"),
        ("DELETE FROM problem", "trial 1: it refers to problem 1"),
        ("DELETE FROM variant WHERE id = 1", "trial 1: it refers to variant 1"),
        ("UPDATE run SET seed = 'x'", "run 1: seed"),
        ("UPDATE variant SET numerics = 'sloppy' WHERE id = 1", "variant 1: unknown numerics"),
    ],
)
def test_a_row_that_makes_no_sense_is_named_and_nothing_is_brought(tmp_path: Path, statement: str, said: str) -> None:
    source = store(tmp_path / "source.db", [trial(final=True), trial("lamport", 4.0, final=True, after=1)])
    change(source, statement)
    target = store(tmp_path / "target.db", [trial("two_shot", 3.0)])
    for bring in (import_databases, merge_databases, export_forced):
        assert f"{source}, {said}" in refused(DatabaseCorruptError, source, target, bring)


def export_forced(sources: list[Path], target: Path) -> None:
    export_database([*sources, target], target.with_name("out.db"))


def test_other_files_are_not_brought(tmp_path: Path) -> None:
    text, target = tmp_path / "notes.txt", tmp_path / "target.db"
    text.write_text("neither of them")
    assert "is not a SQLite database" in refused(DatabaseCorruptError, text, target)
    missing = refused(DatabaseAccessError, tmp_path / "absent.db", target)
    assert "does not exist" in missing
    assert "tunedcomm tune" not in missing
    assert "directory" in refused(DatabaseAccessError, tmp_path, target)
    source, link = store(tmp_path / "source.db", [trial()]), tmp_path / "link.db"
    link.symlink_to(source)
    assert "both source and target" in refused(DatabaseAccessError, source, source)
    assert "both source and target" in refused(DatabaseAccessError, link, source, merge_databases)
    with pytest.raises(ValueError, match="at least one"):
        import_databases([], target)
    assert not target.exists()
