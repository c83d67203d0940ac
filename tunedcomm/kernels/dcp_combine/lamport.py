"""lamport: every rank pushes each peer its heads and their LSEs, which announce themselves; best for decode.

The protocol is `common.lamport`'s. Payload words that equal the sentinel, a −0.0, travel as +0.0: sums begin with +0.0,
and an LSE of either zero gives the same weights. A stage holds a slot of packets for each rank, then a slot of LSEs.

**One LSE for several packets.** The packets of a group belong to one row and to one warp, whose lanes all poll the
group's LSE. A warp leaves its polling loop as one, so all lanes have read the LSE when one of them puts the sentinel
back.

Example:
    2 ranks, T = 1, H = 2, D = 4 in fp32: a row is one packet. Rank 0 stores its packet of head 1 at offset 0 of rank
    1's stage and the LSE at offset 32; rank 1 stores its packet of head 0 at offset 16 of rank 0's stage and the LSE at
    offset 36. Each rank polls both, clears them and merges its own packet and the peer's in rank order.

Numerics: ordered. Graph-safe: the call counter lives in the lane.
Source: own; the protocol as in all_reduce's `lamport`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.lane import block_range
from tunedcomm.kernels.common.packets import escape_sentinel, escape_sentinels, insert_own, weigh_packets
from tunedcomm.kernels.common.sync import (
    INTERPRET,
    SENTINEL,
    as_mask,
    load_packets,
    poll_packets_and_words,
    store_packets,
    store_word,
)
from tunedcomm.kernels.common.variant import LamportVariant
from tunedcomm.kernels.dcp_combine.merge import weigh
from tunedcomm.kernels.dcp_combine.op import CombineVariant


@triton.jit
def places_of(packet, HEADS: tl.constexpr, ROW: tl.constexpr):
    """(row, token) of packets of a rank's heads; both in 32 bits, by which the division takes half as long."""
    row = packet.to(tl.int32) // ROW
    return row, row // HEADS


@triton.jit
def load_part(x, lse, packet, row, token, owner, mask, HEADS: tl.constexpr, ROW: tl.constexpr, RANKS: tl.constexpr):
    """The packets of the heads of rank `owner`, and their LSEs as words: five words."""
    before = (token * (RANKS - 1)).to(tl.int64) + owner  # shares of a token's heads between this one and its place
    w0, w1, w2, w3 = load_packets(x + (packet + before * (HEADS * ROW)) * 16, mask)
    if INTERPRET:
        mask = as_mask(mask)
    at = (lse + (row.to(tl.int64) + before * HEADS) * 4).to(tl.pointer_type(tl.int32))
    return w0, w1, w2, w3, tl.load(at, mask=mask, other=0)


@triton.jit
def write_merged(
    words, lse_words, out, lse_out, packet, row, mask,
    DTYPE: tl.constexpr, BASE: tl.constexpr, ROW: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Merge all ranks' packets (4 words each) by their LSEs (a word each), in rank order; write result and LSE."""
    lses = ()
    for i in tl.static_range(WORLD_SIZE):
        lses = lses + (lse_words[i].to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    weights, valid, lse = weigh(lses, BASE, WORLD_SIZE)
    w0, w1, w2, w3 = weigh_packets(words, weights, valid, WORLD_SIZE, DTYPE)
    store_packets(out + packet * 16, w0, w1, w2, w3, mask)
    is_first = mask & (packet == row.to(tl.int64) * ROW)
    if INTERPRET:
        is_first = as_mask(is_first)
    tl.store((lse_out + row.to(tl.int64) * 4).to(tl.pointer_type(tl.float32)), lse, mask=is_first)


@triton.jit
def lamport_kernel(
    x, lse, out, lse_out, total, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BASE: tl.constexpr, HEADS: tl.constexpr, ROW: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Push each peer its heads; poll the peers' packets and LSEs of the own heads, clear them, merge."""
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = total.to(tl.int64)
    groups = total // GROUP
    lses = stage + WORLD_SIZE * total * 16
    offsets, first, stride = block_range(BLOCK)

    # 1. Push the heads of rank j, and an LSE a group, to rank j.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        row, token = places_of(packet, HEADS, ROW)
        words = ()
        for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
            words = words + load_part(
                x, lse, packet, row, token, (rank + 1 + i) % WORLD_SIZE, mask, HEADS, ROW, WORLD_SIZE
            )  # fmt: skip
        is_first = mask & (packet % GROUP == 0)
        for i in tl.static_range(WORLD_SIZE - 1):
            w0, w1, w2, w3 = escape_sentinels(words[5 * i], words[5 * i + 1], words[5 * i + 2], words[5 * i + 3])
            store_packets(peers[i] + stage + (rank * total + packet) * 16, w0, w1, w2, w3, mask, REMOTE=True)
            beside = peers[i] + lses + (rank * groups + packet // GROUP) * 4
            store_word(beside, escape_sentinel(words[5 * i + 4]), is_first)
    launch_next(PDL)

    # 2. Poll the own heads' packets and LSEs, clear their places, merge with the own packets in rank order.
    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        row, token = places_of(packet, HEADS, ROW)
        own = load_part(x, lse, packet, row, token, rank, mask, HEADS, ROW, WORLD_SIZE)
        place, beside = local + stage + packet * 16, local + lses + packet // GROUP * 4
        polled = poll_packets_and_words(
            place, total * 16, beside, groups * 4, mask, rank, timeout_ns, status, WORLD_SIZE
        )  # fmt: skip
        is_first = mask & (packet % GROUP == 0)
        words, lse_words = (), ()
        for i in tl.static_range(WORLD_SIZE):
            store_packets(place + i * total * 16, empty, empty, empty, empty, mask & (rank != i))
            store_word(beside + i * groups * 4, empty, is_first & (rank != i))
            words = words + (polled[5 * i], polled[5 * i + 1], polled[5 * i + 2], polled[5 * i + 3])  # type: ignore[assignment]
            lse_words = lse_words + (tl.where(rank == i, own[4], polled[5 * i + 4]),)  # type: ignore[assignment]
        words = insert_own(words, own, rank, WORLD_SIZE)
        write_merged(words, lse_words, out, lse_out, packet, row, mask, DTYPE, BASE, ROW, WORLD_SIZE)
    end_call(local, calls)


class Lamport(CombineVariant, LamportVariant, registered=True):
    name = "lamport"
    summary = "push without flags: packets and LSEs announce themselves; best for decode"
    kernels = (lamport_kernel,)
