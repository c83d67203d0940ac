"""Gangs: what travels to them and back, how their deaths and silences are described, what starts them."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from db_samples import trial

from tunedcomm.hardware import process_start
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.gang import process
from tunedcomm.tuner.gang.process import GangProcess, Loss, gang_environment, loss_by_exit
from tunedcomm.tuner.gang.protocol import Command, Settings
from tunedcomm.tuner.search.summary import summarise_problem

PROBLEM = Problem(op="all_reduce", shape=(512,), dtype="bfloat16", world_size=2, mode="eager")
SETTINGS = Settings(backend="host", world_size=2, trials=8, variants=("one_shot",), plugins=("planted",))


def path_of_modules() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_rank_refuses_a_supervisor_of_another_version() -> None:
    line, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-m", "tunedcomm.tuner.gang.worker", str(os.getpid()), str(theirs.fileno())]
        rank = subprocess.Popen([*command, "0.0.1/1"], env=path_of_modules(), pass_fds=[theirs.fileno()])
    assert line.poll(60)
    name, (_, text) = line.recv()
    assert (name, text.split(":")[0]) == ("failure", "TuningError")
    assert "0.0.1/1" in text
    assert rank.wait(60) == 1


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
        assert gang.phase == "starting"
        gang.go()
        assert [key.data for key, _ in selector.select(60)] == [gang]
        assert gang.read() == [("ready", settings)]
        assert gang.phase == "waiting"
        gang.send(command)
        assert gang.phase == "binding"
        deadline = time.monotonic() + 60
        while (loss := gang.loss()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert loss == Loss("crashed", "rank 0 was killed by SIGKILL", killed=True)
        assert gang.read() == [("run", candidate)]
        assert gang.phase == "running"
        assert not selector.get_map()
        gang.send(command)
        assert gang.read() == []
        gang.finish()
        assert gang.phase == "ending"


@pytest.mark.parametrize(
    ("exits", "reason", "killed"),
    [
        ({0: 1, 1: -11}, "rank 1 was killed by SIGSEGV", False),
        ({1: -9, 0: 1}, "rank 1 was killed by SIGKILL", True),
        ({1: 1, 0: 1}, "rank 1 ended with exit code 1; rank 1: ValueError: planted", False),
        ({0: 0, 1: 1}, "rank 1 ended with exit code 1; rank 1: ValueError: planted", False),
        ({0: 0}, "rank 0 ended with exit code 0; rank 1: ValueError: planted", False),
    ],
)
def test_death_is_blamed_on_its_root_cause(exits: dict[int, int], reason: str, killed: bool) -> None:
    assert loss_by_exit(exits, "rank 1: ValueError: planted") == Loss("crashed", reason, killed)


def test_gang_does_not_inherit_the_supervisors_place_in_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    for name in place:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    environment = gang_environment(SETTINGS)
    assert not place & set(environment)
    expected = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", "TUNEDCOMM_PEER_TIMEOUT_S": "2"}
    assert expected.items() <= environment.items()


CHILD = """
import os, sys, time
from tunedcomm.tuner.gang.ranks import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""


def test_child_dies_with_its_parent_and_at_once_if_it_is_gone() -> None:
    environment = path_of_modules()
    middle = "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); "
    middle += "print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", middle, CHILD], env=environment, stdout=subprocess.PIPE, text=True)
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


# Silence

# Launches what it was told to, and is silent from then on; or waits for a command.
SILENT = """
import sys, time
from multiprocessing.connection import Connection
failed_at, launches, _, line = sys.argv[1:5]
line = Connection(int(line))
line.recv_bytes(), line.recv_bytes()
line.send(("ready", None))
if launches == "True":
    line.recv_bytes()
    if failed_at:
        line.send(("failure", (float(failed_at), "ValueError: planted")))
    line.send(("run", None))
time.sleep(60)
"""
BEGIN = 1000.0


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the supervisor alone."""
    (tmp_path / "silent_gang.py").write_text(SILENT)
    monkeypatch.syspath_prepend(tmp_path)
    made = SimpleNamespace(now=BEGIN, sleep=time.sleep)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(process, "time", made)
    return made


@contextmanager
def silent_gang(trial_s: float, *, launches: bool = True, failed_at: float | None = None) -> Iterator[GangProcess]:
    """A gang that said its last word when the clock began."""
    stand_in = ("silent_gang", "" if failed_at is None else str(failed_at), str(launches))
    settings = Settings(backend="host", world_size=2, trials=1, trial_timeout_s=trial_s, stand_in=stand_in)
    with selectors.DefaultSelector() as selector:
        gang = GangProcess(0, settings, selector)
        try:
            gang.go()
            if launches:
                gang.send(Command(kind="trial"))
            while gang.phase != ("running" if launches else "waiting"):
                assert selector.select(60)
                gang.read()
            yield gang
        finally:
            gang.finish()


@pytest.mark.parametrize(
    ("failed_s", "trial_s", "losses"),
    [
        (None, 60, {1: None, 59: None, 61: "hung"}),
        (1, 60, {2: None, 19: None, 61: "crashed"}),  # the other ranks may still say what became of theirs
        (7, 60, {8: "crashed"}),
        (2, 2, {3: "crashed"}),  # a limit that is shorter than that
        (None, 2, {3: "hung"}),
    ],
)
def test_a_raise_on_one_rank_ends_a_gang_early(
    clock: SimpleNamespace, failed_s: float | None, trial_s: float, losses: dict[float, str | None]
) -> None:
    for silent_s, expected in losses.items():
        clock.now = BEGIN
        failed_at = None if failed_s is None else BEGIN + silent_s - failed_s
        with silent_gang(trial_s, failed_at=failed_at) as gang:
            clock.now += silent_s
            loss = gang.loss()
        assert (loss and loss.status) == expected
        if loss is not None and failed_s is not None:
            assert "rank 0: ValueError: planted" in loss.reason
        assert gang.phase == "ending"


def test_who_waits_for_a_command_may_be_silent(clock: SimpleNamespace) -> None:
    with silent_gang(60, launches=False) as gang:
        clock.now += 1000
        assert gang.loss() is None


def test_summary_prefers_finals_and_the_interleaved_baseline() -> None:
    def row(variant: str, us: float | None, **changes: Any) -> Any:
        return trial(variant, us, **{"problem": PROBLEM, "config": {}, "baseline_p50_us": None, **changes})

    trials = [
        row("library", 10.0),
        row("one_shot", 2.0, baseline_p50_us=9.0),
        row("library", 8.0, final=True),
        row("one_shot", 4.0, baseline_p50_us=12.0, final=True),
        row("two_shot", 3.0, numerics="unordered", final=True),
        row("lamport", None, status="hung", reason="x"),
    ]
    result = summarise_problem(PROBLEM, trials, Candidate.of("all_reduce", "one_shot", {}))
    assert (result.best.variant, result.best.latency_p50_us) == ("one_shot", 4.0)
    assert (result.speedup, result.failures, result.num_trials) == (3.0, {"hung": 1}, 3)
