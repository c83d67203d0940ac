"""The supervisor's parts: what travels to gangs and back, how deaths are described, what a sweep is resolved to."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from tunedcomm.db.records import Trial
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang.process import GangProcess, Loss, gang_environment, loss_by_exit, process_start
from tunedcomm.tuner.gang.protocol import Command, Settings
from tunedcomm.tuner.search.sweep import summarise_problem

HERE = Environment("gpu", 1, 0, 0, "host", 0, False, 1, "", "", "2.9", "", "", "1")
PROBLEM = Problem(op="all_reduce", shape=(512,), dtype="bfloat16", world_size=2, mode="eager")
SETTINGS = Settings(backend="host", world_size=2, trials=8, variants=("one_shot",), plugins=("planted",))


def path_of_modules() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_rank_refuses_a_supervisor_of_another_version() -> None:
    line, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", "tunedcomm.tuner.gang.worker", str(os.getpid()), str(theirs.fileno())]
        process = subprocess.Popen([*command, "0.0.1/1"], env=path_of_modules(), pass_fds=[theirs.fileno()])
    assert line.poll(60)
    name, (_, text) = line.recv()
    assert name == "failure"
    assert text.startswith("TuningError: ")
    assert "0.0.1/1" in text
    assert process.wait(60) == 1


CHILD_OF_LINE = """
import os, signal, sys
from multiprocessing.connection import Connection
line = Connection(int(sys.argv[2]))
settings, _ = line.recv(), line.recv()
line.send(("ready", settings))
line.send(("run", line.recv().candidate))
os.write(line.fileno(), b"\\0\\0\\0\\x20torn")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_line_carries_both_ways_and_keeps_what_a_dead_gang_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child_of_line.py").write_text(CHILD_OF_LINE)
    monkeypatch.syspath_prepend(tmp_path)
    settings = replace(SETTINGS, stand_in=("child_of_line",))
    candidate = Candidate.of("all_reduce", "lamport", {"launch_pdl": True, "num_blocks": 4})
    command = Command(kind="trial", problem=PROBLEM, candidate=candidate, baseline=None, final=True)
    with selectors.DefaultSelector() as selector:
        gang = GangProcess(0, settings, selector)
        assert gang.step == "starting"
        gang.go()
        assert [key.data for key, _ in selector.select(60)] == [gang]
        assert gang.read() == [("ready", settings)]
        assert gang.step == "waiting"
        gang.send(command)
        assert gang.step == "binding"
        deadline = time.monotonic() + 60
        while (loss := gang.loss()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert loss == Loss("crashed", "rank 0 was killed by SIGKILL", killed=True)
        assert gang.read() == [("run", candidate)]
        assert gang.step == "running"
        assert not selector.get_map()
        gang.send(command)
        assert gang.read() == []
        gang.finish()
        assert gang.step == "ending"


@pytest.mark.parametrize(
    ("exits", "reason", "killed"),
    [
        ([(0, 1), (1, -11)], "rank 1 was killed by SIGSEGV", False),
        ([(1, -9), (0, 1)], "rank 1 was killed by SIGKILL", True),
        ([(1, 1), (0, 1)], "rank 1 ended with exit code 1; rank 1: ValueError: planted", False),
        ([(0, 0), (1, 1)], "rank 1 ended with exit code 1; rank 1: ValueError: planted", False),
        ([(0, 0)], "rank 0 ended with exit code 0; rank 1: ValueError: planted", False),
    ],
)
def test_death_is_blamed_on_its_root_cause(exits: list[tuple[int, int]], reason: str, killed: bool) -> None:
    assert loss_by_exit(dict(exits), "rank 1: ValueError: planted") == Loss("crashed", reason, killed)


def test_gang_does_not_inherit_the_supervisors_place_in_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    environment = gang_environment(SETTINGS)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & set(environment)
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["TUNEDCOMM_PEER_TIMEOUT_S"] == "2"


CHILD = """
import os, sys, time
from tunedcomm.tuner.gang.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""


def test_child_dies_with_its_parent_and_at_once_if_it_is_gone() -> None:
    environment = path_of_modules()
    middle = "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); "
    middle += "print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", middle, CHILD], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while process_start(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_start(child)
    orphan = subprocess.run([sys.executable, "-c", CHILD, "1"], env=environment, timeout=60, check=False)
    assert orphan.returncode == 1


def record(variant: str, us: float | None, status: str = "ok", **changes: Any) -> Trial:
    values: dict[str, Any] = {
        "problem": PROBLEM,
        "numerics": "library" if variant == "library" else "ordered",
        "config": {},
        "created_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
    }
    return Trial(
        environment=HERE, variant=variant, source_hash="a", status=status, latency_p50_us=us, **{**values, **changes}
    )


def test_summary_prefers_finals_and_the_interleaved_baseline() -> None:
    trials = [
        record("library", 10.0),
        record("one_shot", 2.0, baseline_p50_us=9.0),
        record("library", 8.0, final=True),
        record("one_shot", 4.0, baseline_p50_us=12.0, final=True),
        record("two_shot", 3.0, numerics="unordered", final=True),
        record("lamport", None, "hung", reason="x"),
    ]
    result = summarise_problem(PROBLEM, trials, Candidate.of("all_reduce", "one_shot", {}))
    assert result.best is not None
    assert (result.best.variant, result.best.latency_p50_us) == ("one_shot", 4.0)
    assert result.speedup == 3.0
    assert result.failures == {"hung": 1}
    assert result.num_trials == 3
