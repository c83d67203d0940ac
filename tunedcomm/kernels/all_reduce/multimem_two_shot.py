"""multimem_two_shot: the switch sums each slice for its owner, and the owner's one store reaches every rank.

The input is copied into the scatter area, flags, each rank loads the sums of its slice with `multimem.ld_reduce` and
stores them with `multimem.st` into everybody's gather area, flags, the gathered message is copied to the output. One
area of each kind is enough for the reasons given in `two_shot`, with one addition: the last flags also say that nobody
reads the scatter area any more, because every rank sets them after its own loads.

Numerics: library (each element is summed once, so all ranks get the same bits, in an order that is the switch's).
Graph-safe. Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce._common import slice_packets, slice_rounds
from tunedcomm.kernels.all_reduce._multimem import SPACE, bind_multimem, refuse_multimem, request_multimem
from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.multimem import load_reduce, store_all
from tunedcomm.kernels.common.packets import mean_packets, num_packets, read_elements, write_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["MULTIMEM_TWO_SHOT", "multimem_two_shot_kernel"]


@triton.jit
def multimem_two_shot_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, multicast, scatter, gather,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Block b publishes, sums and collects the same positions of every slice, so blocks b wait for each other alone."""
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        for i in tl.static_range(WORLD_SIZE):
            w0, w1, w2, w3 = read_elements(x, i * share + at, numel, here, WIDTH, TAIL)
            store_packets(local + scatter + (i * share + at) * 16, w0, w1, w2, w3, here)
    # Releases the copies, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        offset = (rank * share + at) * 16
        sums = load_reduce(multicast, peers, local, scatter + offset, here, DTYPE, WORLD_SIZE)
        s0, s1, s2, s3 = mean_packets(sums, DTYPE, AVG, WORLD_SIZE)
        store_all(multicast, peers, local, gather + offset, s0, s1, s2, s3, here, WORLD_SIZE)
    # Releases the sums, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2, WORLD_SIZE)
    await_peers(local, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        for i in tl.static_range(WORLD_SIZE):
            w0, w1, w2, w3 = load_packets(local + gather + (i * share + at) * 16, here)
            write_elements(out, i * share + at, numel, w0, w1, w2, w3, here, WIDTH, TAIL)
    write_counter(local, epoch + 2, EPOCH_OFFSET)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    return refuse_multimem(problem, config, limits, slice_packets(problem), limits.staging_bytes)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish = {"num_blocks": min(slice_packets(problem) / 256, 32), "num_warps": 8}
    return closest(wish, SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (request_multimem(multimem_two_shot_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    layout = workspace.layout
    request = request_multimem(multimem_two_shot_kernel, problem, config)
    return bind_multimem(problem, config, workspace, request, layout.scatter, layout.gather)


MULTIMEM_TWO_SHOT = register_variant(
    Variant(
        op="all_reduce",
        name="multimem_two_shot",
        numerics="library",
        summary="the switch sums each slice for its owner, whose one store reaches every rank (NVLink multicast)",
        space=SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=slice_rounds,
        kernels=(multimem_two_shot_kernel,),
        compile_requests=_requests,
    )
)
