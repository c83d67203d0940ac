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
from cli_samples import run
from db_samples import H200
from fuzz_probe import WORLD_SIZE, Base, bases
from quick import QUICK

from tunedcomm.cli.output import Table, emit, note
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import config_digest
from tunedcomm.hardware import Environment

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
    monkeypatch.setattr("tunedcomm.selection.select.checker", lambda *args, by_name=True: lambda problem: None)
    assert any("decided for" in text for text in fuzz_probe.probe(path, writing=False).broken)


# Text that somebody stored reaches terminals as text: nothing obeys what is in it

# Columns that may hold any text: a row with another one is as sound as before.
FREE = {
    "environment": ["gpu", "fabric", "driver", "cuda", "torch", "triton", "nccl", "tunedcomm"],
    "run": ["command", "budget", "host", "user", "version"],
    "trial": ["reason"],
    "pin": ["reason", "user"],
}
HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\x08\r\u202e<b>&lt;$x$"


def spoil(path: Path) -> str:
    """Append the text to the free columns of every row, and mend the digests; returns one of them."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        for name, columns in FREE.items():
            for column in columns:
                connection.execute(f'UPDATE {name} SET "{column}" = "{column}" || ?', (HOSTILE,))
        for row in map(dict, connection.execute("SELECT * FROM environment ORDER BY id DESC").fetchall()):
            own = {name: value for name, value in row.items() if name not in ("id", "digest")}
            digest = Environment.from_dict({**own, "multicast": row["multicast"] == 1}).digest
            connection.execute("UPDATE environment SET digest = ? WHERE id = ?", (digest, row["id"]))
    return digest


def test_no_command_passes_a_stored_escape_on(
    sound: Base, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _written(tmp_path / "spoilt.db", sound.files[""])
    problem = "--op all_reduce --shape 2048 --world-size 4"
    there = f"{problem} --hardware {spoil(Path(path))[:12]} --db {path}"
    commands = [
        f"db list --hardware H200 --db {path}",
        f"db show {problem} --db {path}",
        f"db stats --db {path}",
        f"db check --db {path}",
        f"db prune --environment H200 --db {path}",
        f"db diff {_written(tmp_path / 'sound.db', sound.files[''])} {path}",
        f"db merge {path} --into {tmp_path}/merged.db",
        f"db import {path} --db {tmp_path}/imported.db",
        f"db export --db {path} {tmp_path}/exported.db --force",
        f"db export --db {path} --format jsonl -",
        f"db pin {there} --variant two_shot --reason why",
        f"db pin {there} --variant one_shot --reason why",
        f"db unpin {there}",
        f"lookup {there}",
        f"explain {there}",
        f"explain {problem} --hardware H1 --db {path}",
        "doctor",
    ]
    monkeypatch.setenv("TUNEDCOMM_DB", path)
    for command in (*commands, *(f"{one} --json" for one in commands if not one.endswith("-"))):
        caplog.clear()
        ended = run(*command.split())
        assert ended.code in (0, 1, 2), command
        for said in (ended.out, ended.err, *caplog.messages):
            assert not {c for c in said if not c.isprintable() and c not in "\n\t"}, (command, said)


def test_what_a_terminal_obeys_is_shown_instead(capsys: pytest.CaptureFixture[str]) -> None:
    emit("a\x1b[31mb\ud800")
    note("c\rd\x07")
    emit(Table(["x"], [["\x9be"]], "f\x1b"))
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
