"""Schema revisions: old databases open and upgrade, and new and upgraded ones hold exactly what the models say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from db_samples import H200, OLDER, candidate, problem

import tunedcomm.db
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.schema import HEAD, REVISIONS, VERSION_TABLE, Base, WorkingBase
from tunedcomm.db.store import Database

DATA = Path(__file__).parent.parent / "data"
MIGRATIONS = Path(tunedcomm.db.__file__).parent / "migrations"
MODELS = {**Base.metadata.tables, **WorkingBase.metadata.tables}


def test_the_list_of_revisions_is_alembics() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in script.walk_revisions())[::-1] == REVISIONS
    assert script.get_current_head() == HEAD


def test_new_database_has_the_schema_of_the_models(database_url: str) -> None:
    Database.open(database_url, create=True).close()
    check_schema(database_url if "://" in database_url else f"sqlite:///{database_url}")


@pytest.mark.parametrize("revision", REVISIONS)
def test_upgraded_database_has_the_schema_of_the_models(tmp_path: Path, revision: str) -> None:
    path = shutil.copy(DATA / f"revision_{revision}.db", tmp_path)
    Database.open(path).close()
    check_schema(f"sqlite:///{path}")


def check_schema(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, [Base.metadata, WorkingBase.metadata]) == []  # type: ignore[arg-type]
        migrated = sa.MetaData()
        migrated.reflect(connection)
    engine.dispose()
    # What Alembic's comparison leaves out on SQLite: names of constraints, and NULL or NOT NULL.
    for name, model in MODELS.items():
        table = migrated.tables[name]
        assert [c.name for c in table.columns] == [c.name for c in model.columns]
        assert {c.name: c.nullable for c in table.columns} == {c.name: c.nullable for c in model.columns}
        for kind in (sa.UniqueConstraint, sa.ForeignKeyConstraint, sa.PrimaryKeyConstraint):
            there = {str(c.name) for c in table.constraints if isinstance(c, kind)}
            assert there == {_name(c) for c in model.constraints if isinstance(c, kind)}


def _name(constraint: sa.Constraint) -> str:
    """The name that the convention gives when the table is made."""
    from sqlalchemy.dialects import sqlite

    formatted = sqlite.dialect().identifier_preparer.format_constraint(constraint)
    assert formatted is not None
    return formatted.strip('"')


def test_comments_of_migrations_equal_the_models() -> None:
    """SQLite stores no comments, so the texts of the revisions after the first are looked through."""
    engine = sa.create_engine(f"sqlite:///{DATA / 'revision_0001.db'}")
    first = sa.MetaData()
    first.reflect(engine)
    engine.dispose()
    known = {column for table in first.tables.values() for column in map(str, table.columns)}
    later = [column for table in MODELS.values() for column in table.columns if str(column) not in known]
    assert {column.table.name for column in later} == {"claim"}
    text = "".join(path.read_text() for path in sorted((MIGRATIONS / "versions").glob("*.py")))
    assert sorted(str(column) for column in later if f'"{column.comment}"' not in text) == []


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_each_revision_opens_and_upgrades(tmp_path: Path, revision: str) -> None:
    asset = DATA / f"revision_{revision}.db"
    path = tmp_path / asset.name
    shutil.copy(asset, path)
    with Database.open(path) as database:
        assert database.schema_version == HEAD
        trials = database.trials()
        assert [t.status for t in trials] == [
            "ok",
            "ok",
            "ok",
            "infeasible",
            "compile_error",
            "incorrect",
            "crashed",
            "hung",
            "pruned",
        ]
        first = trials[0]
        assert (first.variant, first.latency_p50_us, first.baseline_p50_us, first.samples) == (
            "lamport",
            2.9,
            12.5,
            200,
        )
        assert first.config == {"num_blocks": 8, "num_warps": 2, "launch_pdl": True}
        assert (first.problem, first.environment, first.final) == (problem(), H200, True)
        assert database.environments() == [H200, OLDER]
        assert [(p.candidate, p.reason) for p in database.pins()] == [(candidate("two_shot"), "a person's reason")]
        assert [(r.command, r.seed) for r in database.runs()] == [("tunedcomm tune --op all_reduce", 42)]
    found = load_snapshot(H200, 4, layers=[Layer("packaged", str(path))], strict=True)
    assert {row.candidate.variant for row in found.rows} == {"lamport", "library", "one_shot"}
    assert len(found.pins) == 1
