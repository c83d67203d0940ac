"""Whole programs: their end with objects of tunedcomm in globals, and `tunedcomm demo`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunedcomm.cli import demo, main
from tunedcomm.tuner.gang.ranks import run_module

# The last registered of `atexit` runs first: `look` after all of tunedcomm. A group still there would be torn down
# with the interpreter, where gloo's threads abort some of the runs.
_PROGRAM = """
import atexit, os, sys, weakref
import torch
import torch.distributed as dist

def look():
    print("group", "is gone" if group() is None else "is held", flush=True)

atexit.register(look)
import tunedcomm

rank, store, keep = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = weakref.ref(dist.group.WORLD)
kept = [tunedcomm.get_communicator()]
if keep == "everything":
    kept += [tunedcomm.ServingAllReduce(), tunedcomm.install(), tunedcomm.fusion_pass()]
for numel in range(64, 76):
    x = torch.full((numel,), rank + 1.0)
    calls = [tunedcomm.all_reduce]
    if keep == "everything":
        dist.all_reduce(y := x.clone())
        assert torch.equal(y, torch.full((numel,), 3.0))
        calls.append(kept[1].all_reduce)
    for call in calls:
        assert torch.equal(call(x), torch.full((numel,), 3.0))
if keep == "released":
    tunedcomm.release_communicators()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("keep", ["everything", pytest.param("released", marks=pytest.mark.slow)])
def test_groups_are_let_go_of_before_the_interpreter_ends(keep: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), keep], env=environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert outputs == [b"group is gone\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_demo_ranks_get_the_right_sums(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a kernel; the ranks must also end cleanly, and leave stdout alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "one_shot")
    assert run_module("tunedcomm.cli.demo", ["bfloat16", "512", "777"], world_size=2, environment={}) == 0
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_demo_fits_a_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(demo, "SIZES", (1 << 10, 64 << 10))
    monkeypatch.setattr(demo, "TRIALS", 2)
    assert main.code_of(["demo", "--db", str(tmp_path / "demo.db")]) == 0
    shown, progress = capfd.readouterr()
    assert len(shown.splitlines()) + len(progress.splitlines()) <= 25
    for told in ("gloo µs", "64 KiB", "runs", "checked", "NCCL µs", "4 H200", "tunedcomm tune"):
        assert told in shown
