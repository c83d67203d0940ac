"""one_shot_fp32: `one_shot` whose results are fp32 sums of 16-bit floats, never rounded between.

Everything but the last step, which widens, sums in rank order and writes two packets for one, is as in `one_shot`.

Numerics: ordered. Graph-safe.
Source: as `one_shot`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.one_shot import OneShot
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
from tunedcomm.kernels.common.wide import write_wide_sum


@triton.jit
def one_shot_wide_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status,
    input_peers, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, read all ranks' packets, sum and write fp32."""
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
        write_wide_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, AVG, TAIL)
    if SYMMETRIC:
        # 4. Exchange flags. Orders the peers' reads of this rank's input before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)
    else:
        write_counter(local, epoch + 1, EPOCH_OFFSET)


class OneShotWide(OneShot, registered=True):
    name = "one_shot_fp32"
    summary = "fp32 sums of 16-bit floats: every rank reads all inputs and sums them; one exchange of flags"
    kernels = (one_shot_wide_kernel,)
    wide = True
