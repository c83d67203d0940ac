"""Text that somebody stored reaches terminals, pages and images as text: nothing obeys what is in it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from quick import QUICK, some
from report_samples import stored_trials
from sqlalchemy import Text
from typer.testing import CliRunner

from tunedcomm.cli import main
from tunedcomm.db.schema import Base
from tunedcomm.db.store import Database
from tunedcomm.errors import TunedCommError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem, parse_shape

COLUMNS = {
    table.name: [column.name for column in table.columns if isinstance(column.type, Text)]
    for table in Base.metadata.sorted_tables
}
# Columns that may hold any text are spoilt together: a row with one of them is as sound as before.
FREE = {"environment": COLUMNS["environment"], "run": COLUMNS["run"], "trial": ["reason"], "pin": ["reason", "user"]}
# Others alone: a row that no longer makes sense is named, and hides what is in its other columns.
ALONE = [{table: [name]} for table, names in COLUMNS.items() for name in names if name not in FREE.get(table, ())]
SPOILT = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\x7f", "\x08", "\r", "\u202e", "<b>", "&lt;", "$x$"]
HOSTILE = st.permutations(SPOILT).map("".join)
EXAMPLES = settings(
    max_examples=1 if QUICK else 3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finals of three variants, a failure, and a pin, on two software versions."""
    folder = tmp_path_factory.mktemp("stored")
    times = {"library": (10.0, 10.0), "one_shot": (4.0, 10.0), "two_shot": (5.0, 10.0)}
    path = stored_trials(folder / "sound.db", times)
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


def spoil(path: Path, columns: dict[str, list[str]], text: str) -> None:
    """Append a text to columns of every row, and mend the digests."""
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        for table, names in columns.items():
            for name in names:
                if name == "config":
                    spoilt = json.dumps({"num_blocks": 4, text: text})
                    connection.execute(f"UPDATE {table} SET config = ?", (spoilt,))
                else:
                    connection.execute(f'UPDATE {table} SET "{name}" = "{name}" || ?', (text,))
            for row in map(dict, connection.execute(f"SELECT * FROM {table}").fetchall()):
                if (digest := digest_of(table, dict(row))) is not None:
                    connection.execute(f"UPDATE {table} SET digest = ? WHERE id = ?", (digest, row["id"]))
    connection.close()


def digest_of(table: str, row: dict[str, object]) -> str | None:
    row.pop("id", None)
    row.pop("digest", None)
    try:
        if table == "environment":
            return Environment.from_dict({**row, "multicast": bool(row["multicast"])}).digest
        if table == "problem":
            shape = list(parse_shape(str(row["shape"])))
            return Problem.from_dict({**row, "shape": shape, "in_place": bool(row["in_place"])}).digest
    except ValueError:
        pass  # it makes no sense with this text
    return None


def commands(path: Path, sound: Path, folder: Path) -> list[list[str]]:
    problem = ["--op", "all_reduce", "--shape", "512", "--world-size", "4"]
    with sqlite3.connect(path) as connection:
        ((digest,),) = connection.execute("SELECT digest FROM environment ORDER BY id LIMIT 1")
    connection.close()
    there = ["--hardware", digest[:12], "--db", str(path)]
    found = [
        ["db", "list", "--hardware", "H200", "--db", str(path)],
        ["db", "show", *problem, "--db", str(path)],
        ["db", "stats", "--db", str(path)],
        ["db", "check", "--db", str(path)],
        ["db", "prune", "--environment", "H200", "--db", str(path)],
        ["db", "prune", "--failed", "--db", str(path)],
        ["db", "diff", str(sound), str(path)],
        ["db", "merge", str(path), "--into", str(folder / "merged.db")],
        ["db", "import", str(path), "--db", str(folder / "imported.db")],
        ["db", "export", "--db", str(path), str(folder / "exported.db"), "--force"],
        ["db", "export", "--db", str(path), "--format", "nccl-csv", "-"],
        ["db", "pin", *problem, *there, "--variant", "two_shot", "--reason", "why not"],
        ["db", "pin", *problem, *there, "--variant", "one_shot", "--reason", "why not"],
        ["db", "unpin", *problem, *there],
        ["lookup", *problem, *there],
        ["explain", *problem, *there],
        ["explain", *problem, "--hardware", "H200", "--db", str(path)],
        ["explain", *problem, "--hardware", "H1", "--db", str(path)],
        ["doctor"],
    ]
    return [*found, *([*command, "--json"] for command in found if "-" not in command)]


def obeyed(text: str) -> set[str]:
    """Characters that a terminal would obey."""
    return {c for c in text if not c.isprintable() and c not in "\n\t"}


def named(columns: dict[str, list[str]]) -> str:
    return " ".join(f"{table}.{','.join(names)}" for table, names in columns.items())


@pytest.mark.parametrize(
    "columns", [FREE, *(pytest.param(one, marks=pytest.mark.slow) for one in some(ALONE, 4))], ids=named
)
def test_no_command_passes_a_stored_escape_on(
    columns: dict[str, list[str]],
    sound: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @EXAMPLES
    @given(text=HOSTILE)
    def check(text: str) -> None:
        folder = tmp_path_factory.mktemp("spoilt")
        path = Path(shutil.copy(sound, folder / "spoilt.db"))
        spoil(path, columns, text)
        monkeypatch.setenv("TUNEDCOMM_DB", str(path))
        for command in commands(path, sound, folder):
            caplog.clear()
            shown = CliRunner().invoke(main.app, command)
            expected = (SystemExit, TunedCommError)
            assert shown.exception is None or isinstance(shown.exception, expected), command
            for said in (shown.stdout, shown.stderr, "\n".join(caplog.messages)):
                assert not obeyed(said), (command, said)

    check()
