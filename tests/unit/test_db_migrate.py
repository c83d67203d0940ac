"""Schema revisions: old databases upgrade whole or not at all, and end as the models say, with every row."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from cli_samples import record, run
from db_samples import H200, OLDER, candidate, problem, trial
from sqlalchemy.dialects import sqlite

from tunedcomm import kernels
from tunedcomm.db import engine, rekey, schema
from tunedcomm.db.engine import MIGRATIONS, upgrade_database
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import STATUSES
from tunedcomm.db.schema import HEAD, REVISIONS, VERSION_TABLE, Base, WorkingBase
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import import_databases
from tunedcomm.errors import DatabaseVersionError
from tunedcomm.spec import get_variant, variants

DATA = Path(__file__).parent.parent / "data"
MODELS = {**Base.metadata.tables, **WorkingBase.metadata.tables}


def test_the_list_of_revisions_is_alembics() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in script.walk_revisions())[::-1] == REVISIONS
    assert script.get_current_head() == HEAD


def check_schema(url: str) -> None:
    server = sa.create_engine(url)
    with server.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, [Base.metadata, WorkingBase.metadata]) == []  # type: ignore[arg-type]
        migrated = sa.MetaData()
        migrated.reflect(connection)
    server.dispose()
    # What Alembic's comparison leaves out on SQLite: names of constraints, and NULL or NOT NULL.
    for name, model in MODELS.items():
        table = migrated.tables[name]
        assert {c.name: c.nullable for c in table.columns} == {c.name: c.nullable for c in model.columns}
        for kind in (sa.UniqueConstraint, sa.ForeignKeyConstraint, sa.PrimaryKeyConstraint):
            there = {str(c.name) for c in table.constraints if isinstance(c, kind)}
            assert there == {name_of(c) for c in model.constraints if isinstance(c, kind)}


def name_of(constraint: sa.Constraint) -> str:
    """The name that the convention gives when the table is made."""
    formatted = sqlite.dialect().identifier_preparer.format_constraint(constraint)
    assert formatted is not None
    return formatted.strip('"')


def test_new_database_has_the_schema_of_the_models(database_url: str) -> None:
    Database.open(database_url, create=True).close()
    check_schema(database_url if "://" in database_url else f"sqlite:///{database_url}")


def test_comments_of_migrations_equal_the_models() -> None:
    """SQLite stores no comments, so the texts of the revisions after the first are looked through."""
    first = sa.MetaData()
    server = sa.create_engine(f"sqlite:///{DATA / 'revision_0001.db'}")
    first.reflect(server)
    server.dispose()
    known = {column for table in first.tables.values() for column in map(str, table.columns)}
    later = [column for table in MODELS.values() for column in table.columns if str(column) not in known]
    assert {column.table.name for column in later} == {"claim"}
    text = "".join(path.read_text() for path in sorted((MIGRATIONS / "versions").glob("*.py")))
    assert [str(column) for column in later if f'"{column.comment}"' not in text] == []


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_each_revision_opens_and_upgrades(tmp_path: Path, revision: str) -> None:
    path = Path(shutil.copy(DATA / f"revision_{revision}.db", tmp_path))
    with Database.open(path) as database:
        assert database.schema_version == HEAD
        trials = database.trials()
        assert [t.status for t in trials] == ["ok", "ok", *STATUSES]
        first = trials[0]
        times = (first.latency_p50_us, first.baseline_p50_us, first.samples)
        assert (first.variant, *times, first.final) == ("lamport", 2.9, 12.5, 200, True)
        assert first.config == {"num_blocks": 8, "num_warps": 2, "launch_pdl": True}
        assert (first.problem, first.environment) == (problem(), H200)
        assert database.environments() == [H200, OLDER]
        assert [(p.candidate, p.reason) for p in database.pins()] == [(candidate("two_shot"), "a person's reason")]
        assert [(r.command, r.seed) for r in database.runs()] == [("tunedcomm tune --op all_reduce", 42)]
    check_schema(f"sqlite:///{path}")
    found = load_snapshot(H200, 4, layers=[Layer("packaged", str(path))], strict=True)
    assert {row.candidate.variant for row in found.rows} == {"lamport", "library", "one_shot"}
    assert len(found.pins) == 1


# A revision that is made up here

OLD, NEW = HEAD, "0005"
REVISION = f"""
import sqlalchemy as sa
from alembic import op

revision = "{NEW}"
down_revision = "{OLD}"


def upgrade() -> None:
    op.add_column("run", sa.Column("colour", sa.Text(), nullable=True))
    op.execute("UPDATE run SET colour = 'blue'")
"""


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of one more revision of this tunedcomm."""
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "versions" / "r0005_colour.py"
    file.write_text(REVISION, encoding="utf-8")
    monkeypatch.setattr(engine, "MIGRATIONS", folder)
    monkeypatch.setattr(engine, "REVISIONS", (*REVISIONS, NEW))
    monkeypatch.setattr(engine, "READABLE", frozenset({NEW}))
    monkeypatch.setattr(engine, "HEAD", NEW)
    monkeypatch.setattr(schema, "HEAD", NEW)
    return file


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copy(DATA / f"revision_{OLD}.db", tmp_path / "tuned.db"))


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as plain:
        return plain.execute(query).fetchall()


def contents(path: Path) -> dict[str, list[Any]]:
    names = [name for (name,) in rows(path, "SELECT name FROM sqlite_master WHERE type='table' ORDER BY name")]
    return {name: rows(path, f"SELECT * FROM {name} ORDER BY 1") for name in names}


def test_upgrade_changes_the_file_and_keeps_a_copy(old: Path, newer: Path) -> None:
    before = contents(old)
    old.chmod(0o640)
    done = upgrade_database(old)
    assert (done.before, done.after, done.is_needed) == (OLD, NEW, True)
    assert done.copy == old.with_name(f"tuned.db.bak-{OLD}")
    assert contents(done.copy) == before
    assert stat.S_IMODE(done.copy.stat().st_mode) == 0o640
    assert {colour for (colour,) in rows(old, "SELECT colour FROM run")} == {"blue"}
    after = contents(old)
    assert [name for name in before if after[name] != before[name]] == ["run", VERSION_TABLE]
    with Database.open(old) as database:
        assert database.schema_version == NEW
        assert len(database.trials()) == 9
    # Again there is nothing to do, and no second copy.
    again = upgrade_database(old)
    assert (again.before, again.is_needed, again.copy) == (NEW, False, None)
    assert [path.name for path in old.parent.glob("*bak*")] == [done.copy.name]


def test_newer_schema_is_refused_and_left_alone(old: Path) -> None:
    with closing(sqlite3.connect(old)) as plain, plain:
        plain.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0417'")
    before = old.read_bytes()
    for check in (True, False):
        with pytest.raises(DatabaseVersionError, match=r"0417.*upgrade tunedcomm"):
            upgrade_database(old, check=check)
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["tuned.db"]


def test_failed_upgrade_leaves_the_file_and_no_copy(old: Path, newer: Path) -> None:
    before = contents(old)
    newer.write_text(REVISION + "    1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        upgrade_database(old)
    assert contents(old) == before
    assert not list(old.parent.glob("*bak*"))


def test_reading_an_older_schema_names_the_verb_and_layers_go_on(
    old: Path, newer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DatabaseVersionError, match=f"tunedcomm db upgrade --db {old}"):
        Database.open(old, readonly=True)
    fresh = Layer("user", record(tmp_path / "fresh.db", trial(final=True)))
    snapshot = load_snapshot(H200, 4, layers=[fresh])
    assert load_snapshot(H200, 4, layers=[fresh, Layer("site", str(old))]).digest == snapshot.digest
    assert "tunedcomm db upgrade" in caplog.text


def test_server_is_upgraded(postgres_url: str, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(engine, "HEAD", OLD)
        with Database.open(postgres_url, create=True) as database:
            database.start_run(command="tunedcomm tune", seed=1, budget="", host="node")
    assert upgrade_database(postgres_url, check=True).is_needed
    done = upgrade_database(postgres_url)
    assert (done.before, done.after, done.copy) == (OLD, NEW, None)
    server = sa.create_engine(postgres_url)
    with server.connect() as connection:
        assert connection.execute(sa.text("SELECT colour FROM run")).scalars().all() == ["blue"]
    server.dispose()


def test_verb(old: Path, newer: Path) -> None:
    before = old.read_bytes()
    shown = run("db", "upgrade", "--db", old, "--check", "--json")
    assert (shown.code, shown.json["is_needed"]) == (1, True)
    assert run("db", "upgrade", "--db", old, "--check").code == 1
    assert old.read_bytes() == before
    assert not list(old.parent.glob("tuned.db?*"))
    shown = run("db", "upgrade", "--db", old)
    assert shown.code == 0
    assert f"tuned.db.bak-{OLD}" in shown.out
    assert run("db", "upgrade", "--db", old, "--check").code == 0
    shown = run("db", "upgrade", "--db", old, "--json")
    assert shown.json == {"target": str(old), "before": NEW, "after": NEW, "copy": None, "is_needed": False}


# Stored rows keep serving when the source hashes of unchanged kernels are replaced


FORMER, MIDDLE, LATEST = "0" * 16, "1" * 16, "2" * 16


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of the first revision: lamport under an old hash and under the new one, one_shot under an old one."""
    replaced = {("all_reduce", "lamport", FORMER): MIDDLE, ("all_reduce", "lamport", MIDDLE): LATEST}
    replaced["all_reduce", "one_shot", FORMER] = LATEST
    monkeypatch.setattr(rekey, "_replacements", lambda: replaced)
    path = tmp_path / "first.db"
    shutil.copy(DATA / "revision_0001.db", path)
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("UPDATE variant SET source_hash = ? WHERE name IN ('lamport', 'one_shot')", (FORMER,))
        plain.execute("UPDATE variant SET name = 'lamport', source_hash = ? WHERE name = 'two_shot'", (LATEST,))
        plain.execute(
            "UPDATE trial SET variant_id = (SELECT id FROM variant WHERE source_hash = ?) WHERE id = 2", (LATEST,)
        )
    return path


def hashes(path: Path) -> list[tuple[str, str]]:
    with Database.open(path, readonly=True) as database:
        return [(t.variant, t.source_hash) for t in database.trials()]


def test_readers_translate_a_file_that_is_not_written(first: Path) -> None:
    before = first.read_bytes()
    assert {pair for pair in hashes(first) if pair[0] != "library"} == {("lamport", LATEST), ("one_shot", LATEST)}
    found = load_snapshot(H200, 4, layers=[Layer("packaged", str(first))], strict=True)
    assert {row.source_hash for row in found.rows if row.candidate.variant != "library"} == {LATEST}
    assert first.read_bytes() == before


def test_an_upgrade_joins_variants_and_keeps_every_trial(first: Path) -> None:
    before = hashes(first)
    Database.open(first).close()
    with closing(sqlite3.connect(first)) as plain:
        stored = plain.execute("SELECT name, source_hash FROM variant WHERE name != 'library' ORDER BY name").fetchall()
    assert stored == [("lamport", LATEST), ("one_shot", LATEST)]
    assert hashes(first) == before


def test_an_import_takes_rows_under_their_new_hashes(first: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.db"
    with Database.open(target, create=True) as database:
        database.record([trial("lamport", 3.0, source_hash=LATEST)])
    import_databases([first], target)
    assert len(hashes(target)) == 1 + len(hashes(first))
    assert FORMER not in {source_hash for _, source_hash in hashes(target)}


def test_replaced_hashes_lead_to_the_kernels_of_today() -> None:
    """Every line of the list ends in the hash that a variant has now, unless its kernels were changed since."""
    kernels.discover()
    known = [key for key in rekey._replacements() if key[1] in variants(key[0])]  # some variants are gone
    current = {key: kernels.source_hash(get_variant(*key[:2])) for key in known}
    assert current
    assert {key: rekey.current_hash(*key) for key in current} == current
