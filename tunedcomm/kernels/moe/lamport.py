"""lamport: tokens and results are pushed without flags and announce themselves; best for few tokens.

**ep_dispatch.** As `push`, but counts, places and tokens go into the peers' stage, where their readers poll for each
word and put the sentinel back. Counts and places are never the sentinel; tokens are escaped, as by `all_to_all`'s
`lamport`. Parts of a token have places of their own, for what is polled is polled once. Every block polls counts of
every peer, which keeps the stages in turn.

**ep_combine.** Results go to (token, k) of the stage of the token's rank, with the sentinel, a −0.0, turned into +0.0:
sums begin with +0.0, so that changes nothing. First all K packets of a sum are looked at together, then those that are
late are waited for. Not every rank has results for every other, so each block also sends each peer a word.

**Words of a whole block.** A thread has its packets, and their masks, for itself. But counts, places and the word of a
block are fewer than its threads, so all its warps poll the same ones. They put the sentinel back behind a block
barrier, or a slow warp would find it in the place of the word. And such a word is stored by one thread (`send_words`):
what a slow warp stores again may come after its reader has put the sentinel back, and be read two calls later.

Numerics: ordered. Graph-safe: call counters live in the lane.
Source: own; the protocol is as in `all_reduce`'s `lamport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton import next_power_of_2

from tunedcomm.kernels.common.lamport import end_call
from tunedcomm.kernels.common.lane import STATE_OFFSET, read_counter
from tunedcomm.kernels.common.packets import PACKET_BYTES, has_escape, restore, weigh_packets
from tunedcomm.kernels.common.sync import (
    INTERPRET,
    SENTINEL,
    load_packets,
    poll_from,
    poll_words,
    store_packets,
    store_word,
)
from tunedcomm.kernels.common.variant import HOST_GRID
from tunedcomm.kernels.moe.op import sizes_of
from tunedcomm.kernels.moe.push import (
    FEW,
    GRID,
    CombineVariant,
    DispatchVariant,
    GridVariant,
    block_barrier,
    count_all,
    fill_table,
    parts_of_sum,
    quantise_kernel,
    rows_of_token,
    send_results,
    send_token,
    send_words,
    share_counts,
    store_words,
    write_token,
)
from tunedcomm.space import Config, Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def take_packets(place, beside, mask_slot, r, wanted, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Poll packets that rank r sent, put the sentinel back, and return their words."""
    sender = tl.zeros(place.shape, tl.int32) + r.to(tl.int32)
    w0, w1, w2, w3 = poll_from(place, wanted, sender, timeout_ns, status)
    escaped = has_escape(w0, w1, w2, w3) & wanted
    found = poll_words(beside, mask_slot, escaped.to(tl.int32) << sender, timeout_ns, status, WORLD_SIZE)
    said = found[0]
    for i in tl.static_range(1, WORLD_SIZE):  # 0 but for the sender's
        said = said | found[i]
    empty = tl.full(place.shape, SENTINEL, tl.int32)
    store_packets(place, empty, empty, empty, empty, wanted)
    store_word(beside + r * mask_slot, empty, escaped)
    return restore(w0, said, 0), restore(w1, said, 1), restore(w2, said, 2), restore(w3, said, 3)


@triton.jit
def dispatch_lamport_kernel(
    x, ids, out, scales, counts_out, offsets_out, rows, id_words, capacity, alignment, tokens, row_packets,
    wire_packets, local, peers, rank, timeout_ns, status, arena, stage_bytes, scratch, cell,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr, SCALES: tl.constexpr, PADDED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push tokens and counts, poll the peers' counts and places, then their tokens.

    The stage: counts, places, tokens, masks, each by source rank. `scratch` is this rank's: counts, tables, places.
    """
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    KP: tl.constexpr = next_power_of_2(TOPK)
    WIDTH: tl.constexpr = next_power_of_2(LOCAL)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    threads = tl.arange(0, BLOCK)
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    places = stage + WORLD_SIZE * blocks * BINS * 4
    data = (places + WORLD_SIZE * SPLIT * tokens * KP * 4 + 15) // 16 * 16
    wire_bytes = wire_packets * 16
    masks = data + WORLD_SIZE * tokens * wire_bytes
    table = scratch + WORLD_SIZE * blocks * BINS * 4 + block * (WORLD_SIZE * WIDTH * 4)
    own_places = scratch + WORLD_SIZE * blocks * (BINS + WIDTH) * 4

    for token in tl.range(team, tokens, teams):
        at = rank * tokens + token
        send_token(
            token, x + token * wire_bytes, ids, id_words, tokens, 0, peers, rank, own_places, places,
            data + at * wire_bytes, masks + at * wire_packets * 4, wire_packets, part,
            WORLD_SIZE, TOPK, EXPERTS, False, True, SPLIT, BLOCK, 1,
        )  # fmt: skip
    bins = tl.arange(0, BINS)
    mine = count_all(ids, id_words, 0, tokens, TOPK, EXPERTS)
    share_counts(scratch, stage, peers, rank, mine, WORLD_SIZE, EXPERTS)

    others = (1 << WORLD_SIZE) - 1 - (1 << rank)
    sent_here = ((bins // LOCAL == rank) | (block == 0)) & (bins <= EXPERTS)
    from_peers = block * BINS + bins
    bits = tl.where(sent_here, others, 0).to(tl.int32)
    counts = poll_words(
        local + stage + from_peers * 4, blocks * (BINS * 4), bits, timeout_ns, status, WORLD_SIZE
    )  # fmt: skip
    for i in tl.static_range(WORLD_SIZE):
        store_words(scratch, i * blocks * BINS + from_peers, counts[i], sent_here & (rank != i))
    k = tl.arange(0, KP)
    bits_of_k = tl.where(k < TOPK, others, 0).to(tl.int32)
    slot = SPLIT * tokens * (KP * 4)
    for asked in tl.range(team, tokens, teams):
        of_token = (part * tokens + asked) * KP + k
        told = poll_words(local + places + of_token * 4, slot, bits_of_k, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE):
            store_words(own_places + i * slot, of_token, told[i], (k < TOPK) & (rank != i))
    block_barrier()  # all warps have polled
    for i in tl.static_range(WORLD_SIZE):
        none = tl.full((BINS,), SENTINEL, tl.int32)
        store_words(local + stage, i * blocks * BINS + from_peers, none, sent_here & (rank != i))
    fill_table(
        scratch, table, counts_out, offsets_out, rank, capacity, alignment, cell, WORLD_SIZE, EXPERTS, PADDED
    )  # fmt: skip

    for placed in tl.range(team, tokens, teams):
        for s in tl.range(0, WORLD_SIZE):
            r = (rank + s) % WORLD_SIZE
            here_at = r * tokens + placed
            unset = tl.full((KP,), SENTINEL, tl.int32)
            store_words(local + places + r * slot, (part * tokens + placed) * KP + k, unset, (k < TOPK) & (rank != r))
            targets, sent = rows_of_token(
                table + r * (WIDTH * 4), own_places + ((r * SPLIT + part) * tokens + placed) * (KP * 4),
                rows + here_at * (TOPK * 4), part, capacity, TOPK, LOCAL, PADDED,
            )  # fmt: skip
            for start in tl.range(part * BLOCK, wire_packets, SPLIT * BLOCK):
                packet = start + threads
                here = packet < wire_packets
                if r == rank:
                    words = load_packets(x + placed * wire_bytes + packet * 16, here & sent)
                else:
                    words = take_packets(
                        local + data + here_at * wire_bytes + packet * 16,
                        local + masks + (placed * wire_packets + packet) * 4, tokens * wire_packets * 4, r,
                        here & sent, timeout_ns, status, WORLD_SIZE,
                    )  # fmt: skip
                write_token(out, scales, targets, packet, words, here, row_packets, TOPK, SCALES)
    end_call(local, calls)


@triton.jit
def peek_packets(address, mask):
    """`load_packets` of what peers write: relaxed at system scope, past the caches of this SM."""
    if INTERPRET:
        return load_packets(address, mask)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.u32 p, $5, 0;
            mov.u32 $0, 0;
            mov.u32 $1, 0;
            mov.u32 $2, 0;
            mov.u32 $3, 0;
            @p ld.relaxed.sys.global.v4.u32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def combine_lamport_kernel(
    results, weights, ids, rows, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the results for the peers' tokens, then sum the rows of the own tokens as they come."""
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    threads = tl.arange(0, BLOCK)
    row_bytes = row_packets * 16
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    data = stage + WORLD_SIZE * blocks * 16
    one = tl.arange(0, 1)
    for i in tl.static_range(WORLD_SIZE - 1):
        send_words(peers[i] + stage + (rank * blocks + block) * 16 + one, one + 1, one == 0)
    for token in tl.range(team, tokens, teams):
        send_results(
            token, results, rows, tokens, peers, rank, data + token * TOPK * row_bytes, row_packets, part,
            WORLD_SIZE, TOPK, True, SPLIT, BLOCK,
        )  # fmt: skip

    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
    for summed in tl.range(team, tokens, teams):
        sources, weight, valid, there, remote = parts_of_sum(
            results, weights, ids, rows + (rank * tokens + summed) * (TOPK * 4), id_words, summed * TOPK,
            local + data + summed * TOPK * row_bytes, row_bytes, TOPK,
        )  # fmt: skip
        for begin in tl.range(part * BLOCK, row_packets, SPLIT * BLOCK):
            at = begin + threads
            here = at < row_packets
            seen = ()
            for k in tl.static_range(TOPK):
                seen = seen + peek_packets(sources[k] + at * 16, here & there[k])
            words = ()
            for k in tl.static_range(TOPK):
                w0, w1, w2, w3 = seen[4 * k], seen[4 * k + 1], seen[4 * k + 2], seen[4 * k + 3]  # type: ignore[var-annotated]
                late = (w0 == SENTINEL) | (w1 == SENTINEL) | (w2 == SENTINEL) | (w3 == SENTINEL)
                late = late & here & (remote[k] >= 0)
                sender = tl.zeros((BLOCK,), tl.int32) + remote[k] // LOCAL
                p0, p1, p2, p3 = poll_from(sources[k] + at * 16, late, sender, timeout_ns, status)
                store_packets(sources[k] + at * 16, empty, empty, empty, empty, here & (remote[k] >= 0))
                words = words + (tl.where(late, p0, w0), tl.where(late, p1, w1))  # type: ignore[assignment]
                words = words + (tl.where(late, p2, w2), tl.where(late, p3, w3))  # type: ignore[assignment]
            y0, y1, y2, y3 = weigh_packets(words, weight, valid, TOPK, DTYPE)
            store_packets(y + summed * row_bytes + at * 16, y0, y1, y2, y3, here)

    others = ((1 << WORLD_SIZE) - 1 - (1 << rank)) + one * 0
    hello = local + stage + block * 16 + one
    poll_words(hello, blocks * 16, others.to(tl.int32), timeout_ns, status, WORLD_SIZE)
    block_barrier()
    for r in tl.static_range(WORLD_SIZE):
        send_words(hello + r * blocks * 16, one * 0 + SENTINEL, (one == 0) & (rank != r))
    end_call(local, calls)


class _Lamport(GridVariant):
    name = "lamport"
    space = Space(GRID)
    trailing_arguments = ("arena", "stage_bytes")
    room = "stage_bytes"
    host_preferred: Mapping[str, float] = {**HOST_GRID, "split": 1}

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        return problem.shape[0] <= FEW


class DispatchLamport(_Lamport, DispatchVariant, registered=True):
    summary = "push without flags: tokens announce themselves; best for few tokens"
    kernels = (dispatch_lamport_kernel, quantise_kernel)

    def token_bytes(self, problem: Problem) -> int:
        return super().token_bytes(problem) // PACKET_BYTES * (PACKET_BYTES + 4)  # with masks

    def further_bytes(self, problem: Problem, config: Config) -> int:
        return int(config["split"]) * super().further_bytes(problem, config)

    def own_bytes(self, problem: Problem, config: Config) -> int:
        return self.further_bytes(problem, config)


class CombineLamport(_Lamport, CombineVariant, registered=True):
    summary = "push without flags: results announce themselves; best for few tokens"
    kernels = (combine_lamport_kernel,)

    def further_bytes(self, problem: Problem, config: Config) -> int:
        return problem.world_size * int(config["num_blocks"]) * PACKET_BYTES  # of the words of blocks

    def constants(self, problem: Problem, config: Config) -> dict[str, Any]:
        return {**super().constants(problem, config), "LOCAL": sizes_of(problem).local}
