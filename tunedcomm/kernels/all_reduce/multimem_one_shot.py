"""multimem_one_shot: every rank lets the switch sum all ranks' inputs with `multimem.ld_reduce`.

The input is copied into the one-shot area (two areas take turns, as in `one_shot`), the blocks exchange flags, and each
rank loads the sums through the multicast address.

Numerics: unordered: each rank's loads are summed by the switch separately, and nobody promises one order for all.
Graph-safe. Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce._common import message_rounds
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
from tunedcomm.kernels.common.multimem import load_reduce
from tunedcomm.kernels.common.packets import mean_packets, num_packets, packets_of, read_elements, write_elements
from tunedcomm.kernels.common.sync import store_packets
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["MULTIMEM_ONE_SHOT", "multimem_one_shot_kernel"]


@triton.jit
def multimem_one_shot_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, multicast, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, load sums."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    total = num_packets(numel, WIDTH)
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        w0, w1, w2, w3 = read_elements(x, packet, numel, here, WIDTH, TAIL)
        store_packets(local + mine + packet * 16, w0, w1, w2, w3, here)
    # Releases the copies, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        sums = load_reduce(multicast, (q0, q1, q2, q3, q4, q5, q6), local, mine + packet * 16, here, DTYPE, WORLD_SIZE)
        s0, s1, s2, s3 = mean_packets(sums, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    return refuse_multimem(problem, config, limits, packets_of(problem.nbytes), limits.one_shot_bytes)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish = {"num_blocks": min(packets_of(problem.nbytes) / 256, 32), "num_warps": 8}
    return closest(wish, SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (request_multimem(multimem_one_shot_kernel, problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    layout = workspace.layout
    request = request_multimem(multimem_one_shot_kernel, problem, config)
    return bind_multimem(problem, config, workspace, request, layout.one_shot, layout.one_shot_bytes)


MULTIMEM_ONE_SHOT = register_variant(
    Variant(
        op="all_reduce",
        name="multimem_one_shot",
        numerics="unordered",
        summary="every rank loads sums that the switch makes (NVLink multicast)",
        space=SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=message_rounds,
        kernels=(multimem_one_shot_kernel,),
        compile_requests=_requests,
    )
)
