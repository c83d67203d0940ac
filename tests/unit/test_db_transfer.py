"""Databases that are written as lines, imported and merged: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_samples import record, refused, run
from db_samples import H200, OLDER, candidate, problem, trial
from transfer_samples import H100, digests, everything, lines_of, store, sweep

from tunedcomm.db.diff import StoredCatalog, diff_databases
from tunedcomm.db.store import Database
from tunedcomm.db.transfer import import_databases, merge_databases

DATA = Path(__file__).parents[1] / "data"


def test_lines_are_sorted_plain_and_the_same_from_every_database(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", sweep())
    backwards = store(tmp_path / "backwards.db", sweep()[::-1])
    with Database.open(source) as database:
        database.record([trial("one_shot", 2.5, after=20000, error=float("inf"))])
    import_databases([source], tmp_path / "copy.db")
    text = lines_of(source, tmp_path / "a.jsonl").decode("ascii")
    assert lines_of(tmp_path / "copy.db", tmp_path / "b.jsonl").decode() == text
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0] == {"format": "tunedcomm-jsonl", "version": 1, "schema": "0004"}
    assert lines[-1] == {"kind": "end", "lines": len(lines) - 1}
    kinds = [line["kind"] for line in lines[1:]]
    assert sorted(set(kinds), key=kinds.index) == ["environment", "run", "variant", "trial", "end"]
    for line, plain in zip(text.splitlines(), lines, strict=True):
        assert line == json.dumps(plain, sort_keys=True, separators=(",", ":"))
    trials = [line for line in lines if line.get("kind") == "trial"]
    sizes = [(line["problem"]["world_size"], int(line["problem"]["shape"])) for line in trials]
    assert sizes == sorted(sizes)
    assert [line["error"] for line in trials if line["error"] is not None] == ["inf"]
    assert {line["created_at"][-6:] for line in trials} == {"+00:00"}
    # Lines of the same trials say the same, whatever the ids are.
    theirs = map(json.loads, lines_of(backwards, tmp_path / "c.jsonl").decode().splitlines())
    without_runs = [{**t, "run": None} for t in trials if t["error"] is None]
    assert [{**t, "run": None} for t in theirs if t.get("kind") == "trial"] == without_runs


def test_a_source_older_than_this_tunedcomm_is_read(tmp_path: Path) -> None:
    asset = tmp_path / "old.db"
    shutil.copy(DATA / "revision_0001.db", asset)
    before = asset.read_bytes()
    assert merge_databases([asset], tmp_path / "new.db").added == 9
    assert import_databases([asset], tmp_path / "new.db").added == 0
    assert asset.read_bytes() == before


def test_merging_keeps_every_row_and_says_what_it_answers_now(tmp_path: Path) -> None:
    """The better row counts, but only among those of one environment."""
    target = store(
        tmp_path / "all.db",
        [
            trial("one_shot", 5.0, final=True),
            trial("one_shot", 5.0, final=True, environment=H100),
            trial("one_shot", 5.0, final=True, problem=problem(8192)),
        ],
    )
    hosts = tmp_path / "hosts"
    store(hosts / "a.db", [trial("lamport", 4.0, final=True, after=10)], command="tune a")
    store(hosts / "b.db", [trial("two_shot", 6.0, final=True, after=20, environment=H100)], command="tune b")
    store(hosts / "c.db", [trial("lamport", 4.0, final=True, after=30, problem=problem(65536))], command="tune c")
    (hosts / "notes.txt").write_text("no database")
    sources = [hosts / name for name in ("a.db", "b.db", "c.db")]
    expected = everything(target).union(*(everything(source) for source in sources))
    done = merge_databases([hosts], target)
    assert everything(target) == expected
    assert [(Path(s.source).name, s.trials) for s in done.sources] == [("a.db", 1), ("b.db", 1), ("c.db", 1)]
    found = {c.after: [(change.problem.nbytes, change.kind) for change in c.changes] for c in done.comparisons}
    assert found == {H200: [(4096, "winner"), (65536, "only after")], H100: []}
    change = next(c for c in done.comparisons if c.after == H200).changes[0]
    assert change.before is not None
    assert (change.before.candidate, change.before.latency_us, change.ratio) == (candidate("one_shot"), 5.0, 1.25)


def test_a_database_that_is_tuned_meanwhile_loses_nothing(database_url: str, tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", [trial(latency_us=5.0 + n, after=n) for n in range(5)])
    store(tmp_path / "earlier.db", [trial("lamport", 9.0, after=-5, source_hash="first")])
    target = database_url
    with Database.open(target, create=True) as database:
        run = database.start_run(command="tune", seed=None, budget="", host="node")
        database.record([trial("lamport", 4.0, run_id=run, source_hash="former")])
        for bring in (merge_databases, import_databases):
            bring([source], target)
            database.record([trial("lamport", 3.0, run_id=run, after=60)])
            database.record([trial("one_shot", 2.0, run_id=run, after=70)])
            bring([tmp_path / "earlier.db"], target)
        database.finish_run(run)
        assert database.stats()["trials"] == 11
        assert database.stats()["variants"] == 4
    assert StoredCatalog(target).source_hash("all_reduce", "lamport") == "current"


def test_servers_are_sources_and_targets(postgres_url: str, tmp_path: Path) -> None:
    """With rows of their own, of which some are the same, and with an older source of a variant that they know."""
    here, there = store(tmp_path / "here.db", sweep()[:60]), tmp_path / "there.db"
    shutil.copy(here, there)
    with Database.open(there) as database:
        database.record(sweep()[60:])
    with Database.open(here) as database:
        database.pin(problem(), candidate("two_shot"), environment=OLDER, reason="a pin")
        database.record([trial("one_shot", 1.0, after=-50, source_hash="outdated")])
    done = merge_databases([there], postgres_url)
    assert done.added == len(sweep())
    assert done.comparisons
    merge_databases([there], tmp_path / "both.db")
    lines_of(here, tmp_path / "here.jsonl")
    assert import_databases([tmp_path / "here.jsonl"], postgres_url).added == 1
    assert merge_databases([here], postgres_url).added == 0
    merge_databases([here], tmp_path / "both.db")
    assert lines_of(postgres_url, tmp_path / "server.jsonl") == lines_of(tmp_path / "both.db", tmp_path / "both.jsonl")
    assert digests(postgres_url) == digests(tmp_path / "both.db")
    import_databases([postgres_url], tmp_path / "back.db")
    assert digests(tmp_path / "back.db") == digests(postgres_url)
    assert diff_databases(postgres_url, tmp_path / "back.db").is_empty


# On the command line


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Two databases, each with one final; the first has trials that nobody needs."""
    slower = [trial("one_shot", 6.0 + n, config={"num_blocks": 8 << n}) for n in range(3)]
    finals = [trial("one_shot", 5.0, final=True, problem=problem(4096 << number)) for number in range(2)]
    return [record(tmp_path / "a.db", finals[0], *slower), record(tmp_path / "b.db", finals[1])]


def test_export_merges_as_json(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    shown = run("db", "export", *(word for path in (*sources, sources[0]) for word in ("--db", path)), out, "--json")
    assert shown.code == 0
    counts = [(source["source"], source["trials"], source["known"]) for source in shown.json["sources"]]
    assert counts == [(sources[0], 4, 0), (sources[1], 1, 0), (sources[0], 4, 4)]
    assert (shown.json["path"], shown.json["num_bytes"], shown.json["left_out"]) == (str(out), out.stat().st_size, 3)
    with Database.open(out, immutable=True) as database:
        assert database.stats() == shown.json["rows"]
        assert database.stats()["finals"] == 2


def test_export_overwrites_only_if_told_to(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    assert run("db", "export", "--db", sources[0], out).code == 0
    assert "--force" in refused("db", "export", "--db", sources[1], out)
    assert run("db", "export", "--db", sources[1], out, "--force", "--json").json["rows"]["trials"] == 1


def test_lines_on_stdout_are_imported_again(tmp_path: Path) -> None:
    source = store(tmp_path / "source.db", sweep())
    sent = run("db", "export", "--format", "jsonl", "--all", "-", "--db", source)
    assert (sent.code, sent.err) == (0, "")
    path, target = tmp_path / "sent.jsonl", tmp_path / "target.db"
    path.write_text(sent.out)
    for added in (len(sweep()), 0):
        done = run("db", "import", path, "--db", target)
        assert done.code == 0
        assert f"{added} trials added to {target}, which had {len(sweep()) - added} of them" in done.out
    assert everything(target) == everything(source)


def test_merge_counts_what_is_answered_otherwise(tmp_path: Path) -> None:
    target = store(tmp_path / "all.db", [trial("one_shot", 5.0, final=True)])
    hosts = tmp_path / "hosts"
    store(hosts / "a.db", [trial("lamport", 4.0, final=True, after=5)])
    store(hosts / "b.db", [trial("one_shot", 4.0, final=True, environment=H100, problem=problem(8192))])
    shown = run("db", "merge", hosts, "--into", target)
    assert shown.code == 0
    assert f"2 trials added to {target}, which had 0 of them" in shown.out
    # ranks, problems, new, another winner, another latency
    assert shown.line("NVIDIA H200").split()[-5:] == ["4", "1", "0", "1", "0"]
    assert shown.line("NVIDIA H100").split()[-5:] == ["4", "1", "1", "0", "0"]
    again = run("db", "merge", hosts, "--into", target, "--json").json
    assert again["added"] == 0
    assert [entry["winner_changed"] for entry in again["environments"]] == [0, 0]
