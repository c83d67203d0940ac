"""Text that somebody stored reaches terminals, pages and images as text: nothing obeys what is in it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cli_samples import run
from report_samples import stored_trials

from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate

# Columns that may hold any text: a row with another one is as sound as before.
FREE = {
    "environment": ["gpu", "fabric", "driver", "cuda", "torch", "triton", "nccl", "tunedcomm"],
    "run": ["command", "budget", "host", "user", "version"],
    "trial": ["reason"],
    "pin": ["reason", "user"],
}
HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\x08\r\u202e<b>&lt;$x$"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """Finals of three variants, a failure, and a pin, on two software versions."""
    times = {"library": (10.0, 10.0), "one_shot": (4.0, 10.0), "two_shot": (5.0, 10.0)}
    path = stored_trials(tmp_path / "sound.db", times)
    with Database.open(path) as database:
        found = database.trials()
        older = [replace(trial, environment=replace(trial.environment, torch="2.9.0"), id=None) for trial in found]
        failed = replace(found[-1], status="crashed", reason="it hung", latency_p50_us=None, final=False, id=None)
        run = database.start_run(command="tunedcomm tune", seed=1, budget="10 s", host="node")
        database.record([replace(trial, run_id=run) for trial in (*older, failed)])
        problem = replace(found[0].problem, shape=(1024,))
        library = Candidate.of("all_reduce", "library", {})
        database.pin(problem, library, environment=found[0].environment, reason="until then")
    return path


def spoil(path: Path) -> None:
    """Append the text to the free columns of every row, and mend the digests."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        for table, names in FREE.items():
            for name in names:
                connection.execute(f'UPDATE {table} SET "{name}" = "{name}" || ?', (HOSTILE,))
        for row in map(dict, connection.execute("SELECT * FROM environment").fetchall()):
            own = {
                **{name: row[name] for name in row if name not in ("id", "digest")},
                "multicast": row["multicast"] == 1,
            }
            digest = Environment.from_dict(own).digest
            connection.execute("UPDATE environment SET digest = ? WHERE id = ?", (digest, row["id"]))


def commands(path: Path, sound: Path, folder: Path) -> list[list[str]]:
    problem = "--op all_reduce --shape 512 --world-size 4"
    with closing(sqlite3.connect(path)) as connection:
        ((digest,),) = connection.execute("SELECT digest FROM environment ORDER BY id LIMIT 1")
    there = f"{problem} --hardware {digest[:12]} --db {path}"
    found = [
        f"db list --hardware H200 --db {path}",
        f"db show {problem} --db {path}",
        f"db stats --db {path}",
        f"db check --db {path}",
        f"db prune --environment H200 --db {path}",
        f"db diff {sound} {path}",
        f"db merge {path} --into {folder}/merged.db",
        f"db import {path} --db {folder}/imported.db",
        f"db export --db {path} {folder}/exported.db --force",
        f"db export --db {path} --format nccl-csv -",
        f"db pin {there} --variant two_shot --reason why",
        f"db pin {there} --variant one_shot --reason why",
        f"db unpin {there}",
        f"lookup {there}",
        f"explain {there}",
        f"explain {problem} --hardware H1 --db {path}",
        "doctor",
    ]
    return [command.split() for command in (*found, *(f"{one} --json" for one in found if not one.endswith("-")))]


def obeyed(text: str) -> set[str]:
    """Characters that a terminal would obey."""
    return {c for c in text if not c.isprintable() and c not in "\n\t"}


def test_no_command_passes_a_stored_escape_on(
    sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(sound, tmp_path / "spoilt.db"))
    spoil(path)
    monkeypatch.setenv("TUNEDCOMM_DB", str(path))
    for command in commands(path, sound, tmp_path):
        caplog.clear()
        ended = run(*command)
        assert ended.code in (0, 1, 2), command
        for said in (ended.out, ended.err, "\n".join(caplog.messages)):
            assert not obeyed(said), (command, said)
