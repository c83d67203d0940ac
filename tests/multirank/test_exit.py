"""The end of a program that keeps objects of tunedcomm in globals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
kept = {
    "nothing": lambda: None,
    "communicator": tunedcomm.get_communicator,
    "released": tunedcomm.get_communicator,
    "serving": tunedcomm.ServingAllReduce,
    "install": tunedcomm.install,
    "fusion": tunedcomm.fusion_pass,
}[keep]()
for numel in range(64, 76):
    x = torch.full((numel,), rank + 1.0)
    if keep == "install":
        dist.all_reduce(x)
    elif keep == "serving":
        x = kept.all_reduce(x)
    else:
        x = tunedcomm.all_reduce(x)
    assert torch.equal(x, torch.full((numel,), 3.0))
if keep == "released":
    tunedcomm.release_communicators()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("keep", ["nothing", "communicator", "released", "serving", "install", "fusion"])
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
