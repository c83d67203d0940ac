"""multimem: the switch sums each rank's chunk of all ranks' copies with `multimem.ld_reduce`.

The input is copied into the scatter area, chunk j from packet j × total on, flags, each rank loads the sums of its
chunk through the multicast address, flags, after which nobody reads the scatter areas any more.

Numerics: library (each element is summed once, for its one owner, in an order that is the switch's). Graph-safe.
Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import (
    Launch,
    bind_plain,
    blocks_and_threads,
    closest,
    kernel_blocks,
    refuse_multicast,
)
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import CompileRequest
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    load_bytes,
    load_reduce,
    mean_packets,
    num_packets,
    write_elements,
)
from tunedcomm.kernels.common.sync import store_packets
from tunedcomm.kernels.reduce_scatter._common import chunk_packets, chunk_rounds, constants_of, refuse
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["MULTIMEM", "multimem_kernel"]


@triton.jit
def multimem_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status, multicast, scatter,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Block b publishes and sums the same positions of every chunk, so blocks b wait for each other alone."""
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        for i in tl.static_range(WORLD_SIZE):
            at = x + i * nbytes + packet * 16
            w0, w1, w2, w3 = load_bytes(at, nbytes - packet * 16, here, ALIGN)
            store_packets(local + scatter + (i * total + packet) * 16, w0, w1, w2, w3, here)
    # Releases the copies, acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        offset = scatter + (rank * total + packet) * 16
        sums = load_reduce(multicast, peers, local, offset, here, DTYPE, WORLD_SIZE)
        s0, s1, s2, s3 = mean_packets(sums, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, ALIGN < 16)
    # Says that this rank reads no scatter area any more.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2, WORLD_SIZE)
    await_peers(local, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2, EPOCH_OFFSET)


_SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 132),
        "num_warps": PowerOfTwo(4, 16),
    }
)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_multicast(limits) or refuse(problem, limits):
        return reason
    packets = chunk_packets(problem)
    needed = problem.world_size * packets * PACKET_BYTES
    if needed > limits.staging_bytes:
        return f"{problem.world_size} chunks take {needed} bytes; there are {limits.staging_bytes} of staging"
    return blocks_and_threads(config, limits, packets, most_rounds=1 << 16)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish = {"num_blocks": min(chunk_packets(problem) / 256, 32), "num_warps": 8}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _request(problem: Problem, config: Config) -> CompileRequest:
    return CompileRequest.of(multimem_kernel, constants_of(problem, config), num_warps=int(config["num_warps"]))


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (_request(problem, config),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    multicast = workspace.lanes[problem.mode].multicast
    return bind_plain(problem, config, workspace, _request(problem, config), multicast, workspace.layout.scatter)


MULTIMEM = register_variant(
    Variant(
        op="reduce_scatter",
        name="multimem",
        numerics="library",
        summary="the switch sums each chunk for its owner (NVLink multicast)",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        kernels=(multimem_kernel,),
        compile_requests=_requests,
        num_rounds=chunk_rounds,
    )
)
