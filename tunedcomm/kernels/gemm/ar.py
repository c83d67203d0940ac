"""gemm_ar in one kernel: persistent GEMMs whose tiles lie one by one in the ranks' panels, and one for few rows.

In the persistent kernels block b of a grid of G computes the tiles b, b + G, b + 2G, … on every rank. So it hands its
tiles to the peers' blocks b, by the flags of the lane's row b. A tile's place in the panels, its slot, is dense:
BLOCK_M × BLOCK_N elements, including elements beyond the edges of the result.

The kernels begin with flags of their own, which say what `begin_panels_kernel`'s flags say: a peer whose block b has
begun is done with its call before. Each block looks at them after its first product, when they have long come, and
writes panels only after that. Every slot is written once in a call, by one rank, after these first flags.

A block waits for the peers' blocks of its own number alone, for steps that these reach without waiting for a later one
of its own; all blocks are resident. With two blocks an SM, one multiplies while the other waits, sums or copies.

**one_shot.** Block b stores its tiles, rounded, in the own panels and raises its flags on all peers after each. Then,
tile by tile, it waits for the flags of the peers' blocks b, reads the tile on all ranks, sums in rank order and adds
the bias. Last it says that it has read, and waits until its peers have: what peers read is not overwritten too early.

**two_shot.** The i-th tile of a block belongs to rank i mod n. A chunk is n such tiles, one for each owner. In round c
block b computes chunk c, the tile of rank + 1 first and the own one last, and stores each tile, rounded, into this
rank's slot in its owner's panels; sums the own tile of chunk c − 1 from its slots in rank order, adds the bias, and
stores the sum to the output and into all peers' panels; copies the peers' tiles of chunk c − 2 from the own panels to
the output. So partial tiles of one chunk travel while the next is computed, and so do sums. Flags in the lane's row b
count a block's steps as in all_reduce's `two_shot`: with C chunks, scattering chunk c is step max(1, 2c) and summing it
min(2c + 3, 2C).

**two_shot_rolling.** A step for every tile, so that little is left after the last product. The tile of block b's round
c belongs to rank (b + c) mod n: in every round each rank owns the tiles of one block in n, and each block owns one tile
in n rounds. In round c block b computes its tile and stores it into its owner's panels as above; waits for the peers'
blocks b to have ended round c − 1; sums the tile of round c − 1 if it owns it, or copies the one of round c − 2 if a
peer owns that; tells the peers' blocks b that it has ended the round. That one flag says that its partial tile
and its sum are there; its stores to peers had the time of the copy to arrive. Two more rounds without products sum and
copy the remaining tiles, a tile a block.

**multimem.** As two_shot, but tiles stay in the own panels; a tile's owner loads it summed over all ranks with
`multimem.ld_reduce`, adds the bias, and stores it to the output and, with `multimem.st`, into the panels of all ranks.
The peers that read a rank's partial tiles end their call after that. Refused where the fabric reports no multicast.

**lamport**, for few rows, pushes tiles to all ranks as packets that announce themselves. A block computes a tile over a
part of the depth. Where the depth is cut into `split_k` parts, which lets more blocks read B at once, the parts go to
memory of this rank, and the block that comes last to the tile adds them in the order of the depth. The block that has
the whole tile rounds it and pushes its packets into this rank's slot of every rank's stage, the own stage included.
Then all blocks share all packets of the result: they poll all slots, put the sentinel back, sum in rank order, add the
bias and store.

Stages are as in all_reduce's `lamport`, with its proof; slot r holds rank r's product, tightly packed, the own
rank's too. No block waits before it has pushed all that it will push, and all blocks are resident, so every packet
comes. Blocks come to a tile's counter after their part is stored and visible; the last one sets it back for the
next call. Parts and counters belong to the plan, whose calls follow each other.

Numerics: ordered; multimem and lamport library (every rank has the same bits, but the order of the sum is the switch's,
or that over the depth the config's). Graph-safe: epochs and call counters live in the lane.
Source: one-shot and two-shot all-reduces of serving stacks, fed by a persistent GEMM tile by tile; NVLink SHARP as
PyTorch's multimem operators use it; the packets of TensorRT-LLM's and FlashInfer's low-latency all-reduce, in a GEMM's
epilogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.common.feasibility import Launch, refuse_launch_pdl, refuse_multicast, refuse_stage
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers_together,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import AddressLaunch, bind_kernel
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    add_extras,
    escape_sentinels,
    load_reduce,
    narrow,
    store_all,
    widen,
)
from tunedcomm.kernels.common.sync import INTERPRET, SENTINEL, load_packets, poll_packets, store_packets
from tunedcomm.kernels.common.variant import lane_arguments
from tunedcomm.kernels.gemm import tiles
from tunedcomm.kernels.gemm.op import gemm_layout, out_itemsize
from tunedcomm.kernels.gemm.tiles import (
    element_type,
    matrix,
    operand_b,
    part_product,
    pointer_product,
    rounded,
    scaled,
    tile_of,
    tile_product,
    tile_words,
)
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA, LaneLayout, Room

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

_MAX_ONE_SHOT_BYTES = 32 << 20  # every rank reads all of the others: beyond this, two shots move less
_MAX_ROWS = 256  # of lamport
_MAX_PARTS = 512  # tiles in parts: each has a counter
_SHARED_BYTES = 200 * 1024


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
    """Four words: the packets in `words` (4 words a rank, ranks in order) summed from +0.0, plus the bias.

    Args:
        column: index of each packet within its row, int64.
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
    """(column, index in the result, mask) of packets `at` of the slot of the tile at (row, column).

    The result has `m` rows of `packets` packets; columns are counted in packets too.
    """
    PER_PACKET: tl.constexpr = 128 // element_type(DTYPE).primitive_bitwidth
    r = row.to(tl.int64) + at // (BLOCK_N // PER_PACKET)
    c = column.to(tl.int64) // PER_PACKET + at % (BLOCK_N // PER_PACKET)
    return c, r * packets + c, (r < m) & (c < packets)


@triton.jit
def copy_slot(
    out, source, m, packets, row, column,
    BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the tile at (row, column) from its slot, `SLOT` packets at address `source`, to the result."""
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + offsets
        _, packet, mask = packets_in(at, row, column, m, packets, BLOCK_N, DTYPE)
        mask = mask & (at < SLOT)
        w0, w1, w2, w3 = load_packets(source + at * 16, mask)
        store_packets(out + packet * 16, w0, w1, w2, w3, mask)


@triton.jit
def gemm_one_shot_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, peers, rank, timeout_ns, status,
    panels, panel_peers,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slot i × grid + b holds the tile that block b computes in round i.

    Example:
        2 ranks, a result of 2 tiles, 1 block. Each rank stores its partial tiles 0 and 1 in slots 0 and 1 of its own
        panels. It reads slot 0 of both ranks, adds rank 0's tile and then rank 1's, and stores tile 0 of the result;
        then slot 1.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    PER_PACKET: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER_PACKET
    packets = n // PER_PACKET
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    rounds = (rows * columns + tl.num_programs(0) - 1) // tl.num_programs(0)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    # 1. Multiply the own tiles, store them in the own panels, raise a flag after each.
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
        arrive(peers, rank, epoch + 2 + i, WORLD_SIZE)

    # 2. Tile by tile: read the tile of every rank, sum in rank order, add the bias.
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for i in tl.range(0, rounds):
        await_peers_together(local, rank, epoch + 2 + i, timeout_ns, status, WORLD_SIZE)
        tile = tl.program_id(0) + i * tl.num_programs(0)
        if tile < rows * columns:
            down, across = tile_of(tile, rows, columns, GROUP)
            place = tile.to(tl.int64) * (SLOT * 16)
            for start in tl.range(0, SLOT, BLOCK):
                at = start + offsets
                c, packet, mask = packets_in(at, down * BLOCK_M, across * BLOCK_N, m, packets, BLOCK_N, OUT)
                mask = mask & (at < SLOT)
                words = ()
                for r in tl.static_range(WORLD_SIZE):
                    source = address_of(panel_peers, panels, r, rank, WORLD_SIZE)
                    words = words + load_packets(source + place + at * 16, mask)
                s0, s1, s2, s3 = sum_and_bias(words, bias, c, mask, OUT, BIAS, WORLD_SIZE)
                store_packets(out + packet * 16, s0, s1, s2, s3, mask)

    # 3. Exchange flags. Orders the peers' reads of the own panels before the next call.
    arrive(peers, rank, epoch + 2 + rounds, WORLD_SIZE)
    await_peers_together(local, rank, epoch + 2 + rounds, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2 + rounds, EPOCH_OFFSET)


@triton.jit
def _sum_tile(
    bias, out, m, packets, panels, panel_peers, gather, slot, row, column, rank,
    BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the partial tiles in the slots from `slot` on; store the sum in the result and in the peers' panels."""
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + offsets
        c, packet, mask = packets_in(at, row, column, m, packets, BLOCK_N, OUT)
        mask = mask & (at < SLOT)
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            words = words + load_packets(panels + (slot + i) * (SLOT * 16) + at * 16, mask)
        s0, s1, s2, s3 = sum_and_bias(words, bias, c, mask, OUT, BIAS, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(panel_peers[i] + gather + (slot + rank) * (SLOT * 16) + at * 16, s0, s1, s2, s3, mask)
        store_packets(out + packet * 16, s0, s1, s2, s3, mask)


@triton.jit
def gemm_two_shot_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, peers, rank, timeout_ns, status,
    panels, panel_peers, gather, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """In round c: multiply chunk c, sum chunk c − 1, copy chunk c − 2; see the module's text.

    Slot (c × grid + b) × n + r of the panels holds rank r's part of the own tile in chunk c of block b; that many bytes
    `gather` further lies what rank r summed, its own tile there.

    Example:
        2 ranks, a result of 2 tiles, 1 block: tile 0 belongs to rank 0, tile 1 to rank 1, and both make chunk 0. Round
        0: rank 0 stores its partial tile 1 in slot 0 of rank 1's panels and its partial tile 0 in slot 0 of its own;
        rank 1 fills the slots 1. Round 1: rank 0 sums slots 0 and 1, stores tile 0 in its result and `gather` + slot 0
        of rank 1's panels. Round 2: rank 0 copies tile 1 from `gather` + slot 1 of its own panels to its result.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    PER_PACKET: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER_PACKET
    packets = n // PER_PACKET
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, chunks + 2):
        # 1. Multiply the tiles of chunk c, store each in its owner's panels.
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
                    target = address_of(panel_peers, panels, owner, rank, WORLD_SIZE)
                    slot = (c * grid + block) * WORLD_SIZE + rank
                    store_slot(target + slot * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
            arrive(peers, rank, base + tl.maximum(1, 2 * c), WORLD_SIZE)
        # 2. Sum the own tile of chunk c − 1, store it in the result and in every peer's panels.
        if (c >= 1) & (c <= chunks):
            d = c - 1
            await_peers_together(local, rank, base + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            tile = block + (d * WORLD_SIZE + rank) * grid
            if tile < rows * columns:
                down, across = tile_of(tile, rows, columns, GROUP)
                _sum_tile(
                    bias, out, m, packets, panels, panel_peers, gather, (d * grid + block) * WORLD_SIZE,
                    down * BLOCK_M, across * BLOCK_N, rank, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
            summed = base + tl.minimum(2 * d + 3, 2 * chunks)
            arrive(peers, rank, summed, WORLD_SIZE)
        # 3. Copy the peers' tiles of chunk c − 2 to the result.
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
    """(True if this block has a tile in round `c`, its first row, its first column)."""
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
    a, b, bias, scale_a, scale_b, out, m, n, k, local, peers, rank, timeout_ns, status,
    panels, panel_peers, gather, rounds,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """In round c: multiply tile c, sum or copy an earlier tile; see the module's text.

    Slot (c // n × grid + b) × n + r of the panels holds rank r's part of block b's tile in round c, if this rank owns
    it; `gather` bytes further lies what rank r summed, if that rank does.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // (128 // element_type(OUT).primitive_bitwidth)
    packets = n // (128 // element_type(OUT).primitive_bitwidth)
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, rounds + 2):
        has_tile, row, column = _tile_in(c, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
        # 1. Multiply the tile of round c, store it in its owner's panels.
        if (c < rounds) & has_tile:
            total = tile_product(x, y, row, column, k, BLOCK_M, BLOCK_N, BLOCK_K, NK)
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            if c == 0:
                await_peers_together(local, rank, base, timeout_ns, status, WORLD_SIZE)
            target = address_of(panel_peers, panels, _owner_in(c, WORLD_SIZE), rank, WORLD_SIZE)
            slot = _slots_in(c, grid, WORLD_SIZE) + rank
            store_slot(target + slot * (SLOT * 16), total, BLOCK_M, BLOCK_N, OUT)
        if c >= 1:
            await_peers_together(local, rank, base + c, timeout_ns, status, WORLD_SIZE)
        # 2. Sum the tile of round c − 1 if it is the own one, store it in the result and in every peer's panels.
        if (c >= 1) & (c <= rounds):
            has_tile, row, column = _tile_in(c - 1, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
            if has_tile & (_owner_in(c - 1, WORLD_SIZE) == rank):
                _sum_tile(
                    bias, out, m, packets, panels, panel_peers, gather, _slots_in(c - 1, grid, WORLD_SIZE),
                    row, column, rank, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
        # 3. Copy the tile of round c − 2 to the result if a peer owns it.
        if c >= 2:
            has_tile, row, column = _tile_in(c - 2, grid, columns, rows, BLOCK_M, BLOCK_N, GROUP)
            owner = _owner_in(c - 2, WORLD_SIZE)
            if has_tile & (owner != rank):
                slot = _slots_in(c - 2, grid, WORLD_SIZE) + owner
                copy_slot(
                    out, panels + gather + slot * (SLOT * 16), m, packets, row, column, BLOCK_N, OUT, SLOT, COPY
                )  # fmt: skip
        if c <= rounds:
            arrive(peers, rank, base + c + 1, WORLD_SIZE)
    write_counter(local, base + rounds + 1, EPOCH_OFFSET)


@triton.jit
def _sum_everywhere(
    bias, out, m, packets, panels, panel_peers, multicast, place, gather, row, column,
    BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the sum of the tile at `place` of every rank's panels; store it in the result and `gather` bytes further."""
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    for start in tl.range(0, SLOT, BLOCK):
        at = start + offsets
        c, packet, mask = packets_in(at, row, column, m, packets, BLOCK_N, OUT)
        mask = mask & (at < SLOT)
        s = load_reduce(multicast, panel_peers, panels, place + at * 16, mask, OUT, WORLD_SIZE)
        if BIAS:
            b = load_packets(bias + c * 16, mask)
            s = add_extras(s, b, b, OUT, True, False)
        store_packets(out + packet * 16, s[0], s[1], s[2], s[3], mask)
        store_all(multicast, panel_peers, panels, place + gather + at * 16, s[0], s[1], s[2], s[3], mask, WORLD_SIZE)


@triton.jit
def gemm_multimem_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, local, peers, rank, timeout_ns, status,
    panels, panel_peers, multicast, gather, chunks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NK: tl.constexpr,
    DTYPE: tl.constexpr, OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """In round c: multiply chunk c, sum chunk c − 1, copy chunk c − 2; see the module's text.

    A tile's slot has the tile's number; the sum lies `gather` bytes further.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    base = epoch + 1
    PER_PACKET: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N // PER_PACKET
    packets = n // PER_PACKET
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    grid = tl.num_programs(0).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
    y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    for c in tl.range(0, chunks + 2):
        # 1. Multiply the tiles of chunk c, store them in the own panels.
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
            arrive(peers, rank, base + tl.maximum(1, 2 * c), WORLD_SIZE)
        # 2. Load the sum of the own tile of chunk c − 1, store it in the result and in every rank's panels.
        if (c >= 1) & (c <= chunks):
            d = c - 1
            await_peers_together(local, rank, base + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            tile = block + (d * WORLD_SIZE + rank) * grid
            if tile < rows * columns:
                down, across = tile_of(tile, rows, columns, GROUP)
                _sum_everywhere(
                    bias, out, m, packets, panels, panel_peers, multicast, tile * (SLOT * 16), gather,
                    down * BLOCK_M, across * BLOCK_N, BLOCK_N, OUT, WORLD_SIZE, BIAS, SLOT, BLOCK,
                )  # fmt: skip
            summed = base + tl.minimum(2 * d + 3, 2 * chunks)
            arrive(peers, rank, summed, WORLD_SIZE)
        # 3. Copy the peers' tiles of chunk c − 2 to the result.
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


@triton.jit
def _is_last_part(counters, tile, SPLIT: tl.constexpr):
    """True for the block that comes to a tile as the last of SPLIT; it sees what the others stored before."""
    if not INTERPRET:
        tl.debug_barrier()  # all threads of the block have stored
    place = counters.to(tl.pointer_type(tl.int32)) + tile
    last = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        tl.store(place, tl.num_programs(0) * 0)
    return last


@triton.jit
def _push(
    total, peers, local, slot, row, column, m, packets,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OUT: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Round a tile and push it into the slot at offset `slot` of every rank, whose rows have `packets` packets."""
    PER_PACKET: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    w0, w1, w2, w3 = tile_words(total, BLOCK_M, BLOCK_N, OUT)
    w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
    r = row + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    c = column // PER_PACKET + tl.arange(0, BLOCK_N // PER_PACKET).to(tl.int64)[None, :]
    mask = (r < m) & (c < packets)
    place = slot + (r * packets + c) * 16
    for i in tl.static_range(WORLD_SIZE - 1):
        store_packets(peers[i] + place, w0, w1, w2, w3, mask, REMOTE=True)
    store_packets(local + place, w0, w1, w2, w3, mask, REMOTE=True)


@triton.jit
def gemm_lamport_kernel(
    a, b, bias, scale_a, scale_b, out, m, n, k, parts, counters, local, peers, rank, timeout_ns,
    status, arena, stage_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NK: tl.constexpr, DTYPE: tl.constexpr,
    OUT: tl.constexpr, SCALING: tl.constexpr, WORLD_SIZE: tl.constexpr, SPLIT: tl.constexpr, POINTERS: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply and push tiles, then poll and sum packets; see the module's text.

    Args:
        parts: room for a tile of fp32 for each part of the depth.
        counters: an int32 a tile.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    PER_PACKET: tl.constexpr = 128 // element_type(OUT).primitive_bitwidth
    packets = n // PER_PACKET
    count = m * packets
    rows = (m + BLOCK_M - 1) // BLOCK_M
    tiles = rows * ((n + BLOCK_N - 1) // BLOCK_N)
    span = (k + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT) * BLOCK_K
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if not POINTERS:
        x = matrix(a, m, k, BLOCK_M, BLOCK_K, DTYPE)
        y = operand_b(b, k, n, BLOCK_N, BLOCK_K, NK, DTYPE)

    # 1. Multiply parts of tiles; the block with the whole tile pushes it into slot `rank` of every rank's stage.
    for item in tl.range(tl.program_id(0), tiles * SPLIT, tl.num_programs(0)):
        tile, part = item // SPLIT, item % SPLIT
        row, column = (tile % rows * BLOCK_M).to(tl.int32), (tile // rows * BLOCK_N).to(tl.int32)
        start, end = part * span, tl.minimum((part + 1) * span, k)
        if POINTERS:
            total = pointer_product(a, b, row, column, start, end, m, n, k, BLOCK_M, BLOCK_N, BLOCK_K, NK, DTYPE)
        else:
            total = part_product(x, y, row, column, start, end, BLOCK_M, BLOCK_N, BLOCK_K, NK)
        if SPLIT > 1:
            base = parts.to(tl.pointer_type(tl.float32)) + tile * (SPLIT * BLOCK_M * BLOCK_N)
            at = tl.multiple_of(base, 16) + within
            tl.store(at + part * (BLOCK_M * BLOCK_N), total)
            if _is_last_part(counters, tile, SPLIT):
                whole = tl.load(at)
                for i in tl.static_range(1, SPLIT):
                    whole += tl.load(at + i * (BLOCK_M * BLOCK_N))
                whole = scaled(whole, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
                _push(
                    whole, peers, local, stage + rank * count * 16, row, column, m, packets,
                    BLOCK_M, BLOCK_N, OUT, WORLD_SIZE,
                )  # fmt: skip
        else:
            total = scaled(total, scale_a, scale_b, row, column, m, n, SCALING, BLOCK_M, BLOCK_N)
            _push(
                total, peers, local, stage + rank * count * 16, row, column, m, packets,
                BLOCK_M, BLOCK_N, OUT, WORLD_SIZE,
            )  # fmt: skip
    launch_next(PDL)

    # 2. Poll the packets of every rank, clear their places, sum in rank order, add the bias.
    offsets, first, stride = block_range(BLOCK)
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    for begin in tl.range(first, count, stride):
        packet = begin + offsets
        mask = packet < count
        place = local + stage + packet * 16
        words = poll_packets(place, count * 16, mask, rank * 0 - 1, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * count * 16, empty, empty, empty, empty, mask)
        s0, s1, s2, s3 = sum_and_bias(words, bias, packet % packets, mask, OUT, BIAS, WORLD_SIZE)
        store_packets(out + packet * 16, s0, s1, s2, s3, mask)
    end_call(local, calls)


class SlotVariant(tiles.GemmVariant):
    """A persistent GEMM whose tiles lie in slots.

    Its kernel takes `(a, b, bias, scale_a, scale_b, out, m, n, k, local, peers, rank, timeout_ns, status, panels,
    panel_peers, *further, constants)`, with the addresses of the panels' data.
    """

    op = "gemm_ar"
    space = tiles.tile_space(num_blocks=Choice(1, 2, 4, 8, 16, 32, 64, 128, 132, 264))
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
        if reason := tiles.refuse_gemm(problem, limits, panel_bytes=self.panel_bytes(problem, config), packets=True):
            return reason
        if reason := tiles.refuse_tiles(problem, config, limits, rows=problem.shape[0]):
            return reason
        count, blocks = tiles.num_tiles(problem.shape[0], problem, config), int(config["num_blocks"])
        if blocks > count:
            return f"{blocks} blocks, but only {count} tiles"
        most = limits.num_sms if limits.backend == "cuda" else 2
        if limits.backend == "cuda" and blocks > most and tiles.two_fit(problem, config):
            most *= 2
        if blocks > min(most, limits.max_blocks):
            return f"{blocks} blocks; {min(most, limits.max_blocks)} are resident at once, with flags of their own"
        if 2 * blocks < min(count, most) and limits.backend == "cuda":
            return f"{blocks} blocks leave most SMs idle"
        return None

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        preferred = tiles.preferred_tile(problem, limits, rows=problem.shape[0])
        count = tiles.num_tiles(problem.shape[0], problem, preferred)  # type: ignore[arg-type]
        return {**preferred, "num_blocks": min(count, limits.num_sms if limits.backend == "cuda" else 2)}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        """The constants of all GEMMs, BIAS, BLOCK, and COPY.

        Loops over packets take BLOCK of them at once from every rank: enough to keep the links busy.
        """
        items = 4 if problem.world_size == 2 else 2 if problem.world_size <= 4 else 1
        threads = 32 * int(config["num_warps"])
        copy: dict[str, Value] = {"COPY": 4 * threads} if self.gathers else {}
        bias = gemm_layout(problem).bias
        return {**super().constants(problem, config), "BIAS": bias, "BLOCK": threads * items, **copy}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config["num_blocks"])

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Tiles of the block that has the most."""
        return -(-tiles.num_tiles(problem.shape[0], problem, config) // int(config["num_blocks"]))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        panels = workspace.panels(problem.mode, self.panel_bytes(problem, config))
        kernel = bind_kernel(self.request(problem, config), int(config["num_blocks"]), workspace.device)
        data = (panels.data, tuple(peer + PANEL_DATA if peer else 0 for peer in panels.peers))
        lane, further = lane_arguments(problem, workspace), self.further(problem, config, panels)
        launch = kernel.fix((*(None,) * 6, *problem.shape, *lane, *data, *further))
        return AddressLaunch(launch, tiles.addresses(problem))


class OneShot(SlotVariant, registered=True):
    name = "one_shot"
    summary = "one persistent GEMM kernel; every rank reads and sums all ranks' tiles as they come"
    kernels = (gemm_one_shot_kernel,)
    scatters = gathers = False

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        nbytes = self.partial_bytes(problem, config)
        if nbytes > _MAX_ONE_SHOT_BYTES:
            return f"one shot is out of the question at {nbytes} bytes a rank"
        return super().infeasible(problem, config, limits)

    def further(self, problem: Problem, config: Config, panels: Panels) -> tuple[int, ...]:
        return ()


class TwoShot(SlotVariant, registered=True):
    name = "two_shot"
    summary = "one persistent kernel: products scattered to the tiles' owners, summed, and the sums gathered"
    kernels = (gemm_two_shot_kernel,)


class TwoShotRolling(SlotVariant, registered=True):
    name = "two_shot_rolling"
    summary = "one persistent kernel: each tile scattered, summed and gathered beside the block's next two"
    kernels = (gemm_two_shot_rolling_kernel,)

    def further(self, problem: Problem, config: Config, panels: Panels) -> tuple[int, ...]:
        return self.partial_bytes(problem, config), self.num_rounds(problem, config)


class Multimem(SlotVariant, registered=True):
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


class Lamport(tiles.GemmVariant, registered=True):
    op = "gemm_ar"
    name = "lamport"
    numerics = "library"
    summary = "a GEMM whose epilogue pushes packets that announce themselves; for few rows"
    kernels = (gemm_lamport_kernel,)
    space = Space(
        {
            "block_m": Choice(16, 32, 64),
            "block_n": Choice(32, 64, 128),
            "block_k": Choice(32, 64, 128, 256),
            "num_warps": Choice(4, 8),
            "num_stages": Choice(1, 2, 4, 6),
            "split_k": Choice(1, 2, 4, 8),
            "pointers": Choice(False, True),
            "launch_pdl": Choice(False, True),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        m, n, k = problem.shape
        if reason := tiles.refuse_gemm(problem, limits, packets=True):
            return reason
        if m > _MAX_ROWS:
            return f"{m} rows are a matter of bandwidth: at most {_MAX_ROWS}"
        nbytes, on_gpus = m * n * out_itemsize(problem), limits.backend == "cuda"
        if reason := refuse_stage(problem, limits, nbytes) or refuse_launch_pdl(config, limits):
            return reason
        block_m, split = int(config["block_m"]), int(config["split_k"])
        packets = block_m * int(config["block_n"]) * out_itemsize(problem) // PACKET_BYTES
        if on_gpus and packets < 32 * int(config["num_warps"]):
            # The second copy would come after the first was polled, and lie there for the next call but one.
            return f"a tile has {packets} packets: threads beyond would push some of them twice"
        if on_gpus and m > block_m and block_m < 64:
            return f"{m} rows go into one tile, or into tiles of 64 rows"
        if reason := tiles.refuse_tiles(problem, {**config, "group": 1}, limits, rows=m):
            return reason
        if split == 1:
            return None
        if on_gpus and -(-k // int(config["block_k"])) < 2 * split:
            return f"a depth of {k} in {split} parts leaves a block less than two steps"
        count = tiles.num_tiles(m, problem, config)
        if count > _MAX_PARTS:
            return f"{count} tiles keep all SMs busy: only split_k=1"
        if on_gpus and count * split > 8 * limits.num_sms:
            return f"{count} tiles in {split} parts are more than 8 blocks an SM"
        return None

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        m, _, k = problem.shape
        preferred: dict[str, Any] = {**tiles.preferred_tile(problem, limits, rows=min(m, 64)), "pointers": False}
        preferred["launch_pdl"] = limits.launch_pdl
        if limits.backend == "host":
            return {**preferred, "split_k": 2}
        count = max(tiles.num_tiles(m, problem, preferred), 1)
        max_parts = min(max(k // int(preferred["block_k"]) // 2, 1), 8)
        parts = max(min(self._per_sm(problem, preferred) * limits.num_sms // count, max_parts), 1)
        return {**preferred, "split_k": parts}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        found = super().constants(problem, {**config, "group": 1})
        del found["GROUP"]
        found |= {"SPLIT": config["split_k"], "POINTERS": config["pointers"], "PDL": config["launch_pdl"]}
        return {**found, "BIAS": gemm_layout(problem).bias, "BLOCK": 32 * int(config["num_warps"])}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        """Parts of tiles: the blocks of the grid at most, on any GPU."""
        return tiles.num_tiles(problem.shape[0], problem, config) * int(config["split_k"])

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        m, n, _ = problem.shape
        return Room(stage=m * n * out_itemsize(problem) * problem.world_size)

    def _per_sm(self, problem: Problem, config: Config) -> int:
        """Blocks that an SM holds for certain, with up to 128 registers a thread."""
        m, n, k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
        shared = int(config["num_stages"]) * (m + n) * k * ITEMSIZE[problem.dtype] + m * n * 4 + 1024
        return max(min(_SHARED_BYTES // shared, 16 // int(config["num_warps"])), 1)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        device, blocks = workspace.device, self.num_blocks(problem, config)
        grid = 1  # on the host, where interpreted blocks run one after another, and here they wait for each other
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            grid = min(blocks, self._per_sm(problem, config) * num_sms)
        a_part = int(config["block_m"]) * int(config["block_n"]) * 4 if int(config["split_k"]) > 1 else 0
        parts = workspace.scratch(problem.mode, max(blocks * a_part, 16))
        counters = torch.zeros(tiles.num_tiles(problem.shape[0], problem, config), dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a launch may be on any stream
        memory = (*problem.shape, parts.data_ptr(), counters.data_ptr())
        lane, stage = lane_arguments(problem, workspace), (workspace.layout.arena, workspace.layout.stage_bytes)
        kernel = bind_kernel(self.request(problem, config), grid, device)
        launch: Any = kernel.fix((*(None,) * 6, *memory, *lane, *stage))
        launch.keep = counters  # live as long as the launch
        return AddressLaunch(launch, tiles.addresses(problem))
