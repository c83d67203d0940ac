"""gemm_ar in one persistent GEMM, whose tiles lie one by one in the ranks' panels.

Block b of a grid of G computes the tiles b, b + G, b + 2G, … on every rank, so what it hands to the peers it hands to
their blocks b, by the flags of the lane's row b. A tile's place in the panels, its slot, is dense: BLOCK_M × BLOCK_N
elements, whatever hangs over the edges of the result included.

The kernels begin with flags of their own, which say what those of `begin_panels_kernel` say: a peer whose block b has
begun is done with its call before. Each block looks at them after its first product, when they have long come, and
writes panels only after that. Every slot is written once in a call, by one rank, after these first flags.

A block waits for the peers' blocks of its own number alone, for steps that these reach without waiting for a later one
of its own; all blocks are resident. With two blocks an SM, one multiplies while the other waits, sums or copies.

**one_shot.** Block b stores its tiles, rounded, in the own panels and raises its flags on all peers after each. Then,
tile by tile, it waits for the flags of the peers' blocks b, reads the tile on all ranks, sums in rank order and adds
the bias. Last it says that it has read, and waits until its peers have: what peers read is not overwritten too early.

**two_shot.** The i-th tile of a block belongs to rank i mod n. A chunk is n such tiles, one for each owner. In round c
block b

- computes chunk c, the tile of rank + 1 first and the own one last, and stores each tile, rounded, into this rank's
  slot in its owner's panels;
- sums the own tile of chunk c − 1 from its slots in rank order, adds the bias, stores the sum to the output and into
  all peers' panels;
- copies the peers' tiles of chunk c − 2 from the own panels to the output.

So partial tiles of one chunk travel while the next is computed, and so do sums. Flags in the lane's row b count a
block's steps as in all_reduce's `two_shot`: with C chunks, scattering chunk c is step max(1, 2c) and summing it
min(2c + 3, 2C).

**two_shot_rolling.** A step for every tile, so that little is left after the last product. The tile of block b's round
c belongs to rank (b + c) mod n: in every round each rank owns the tiles of one block in n, and each block owns one tile
in n rounds. In round c block b

- computes its tile and stores it, rounded, into this rank's slot in its owner's panels;
- waits for the peers' blocks b to have ended round c − 1;
- if it owns the tile of round c − 1, sums its slots in rank order, adds the bias, and stores the sum to the output and
  into all peers' panels;
- copies the tile of round c − 2 from the own panels to the output, if a peer owns that one;
- tells the peers' blocks b that it has ended the round: one flag says both that its partial tile and that its sum are
  there, and what it stored to peers had the time of the copy to arrive.

Two more rounds without products sum and copy what is left, a tile a block.

**multimem.** As two_shot, but tiles stay in the own panels; a tile's owner loads it summed over all ranks with
`multimem.ld_reduce`, adds the bias, and stores it to the output and, with `multimem.st`, into the panels of all ranks.
The peers that read a rank's partial tiles end their call after that. Refused where the fabric reports no multicast.

Numerics: ordered; multimem library (each element is summed once, so all ranks get the same bits, in an order that is
the switch's). Graph-safe: the epochs live in the lane.
Source: one-shot and two-shot all-reduces of serving stacks, fed by a persistent GEMM tile by tile; NVLink SHARP as
PyTorch's multimem operators use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, refuse_multicast
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers_together,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import AddressLaunch, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, add_extras, load_reduce, narrow, store_all, widen
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import lane_arguments
from tunedcomm.kernels.gemm.op import out_itemsize, refuse_gemm, wanted_of
from tunedcomm.kernels.gemm.tiles import element_type, matrix, operand_b, rounded, scaled, tile_of, tile_product
from tunedcomm.kernels.gemm.variant import (
    GemmVariant,
    addresses,
    num_tiles,
    refuse_tiles,
    tile_space,
    tile_wish,
    two_fit,
)
from tunedcomm.space import Choice, Config, Value
from tunedcomm.spec import Limits, Numerics, Problem
from tunedcomm.symm.layout import PANEL_DATA

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

_MOST_ONE_SHOT_BYTES = 32 << 20  # every rank reads all of the others: beyond this, two shots move less


@triton.jit
def _sum_word(words, b, OFFSET: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    low, high = widen(words[OFFSET], DTYPE)
    low += 0.0
    high += 0.0
    for i in tl.static_range(1, WORLD_SIZE):
        more_low, more_high = widen(words[4 * i + OFFSET], DTYPE)
        low += more_low
        high += more_high
    if BIAS:
        more_low, more_high = widen(b[OFFSET], DTYPE)
        low += more_low
        high += more_high
    return narrow(low, high, DTYPE)


@triton.jit
def sum_and_bias(words, bias, column, mask, DTYPE: tl.constexpr, BIAS: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Four words: the packets in `words` (4 words a rank, ranks in order) summed from +0.0, plus those of the bias.

    Args:
        bias: its address.
        column: numbers of the packets within their rows, int64.
        mask: packets that are wanted.
    """
    b = words
    if BIAS:
        b = load_packets(bias + column * 16, mask)
    return (
        _sum_word(words, b, 0, DTYPE, BIAS, WORLD_SIZE),
        _sum_word(words, b, 1, DTYPE, BIAS, WORLD_SIZE),
        _sum_word(words, b, 2, DTYPE, BIAS, WORLD_SIZE),
        _sum_word(words, b, 3, DTYPE, BIAS, WORLD_SIZE),
    )


@triton.jit
def store_slot(address, total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """Store a tile, rounded, to the slot at `address`."""
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    p = address.to(tl.pointer_type(element_type(DTYPE))) + within
    tl.store(tl.multiple_of(p, (16, 16)), rounded(total, DTYPE))


@triton.jit
def packets_in(at, row, column, m, packets, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """Of packets number `at` of the slot of the tile at (row, column): column, number in the result, if they exist.

    The result has `m` rows of `packets` packets; columns are counted in packets too.
    """
    PER: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    r = row.to(tl.int64) + at // (BLOCK_N // PER)
    c = column.to(tl.int64) // PER + at % (BLOCK_N // PER)
    return c, r * packets + c, (r < m) & (c < packets)


@triton.jit
def copy_slot(
    out, source, m, packets, row, column,
    BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the tile at (row, column) from its slot, `SLOT` packets at address `source`, to the result."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + lanes
        _, packet, here = packets_in(at, row, column, m, packets, BLOCK_N, DTYPE)
        here = here & (at < SLOT)
        w0, w1, w2, w3 = load_packets(source + at * 16, here)
        store_packets(out + packet * 16, w0, w1, w2, w3, here)


@triton.jit
def gemm_one_shot_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slot i × grid + b holds the tile that block b computes in round i."""
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER
    packets = n // PER
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    rounds = (rows * columns + tl.num_programs(0) - 1) // tl.num_programs(0)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for i in tl.range(0, rounds):
        tile = tl.program_id(0) + i * tl.num_programs(0)
        if tile < rows * columns:
            down, across = tile_of(tile, rows, columns, GROUP)
            row, column = (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)
            total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            if i == 0:
                await_peers_together(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
            store_slot(panels + tile.to(tl.int64) * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
        arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 + i, WORLD_SIZE)

    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for i in tl.range(0, rounds):
        await_peers_together(local, rank, epoch + 2 + i, timeout_ns, status, WORLD_SIZE)
        tile = tl.program_id(0) + i * tl.num_programs(0)
        if tile < rows * columns:
            down, across = tile_of(tile, rows, columns, GROUP)
            place = tile.to(tl.int64) * (SLOT * 16)
            for start in tl.range(0, SLOT, BLOCK):
                at = start + lanes
                c, packet, here = packets_in(at, down * BLOCK_M, across * BLOCK_N, m, packets, BLOCK_N, OUT)
                here = here & (at < SLOT)
                words = ()
                for r in tl.static_range(WORLD_SIZE):
                    source = address_of(peers, panels, r, rank, WORLD_SIZE)
                    words = words + load_packets(source + place + at * 16, here)
                s0, s1, s2, s3 = sum_and_bias(words, bias, c, here, OUT, BIAS, WORLD_SIZE)
                store_packets(out + packet * 16, s0, s1, s2, s3, here)

    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2 + rounds, WORLD_SIZE)
    await_peers_together(local, rank, epoch + 2 + rounds, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2 + rounds, EPOCH_OFFSET)


@triton.jit
def _sum_tile(
    bias, out, m, packets, panels, peers, gather, slot, row, column, rank,
    BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the tile whose partial ones are in the slots from `slot` on; store it here and into the peers' slots."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + lanes
        c, packet, here = packets_in(at, row, column, m, packets, BLOCK_N, OUT)
        here = here & (at < SLOT)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(panels + (slot + i) * (SLOT * 16) + at * 16, here)
        s0, s1, s2, s3 = sum_and_bias(words, bias, c, here, OUT, BIAS, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + gather + (slot + rank) * (SLOT * 16) + at * 16, s0, s1, s2, s3, here)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)


@triton.jit
def gemm_two_shot_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6, gather, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """See the module's text.

    Slot (c × grid + b) × n + r of the panels holds rank r's part of the own tile in chunk c of block b; that many bytes
    `gather` further lies what rank r summed, its own tile there.
    """
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER
    packets = n // PER
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, chunks + 2):
        if c < chunks:
            for s in tl.range(0, WORLD_SIZE):
                owner = (rank + 1 + s) % WORLD_SIZE
                tile = block + (c * WORLD_SIZE + owner) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    row, column = (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)
                    total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
                    total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
                    if c == 0:
                        await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
                    target = address_of(peers, panels, owner, rank, WORLD_SIZE)
                    slot = (c * grid + block) * WORLD_SIZE + rank
                    store_slot(target + slot * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, base + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= chunks):
            d = c - 1
            await_peers_together(local, rank, base + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            tile = block + (d * WORLD_SIZE + rank) * grid
            if tile < rows * columns:
                down, across = tile_of(tile, rows, columns, GROUP)
                _sum_tile(
                    bias, out, m, packets, panels, peers, gather, (d * grid + block) * WORLD_SIZE,
                    down * BLOCK_M, across * BLOCK_N, rank, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
            summed = base + tl.minimum(2 * d + 3, 2 * chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, summed, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            await_peers_together(local, rank, base + tl.minimum(2 * e + 3, 2 * chunks), timeout_ns, status, WORLD_SIZE)
            for s in tl.range(0, WORLD_SIZE - 1):
                owner = (rank + 1 + s) % WORLD_SIZE
                tile = block + (e * WORLD_SIZE + owner) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    slot = (e * grid + block) * WORLD_SIZE + owner
                    copy_slot(
                        out, panels + gather + slot * (SLOT * 16), m, packets, down * BLOCK_M, across * BLOCK_N,
                        BLOCK_N, OUT, SLOT, COPY,
                    )  # fmt: skip
    write_counter(local, base + 2 * chunks, EPOCH_OFFSET)


@triton.jit
def _tile_in(c, grid, columns, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(whether this block has a tile in a round, its first row, its first column)."""
    tile = tl.program_id(0).to(tl.int64) + c * grid
    down, across = tile_of(tile, rows, columns, GROUP)
    return tile < rows * columns, (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)


@triton.jit
def _slots_in(c, grid, WORLD_SIZE: tl.constexpr):
    """The first of the slots of this block's tile in a round, on the rank that owns it."""
    return ((c // WORLD_SIZE) * grid + tl.program_id(0)) * WORLD_SIZE


@triton.jit
def _owner_in(c, WORLD_SIZE: tl.constexpr):
    return (tl.program_id(0) + c).to(tl.int32) % WORLD_SIZE


@triton.jit
def gemm_two_shot_rolling_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6, gather, rounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """See the module's text.

    Slot (c // n × grid + b) × n + r of the panels holds rank r's part of block b's tile in round c, if this rank owns
    it; `gather` bytes further lies what rank r summed, if that rank does.
    """
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // (128 // element_type(OUT).primitive_bitwidth)
    packets = n // (128 // element_type(OUT).primitive_bitwidth)
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, rounds + 2):
        there, row, column = _tile_in(c, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
        if (c < rounds) & there:
            total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            if c == 0:
                await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
            target = address_of(peers, panels, _owner_in(c, WORLD_SIZE), rank, WORLD_SIZE)
            slot = _slots_in(c, grid, WORLD_SIZE) + rank
            store_slot(target + slot * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
        if c >= 1:
            await_peers_together(local, rank, base + c, timeout_ns, status, WORLD_SIZE)
        if (c >= 1) & (c <= rounds):
            there, row, column = _tile_in(c - 1, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
            if there & (_owner_in(c - 1, WORLD_SIZE) == rank):
                _sum_tile(
                    bias, out, m, packets, panels, peers, gather, _slots_in(c - 1, grid, WORLD_SIZE), row, column, rank,
                    BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
        if c >= 2:
            there, row, column = _tile_in(c - 2, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
            owner = _owner_in(c - 2, WORLD_SIZE)
            if there & (owner != rank):
                slot = _slots_in(c - 2, grid, WORLD_SIZE) + owner
                copy_slot(
                    out, panels + gather + slot * (SLOT * 16), m, packets, row, column, BLOCK_N, OUT, SLOT, COPY
                )  # fmt: skip
        if c <= rounds:
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, base + c + 1, WORLD_SIZE)
    write_counter(local, base + rounds + 1, EPOCH_OFFSET)


@triton.jit
def _sum_everywhere(
    bias, out, m, packets, panels, peers, multicast, place, gather, row, column,
    BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the tile that lies `place` bytes into every rank's panels; store it here, and `gather` further there."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + lanes
        c, packet, here = packets_in(at, row, column, m, packets, BLOCK_N, OUT)
        here = here & (at < SLOT)
        s = load_reduce(multicast, peers, panels, place + at * 16, here, OUT, WORLD_SIZE)
        if BIAS:
            b = load_packets(bias + c * 16, here)
            s = add_extras(s, b, b, OUT, True, False)
        store_packets(out + packet * 16, s[0], s[1], s[2], s[3], here)
        store_all(multicast, peers, panels, place + gather + at * 16, s[0], s[1], s[2], s[3], here, WORLD_SIZE)


@triton.jit
def gemm_multimem_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    panels, p0, p1, p2, p3, p4, p5, p6, multicast, gather, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """See the module's text. A tile's slot is that of its number; its sum lies `gather` bytes further."""
    peers = (p0, p1, p2, p3, p4, p5, p6)
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    PER: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER
    packets = n // PER
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, chunks + 2):
        if c < chunks:
            for s in tl.range(0, WORLD_SIZE):
                tile = block + (c * WORLD_SIZE + s) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    row, column = (down * BLOCK_M).to(tl.int32), (across * BLOCK_N).to(tl.int32)
                    total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
                    total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
                    if c == 0:
                        await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
                    store_slot(panels + tile * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, base + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= chunks):
            d = c - 1
            await_peers_together(local, rank, base + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            tile = block + (d * WORLD_SIZE + rank) * grid
            if tile < rows * columns:
                down, across = tile_of(tile, rows, columns, GROUP)
                _sum_everywhere(
                    bias, out, m, packets, panels, peers, multicast, tile * (SLOT * 16), gather,
                    down * BLOCK_M, across * BLOCK_N, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
            summed = base + tl.minimum(2 * d + 3, 2 * chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, summed, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            await_peers_together(local, rank, base + tl.minimum(2 * e + 3, 2 * chunks), timeout_ns, status, WORLD_SIZE)
            for s in tl.range(0, WORLD_SIZE - 1):
                tile = block + (e * WORLD_SIZE + (rank + 1 + s) % WORLD_SIZE) * grid
                if tile < rows * columns:
                    down, across = tile_of(tile, rows, columns, GROUP)
                    copy_slot(
                        out, panels + gather + tile * (SLOT * 16), m, packets, down * BLOCK_M, across * BLOCK_N,
                        BLOCK_N, OUT, SLOT, COPY,
                    )  # fmt: skip
    write_counter(local, base + 2 * chunks, EPOCH_OFFSET)


def refuse_packets(problem: Problem, limits: Limits, *, panel_bytes: int) -> str | None:
    """Why no kernel that moves the result as packets can run `problem`, or None."""
    if reason := refuse_gemm(problem, limits, panel_bytes=panel_bytes):
        return reason
    if problem.shape[1] * out_itemsize(problem) % PACKET_BYTES:
        return f"rows of {problem.shape[1]} results are no whole packets of {PACKET_BYTES} bytes"
    return None


class SlotVariant(GemmVariant):
    """A persistent GEMM whose tiles lie in slots.

    Its kernel takes `(a, b, bias, scale_a, scale_b, out, m, n, k, local, q0 … q6, rank, timeout_ns, status, panels,
    p0 … p6, *further, constants)`, with the addresses of the panels' data.
    """

    op = "gemm_ar"
    numerics: Numerics = "ordered"
    space = tile_space(num_blocks=Choice(1, 2, 64, 128, 132, 264))
    scatters = True  # partial tiles lie in their owner's panels, one of every rank
    gathers = True  # sums lie behind the partial tiles, and are copied to the result

    def rounds_of_owners(self, problem: Problem, config: Config) -> int:
        """Turns that each rank has to own one of a block's tiles."""
        return -(-self.num_rounds(problem, config) // problem.world_size)

    def partial_bytes(self, problem: Problem, config: Config) -> int:
        """Bytes of a rank's slots for partial tiles: of its own ones, or every rank's of those that it owns."""
        a_block = self.num_rounds(problem, config)
        if self.scatters:
            a_block = self.rounds_of_owners(problem, config) * problem.world_size
        slot = int(config["block_m"]) * int(config["block_n"]) * out_itemsize(problem)
        return a_block * int(config["num_blocks"]) * slot

    def panel_bytes(self, problem: Problem, config: Config) -> int:
        return self.partial_bytes(problem, config) * (2 if self.gathers else 1)

    def further(self, problem: Problem, config: Config, panels: Panels) -> tuple[int, ...]:
        """Last runtime arguments of the kernel."""
        return self.partial_bytes(problem, config), self.rounds_of_owners(problem, config)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_packets(problem, limits, panel_bytes=self.panel_bytes(problem, config)):
            return reason
        if reason := refuse_tiles(problem, config, limits, rows=problem.shape[0]):
            return reason
        tiles, blocks = num_tiles(problem.shape[0], problem, config), int(config["num_blocks"])
        if blocks > tiles:
            return f"{blocks} blocks, but only {tiles} tiles"
        most = limits.num_sms if limits.backend == "cuda" else 2
        if limits.backend == "cuda" and blocks > most and two_fit(problem, config):
            most *= 2
        if blocks > min(most, limits.max_blocks):
            return f"{blocks} blocks; {min(most, limits.max_blocks)} are resident at once, with flags of their own"
        if 2 * blocks < min(tiles, most) and limits.backend == "cuda":
            return f"{blocks} blocks leave most SMs idle"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        wish = tile_wish(problem, limits, rows=problem.shape[0])
        tiles = num_tiles(problem.shape[0], problem, wish)  # type: ignore[arg-type]
        return {**wish, "num_blocks": min(tiles, limits.num_sms if limits.backend == "cuda" else 2)}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        """Those of all GEMMs, BIAS, BLOCK, and COPY.

        BLOCK is what loops over packets take at once, in tiles of all ranks: enough to keep the links busy.
        """
        items = 4 if problem.world_size == 2 else 2 if problem.world_size <= 4 else 1
        threads = 32 * int(config["num_warps"])
        own: dict[str, Value] = {"BIAS": wanted_of(problem).bias, "BLOCK": threads * items}
        if self.gathers:
            own["COPY"] = 4 * threads
        return {**super().constants(problem, config), **own}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config["num_blocks"])

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Tiles of a block, of the one that has the most."""
        return -(-num_tiles(problem.shape[0], problem, config) // int(config["num_blocks"]))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        panels = workspace.panels(problem.mode, self.panel_bytes(problem, config))
        kernel = bind_kernel(self.request(problem, config), int(config["num_blocks"]), workspace.device)
        data = (panels.data, *(peer + PANEL_DATA if peer else 0 for peer in panels.peers))
        lane, further = lane_arguments(problem, workspace), self.further(problem, config, panels)
        return AddressLaunch(kernel.fix((*(None,) * 6, *problem.shape, *lane, *data, *further)), addresses(problem))


class OneShot(SlotVariant):
    name = "one_shot"
    summary = "one persistent GEMM kernel; every rank reads and sums all ranks' tiles as they come"
    kernels = (gemm_one_shot_kernel,)
    scatters = gathers = False

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        nbytes = self.partial_bytes(problem, config)
        if nbytes > _MOST_ONE_SHOT_BYTES:
            return f"one shot is out of the question at {nbytes} bytes a rank"
        return super().infeasible(problem, config, limits)

    def further(self, problem: Problem, config: Config, panels: Panels) -> tuple[int, ...]:
        return ()


class TwoShot(SlotVariant):
    name = "two_shot"
    summary = "one persistent kernel: products scattered to the tiles' owners, summed, and the sums gathered"
    kernels = (gemm_two_shot_kernel,)


class TwoShotRolling(SlotVariant):
    name = "two_shot_rolling"
    summary = "one persistent kernel: each tile scattered, summed and gathered beside the block's next two"
    kernels = (gemm_two_shot_rolling_kernel,)

    def further(self, problem: Problem, config: Config, panels: Panels) -> tuple[int, ...]:
        return self.partial_bytes(problem, config), self.num_rounds(problem, config)


class Multimem(SlotVariant):
    name = "multimem"
    numerics = "library"
    summary = "one persistent kernel; the switch sums each tile for its owner and gathers it (NVLink multicast)"
    kernels = (gemm_multimem_kernel,)
    scatters = False

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_multicast(limits) or super().infeasible(problem, config, limits)

    def further(self, problem: Problem, config: Config, panels: Panels) -> tuple[int, ...]:
        multicast = panels.multicast + PANEL_DATA if panels.multicast else 0
        return multicast, *super().further(problem, config, panels)


ONE_SHOT = OneShot().register()
TWO_SHOT = TwoShot().register()
TWO_SHOT_ROLLING = TwoShotRolling().register()
MULTIMEM = Multimem().register()
