"""Interface of the adapters of `tunedcomm bench --peers`, Python files that run another project's kernels beside ours.

The file's name is the contender's. It has one function, called on every rank with every problem:

    def peers(problem: Problem, device: torch.device) -> Iterator[Peer]

It yields a `Peer` for each setting worth a try, of which the fastest counts; all ranks must yield the same. It raises
`LeftOut` with the reason where the project cannot run the problem, and imports the project in the function, so that
`ModuleNotFoundError` is such a reason, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from tunedcomm.hardware import ranks_may_share_a_gpu
from tunedcomm.spec import Problem

__all__ = ["LeftOut", "Peer", "Tensors", "default_group", "need_signals", "plain_gemm", "symmetric"]

Tensors: TypeAlias = tuple[torch.Tensor, ...]
_SIGNAL_BYTES, _USUAL_PAD_BYTES = 4, 9216


class LeftOut(Exception):  # noqa: N818 - not an error: a reason that is printed
    """The peer does not take part; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """One setting of another project's kernel for one problem.

    Its results are compared with the op's reference before it is timed; wrong ones put it out.

    Attributes:
        config: the setting, as text.
        allocate: makes tensors for the op's inputs, in the op's order, where the peer wants them, such as in symmetric
            memory; values are copied into them. Called as often as inputs take turns, by all ranks together.
        run: one launch with such tensors on the current stream; gives the op's outputs, in the op's order. Captured
            in a CUDA graph where the problem's mode says so.
        num_sms: blocks that it occupies; None where that is not known.
    """

    config: str
    allocate: Callable[[], Tensors]
    run: Callable[[Tensors], Tensors]
    num_sms: int | None = None


def default_group() -> dist.ProcessGroup:
    """The group of a benchmark's ranks."""
    group = dist.group.WORLD
    assert group is not None, "ranks of a benchmark have a default group"
    return group


def need_rendezvous(device: torch.device) -> None:
    """Refuse where ranks call their GPUs by the same number, which PyTorch's symmetric memory takes for one GPU.

    Collective at its first call.

    Raises:
        LeftOut: they do.
    """
    if device.type != "cuda" or not dist.is_initialized() or ranks_may_share_a_gpu():
        return
    if len(set(indices := _indices(device.index))) < len(indices):
        raise LeftOut("PyTorch's symmetric memory refuses ranks that call their GPUs by the same number")


@functools.cache
def _indices(index: int) -> list[int]:
    """Each rank's number of its GPU."""
    found = [index] * dist.get_world_size()
    dist.all_gather_object(found, index)
    return found


def symmetric(shape: Sequence[int], dtype: str, device: torch.device) -> torch.Tensor:
    """A tensor that all ranks address, which they make together; on the host, where none can be, an ordinary one."""
    if device.type != "cuda":
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    import torch.distributed._symmetric_memory as symm_mem

    need_rendezvous(device)
    tensor = symm_mem.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    symm_mem.rendezvous(tensor, default_group())
    return tensor


def need_signals(num_blocks: int, world_size: int) -> None:
    """Refuse a grid that has more blocks than PyTorch's signal pad has slots, beyond which kernels write elsewhere.

    Raises:
        LeftOut: it has.
    """
    import torch.distributed._symmetric_memory as symm_mem

    pad = getattr(symm_mem, "get_signal_pad_size", lambda: _USUAL_PAD_BYTES)()  # torch 2.9 has no such function
    slots = pad // (_SIGNAL_BYTES * world_size)
    if num_blocks > slots:
        raise LeftOut(f"its grid of {num_blocks} blocks is more than the {slots} that the signal pad has slots for")


def plain_gemm(problem: Problem) -> bool:
    """True if B is stored [N, K], False for [K, N], for a fused GEMM of 16-bit numbers with nothing besides.

    Raises:
        LeftOut: there is more to it, or the ranks do not share M evenly.
    """
    if problem.layout not in ("nk", "kn") or problem.scaling or problem.dtype not in ("bfloat16", "float16"):
        extras = "/".join(part for part in (problem.dtype, problem.layout, problem.scaling) if part)
        raise LeftOut(f"it multiplies bfloat16 and float16 in the layouts nk and kn, not {extras}")
    if problem.shape[0] % problem.world_size:
        raise LeftOut(f"M = {problem.shape[0]} is not a multiple of {problem.world_size} ranks")
    return problem.layout == "nk"
