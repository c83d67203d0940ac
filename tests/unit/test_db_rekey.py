"""Stored rows keep serving when the source hashes of unchanged kernels are replaced."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from db_samples import H200, trial

from tunedcomm import kernels
from tunedcomm.db import rekey
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import import_databases
from tunedcomm.spec import get_variant

DATA = Path(__file__).parent.parent / "data"
OLD, MIDDLE, NEW = "0" * 16, "1" * 16, "2" * 16


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of the first revision: lamport under an old hash and under the new one, one_shot under an old one."""
    replaced = {("all_reduce", "lamport", OLD): MIDDLE, ("all_reduce", "lamport", MIDDLE): NEW}
    replaced["all_reduce", "one_shot", OLD] = NEW
    monkeypatch.setattr(rekey, "_replacements", lambda: replaced)
    path = tmp_path / "first.db"
    shutil.copy(DATA / "revision_0001.db", path)
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("UPDATE variant SET source_hash = ? WHERE name IN ('lamport', 'one_shot')", (OLD,))
        plain.execute("UPDATE variant SET name = 'lamport', source_hash = ? WHERE name = 'two_shot'", (NEW,))
        plain.execute(
            "UPDATE trial SET variant_id = (SELECT id FROM variant WHERE source_hash = ?) WHERE id = 2", (NEW,)
        )
    return path


def hashes(path: Path) -> list[tuple[str, str]]:
    with Database.open(path, readonly=True) as database:
        return [(t.variant, t.source_hash) for t in database.trials()]


def test_readers_translate_a_file_that_is_not_written(first: Path) -> None:
    before = first.read_bytes()
    assert {pair for pair in hashes(first) if pair[0] != "library"} == {("lamport", NEW), ("one_shot", NEW)}
    found = load_snapshot(H200, 4, layers=[Layer("packaged", str(first))], strict=True)
    assert {row.source_hash for row in found.rows if row.candidate.variant != "library"} == {NEW}
    assert first.read_bytes() == before


def test_an_upgrade_joins_variants_and_keeps_every_trial(first: Path) -> None:
    before = hashes(first)
    Database.open(first).close()
    with closing(sqlite3.connect(first)) as plain:
        stored = plain.execute("SELECT name, source_hash FROM variant WHERE name != 'library' ORDER BY name").fetchall()
    assert stored == [("lamport", NEW), ("one_shot", NEW)]
    assert hashes(first) == before


def test_an_import_takes_rows_under_their_new_hashes(first: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.db"
    with Database.open(target, create=True) as database:
        database.record([trial("lamport", 3.0, source_hash=NEW)])
    import_databases([first], target)
    assert len(hashes(target)) == 1 + len(hashes(first))
    assert OLD not in {source_hash for _, source_hash in hashes(target)}


def test_replaced_hashes_lead_to_the_kernels_of_today() -> None:
    """Every line of the list ends in the hash that a variant has now, unless its kernels were changed since."""
    kernels.discover()
    current = {key: kernels.source_hash(get_variant(*key[:2])) for key in rekey._replacements()}
    assert current
    assert {key: rekey.current_hash(*key) for key in current} == current
