"""What a database answers by itself, and what lies between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_samples import run
from db_samples import H200, OLDER, candidate, decide, problem, trial
from transfer_samples import H100, SIZES, snapshot_of, store, sweep

from tunedcomm.db.diff import Difference, StoredCatalog, diff_databases
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
        assert run("db", "diff", source, other).code == 0


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
    shown = run("db", "diff", tmp_path / "before.db", tmp_path / "after.db")
    assert shown.code == 1
    assert "5 trials, 4 of them in it alone" in shown.line("before.db")
    assert "one_shot(num_blocks=4) 5.00 lamport(num_blocks=4) 4.00" in shown.line("1.25x as fast")
    assert "one_shot(num_blocks=4) 5.00 one_shot(num_blocks=4) 7.50" in shown.line("1.50x slower")


def test_rows_that_change_no_answer_end_with_0(tmp_path: Path) -> None:
    found = differ(tmp_path, [final("one_shot", 5.0)], [final("one_shot", 5.0), final("lamport", 9.0, after=9)])
    assert not found.is_empty
    shown = run("db", "diff", tmp_path / "before.db", tmp_path / "after.db")
    assert shown.code == 0
    assert "0 of 1 problem differ" in shown.out
    assert run("db", "diff", tmp_path / "before.db", tmp_path / "after.db", "--json").json["differ"] is False


def test_new_software_on_the_same_hardware_is_compared(tmp_path: Path) -> None:
    found = differ(tmp_path, [final("one_shot", 5.0, environment=OLDER)], [final("lamport", 4.0)])
    (comparison,) = found.comparisons
    assert (comparison.before, comparison.after) == (OLDER, H200)
    assert [change.kind for change in comparison.changes] == ["winner"]
    assert comparison.drift == ["torch 2.9.0 → 2.11.0", "triton 3.5.0 → 3.6.0"]
    assert found.environments_only == ((OLDER,), (H200,))
    text = run("db", "diff", tmp_path / "before.db", tmp_path / "after.db").out
    assert text.count("torch 2.9.0 → 2.11.0") == 1
    assert OLDER.digest[:8] in text


def test_as_json(tmp_path: Path) -> None:
    differ(tmp_path, [final("one_shot", 5.0)], [final("one_shot", 5.0), final("lamport", 4.0, after=9)])
    ended = run("db", "diff", tmp_path / "before.db", tmp_path / "after.db", "--json")
    shown = ended.json
    assert ended.code == 1
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


# Answers of one database: as selection gives them, whatever this tunedcomm's kernels are by now


def test_answers_as_selection_does(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [t for t in sweep() if t.source_hash == "current"])
    found = StoredCatalog(source).answers(H200, 4)
    assert list(found) == list(map(problem, SIZES))
    for asked, answer in found.items():
        decision = decide(snapshot_of(source), asked)
        assert (answer.candidate, answer.source) == (decision.candidate, "exact"), asked
        assert (answer.latency_us, answer.library_us) == (decision.latency_us, decision.library_us), asked


def test_the_newest_stored_source_counts(tmp_path: Path) -> None:
    records = [trial("one_shot", 2.0, final=True, source_hash="former")]
    records += [trial("one_shot", 6.0, final=True, source_hash="later", after=9), trial("lamport", 5.0, final=True)]
    source = store(tmp_path / "source.db", records)
    stored = StoredCatalog(source)
    assert stored.source_hash("all_reduce", "one_shot") == "later"
    assert stored.answers(H200, 4)[problem()].candidate == candidate("lamport")


def test_a_pin_of_what_was_never_measured_counts(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [trial("one_shot", 2.0, final=True)])
    with Database.open(source) as database:
        database.pin(problem(), candidate("two_shot"), environment=H200, reason="")
    decision = StoredCatalog(source).answers(H200, 4)[problem()]
    assert (decision.candidate, decision.source) == (candidate("two_shot"), "pin")


def test_environments_come_in_the_order_of_their_last_trials(tmp_path: Path) -> None:
    records = [trial(environment=H100, after=30), trial(environment=H200, after=10)]
    records += [trial(environment=OLDER, after=20, problem=problem(world_size=2)), trial(environment=H200, after=40)]
    source = store(tmp_path / "source.db", records)
    stored = StoredCatalog(source)
    assert stored.environments == [H200, H100, OLDER]
    assert stored.world_sizes == {2, 4}
