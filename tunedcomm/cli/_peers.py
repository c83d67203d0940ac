"""PyTorch's own operators as contenders, each in the form that suits it most: on inputs in symmetric memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tunedcomm.cli._fused_peers import NCCL_COMPILED_NORM, compiled_norm
from tunedcomm.cli._peer_files import Adapter
from tunedcomm.peers import LeftOut, Peer, Tensors, default_group, symmetric
from tunedcomm.spec import Problem, get_op

__all__ = ["TORCH_PEERS"]

_ONE_SHOT_BYTES = 32 << 20  # beyond this it is behind NCCL and only takes time
_GRANULE = 16  # bytes a rank that PyTorch's kernels move at once
_DTYPES = ("bfloat16", "float32")


def _suits(problem: Problem, device: torch.device, op: str) -> bool:
    if problem.op != op or device.type != "cuda" or problem.reduction not in ("sum", ""):
        return False
    if problem.world_size not in (2, 4, 8):
        raise LeftOut(f"PyTorch's operators were made for 2, 4 or 8 ranks, not {problem.world_size}")
    if problem.dtype not in _DTYPES:
        raise LeftOut(f"PyTorch's operators take {' and '.join(_DTYPES)}, not {problem.dtype}")
    if problem.numel == 0 or problem.nbytes % (_GRANULE * problem.world_size):
        raise LeftOut(f"{problem.nbytes} bytes are no multiple of {_GRANULE} for each of {problem.world_size} ranks")
    return True


def _one_shot(problem: Problem, device: torch.device) -> Iterator[Peer]:
    if not _suits(problem, device, "all_reduce"):
        return
    if problem.nbytes > _ONE_SHOT_BYTES:
        raise LeftOut(f"a one-shot of more than {_ONE_SHOT_BYTES >> 20} MiB only takes time")
    name, out = (
        default_group().group_name,
        torch.empty(problem.shape, dtype=getattr(torch, problem.dtype), device=device),
    )

    def run(inputs: Tensors) -> Tensors:
        torch.ops.symm_mem.one_shot_all_reduce_out(inputs[0], "sum", name, out)
        return (out,)

    yield Peer("", lambda: (symmetric(problem.shape, problem.dtype, device),), run)


def _two_shot(problem: Problem, device: torch.device) -> Iterator[Peer]:
    if not _suits(problem, device, "all_reduce"):
        return
    name = default_group().group_name

    def run(inputs: Tensors) -> Tensors:
        torch.ops.symm_mem.two_shot_all_reduce_(inputs[0], "sum", name)
        return inputs

    yield Peer("in place", lambda: (symmetric(problem.shape, problem.dtype, device),), run)


def _low_contention(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """The copy engines' gather, and the exchange with a sum behind it, that PyTorch's compiler may choose."""
    if problem.op not in ("all_gather", "reduce_scatter") or not _suits(problem, device, problem.op):
        return
    name, gathers = default_group().group_name, problem.op == "all_gather"
    rows = problem.numel if gathers else problem.numel * problem.world_size
    operators = torch.ops.symm_mem

    def run(inputs: Tensors) -> Tensors:
        if gathers:
            found = operators._low_contention_all_gather(inputs[0], name)
        else:
            found = operators._low_contention_reduce_scatter(inputs[0], "sum", name)
        return (torch.ops._c10d_functional.wait_tensor(found),)

    # The operators' stream joins the caller's by a record of pending work, which waiting looks up.
    yield Peer("", lambda: (symmetric((rows,), problem.dtype, device),), run)


def _compiled_norm(problem: Problem, device: torch.device) -> Iterator[Peer]:
    if problem.op == "all_reduce_rms_norm" and device.type == "cuda":
        spec = get_op(problem.op)
        yield Peer(
            "in place", lambda: spec.make_inputs(problem, 0, 0, "random", device), compiled_norm(problem, device)
        )


TORCH_PEERS = (
    Adapter("torch_one_shot_symmetric", _one_shot),
    Adapter("torch_two_shot_symmetric", _two_shot),
    Adapter("torch_low_contention", _low_contention),
    Adapter(NCCL_COMPILED_NORM, _compiled_norm),
)
