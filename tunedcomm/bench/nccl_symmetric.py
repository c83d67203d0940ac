"""NCCL's collectives on symmetric windows, the fastest NCCL there is, as a contender.

Inputs and outputs lie in a memory pool that the group's communicator has registered as windows, so that NCCL may choose
its symmetric kernels. Without NCCL_NVLS_ENABLE=0 NCCL would make multicast objects for these windows, which this
benchmark never does.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.peers import LeftOut, Peer, Tensors, default_group
from tunedcomm.spec import Problem, get_op

# NCCL reads the variable when its first communicator is made.
_NVLS_AT_START = os.environ.get("NCCL_NVLS_ENABLE")
_COLLECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_gather": dist.all_gather_into_tensor,
    "all_to_all": dist.all_to_all_single,
    "reduce_scatter": dist.reduce_scatter_tensor,
}
# Device to its pool and the backend that has registered the pool. One pool serves all problems: it gives freed blocks
# out again, so only the first problems of a size register anything.
_pools: dict[torch.device, tuple[Any, Any]] = {}


def _pool(device: torch.device) -> Any:
    if device not in _pools:
        backend: Any = default_group()._get_backend(device)
        if not hasattr(backend, "register_mem_pool"):
            raise LeftOut(f"torch {torch.__version__} cannot register windows")
        dist.barrier()  # the communicator is there then
        pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(pool, symm=True)  # also what is allocated from it later
        _pools[device] = pool, backend
    return _pools[device][0]


def release() -> None:
    """Deregister and drop the pools, after the last tensor in them is gone and before the group goes; collective.

    NCCL aborts a process that ends with windows.
    """
    gc.collect()
    while _pools:
        device, (pool, backend) = _pools.popitem()
        torch.cuda.synchronize(device)
        backend.deregister_mem_pool(pool)
        del pool


def in_windows(tensors: Tensors, device: torch.device) -> Tensors:
    """New tensors like these in registered memory; all ranks together.

    Raises:
        LeftOut: NCCL may make multicast objects, or torch cannot register windows.
    """
    if _NVLS_AT_START != "0":
        raise LeftOut("NCCL may use NVLink multicast for windows; start with NCCL_NVLS_ENABLE=0")
    with torch.cuda.use_mem_pool(_pool(device), device):
        return tuple(torch.empty_like(tensor) for tensor in tensors)


def peers(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """NCCL in place, where the op has such a form, and out of place."""
    if device.type != "cuda" or problem.reduction not in ("", "sum"):
        return
    spec = get_op(problem.op)

    def allocate() -> Tensors:
        return in_windows(spec.make_inputs(problem, 0, 0, "random", device), device)

    if problem.op == "all_reduce":
        (out,) = in_windows(spec.make_outputs(problem, device), device)

        def sum_in_place(inputs: Tensors) -> Tensors:
            dist.all_reduce(inputs[0])
            return inputs

        def sum_of_copy(inputs: Tensors) -> Tensors:
            dist.all_reduce(out.copy_(inputs[0]))
            return (out,)

        yield Peer("in place", allocate, sum_in_place)
        yield Peer("", allocate, sum_of_copy)
    elif (collective := _COLLECTIVES.get(problem.op)) is not None:
        (out,) = in_windows(spec.make_outputs(problem, device), device)

        def run(inputs: Tensors) -> Tensors:
            collective(out.view(-1), inputs[0].view(-1))
            return (out,)

        yield Peer("", allocate, run)
