"""The file of untuned problems: many writers, hostile lines, and what a reader makes of it."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, START, problem

from tunedcomm.db import engine
from tunedcomm.db import misses as miss_log
from tunedcomm.db.misses import Miss, append, compact, log_path, read
from tunedcomm.spec import Problem


def miss(asked: Problem | None = None, count: int = 1, **changes: Any) -> Miss:
    values: dict[str, Any] = {"problem": asked or problem(), "hard_key": H200.hard_key, "count": count}
    return Miss(**{**values, "source": "library", "last_seen": START, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "misses.jsonl"


def test_counts_add_up_and_the_most_called_comes_first(path: Path) -> None:
    rare, often = problem(2048), problem(4096, in_place=True, reduction="avg")
    append(path, [miss(rare, 7), miss(often, 5)])
    later = START + timedelta(hours=1)
    append(path, [miss(often, 6, source="interpolated", last_seen=later)])
    append(path, [miss(rare, 1, hard_key=("other", *H200.hard_key[1:]))])
    misses, skipped = read(path)
    assert skipped == 0
    assert [(m.problem, m.count, m.source) for m in misses] == [
        (often, 11, "interpolated"),
        (rare, 7, "library"),
        (rare, 1, "library"),
    ]
    assert misses[0].last_seen == later
    assert misses[0].hard_key == H200.hard_key


def test_a_line_is_one_write_and_plain_json(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write

    def write(file: int, line: bytes) -> int:
        written.append(line)
        return real(file, line)

    monkeypatch.setattr(miss_log.os, "write", write)
    append(path, [miss(problem(1 << k)) for k in range(3, 8)])
    assert len(written) == 5
    for line in written:
        assert line.startswith(b"\n")
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 2
        assert len(line) < 4096
        assert json.loads(line)["environment"]["gpu"] == "NVIDIA H200"


def test_a_file_that_was_never_made(path: Path) -> None:
    assert read(path) == ([], 0)
    compact(path)
    assert list(path.parent.iterdir()) == []


_GOOD = {
    "problem": {**problem().to_dict(), "shape": "2048"},
    "environment": dict(zip(miss_log.HARD_FIELDS, H200.hard_key, strict=True)),
    "count": 1,
    "source": "library",
    "last_seen": "2026-01-01T00:00:00+00:00",
}


def _with(**changes: object) -> bytes:
    return json.dumps({**_GOOD, **changes}).encode()


def _problem_with(**changes: object) -> bytes:
    return _with(problem={**_GOOD["problem"], **changes})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"{}",
        b"[" * 3000,
        b'{"problem": ' * 300,
        _with()[:-20],
        _with(count=0),
        _with(count=-1),
        _with(count=1.5),
        _with(count="1"),
        _with(count=10**30),
        _with(count=True),
        _with(last_seen="yesterday"),
        _with(last_seen=5),
        _with(source=None),
        _with(environment={}),
        _with(environment=[1]),
        _with(environment={**_GOOD["environment"], "gpu": ["H200"]}),  # type: ignore[dict-item]
        _with(environment={**_GOOD["environment"], "num_sms": 1.5}),  # type: ignore[dict-item]
        _problem_with(shape=[2048]),
        _problem_with(shape="2048xbig"),
        _problem_with(shape="9" * 30),
        _problem_with(dtype="float3"),
        _problem_with(dtype=["bfloat16"]),
        _problem_with(world_size="4"),
        _problem_with(world_size=0),
        _problem_with(mode="lazy"),
        _problem_with(op=7),
        _with(padding="x" * 5000),
    ],
)
def test_what_makes_no_sense_is_skipped(path: Path, line: bytes) -> None:
    append(path, [miss()])
    with path.open("ab") as file:
        file.write(line + b"\n")
    append(path, [miss()])
    misses, skipped = read(path)
    assert [m.count for m in misses] == [2]
    assert skipped == 1


def test_a_torn_line_does_not_take_the_next_one_along(path: Path) -> None:
    append(path, [miss()])
    path.write_bytes(path.read_bytes() + _with()[:50])
    append(path, [miss(), miss()])
    misses, skipped = read(path)
    assert (misses[0].count, skipped) == (3, 1)


def test_a_full_disk_is_an_os_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(miss_log.os, "write", lambda file, line: real(file, line[:40]))
    with pytest.raises(OSError, match="no space left for a whole line"):
        append(path, [miss()])


def test_a_large_file_is_not_added_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, [miss(count=3), miss(count=4)])
    before = path.read_bytes()
    monkeypatch.setattr(miss_log, "MAX_BYTES", len(before))
    with pytest.raises(OSError, match=r"has reached .* --from-misses"):
        append(path, [miss()])
    assert path.read_bytes() == before
    compact(path)
    append(path, [miss()])
    assert read(path)[0][0].count == 8


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_file_is_refused_and_nobody_waits(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    for use in (lambda: append(path, [miss()]), lambda: read(path)):
        with pytest.raises(OSError, match=r"Is a directory|not a regular file|No such device"):
            use()


def _write_lines(path: Path, worker: int, lines: int) -> None:
    for i in range(0, lines, 100):
        append(path, [miss(problem(2 * (worker * 1000 + i + k + 1))) for k in range(100)])


def test_two_processes_lose_no_line(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    lines = 10_000
    workers = [context.Process(target=_write_lines, args=(path, worker, lines)) for worker in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len(list(filter(None, path.read_bytes().splitlines()))) == 2 * lines
    misses, skipped = read(path)
    assert skipped == 0
    assert sum(m.count for m in misses) == 2 * lines


def _write_for_a_while(path: Path, rounds: int) -> None:
    for _ in range(rounds):
        append(path, [miss()])


def test_compacting_beside_a_writer_loses_no_line(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rounds = 4000
    writers = [context.Process(target=_write_for_a_while, args=(path, rounds)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        compact(path)
    compact(path)
    misses, skipped = read(path)
    assert ([m.count for m in misses], skipped) == ([2 * rounds], 0)
    assert [entry.name for entry in path.parent.iterdir()] == ["misses.jsonl"]


def test_compacting_leaves_out_what_is_tuned(path: Path) -> None:
    tuned, other = problem(2048), problem(4096)
    there = replace(H200, gpu="NVIDIA B200").hard_key
    append(path, [miss(tuned, 9), miss(tuned, 2, hard_key=there), miss(other, 3), miss(other, 4)])
    compact(path, without={(H200.hard_key, tuned)})
    assert [(m.problem, m.count) for m in read(path)[0]] == [(other, 7), (tuned, 2)]
    assert len(path.read_bytes().splitlines()) == 2


def test_where_the_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr(engine.platformdirs, "user_data_dir", lambda *_, **__: str(data))
    assert log_path() == tmp_path / "misses.jsonl", "beside the user database"
    monkeypatch.setenv("TUNEDCOMM_DB", "postgresql+psycopg://host/name")
    assert log_path() == data / "misses.jsonl"
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", "~/elsewhere.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert log_path() == tmp_path / "elsewhere.jsonl"
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", "1")
    assert log_path() == data / "misses.jsonl"


def test_only_the_users_data_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data" / "tunedcomm"
    monkeypatch.setattr(engine.platformdirs, "user_data_dir", lambda *_, **__: str(data))
    append(data / "misses.jsonl", [miss()])
    assert len(read(data / "misses.jsonl")[0]) == 1
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "other" / "misses.jsonl", [miss()])
