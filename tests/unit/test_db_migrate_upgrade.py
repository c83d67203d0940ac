"""Upgrades to a second revision that is made up here: copied before, all or nothing, and never downwards."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from db_samples import H200, trial
from typer.testing import CliRunner

from tunedcomm.cli import main
from tunedcomm.db import engine, schema
from tunedcomm.db.engine import upgrade_database
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.schema import VERSION_TABLE
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseVersionError

ASSET = Path(__file__).parent.parent / "data" / f"revision_{schema.HEAD}.db"
OLD, NEW = schema.HEAD, "0004"
REVISION = f"""
import sqlalchemy as sa
from alembic import op

revision = "{NEW}"
down_revision = "{OLD}"


def upgrade() -> None:
    op.add_column("run", sa.Column("colour", sa.Text(), nullable=True))
    op.execute("UPDATE run SET colour = 'blue'")
    %s


def downgrade() -> None:
    op.drop_column("run", "colour")
"""


def make_revision(folder: Path, last_line: str = "") -> None:
    shutil.copytree(engine.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "r0004_colour.py").write_text(REVISION % last_line, encoding="utf-8")


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This tunedcomm has two revisions; the folder of them."""
    folder = tmp_path / "migrations"
    make_revision(folder)
    monkeypatch.setattr(engine, "MIGRATIONS", folder)
    monkeypatch.setattr(engine, "REVISIONS", (*schema.REVISIONS, NEW))
    monkeypatch.setattr(engine, "READABLE", frozenset({NEW}))
    monkeypatch.setattr(engine, "HEAD", NEW)
    monkeypatch.setattr(schema, "HEAD", NEW)
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.db"
    shutil.copy(ASSET, path)
    return path


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
    assert done.copy == old.with_name("tuned.db.bak-0003")
    assert contents(done.copy) == before
    assert stat.S_IMODE(done.copy.stat().st_mode) == 0o640
    assert {colour for (colour,) in rows(old, "SELECT colour FROM run")} == {"blue"}
    after = contents(old)
    assert {name: after[name] for name in before if name not in ("run", VERSION_TABLE)} == {
        name: before[name] for name in before if name not in ("run", VERSION_TABLE)
    }
    with Database.open(old) as database:
        assert database.schema_version == NEW
        assert len(database.trials()) == 9
    # Again there is nothing to do, and no second copy.
    again = upgrade_database(old)
    assert (again.before, again.is_needed, again.copy) == (NEW, False, None)
    assert sorted(path.name for path in old.parent.glob("*bak*")) == ["tuned.db.bak-0003"]


def test_check_changes_nothing(old: Path, newer: Path) -> None:
    before = old.read_bytes()
    found = upgrade_database(old, check=True)
    assert (found.before, found.after, found.copy) == (OLD, NEW, None)
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir() if path.is_file()] == ["tuned.db"]


@pytest.mark.parametrize("check", [True, False])
def test_newer_schema_is_refused_and_left_alone(old: Path, check: bool) -> None:
    with closing(sqlite3.connect(old)) as plain:
        plain.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0417'")
        plain.commit()
    before = old.read_bytes()
    with pytest.raises(DatabaseVersionError, match=r"newer tunedcomm.*0417.*upgrade tunedcomm"):
        upgrade_database(old, check=check)
    assert old.read_bytes() == before
    assert [path.name for path in old.parent.iterdir()] == ["tuned.db"]


def test_failed_upgrade_leaves_the_file_and_no_copy(old: Path, newer: Path) -> None:
    before = contents(old)
    shutil.rmtree(newer)
    make_revision_failing(newer)
    with pytest.raises(ZeroDivisionError):
        upgrade_database(old)
    assert contents(old) == before
    assert not list(old.parent.glob("*bak*"))


def make_revision_failing(folder: Path) -> None:
    source = Path(schema.__file__).parent / "migrations"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / "r0004_colour.py").write_text(REVISION % "1 / 0", encoding="utf-8")


def test_reading_an_older_schema_names_the_verb_and_layers_go_on(
    old: Path, newer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DatabaseVersionError, match=rf"schema 0003.*reads 0004.*tunedcomm db upgrade --db {old}"):
        Database.open(old, readonly=True)
    fresh = tmp_path / "fresh.db"
    with Database.open(fresh, create=True) as database:
        database.record([trial(final=True)])
    snapshot = load_snapshot(H200, 4, layers=[Layer("user", str(fresh))])
    layers = [Layer("user", str(fresh)), Layer("site", str(old))]
    with caplog.at_level("WARNING", "tunedcomm"):
        assert load_snapshot(H200, 4, layers=layers).digest == snapshot.digest
    assert "left out (site)" in caplog.text
    assert "tunedcomm db upgrade" in caplog.text


def test_server_is_upgraded(postgres_url: str, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(engine, "MIGRATIONS", Path(schema.__file__).parent / "migrations")
        older.setattr(engine, "REVISIONS", (OLD,))
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


def invoke(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main.app, ["db", "upgrade", *arguments])
    return shown.exit_code, shown.stdout


def test_verb(old: Path, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB", str(old))
    code, text = invoke("--check")
    assert code == 1
    assert "0003" in text
    assert "0004" in text
    code, text = invoke("--check", "--json")
    assert (code, json.loads(text)["is_needed"]) == (1, True)
    code, text = invoke()
    assert code == 0
    assert "tuned.db.bak-0003" in text
    assert invoke("--check")[0] == 0
    code, text = invoke("--json")
    assert code == 0
    assert json.loads(text) == {"target": str(old), "before": NEW, "after": NEW, "copy": None, "is_needed": False}
