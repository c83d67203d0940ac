"""multimem: the switch sums each rank's chunk of all ranks' copies with `multimem.ld_reduce`.

The input is copied into the scatter area, chunk j from packet j × total on, flags, each rank loads the sums of its
chunk through the multicast address, flags, after which nobody reads the scatter areas any more.

Numerics: library (each element is summed once, for its one owner, in an order that is the switch's). Graph-safe.
Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import refuse_multicast
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, block_range, read_counter, write_counter
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    load_bytes,
    load_reduce,
    mean_packets,
    num_packets,
    packets_of,
    write_elements,
)
from tunedcomm.kernels.common.sync import store_packets
from tunedcomm.kernels.reduce_scatter.op import ReduceScatterVariant
from tunedcomm.space import Choice, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


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


class Multimem(ReduceScatterVariant):
    name = "multimem"
    numerics = "library"
    summary = "the switch sums each chunk for its owner (NVLink multicast)"
    kernels = (multimem_kernel,)
    space = Space({"num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 132), "num_warps": PowerOfTwo(4, 16)})
    areas = ("multicast", "scatter")

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        if reason := refuse_multicast(limits) or super().refuse(problem, limits):
            return reason
        needed = problem.world_size * packets_of(problem.nbytes) * PACKET_BYTES
        if needed > limits.staging_bytes:
            return f"{problem.world_size} chunks take {needed} bytes; there are {limits.staging_bytes} of staging"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {"num_blocks": min(packets_of(problem.nbytes) / 256, 32), "num_warps": 8}


MULTIMEM = Multimem().register()
