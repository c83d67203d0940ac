"""Spoilt databases: never a crash, never an unchecked candidate, always the library or a named error.

`TUNEDCOMM_TEST_FUZZ=10000` runs so many of them.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import fuzz_probe
import pytest
from db_samples import H200
from fuzz_probe import WORLD_SIZE, Base, bases
from quick import QUICK

from tunedcomm.cli.output import emit, note, table
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import config_digest

CASES = int(os.environ.get("TUNEDCOMM_TEST_FUZZ", "12" if QUICK else "50"))


@pytest.mark.timeout(600 + 4 * CASES)
def test_spoilt_databases() -> None:
    found = {number: fuzz_probe.run_case(number) for number in range(CASES)}
    assert {number: case.broken for number, case in found.items() if case.broken} == {}
    # Neither all of them harmless nor all of them beyond reading: both would test next to nothing.
    assert sum(case.answered for case in found.values()) > CASES // 10
    assert sum(bool(case.errors) for case in found.values()) > CASES // 10


@pytest.fixture(scope="module")
def sound() -> Iterator[Base]:
    with tempfile.TemporaryDirectory() as folder:
        yield next(base for base in bases(Path(folder)) if base.name == "rollback")


def test_the_probe_sees_what_is_wrong(sound: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that launches what the fastest row says, whatever that is."""
    path = tmp_path / "tuned.db"
    path.write_bytes(sound.files[""])
    names = ("config", "config_digest", "latency_p10_us", "latency_p50_us", "latency_p90_us")
    values = ('{"num_blocks":9999}', config_digest({"num_blocks": 9999}), 0.1, 0.1, 0.1)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"UPDATE trial SET {', '.join(f'{name} = ?' for name in names)} WHERE final", values)
    assert fuzz_probe.probe(path).broken == []
    monkeypatch.setattr("tunedcomm.selection.select.check_candidate", lambda *args, by_name=True: None)
    assert any("decided for" in text for text in fuzz_probe.probe(path, writing=False).broken)


def test_what_a_terminal_obeys_is_shown_instead(capsys: pytest.CaptureFixture[str]) -> None:
    emit("a\x1b[31mb\ud800")
    note("c\rd\x07")
    table(["x"], [["\x9be"]], title="f\x1b")
    said = capsys.readouterr()
    assert said.out == "a\\x1b[31mb\\ud800\nf\\x1b\nx\n\\x9be\n"
    assert said.err == "c\\rd\\x07\n"


def test_no_row_of_a_damaged_layer_is_used_twice_or_in_part(sound: Base, tmp_path: Path) -> None:
    """A layer that turns out damaged half way leaves nothing of itself behind."""
    path = tmp_path / "tuned.db"
    good = load_snapshot(H200, WORLD_SIZE, layers=[Layer("user", _written(path, sound.files[""]))])
    assert good.rows
    data = bytearray(sound.files[""])
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'pin'").fetchone()
    data[(root - 1) * sound.page_size : root * sound.page_size] = b"\xff" * sound.page_size
    left = load_snapshot(H200, WORLD_SIZE, layers=[Layer("user", _written(tmp_path / "bad.db", data))])
    assert left.rows == ()


def _written(path: Path, data: bytes | bytearray) -> str:
    path.write_bytes(data)
    return str(path)
