"""Spoilt databases: never a crash, never an unchecked candidate, always the library or a named error.

`TUNEDCOMM_TEST_FUZZ=10000` runs so many of them; what came of 10,000 is in bench/results/db/db_fuzz.csv.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import fuzz_probe
import pytest
from fuzz_base import HERE, WORLD_SIZE, Base, bases
from fuzz_files import KINDS, TABLES
from fuzz_values import CONFIGS, VALUES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import QUICK

from tunedcomm.cli.output import emit, note, table
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import config_digest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "db" / "db_fuzz.csv"
CASES = int(os.environ.get("TUNEDCOMM_TEST_FUZZ", "10" if QUICK else "40"))
AXES = st.sampled_from(["num_blocks", "num_warps", "items", "num_chunks", "launch_pdl", "", "BLOCK"])
AXIS_VALUES = st.one_of(st.booleans(), st.sampled_from([0, 1, 2, 4, 8, 32, 264, -1, 10**30]), st.text(max_size=3))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
CELLS = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=20),
    st.sampled_from([*VALUES, *CONFIGS]),
    st.dictionaries(AXES, AXIS_VALUES, max_size=5).map(json.dumps),
    JSON.map(json.dumps),
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(TABLES), st.integers(0, 99), st.sampled_from([0, 1, 2, 3, 7]), CELLS),
    min_size=1,
    max_size=6,
)


def run_fuzzer(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fuzz_probe.py")), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


@pytest.mark.timeout(600 + 2 * CASES)
def test_spoilt_databases(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    done = run_fuzzer("--cases", str(CASES), "--out", str(out), timeout=500 + 2 * CASES)
    assert done.returncode == 0, done.stderr[-5000:]
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    whole = rows[-1]
    assert (whole["kind"], whole["cases"], whole["broken"], whole["crashed"]) == ("all", str(CASES), "0", "0")
    # Neither all of them harmless nor all of them beyond reading: both would test next to nothing.
    assert int(whole["answered"]) > CASES // 10
    assert int(whole["refused"]) > CASES // 10


def test_ten_thousand_of_them_broke_no_promise() -> None:
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["kind"] for row in rows} == {*KINDS, "all"}
    for row in rows:
        assert tuple(row) == tuple(fuzz_probe.COLUMNS)
        assert (row["broken"], row["crashed"]) == ("0", "0")
    assert int(rows[-1]["cases"]) >= 10_000


@pytest.fixture(scope="module")
def sound() -> Iterator[Base]:
    with tempfile.TemporaryDirectory() as folder:
        yield next(base for base in bases(Path(folder)) if base.name == "rollback")


@given(changes=CHANGES, untyped=st.sampled_from([None, *TABLES]))
@settings(
    max_examples=max(3, CASES // 4),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_rows_of_any_kind(sound: Base, untyped: str | None, changes: list[tuple[str, int, int, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.db"
        path.write_bytes(sound.files[""])
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if untyped is not None:
                connection.execute(f"CREATE TABLE untyped AS SELECT * FROM {untyped}")
                connection.execute(f"DROP TABLE {untyped}")
                connection.execute(f"ALTER TABLE untyped RENAME TO {untyped}")
            for name, number, where, value in changes:
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
                column = columns[number % len(columns)]
                with suppress(sqlite3.IntegrityError):
                    connection.execute(f'UPDATE {name} SET "{column}" = ? WHERE rowid % 8 >= ?', (value, where))
        logging.disable(logging.CRITICAL)
        try:
            case = fuzz_probe.probe(path, commands=False)
        finally:
            logging.disable(logging.NOTSET)
    assert case.broken == []


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
    good = load_snapshot(HERE, WORLD_SIZE, layers=[Layer("user", _written(path, sound.files[""]))])
    assert good.rows
    data = bytearray(sound.files[""])
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'pin'").fetchone()
    data[(root - 1) * sound.page_size : root * sound.page_size] = b"\xff" * sound.page_size
    left = load_snapshot(HERE, WORLD_SIZE, layers=[Layer("user", _written(tmp_path / "bad.db", data))])
    assert left.rows == ()


def _written(path: Path, data: bytes | bytearray) -> str:
    path.write_bytes(data)
    return str(path)
