"""one_shot_fp32, push_fp32: `one_shot` and `push` whose results are fp32 sums of 16-bit floats, never rounded between.

Half of the bytes of an fp32 reduce_scatter cross the links, and its sums have the same bits: the inputs are exact in
fp32. The last step widens, sums in rank order and writes two packets for one. Everything else is as in the
variants named, with their invariants.

Numerics: ordered. Graph-safe.
Source: as `one_shot` and `push`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive_at,
    await_at,
    block_range,
    exchange_flags,
    read_counter,
    shifted,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, load_bytes, num_packets
from tunedcomm.kernels.common.sync import INTERPRET, load_packets, store_packets
from tunedcomm.kernels.common.wide import write_wide_sum
from tunedcomm.kernels.reduce_scatter.one_shot import OneShot
from tunedcomm.kernels.reduce_scatter.push import RING, Push, push_piece


@triton.jit
def one_shot_wide_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status,
    input_peers, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Publish the peers' chunks, exchange flags, read the own chunk of all ranks, sum and write fp32."""
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the peers' chunks to the own area; peers read a symmetric input where it lies.
    if not SYMMETRIC:
        for start in tl.range(first, total, stride):
            packet = start + offsets
            mask = packet < total
            for i in tl.static_range(WORLD_SIZE - 1):
                owner = (rank + 1 + i) % WORLD_SIZE
                at = x + owner * nbytes + packet * 16
                w0, w1, w2, w3 = load_bytes(at, nbytes - packet * 16, mask, ALIGN)
                store_packets(local + own_area + (owner * total + packet) * 16, w0, w1, w2, w3, mask)

    # 2. Exchange flags. Releases the copies (or what wrote the inputs), acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    # 3. Read the own chunk of every rank and sum in rank order.
    own_chunk = x + rank * nbytes
    if SYMMETRIC:
        shift = rank * nbytes
        sources = shifted(input_peers, shift)
    else:
        shift = own_area + rank * total * 16
        sources = shifted(peers, shift)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(sources, own_chunk, i, rank, WORLD_SIZE) + packet * 16
            if SYMMETRIC:
                words = words + load_bytes(source, left, mask, ALIGN)
            else:
                words = words + load_packets(source, mask & (rank != i))
        if not SYMMETRIC:
            own = load_bytes(own_chunk + packet * 16, left, mask, ALIGN)
            words = insert_own(words, own, rank, WORLD_SIZE)
        write_wide_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, AVG, ALIGN < 16)
    if SYMMETRIC:
        # 4. Exchange flags. Orders the peers' reads of this rank's input before whatever follows this kernel.
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)
    else:
        write_counter(local, epoch + 1, EPOCH_OFFSET)


class OneShotWide(OneShot, registered=True):
    name = "one_shot_fp32"
    summary = "fp32 sums of 16-bit floats: every rank reads its chunk of all inputs; one exchange of flags"
    kernels = (one_shot_wide_kernel,)
    wide = True


@triton.jit
def push_wide_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, scatter, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, sum piece c − 1, as `push_kernel` does; every sum is written as fp32."""
    epoch = read_counter(local, EPOCH_OFFSET)
    total = num_packets(numel, WIDTH)
    nbytes = numel.to(tl.int64) * WIDTH
    num_teams = tl.num_programs(0)
    if SPLIT:
        num_teams = num_teams // 2
    team = tl.program_id(0) % num_teams
    stride = num_teams.to(tl.int64) * BLOCK
    first = team.to(tl.int64) * BLOCK
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot_bytes = ring * span * 16
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    pushes = tl.program_id(0) < num_teams  # all blocks do, where they are not split
    sums = (tl.program_id(0) >= num_teams) if SPLIT and not INTERPRET else pushes
    # Row of flags that a pusher raises: the peers' reducers wait for it.
    reducer = team + num_teams if SPLIT else team

    for c in tl.range(0, num_chunks + 1):
        # 1. Push piece c of chunk j to rank j.
        if (c < num_chunks) & pushes:
            if SPLIT and c >= ring:
                await_at(local, team, rank, epoch + c - ring + 1, timeout_ns, status, WORLD_SIZE)
            place = scatter + rank * slot_bytes - (c - c % ring) * span * 16
            end = tl.minimum(total, (c + 1) * span)
            push_piece(x, peers, place, first + c * span, end, stride, nbytes, rank, WORLD_SIZE, ALIGN, BLOCK)
            arrive_at(reducer, peers, rank, epoch + c + 1, WORLD_SIZE)
        # 2. Sum piece c − 1 of the own chunk in rank order.
        if (c >= 1) & sums:
            d = c - 1
            await_at(local, reducer, rank, epoch + d + 1, timeout_ns, status, WORLD_SIZE)
            place = local + scatter - (d - d % ring) * span * 16
            end = tl.minimum(total, (d + 1) * span)
            for start in tl.range(first + d * span, end, stride):
                packet = start + offsets
                mask = packet < end
                own = load_bytes(x + rank * nbytes + packet * 16, nbytes - packet * 16, mask, ALIGN)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(place + i * slot_bytes + packet * 16, mask & (rank != i))
                words = insert_own(words, own, rank, WORLD_SIZE)
                write_wide_sum(words, out, packet, numel, mask, WORLD_SIZE, DTYPE, AVG, ALIGN < 16)
            if SPLIT:
                arrive_at(team, peers, rank, epoch + d + 1, WORLD_SIZE)
    # 3. Wait until every peer has read all of its scatter area that this team fills.
    if SPLIT:
        if sums:
            await_at(local, team, rank, epoch + num_chunks, timeout_ns, status, WORLD_SIZE)
    else:
        arrive_at(team, peers, rank, epoch + num_chunks + 1, WORLD_SIZE)
        await_at(local, team, rank, epoch + num_chunks + 1, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + num_chunks + 1, EPOCH_OFFSET)


class PushWide(Push, registered=True):
    name = "push_fp32"
    summary = "fp32 sums of 16-bit floats: chunks pushed piece by piece, sums made meanwhile; best at large sizes"
    kernels = (push_wide_kernel,)
    wide = True
