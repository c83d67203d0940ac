"""Other projects' all_reduce, for comparison where they are installed; and PyTorch's own operators at their best.

Each is run in the form that suits it most: PyTorch's operators and Kraken's one-shot on symmetric inputs, without the
copies that a plain input would cost them. A peer that is not installed is left out.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm.cli._fused_peers import NCCL_COMPILED_NORM, compiled_norm
from tunedcomm.spec import Problem

__all__ = ["PEERS", "Peer", "peers_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A contender that is no variant of ours.

    Attributes:
        name: as in the column `contender`.
        config: what it ran with.
        load: copies the caller's inputs to where the peer reads them.
        run: one launch on the current stream.
        result: where the results are afterwards.
    """

    name: str
    config: str
    load: Callable[[tuple[torch.Tensor, ...]], None]
    run: Callable[[], None]
    result: Callable[[], tuple[torch.Tensor, ...]]


_KRAKEN_BYTES = 32 << 20  # beyond this its kernels are behind NCCL and only take time
PEERS = ("torch_one_shot_symmetric", "torch_two_shot_symmetric", "kraken", NCCL_COMPILED_NORM)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "ranks of a benchmark have a default group"
    return group


def _symmetric(problem: Problem, device: torch.device) -> torch.Tensor:
    tensor = symm_mem.empty(problem.numel, dtype=getattr(torch, problem.dtype), device=device)
    symm_mem.rendezvous(tensor, _world())
    return tensor


def _torch_one_shot(problem: Problem, device: torch.device) -> Peer:
    held = _symmetric(problem, device)
    out = torch.empty_like(held)
    name = _world().group_name

    def run() -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(held, "sum", name, out)

    return Peer("torch_one_shot_symmetric", "", lambda x: _copy(held, x[0]), run, lambda: (out,))


def _torch_two_shot(problem: Problem, device: torch.device) -> Peer:
    held = _symmetric(problem, device)
    name = _world().group_name

    def run() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(held, "sum", name)

    return Peer("torch_two_shot_symmetric", "", lambda x: _copy(held, x[0]), run, lambda: (held,))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _run_kraken(
    function: Callable[..., torch.Tensor],
    held: torch.Tensor,
    result: list[torch.Tensor],
    blocks: int,
    warps: int,
    block_size: int,
) -> None:
    result[0] = function(held, max_num_blocks=blocks, num_warps=warps, BLOCK_SIZE=block_size)


def _kraken(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """Kraken's one- and two-shot, each with its default grid and with one that suits larger messages."""
    import kraken

    held = _symmetric(problem, device)
    result: list[torch.Tensor] = [held]
    for function in (kraken.comm.one_shot_all_reduce, kraken.comm.two_shot_all_reduce):
        if function is kraken.comm.one_shot_all_reduce and problem.nbytes > 16 << 20:
            continue
        for blocks, warps, block_size in ((24, 32, 8192), (64, 16, 4096)):
            run = functools.partial(_run_kraken, function, held, result, blocks, warps, block_size)
            config = f"{function.__name__} max_num_blocks={blocks} num_warps={warps} BLOCK_SIZE={block_size}"
            yield Peer("kraken", config, lambda x: _copy(held, x[0]), run, lambda: (result[0],))


def peers_of(problem: Problem, device: torch.device, wanted: Callable[[str], bool]) -> Iterator[Peer]:
    """The peers that can run `problem`; several of one name are its settings, of which the best counts."""
    if problem.op == "all_reduce_rms_norm" and device.type == "cuda" and wanted(NCCL_COMPILED_NORM):
        for load, run, result in compiled_norm(problem, device):
            yield Peer(NCCL_COMPILED_NORM, "in place", load, run, result)
        return
    if (
        problem.op != "all_reduce"
        or device.type != "cuda"
        or problem.reduction != "sum"
        or problem.world_size not in (2, 4, 8)
    ):
        return
    granular = problem.nbytes % (16 * problem.world_size) == 0 and problem.numel > 0
    if not granular or problem.dtype not in ("bfloat16", "float32"):
        return
    if wanted("torch_one_shot_symmetric") and problem.nbytes <= 32 << 20:
        yield _torch_one_shot(problem, device)
    if wanted("torch_two_shot_symmetric"):
        yield _torch_two_shot(problem, device)
    suits = problem.nbytes <= _KRAKEN_BYTES and problem.dtype == "bfloat16"
    if suits and wanted("kraken") and importlib.util.find_spec("kraken") is not None:
        yield from _kraken(problem, device)
