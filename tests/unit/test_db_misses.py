"""The file of untuned problems: many writers, hostile lines, and what a reader makes of it."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_samples import real_trial
from db_samples import H200, START, problem, row

from tunedcomm import kernels, spec
from tunedcomm.db import misses as miss_log
from tunedcomm.db import sidecar, targets
from tunedcomm.db.misses import Miss, append, compact, log_path, read
from tunedcomm.dispatch import misses
from tunedcomm.dispatch.decide import decide
from tunedcomm.dispatch.launches import counted
from tunedcomm.dispatch.plans import plan_for
from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, get_variant, why_no_kernel
from tunedcomm.symm.layout import limits_for


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
    monkeypatch.setattr(sidecar.os, "write", lambda file, line: written.append(line) or len(line))
    append(path, [miss(problem(1 << k)) for k in range(3, 8)])
    assert len(written) == 5
    for line in written:
        assert (line[:1], line[-1:], line.count(b"\n")) == (b"\n", b"\n", 2)
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


NONSENSE = [
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
]


def test_what_makes_no_sense_is_skipped(path: Path) -> None:
    append(path, [miss()])
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in NONSENSE)
    append(path, [miss()])
    misses, skipped = read(path)
    assert [m.count for m in misses] == [2]
    assert skipped == len(NONSENSE)


def test_a_full_disk_is_an_os_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(sidecar.os, "write", lambda file, line: real(file, line[:40]))
    with pytest.raises(OSError, match="no space"):
        append(path, [miss()])


def test_a_large_file_is_not_added_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(path, [miss(count=3), miss(count=4)])
    before = path.read_bytes()
    monkeypatch.setattr(sidecar, "MAX_BYTES", len(before))
    with pytest.raises(OSError, match="--from-misses"):
        append(path, [miss()])
    assert path.read_bytes() == before
    compact(path)
    append(path, [miss()])
    assert read(path)[0][0].count == 8


def test_compacting_beside_a_writer_loses_no_line(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rounds = 1500

    def write() -> None:
        for _ in range(rounds):
            append(path, [miss()])

    writers = [context.Process(target=write) for _ in range(2)]
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
    monkeypatch.setattr(targets.platformdirs, "user_data_dir", lambda *_, **__: str(data))
    assert log_path() == tmp_path / "misses.jsonl", "beside the user database"
    monkeypatch.setenv("TUNEDCOMM_DB", "postgresql+psycopg://host/name")
    assert log_path() == data / "misses.jsonl"
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", "~/elsewhere.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert log_path() == tmp_path / "elsewhere.jsonl"
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", "1")
    assert log_path() == data / "misses.jsonl"


# Counting: only missed problems, only on the first rank, and never an error


TUNED = Problem("all_reduce", (98304,), "bfloat16", 4)
UNTUNED = Problem("all_reduce", (98304,), "float32", 4)


@pytest.fixture(autouse=True)
def _own_counters() -> Iterator[None]:
    misses._forget()
    yield
    misses._forget()


def launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
    """What every plan here launches."""


def communicator(rank: int = 0, mode: str = "cached", bind: Any = None) -> Any:
    """What `plan_for` needs of one: lamport is tuned at one problem."""
    kernels.discover()
    limits = limits_for(H200, 4)
    stored = real_trial("lamport", 4.0, problem=TUNED)
    tuned = row("lamport", 4.0, problem=TUNED, candidate=stored.candidate, source_hash=stored.source_hash)

    def bind_for_calls(problem: Problem, candidate: Candidate, *, counter: Any, **_: Any) -> Any:
        bare = bind(problem, candidate) if bind else launch
        return bare if counter is None else counted(bare, counter)

    return SimpleNamespace(
        rank=rank,
        device=SimpleNamespace(type="cuda"),
        limits=limits,
        environment=H200,
        snapshot=Snapshot(environment=H200, world_size=4, rows=(tuned,)),
        settings=SimpleNamespace(mode=mode, forced={}, check=(0, False)),
        quarantined={},
        noted=None,
        bind=bind_for_calls,
    )


def call(problem: Problem, times: int = 1, **changes: Any) -> None:
    plan = plan_for(communicator(**changes), problem, "default")
    for _ in range(times):
        plan.launch((), (), 0)


def test_a_missed_plan_counts_its_calls(path: Path) -> None:
    near = Problem("all_reduce", (98304 + 512,), "bfloat16", 4)
    call(UNTUNED, 3)
    call(near, 5)
    call(UNTUNED, 4)
    assert not path.exists(), "no file is touched in a call"
    misses.flush()
    found, skipped = read(path)
    assert skipped == 0
    assert [(m.problem, m.count, m.source) for m in found] == [(UNTUNED, 7, "library"), (near, 5, "interpolated")]
    assert found[0].hard_key == H200.hard_key
    misses.flush()
    assert path.read_bytes().count(b'{"count"') == 2, "nothing new, nothing written"
    call(near)
    misses.flush()
    assert sum(m.count for m in read(path)[0]) == 13


def test_a_call_does_not_ask_whether_a_kernel_could_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking each variant took longer than to decide; `tune --from-misses` asks."""
    asked: list[Problem] = []
    variant = get_variant("all_reduce", "lamport")
    monkeypatch.setitem(
        spec._variants,
        ("all_reduce", "lamport"),
        replace(variant, default=lambda problem, limits: asked.append(problem) or variant.default(problem, limits)),
    )
    hopeless = replace(UNTUNED, dtype="int64")
    call(hopeless)
    call(UNTUNED)
    misses.flush()
    assert [m.problem for m in read(path)[0]] == [UNTUNED, hopeless]
    assert not {UNTUNED, hopeless} & set(asked)


def test_a_policy_that_nothing_can_meet_says_why() -> None:
    limits = limits_for(H200, 4)
    kernels.discover()
    asked = Problem("gemm_ar", (64, 8192, 2048), "float32", 4, layout="nk")
    with pytest.raises(InfeasibleError, match="tuning would find none") as caught:
        decide(asked, Snapshot(environment=H200, world_size=4), limits, policy="ordered")
    assert "tunedcomm tune" not in str(caught.value)
    assert why_no_kernel(asked, limits, "any") is not None
    assert why_no_kernel(UNTUNED, limits, "ordered") is None


def test_a_tuned_candidate_that_cannot_be_bound_is_no_miss() -> None:
    def bind(problem: Problem, candidate: Candidate) -> Any:
        if candidate.variant != "library":
            raise InfeasibleError("too large")
        return launch

    plan = plan_for(communicator(bind=bind), TUNED, "default")
    assert (plan.decide_again().source, plan.launch) == ("library", launch)


@pytest.mark.parametrize("place", ["directory", "missing/misses.jsonl", "file/misses.jsonl", "fifo", "x" * 300])
def test_a_log_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", str(tmp_path / place))
    for _ in range(3):
        call(UNTUNED)
        misses.flush()
    (said,) = caplog.messages
    assert "TUNEDCOMM_MISS_LOG" in said
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "fifo", "file"]


def test_a_forked_child_does_not_count_for_its_parent(path: Path) -> None:
    call(UNTUNED, 5)
    child = os.fork()
    if child == 0:
        try:
            misses.flush()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not path.exists()
    misses.flush()
    assert read(path)[0][0].count == 5
