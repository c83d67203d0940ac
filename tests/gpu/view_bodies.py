"""What each rank runs in `run_views.py`: the ops where processes see their GPUs in different ways."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured
from program_states import CLEAN, Bits, Case, cases, results_of

import tunedcomm
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import Candidate
from tunedcomm.symm.mapped import MappedMemory

# A variant of each op beside those that dispatch chooses; all kernels where VIEW_KERNELS is set.
SOME = {"all_reduce": "two_shot", "all_gather": "push", "reduce_scatter": "push", "all_to_all": "push",
        "all_to_all_v": "push", "broadcast": "push", "all_reduce_bias": "lamport", "all_reduce_rms_norm": "two_shot",
        "ag_gemm": "sm_persistent", "gemm_rs": "push_reduce", "gemm_ar": "two_shot", "ep_dispatch": "push",
        "ep_combine": "push", "all_gather_list": "lamport", "all_gather_v": "push", "reduce_scatter_v": "push",
        "dcp_combine": "lamport", "ulysses_scatter": "push",
        "ulysses_gather": "pull"}  # fmt: skip
SIZES = (1 << 10, 1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 22, 1 << 23, 1 << 25)
MIB = 1 << 20


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}"


def _used() -> int:
    """Bytes in use on this rank's GPU, while every rank waits: each one takes memory of the others' GPUs, too."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    dist.barrier()
    return total - free


def environment_body() -> dict[str, object]:
    """Symmetric memory is there, made by the library, and the environment is that of every other view."""
    comm = get_communicator()
    assert comm.limits.symmetric
    assert not comm.limits.multicast
    assert comm.workspace is not None
    assert all(isinstance(buffer.owner, MappedMemory) for buffer in comm.workspace.buffers.values())
    return {"digest": comm.environment.digest, "snapshot": comm.snapshot.digest, "fabric": comm.environment.fabric}


def memory_body() -> dict[str, object]:
    """Device memory of a group: at its first call of 2 KB, after a large one, and after it was destroyed."""
    x = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    large = torch.ones(32 * MIB, dtype=torch.bfloat16, device="cuda")
    found = {}
    for turn in ("loading", "NCCL alone", "group"):  # the first loads kernels, and what NCCL keeps
        begin = _used()
        group = dist.new_group()
        dist.all_reduce(x.clone(), group=group)
        nccl = _used()
        held = first = grown = 0
        if turn != "NCCL alone":
            tunedcomm.all_reduce(x, group=group)
            first = _used() - nccl
            held = _held(group)
            with tunedcomm.force("all_reduce", "two_shot"):
                tunedcomm.all_reduce(large, group=group)
            grown = _used() - nccl
        dist.destroy_process_group(group)
        del group
        found[turn] = {"first": first, "held": held, "grown": grown, "left": _used() - begin}
    result = {turn: {name: round(value / MIB, 1) for name, value in each.items()} for turn, each in found.items()}
    assert found["group"]["first"] <= 48 * MIB, result
    assert found["group"]["grown"] >= found["group"]["first"] + 8 * MIB, result
    assert found["group"]["left"] <= found["NCCL alone"]["left"] + 2 * MIB, result
    return {"MiB": result}


def _held(group: Any) -> int:
    workspace = get_communicator(group).workspace
    assert workspace is not None
    return sum(workspace.held().values())


def ops_body() -> dict[str, object]:
    """Every op, eager; results go to VIEW_FILE, for the comparison with other views."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    every = cases(rank, world_size, _device())
    some = {name: [SOME[case.op]] for name, case in every.items()}
    kernels = None if os.environ.get("VIEW_KERNELS") else some
    found = results_of(CLEAN, tuple(range(world_size)), rank, world_size, _device(), kernels)
    for (title, turn), bits in found.items():
        again = found[title, "first"]
        assert all(torch.equal(one.words, other.words) for one, other in zip(bits, again, strict=True)), (title, turn)
    _save({f"{title}, {turn}": [bits.words for bits in each] for (title, turn), each in found.items()}, "ops")
    return {"calls": len(found)}


def graphs_body() -> dict[str, object]:
    """Every op that can be captured: replays give the bits of eager calls; the lanes grow before the capture.

    One variant forced, and what dispatch chooses for graphs. The eager calls are forced to the graph's candidate, for
    dispatch may choose another one for them, whose bits differ.
    """
    rank, world_size, count = dist.get_rank(), dist.get_world_size(), 0
    group, left_out = dist.new_group(), []
    for name, case in cases(rank, world_size, _device()).items():
        if name in ("symmetric", "all_gather with progress", "intercept"):
            continue
        call = functools.partial(_called, case, group)
        for variant in (SOME[case.op], ""):
            made: list[list[torch.Tensor]] = []
            try:
                # Leaving the block of `force` drops the plans, so that it covers the warm-up and the capture.
                with tunedcomm.force(case.op, variant) if variant else contextlib.nullcontext():
                    graph = captured(functools.partial(_note, made, call), 2)
                    candidate = _in_graphs(group, case.op)
                assert variant in ("", candidate.variant), (name, variant, candidate)
                with tunedcomm.force(case.op, candidate.variant, candidate.config_dict):
                    expected = [Bits.of(tensor) for tensor in call()]
            except tunedcomm.InfeasibleError as error:
                left_out.append(f"{name} {variant}: {error}"[:160])
                continue
            for _ in range(3):
                for tensor in made[-1]:
                    tensor.zero_()
                graph.replay()
                torch.cuda.synchronize()
                got = [Bits.of(tensor) for tensor in made[-1]]
                same = [torch.equal(a.words, b.words) for a, b in zip(got, expected, strict=True)]
                assert all(same), (name, str(candidate), same)
            count += 1
            del graph
    assert count > 40, left_out
    return {"graphs": count, "left_out": left_out}


def _in_graphs(group: Any, op: str) -> Candidate:
    """What the one problem of `op` that was called since the plans were last dropped runs in graphs.

    A capture that finds no such plan is served by the library, and its plan is not among those kept.
    """
    communicator = get_communicator(group)
    plans = [plan for plan in communicator.plans.values() if plan.problem.op == op and plan.problem.mode == "graph"]
    (plan,) = plans
    assert any(replayed is plan for replayed in communicator._captured.values()), (op, "the plan is not in the graph")
    return plan.decide_again().candidate


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [each for each in found if each is not None]


def _called(case: Case, group: Any) -> list[torch.Tensor]:
    return _tensors(case.call(group, *case.inputs))


def _note(made: list[Any], call: Callable[[], Any], turn: int) -> None:
    made.append(call())


def _save(found: dict[str, list[torch.Tensor]], what: str) -> None:
    torch.save(found, Path(os.environ["VIEW_FOLDER"], f"{os.environ['VIEW']}-{what}-{dist.get_rank()}.pt"))


def autotune_body() -> dict[str, object]:
    """Tuning in the running job."""
    x = torch.full((3000,), dist.get_rank() + 1.0, device="cuda")
    total = torch.full_like(x, dist.get_world_size() * (dist.get_world_size() + 1) / 2)
    with tunedcomm.autotune(budget_s=4):
        for _ in range(3):
            assert torch.equal(tunedcomm.all_reduce(x), total)
    assert torch.equal(tunedcomm.all_reduce(x), total)
    return {"runs": str(tunedcomm.explain("all_reduce", x)).splitlines()[0][:120]}


def _reduce(x: torch.Tensor, turn: int) -> None:
    tunedcomm.all_reduce(x)


def times_body() -> dict[str, object]:
    """Medians in µs of all_reduce in graphs at 10 sizes, and what ran."""
    found: dict[str, float] = {}
    for numel in SIZES:
        x = torch.ones(numel, dtype=torch.bfloat16, device="cuda")
        graph = captured(functools.partial(_reduce, x), 20)
        for _ in range(3):
            graph.replay()
        samples = []
        for _ in range(15):
            ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            dist.barrier()
            torch.cuda.synchronize()
            ends[0].record()
            graph.replay()
            ends[1].record()
            torch.cuda.synchronize()
            samples.append(ends[0].elapsed_time(ends[1]) * 1000 / 20)
        found[str(2 * numel)] = round(statistics.median(samples), 2)
        del graph
    return {"us": found}
