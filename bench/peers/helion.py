"""Helion (github.com/pytorch/helion) as a contender: the distributed examples of its repository.

Needs Helion's checkout on PYTHONPATH, for the kernels lie in `examples/distributed` and not in the package. They run
with the configs that the examples give. Its fused norms give no sum beside the norm, which is part of
all_reduce_rms_norm here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch

from tunedcomm.peers import LeftOut, Peer, Tensors, need_signals, plain_gemm, symmetric
from tunedcomm.spec import Problem

ALL_REDUCE_BLOCK = 8192
LARGEST_BYTES = 32 << 20
TILE, SHARD_MULTIPLE = 64, 128


def _up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _all_reduce(problem: Problem, device: torch.device) -> Iterator[Peer]:
    if problem.reduction != "sum" or problem.dtype not in ("bfloat16", "float16", "float32"):
        raise LeftOut(f"it sums floating point numbers; this is {problem.reduction} of {problem.dtype}")
    if problem.nbytes > LARGEST_BYTES:
        raise LeftOut(f"a one-shot, it is run up to {LARGEST_BYTES >> 20} MiB")
    blocks = _up(problem.numel, ALL_REDUCE_BLOCK)
    need_signals(blocks, problem.world_size)
    example = importlib.import_module("examples.distributed.all_reduce")

    def run(inputs: Tensors) -> Tensors:
        return (example.helion_one_shot_all_reduce(inputs[0]),)

    yield Peer("one_shot", lambda: (symmetric(problem.shape, problem.dtype, device),), run, num_sms=blocks)


def _ag_gemm(problem: Problem, device: torch.device) -> Iterator[Peer]:
    (m, n, k), nk = problem.shape, plain_gemm(problem)
    rows, dtype = m // problem.world_size, getattr(torch, problem.dtype)
    if rows % SHARD_MULTIPLE:
        raise LeftOut(f"a rank's {rows} rows are not a multiple of {SHARD_MULTIPLE}")
    example = importlib.import_module("examples.distributed.all_gather_matmul")

    def allocate() -> Tensors:
        b = torch.empty((n, k) if nk else (k, n), dtype=dtype, device=device)
        return symmetric((rows, k), problem.dtype, device), b

    def run(inputs: Tensors) -> Tensors:
        a, b = inputs
        return (example.helion_all_gather_matmul(a, b.t() if nk else b)[1],)

    yield Peer("all_gather_matmul", allocate, run)


def _gemm_rs(problem: Problem, device: torch.device) -> Iterator[Peer]:
    (m, n, k), nk = problem.shape, plain_gemm(problem)
    dtype = getattr(torch, problem.dtype)
    need_signals(_up(m, TILE) * _up(n, TILE), problem.world_size)
    example = importlib.import_module("examples.distributed.matmul_reduce_scatter")
    staging = symmetric((m, n), problem.dtype, device)

    def allocate() -> Tensors:
        b = torch.empty((n, k) if nk else (k, n), dtype=dtype, device=device)
        return torch.empty((m, k), dtype=dtype, device=device), b

    def run(inputs: Tensors) -> Tensors:
        a, b = inputs
        return (example.helion_matmul_reduce_scatter(staging, a, b.t() if nk else b),)

    yield Peer("matmul_reduce_scatter", allocate, run)


_OPS = {"ag_gemm": _ag_gemm, "all_reduce": _all_reduce, "gemm_rs": _gemm_rs}


def peers(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """The example that does what the problem asks."""
    importlib.import_module("helion")
    if problem.op not in _OPS:
        raise LeftOut(f"Helion has no example of {problem.op} that can be compared")
    yield from _OPS[problem.op](problem, device)
