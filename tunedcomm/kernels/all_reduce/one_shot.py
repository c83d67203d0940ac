"""one_shot, one_shot_fp32: every rank reads all ranks' inputs and sums them itself; one flag exchange a block.

Plain input: each rank copies its input into its own one-shot area, the blocks exchange flags, and everybody reads
everybody's copy. Two areas take turns, so no flag is needed at the end: a rank writes an area again only in the call
after the next flagged call, in which it waited for peers that had finished reading (stream order).

Symmetric input (out of place): peers read the input itself, so flags are exchanged before (the inputs are there) and
after (nobody reads any more; the caller may overwrite its input).

`one_shot_fp32` gives fp32 sums of 16-bit floats; the last step alone differs.

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
    block_range,
    exchange_flags,
    read_counter,
    shifted,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, num_packets, read_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PullVariant
from tunedcomm.kernels.common.wide import write_sum
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem


@triton.jit
def one_shot_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status,
    input_peers, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets and sum.

    Example:
        2 ranks, 8 fp32 elements (2 packets), epoch 0. Each rank copies its packets to offsets 0 and 16 of its own area
        0. After the flags, each rank reads offsets 0 and 16 of the peer's area 0, adds rank 0's packet and then rank
        1's, and writes both sums to its output.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    total = num_packets(numel, WIDTH)
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the own input to the own area; peers read a symmetric input where it lies.
    if SYMMETRIC:
        sources = input_peers
    else:
        sources = shifted(peers, own_area)
        for start in tl.range(first, total, stride):
            packet = start + offsets
            mask = packet < total
            w0, w1, w2, w3 = read_elements(x, packet, numel, mask, WIDTH, TAIL)
            store_packets(local + own_area + packet * 16, w0, w1, w2, w3, mask)

    # 2. Exchange flags. Releases the copies (or what wrote the inputs), acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read the packet of every rank and sum in rank order.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        own = read_elements(x, packet, numel, mask, WIDTH, TAIL)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(sources, x, i, rank, WORLD_SIZE)
            if SYMMETRIC:
                words = words + read_elements(source, packet, numel, mask & (rank != i), WIDTH, TAIL)
            else:
                words = words + load_packets(source + packet * 16, mask & (rank != i))
        words = insert_own(words, own, rank, WORLD_SIZE)
        write_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, WIDTH, AVG, TAIL, WIDE)
    if SYMMETRIC:
        # 4. Exchange flags. Orders the peers' reads of this rank's input before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
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
    max_blocks = 64
    max_rounds = 8

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_one_shot(problem, limits)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "WIDE": self.wide}


class OneShotWide(OneShot, registered=True):
    name = "one_shot_fp32"
    summary = "fp32 sums of 16-bit floats: every rank reads all inputs and sums them; one exchange of flags"
    wide = True
