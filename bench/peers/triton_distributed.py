"""Triton-distributed (github.com/ByteDance-Seed/Triton-distributed) as a contender.

Needs its build of Triton in the place of the usual one, NVSHMEM for Python, and NVSHMEM_DISABLE_NVLS=1: without that
NVSHMEM makes multicast objects where the fabric has multicast. Of its methods those are run that need none. Its fused
GEMMs count their launches on the host, which a captured launch cannot, so they run eagerly only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from tunedcomm.peers import LeftOut, Peer, Tensors, default_group, plain_gemm
from tunedcomm.spec import Problem

LARGEST_BYTES = 32 << 20
LARGEST_ONE_SHOT_BYTES = 8 << 20
PACKET_BYTES = 16


def _start(utils: Any) -> tuple[int, int]:
    """Have NVSHMEM running; (rank, ranks)."""
    group = default_group()
    if not utils.is_shmem_initialized():
        utils.init_nvshmem_by_torch_process_group(group)
    return group.rank(), group.size()


def _all_reduce(problem: Problem, device: torch.device) -> Iterator[Peer]:
    from triton_dist import utils
    from triton_dist.kernels.allreduce import AllReduceMethod
    from triton_dist.kernels.nvidia import allreduce

    if problem.reduction != "sum" or problem.dtype not in ("bfloat16", "float16", "float32"):
        raise LeftOut(f"it sums floating point numbers; this is {problem.reduction} of {problem.dtype}")
    if problem.nbytes > LARGEST_BYTES or problem.nbytes % (PACKET_BYTES * problem.world_size):
        raise LeftOut(f"it is run up to {LARGEST_BYTES >> 20} MiB, for {PACKET_BYTES} bytes a rank or a multiple")
    rank, ranks = _start(utils)
    dtype = getattr(torch, problem.dtype)
    methods = {"one_shot": (AllReduceMethod.OneShot, ranks), "two_shot": (AllReduceMethod.TwoShot, 2)}
    for text, (method, copies) in methods.items():
        if text == "one_shot" and problem.nbytes > LARGEST_ONE_SHOT_BYTES:
            continue
        context = allreduce.create_allreduce_ctx(problem.nbytes * copies, rank, ranks, ranks)
        out = torch.empty(problem.shape, dtype=dtype, device=device)

        def run(inputs: Tensors, method: Any = method, context: Any = context, out: torch.Tensor = out) -> Tensors:
            allreduce.all_reduce(inputs[0], method=method, ctx=context, output=out)
            return (out,)

        yield Peer(text, lambda: (torch.empty(problem.shape, dtype=dtype, device=device),), run)


def _fused(problem: Problem, device: torch.device) -> Iterator[Peer]:
    from triton_dist import utils
    from triton_dist.kernels import nvidia

    if problem.mode == "graph":
        raise LeftOut("its fused GEMMs count launches on the host, which a captured launch cannot")
    (m, n, k), nk = problem.shape, plain_gemm(problem)
    rank, ranks = _start(utils)
    dtype, gathers = getattr(torch, problem.dtype), problem.op == "ag_gemm"
    if gathers:
        context = nvidia.create_ag_gemm_context(m, n * ranks, k, dtype, rank, ranks, num_local_ranks=ranks)
    else:
        stream = torch.cuda.Stream(priority=-1) if device.type == "cuda" else None
        context = nvidia.create_gemm_rs_context(m, n, rank, ranks, ranks, dtype, stream)
    function = nvidia.ag_gemm if gathers else nvidia.gemm_rs

    def allocate() -> Tensors:
        a = torch.empty((m // ranks if gathers else m, k), dtype=dtype, device=device)
        return a, torch.empty((n, k) if nk else (k, n), dtype=dtype, device=device)

    def run(inputs: Tensors) -> Tensors:
        a, b = inputs
        return (function(a, b.t() if nk else b, ctx=context, autotune=True),)

    yield Peer(f"{problem.op}, tuned by itself", allocate, run)


_OPS = {"ag_gemm": _fused, "all_reduce": _all_reduce, "gemm_rs": _fused}


def peers(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """Its kernels for one node that need no multicast."""
    import triton_dist  # noqa: F401 - says whether it is there

    if os.environ.get("NVSHMEM_DISABLE_NVLS") != "1":
        raise LeftOut("set NVSHMEM_DISABLE_NVLS=1: without it NVSHMEM may make multicast objects, which is not wanted")
    if problem.op not in _OPS:
        raise LeftOut(f"no adapter for Triton-distributed's {problem.op}")
    yield from _OPS[problem.op](problem, device)
