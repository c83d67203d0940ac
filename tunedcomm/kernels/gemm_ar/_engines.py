"""An all_reduce of rows whose bytes the copy engines move: this library's reduce_scatter and all_gather by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels._data import PACKET_BYTES
from tunedcomm.kernels._launch import AddressLaunch
from tunedcomm.kernels._matmul import out_itemsize, wanted_of
from tunedcomm.kernels.all_gather.copy_engine import COPY_ENGINE as GATHER
from tunedcomm.kernels.all_gather.copy_engine import flags_kernel
from tunedcomm.kernels.reduce_scatter.copy_engine import COPY_ENGINE as SCATTER
from tunedcomm.kernels.reduce_scatter.copy_engine import end_kernel, sum_kernel
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["KERNELS", "bind_engines", "refuse_engines", "requests_of"]

KERNELS = (sum_kernel, end_kernel, flags_kernel)


def _halves(problem: Problem, config: Config, rows: int) -> tuple[Problem, dict[str, Value], Problem, dict[str, Value]]:
    """Problem and config of the reduce_scatter, and of the all_gather."""
    share = rows * problem.shape[1] // problem.world_size
    dtype = wanted_of(problem).dtype
    scatter = replace(problem, op="reduce_scatter", shape=(share,), dtype=dtype, layout="", scaling="")
    shared: dict[str, Value] = {"num_streams": 1, "num_chunks": config["num_chunks"]}
    summing = {"num_blocks": config["num_blocks"], "num_warps": config["num_warps"]}
    gather = replace(scatter, op="all_gather", reduction="")
    return scatter, {**summing, **shared}, gather, {"direction": "push", **shared}


def refuse_engines(problem: Problem, config: Config, limits: Limits, rows: int) -> str | None:
    """Why they cannot do it, or None."""
    if rows * problem.shape[1] * out_itemsize(problem) % (problem.world_size * PACKET_BYTES):
        return f"{rows} rows are no {problem.world_size} shares of whole packets"
    scatter, scattering, gather, gathering = _halves(problem, config, rows)
    return SCATTER.infeasible(scatter, scattering, limits) or GATHER.infeasible(gather, gathering, limits)


def requests_of(problem: Problem, config: Config, rows: int) -> Iterable[Any]:
    """Binaries of both halves."""
    scatter, scattering, gather, gathering = _halves(problem, config, rows)
    return (*SCATTER.compile_requests(scatter, scattering), *GATHER.compile_requests(gather, gathering))


def bind_engines(problem: Problem, config: Config, workspace: Workspace, rows: int) -> Callable[[int, int, int], None]:
    """`(stream, address of the rows, 0)` to that all_reduce, in place; sums pass through a tensor of the launch."""
    import torch

    scatter, scattering, gather, gathering = _halves(problem, config, rows)
    # Under the op that was called: a lost peer is to be named with it.
    first = SCATTER.bind(replace(scatter, op=problem.op), scattering, workspace)
    second = GATHER.bind(replace(gather, op=problem.op), gathering, workspace)
    assert isinstance(first, AddressLaunch)
    assert isinstance(second, AddressLaunch)
    scattered, gathered = first.by_address, second.by_address
    share = torch.empty(scatter.numel, dtype=getattr(torch, scatter.dtype), device=workspace.device)
    room = share.data_ptr()

    def run(stream: int, address: int, bias: int) -> None:
        del bias
        scattered(stream, address, room)
        gathered(stream, room, address)

    run.keep = share  # type: ignore[attr-defined]
    return run
