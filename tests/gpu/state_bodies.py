"""What each rank of a GPU test of programs' states runs, by `run_bodies.py`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from bodies import captured
from program_states import CLEAN, ON_GPUS, STATES, differences, results_of

import tunedcomm


def surroundings_body() -> dict[str, object]:
    """Every op and variant in every state, on all ranks and on rank 0 alone: the bits of calls without any state.

    Prints a line that begins with OK for each state. STATE names the only one to run.
    """
    os.environ.setdefault("TUNEDCOMM_WORKSPACE_MIB", "16")  # every state has groups of its own
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products want it
    rank, world_size, count = dist.get_rank(), dist.get_world_size(), 0
    only, every = os.environ.get("STATE"), tuple(range(world_size))
    device = f"cuda:{torch.cuda.current_device()}"
    wanted = results_of(CLEAN, every, rank, world_size, device)
    for state in [only] if only else [name for name in (*ON_GPUS, *STATES) if name != CLEAN]:
        for who, ranks in (("all ranks", every), ("rank 0 alone", (0,))):
            found = results_of(state, ranks, rank, world_size, device)
            wrong = differences(state, found, wanted)
            assert not wrong, "\n".join([f"{len(wrong)} of {len(found)} on rank {rank}", *wrong])
            torch.cuda.synchronize()
            dist.barrier()
            count += len(found)
            if rank == 0:
                sys.stdout.write(f"OK surroundings {state}, {who}: {len(found)} calls of {world_size} ranks\n")
                sys.stdout.flush()
    assert count
    return {"calls": count}


def interrupted_body() -> dict[str, object]:
    """An exception in a call of one rank: its peers' kernels end at once, in graphs, too; then it comes back."""
    rank, world_size, checked = dist.get_rank(), dist.get_world_size(), 0
    assert float(os.environ["TUNEDCOMM_PEER_TIMEOUT_S"]) >= 5
    other = dist.new_group()
    x = torch.full((4096,), rank + 1.0, device="cuda", dtype=torch.bfloat16)
    total = torch.full_like(x, world_size * (world_size + 1) / 2)

    def right(group: dist.ProcessGroup | None) -> None:
        assert torch.equal(tunedcomm.all_reduce(x, group=group), total)

    def ends(call: Callable[[], object], victim: int) -> None:
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.monotonic()
        if rank == victim:
            with pytest.raises(KeyboardInterrupt):
                _interrupted(lambda: tunedcomm.all_reduce(x))
        else:
            call()
            torch.cuda.synchronize()
            with pytest.raises(tunedcomm.GroupAbortedError, match=f"rank {victim} left"):
                tunedcomm.all_reduce(x)
        assert time.monotonic() - begin < 3, "the kernel waited for its time-out"
        dist.barrier()
        right(other)
        torch.cuda.synchronize()
        tunedcomm.release_communicator()
        right(None)

    right(other)
    for variant in ("lamport", "one_shot", "two_shot", "two_shot_lamport"):
        with tunedcomm.force("all_reduce", variant):
            for turn in range(world_size):
                right(None)
                ends(lambda: tunedcomm.all_reduce(x), turn)
                graph = captured(lambda _: tunedcomm.all_reduce(x), 3)
                graph.replay()
                ends(graph.replay, turn)
                del graph
                checked += 1
    return {"checked": checked}


def _interrupted(call: Callable[[], object]) -> None:
    """Raise KeyboardInterrupt where the call looks whether its group has ended, right before it launches."""
    from tunedcomm.dispatch.groups import get_communicator

    communicator = get_communicator()
    real = type(communicator).check_peers

    def check_peers(self: object) -> None:
        raise KeyboardInterrupt("planted")

    type(communicator).check_peers = check_peers  # type: ignore[assignment]
    communicator.forget_calls()
    try:
        call()
    finally:
        type(communicator).check_peers = real  # type: ignore[method-assign]
