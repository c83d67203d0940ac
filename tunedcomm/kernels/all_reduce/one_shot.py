"""one_shot: every rank reads all ranks' inputs and sums them itself; one flag exchange a block.

Plain input: each rank copies its input into its own one-shot area, the blocks exchange flags, and everybody reads
everybody's copy. Two areas take turns, so no flag is needed at the end: a rank writes an area again only in the call
after the next flagged call, in which it waited for peers that had finished reading (stream order).

Symmetric input (out of place): peers read the input itself, so flags are exchanged before (the inputs are there) and
after (nobody reads any more; the caller may overwrite its input).

Numerics: ordered; loads are issued for all ranks at once and added in rank order. Graph-safe.
Source: the one-shot scheme of NCCL-free serving stacks and PyTorch's symmetric memory operators.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import AllReduceVariant
from tunedcomm.kernels.common.feasibility import refuse_one_shot
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, num_packets, read_elements, sum_packets, write_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PullVariant
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def one_shot_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    x0, x1, x2, x3, x4, x5, x6, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets and sum."""
    epoch = read_counter(local, EPOCH_OFFSET)
    mine = area + (epoch & 1) * area_bytes
    total = num_packets(numel, WIDTH)
    lanes, first, step = block_range(BLOCK)
    if SYMMETRIC:
        peers = (x0, x1, x2, x3, x4, x5, x6)
    else:
        peers = (q0 + mine, q1 + mine, q2 + mine, q3 + mine, q4 + mine, q5 + mine, q6 + mine)
        for start in tl.range(first, total, step):
            packet = start + lanes
            here = packet < total
            w0, w1, w2, w3 = read_elements(x, packet, numel, here, WIDTH, TAIL)
            store_packets(local + mine + packet * 16, w0, w1, w2, w3, here)

    # Releases the copies (or what wrote the inputs), acquires the peers'.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        own = read_elements(x, packet, numel, here, WIDTH, TAIL)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(peers, x, i, rank, WORLD_SIZE)
            if SYMMETRIC:
                words = words + read_elements(source, packet, numel, here & (rank != i), WIDTH, TAIL)
            else:
                words = words + load_packets(source + packet * 16, here & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
    if SYMMETRIC:
        # Orders the peers' reads of this rank's input before whatever follows this kernel.
        arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2, WORLD_SIZE)
        await_peers(local, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)
    else:
        write_counter(local, epoch + 1, EPOCH_OFFSET)


class OneShot(PullVariant, AllReduceVariant, registered=True):
    name = "one_shot"
    summary = "every rank reads all inputs and sums them; one exchange of flags"
    kernels = (one_shot_kernel,)
    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128),
            "num_warps": PowerOfTwo(2, 16),
            "items": Choice(1, 2),
        }
    )
    most_blocks = 64
    most_rounds = 8

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_one_shot(problem, limits)
