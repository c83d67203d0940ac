"""What lies between two databases, in words and in µs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from db_samples import H200, OLDER, problem, trial
from transfer_samples import store, sweep
from typer.testing import CliRunner

from tunedcomm.cli import main
from tunedcomm.db.diff import Difference, diff_databases
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import export_database, import_databases


def differ(tmp_path: Path, before: list[Any], after: list[Any]) -> Difference:
    """Both databases have the same run, so that only what is given differs."""
    paths = []
    for name, records in (("before", before), ("after", after)):
        path = tmp_path / f"{name}.db"
        with Database.open(path, create=True) as database:
            database.record(records)
        paths.append(path)
    return diff_databases(*paths)


def changes(found: Difference) -> list[tuple[int, str]]:
    return [(change.problem.nbytes, change.kind) for c in found.comparisons for change in c.changes]


def diff(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(main.app, ["db", "diff", *arguments])
    return shown.exit_code, shown.stdout


def final(variant: str, latency_us: float, message_bytes: int = 4096, **more: Any) -> Any:
    return trial(variant, latency_us, final=True, problem=problem(message_bytes), **more)


def test_the_same_rows_are_no_difference(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", sweep())
    export_database([source], tmp_path / "out.jsonl", form="jsonl", everything=True)
    import_databases([source], tmp_path / "copy.db")
    for other in (source, tmp_path / "copy.db", tmp_path / "out.jsonl"):
        found = diff_databases(source, other)
        assert found.is_empty
        assert found.trials == (len(sweep()), len(sweep()))
        code, text = diff(str(source), str(other))
        assert code == 0
        assert text.splitlines()[-1] == "no difference"


def test_every_kind_of_change_is_named(tmp_path: Path) -> None:
    before = [
        final("one_shot", 5.0, 1024),
        final("one_shot", 5.0, 4096),
        final("lamport", 6.0, 4096),
        final("one_shot", 5.0, 16384),
        final("one_shot", 5.0, 65536),
    ]
    after = [
        final("one_shot", 5.02, 1024),  # within the noise
        final("one_shot", 5.0, 4096),
        final("lamport", 4.0, 4096, after=9),
        final("one_shot", 7.5, 16384),
        final("one_shot", 5.0, 262144),
    ]
    found = differ(tmp_path, before, after)
    assert sorted(changes(found)) == [
        (4096, "winner"),
        (16384, "latency"),
        (65536, "only before"),
        (262144, "only after"),
    ]
    assert found.trials_only == (4, 4)
    code, text = diff(str(tmp_path / "before.db"), str(tmp_path / "after.db"))
    assert code == 1
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.endswith("before.db, schema 0003, 5 trials, 4 of them in it alone") for line in lines)
    assert "4 of 5 problems are answered otherwise" in text
    row = next(line for line in lines if line.startswith("all_reduce 2048"))
    assert row.endswith("one_shot(num_blocks=4) 5.00 lamport(num_blocks=4) 4.00 1.25x as fast")
    row = next(line for line in lines if line.startswith("all_reduce 8192"))
    assert row.endswith("one_shot(num_blocks=4) 5.00 one_shot(num_blocks=4) 7.50 1.50x slower")
    for title in ("another winner: 1", "the same winner, another latency: 1", "only in A: 1", "only in B: 1"):
        assert title in lines


def test_new_software_on_the_same_hardware_is_compared(tmp_path: Path) -> None:
    found = differ(tmp_path, [final("one_shot", 5.0, environment=OLDER)], [final("lamport", 4.0)])
    (comparison,) = found.comparisons
    assert (comparison.before, comparison.after) == (OLDER, H200)
    assert [change.kind for change in comparison.changes] == ["winner"]
    assert comparison.drift == ["torch 2.9.0 → 2.11.0", "triton 3.5.0 → 3.6.0"]
    assert found.environments_only == ((OLDER,), (H200,))
    _, text = diff(str(tmp_path / "before.db"), str(tmp_path / "after.db"))
    assert "software: torch 2.9.0 → 2.11.0, triton 3.5.0 → 3.6.0" in text
    assert f"measured only in A: {OLDER} [{OLDER.digest[:8]}]" in text


def test_as_json(tmp_path: Path) -> None:
    differ(tmp_path, [final("one_shot", 5.0)], [final("one_shot", 5.0), final("lamport", 4.0, after=9)])
    code, text = diff(str(tmp_path / "before.db"), str(tmp_path / "after.db"), "--json")
    assert code == 1
    shown = json.loads(text)
    assert shown["differ"] is True
    assert (shown["before"]["trials"], shown["after"]["trials_only"]) == (1, 1)
    (comparison,) = shown["comparisons"]
    assert comparison["environments"]["after"]["digest"] == H200.digest
    (change,) = comparison["changes"]
    assert change["kind"] == "winner"
    assert change["before"]["variant"] == "one_shot"
    assert change["after"] == {
        "variant": "lamport",
        "config": {"num_blocks": 4},
        "source": "exact",
        "latency_us": 4.0,
        "library_us": 10.0,
        "noise": 0.01,
    }
    assert change["ratio"] == 1.25
