"""Kraken (github.com/meta-pytorch/kraken) as a contender: `tunedcomm bench --op all_reduce --peers bench/peers`.

Needs Kraken's checkout on PYTHONPATH, and the package cuda-bindings. What peers read lies in symmetric memory from the
start, so it makes no copy that it could do without. Its fused norms give no sum beside the norm, which is part of
all_reduce_rms_norm here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tunedcomm.peers import LeftOut, Peer, Tensors, need_signals, plain_gemm, symmetric
from tunedcomm.spec import Problem

# (max_num_blocks, num_warps, BLOCK_SIZE): its defaults, and what suits larger messages.
GRIDS = ((24, 32, 8192), (64, 16, 4096))
LARGEST_BYTES = 32 << 20  # all_reduce beyond this is behind NCCL and only takes time
LARGEST_ONE_SHOT_BYTES = 16 << 20
TILE, BIAS_BLOCK, MAX_BIAS_BLOCKS = 64, 4096, 24
SHARD_MULTIPLE, GROUP = 128, 4  # rows of a tile of all_gather_matmul, and how many it groups


def _up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _bf16(problem: Problem) -> None:
    if problem.dtype != "bfloat16" or problem.reduction not in ("sum", "") or problem.numel % 8:
        raise LeftOut("it sums bfloat16 in packets of 8")


def _all_reduce(kraken: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    _bf16(problem)
    if problem.nbytes > LARGEST_BYTES:
        raise LeftOut(f"it is run up to {LARGEST_BYTES >> 20} MiB")
    for function in (kraken.comm.one_shot_all_reduce, kraken.comm.two_shot_all_reduce):
        one_shot = function is kraken.comm.one_shot_all_reduce
        if one_shot and problem.nbytes > LARGEST_ONE_SHOT_BYTES:
            continue
        for blocks, warps, block_size in GRIDS:

            def run(
                inputs: Tensors,
                function: Callable[..., torch.Tensor] = function,
                blocks: int = blocks,
                warps: int = warps,
                block_size: int = block_size,
            ) -> Tensors:
                return (function(inputs[0], max_num_blocks=blocks, num_warps=warps, BLOCK_SIZE=block_size),)

            config = f"{function.__name__} max_num_blocks={blocks} num_warps={warps} BLOCK_SIZE={block_size}"
            each = block_size if one_shot else block_size * problem.world_size
            yield Peer(
                config,
                lambda: (symmetric(problem.shape, problem.dtype, device),),
                run,
                num_sms=min(blocks, _up(problem.numel, each)),
            )


def _all_gather(kraken: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    dtype = getattr(torch, problem.dtype)
    out = torch.empty((problem.numel * problem.world_size,), dtype=dtype, device=device)
    progress = torch.zeros(problem.world_size, dtype=torch.uint32, device=device)

    def run(inputs: Tensors) -> Tensors:
        kraken.comm.all_gather_w_progress(inputs[0], a_out=out, progress=progress)
        return (out,)

    yield Peer("all_gather_w_progress", lambda: (symmetric(problem.shape, problem.dtype, device),), run, num_sms=0)


def _all_reduce_bias(kraken: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    _bf16(problem)
    staging = symmetric(problem.shape, problem.dtype, device)
    out = torch.empty(problem.shape, dtype=torch.bfloat16, device=device)

    def allocate() -> Tensors:  # it adds a bias as large as the sum
        return torch.empty_like(out), torch.empty_like(out)

    for function in (kraken.fused.one_shot_all_reduce_bias, kraken.fused.two_shot_all_reduce_bias):

        def run(inputs: Tensors, function: Callable[..., Any] = function) -> Tensors:
            function(staging, inputs[0], inputs[1], out)
            return (out,)

        yield Peer(function.__name__, allocate, run, num_sms=min(MAX_BIAS_BLOCKS, _up(problem.numel, BIAS_BLOCK)))


def _operands(problem: Problem, device: torch.device, *, shared: bool) -> Callable[[], Tensors]:
    """Makes A, one rank's rows of it in symmetric memory if shared, and B as it is stored."""
    (m, n, k), nk = problem.shape, plain_gemm(problem)
    dtype = getattr(torch, problem.dtype)

    def allocate() -> Tensors:
        b = torch.empty((n, k) if nk else (k, n), dtype=dtype, device=device)
        if shared:
            return symmetric((m // problem.world_size, k), problem.dtype, device), b
        return torch.empty((m, k), dtype=dtype, device=device), b

    return allocate


def _ag_gemm(kraken: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    (m, _, k), nk = problem.shape, plain_gemm(problem)
    if m // problem.world_size % SHARD_MULTIPLE:
        raise LeftOut(f"a rank's {m // problem.world_size} rows are not a multiple of {SHARD_MULTIPLE}")
    group = GROUP if m // problem.world_size % (SHARD_MULTIPLE * GROUP) == 0 else 1
    gathered = torch.empty((m, k), dtype=getattr(torch, problem.dtype), device=device)
    progress = torch.zeros(problem.world_size, dtype=torch.uint32, device=device)

    def run(inputs: Tensors) -> Tensors:
        a, b = inputs
        kept = {"a_out": gathered, "progress": progress, "group_size_m": group}
        return (kraken.fused.all_gather_matmul(a, b.t() if nk else b, **kept)[1],)

    yield Peer(f"all_gather_matmul group_size_m={group}", _operands(problem, device, shared=True), run)


def _tiles(problem: Problem) -> int:
    return _up(problem.shape[0], TILE) * _up(problem.shape[1], TILE)


def _gemm_rs(kraken: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    nk, allocate = plain_gemm(problem), _operands(problem, device, shared=False)
    functions = [kraken.fused.gemm_reduce_scatter_ce_persistent]
    with contextlib.suppress(LeftOut):  # the other one does not signal for every tile
        need_signals(_tiles(problem), problem.world_size)
        functions.append(kraken.fused.gemm_reduce_scatter)
    for function in functions:

        def run(inputs: Tensors, function: Callable[..., torch.Tensor] = function) -> Tensors:
            a, b = inputs
            return (function(a, b.t() if nk else b),)

        yield Peer(function.__name__, allocate, run)


def _gemm_ar(kraken: Any, problem: Problem, device: torch.device) -> Iterator[Peer]:
    nk, allocate = plain_gemm(problem), _operands(problem, device, shared=False)
    need_signals(_tiles(problem), problem.world_size)

    def run(inputs: Tensors) -> Tensors:
        a, b = inputs
        return (kraken.fused.gemm_one_shot_all_reduce_fused(a, b.t() if nk else b),)

    yield Peer("gemm_one_shot_all_reduce_fused, to fp32", allocate, run)


_OPS = {
    "ag_gemm": _ag_gemm,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_reduce_bias": _all_reduce_bias,
    "gemm_ar": _gemm_ar,
    "gemm_rs": _gemm_rs,
}


def peers(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """Kraken's kernels for the problem, each with the settings of its own benchmarks."""
    import kraken

    if problem.op not in _OPS:
        raise LeftOut(f"Kraken has no {problem.op}")
    yield from _OPS[problem.op](kraken, problem, device)
