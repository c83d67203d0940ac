"""The file of untuned problems: many writers, hostile lines, and what a reader makes of it."""

from __future__ import annotations

import json
import multiprocessing
import os
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
        b"[" * 3000,
        _with()[:-20],
        _with(count=0),
        _with(count="1"),
        _with(count=10**30),
        _with(last_seen="yesterday"),
        _with(source=None),
        _with(environment={}),
        _with(environment={**_GOOD["environment"], "gpu": ["H200"]}),  # type: ignore[dict-item]
        _problem_with(shape="2048xbig"),
        _problem_with(shape="9" * 30),
        _problem_with(dtype="float3"),
        _problem_with(world_size="4"),
        _problem_with(mode="lazy"),
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
