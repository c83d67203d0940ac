"""tokens_lamport, tokens_push, tokens_direct, tokens_pull: the layout `tokens`, whose rows are known beforehand.

Token t of rank r stands in row r · T + t of every rank that has experts of it. So nobody counts, and nothing can
overflow. A *line*, the token's ids and weights, goes to all ranks: by it a rank knows whether the token comes.

**tokens_lamport**, for few tokens. Block b does the tokens of team b // SPLIT, and of each the packets of part
b % SPLIT. It stores a line of its own and its packets into every stage, polls the lines of the same (token, part) of
all ranks, then the packets that these announce. Bits of tokens are kept by escapes (`packets`). Every block polls a
line of every peer, which keeps the stages in turn; in ep_combine, where a rank may have nothing for a token, a word
does.

**tokens_push**, for many tokens. Pieces of `chunk_tokens` go round a ring in the peers' gather areas, ordered by flags,
and are copied while later ones travel: ep_dispatch copies a token of piece c − 2 after it has sent one of piece c,
ep_combine sums piece c − 1 behind piece c. The proofs of `push` hold: the flags and rings are the same.

**tokens_direct** and **tokens_pull**, of buffers that peers address (`input_kind` symmetric). ep_dispatch writes lines
and rows straight into the peers' outputs, once their blocks have said that what used the outputs before has ended.
ep_combine reads the peers' rows once their blocks have said that these are complete, and ends when no peer reads its
own rows any more.

**A number of tokens** (NUMBERED), which each rank reads on the device, bounds the loops over its tokens. In ep_dispatch
each block first sends its rank's number to its counterparts, in a word behind all else in the stage, and polls theirs
before the lines. The ranks themselves write the lines of tokens that nobody has. ep_combine gets the own number and the
largest one from the dispatch.

In tokens_push, tokens_direct and tokens_pull the first FEW tokens of each rank then travel as in tokens_lamport, in
PARTS parts. If no rank has more, which all know from the numbers, that is all: no flag is raised, and the epoch stays.
Otherwise pieces and flags follow for the tokens from FEW on. With flags alone, 64 tokens of 4096 took 1.5 (buffers) and
2.7 (tokens_push) times as long as 64 of 64 on two H200. Stages and flags are counted apart, and every call polls a word
of every peer in its stage, so both proofs hold for calls of either kind in any order.

A thread loads `items` packets before it stores them, since stores between loads would keep the next load back.

**ep_combine.** Each rank sends one row for a token, the sum of its experts. The token's rank adds the ranks' rows in
order, from +0.0 in fp32, and rounds once; a rank without experts of the token adds nothing. In the layout `rank`
(SORTED) results stand expert by expert, `held` are the rows of the dispatch, and a rank sums its rows of a token by
weight as it loads them; the own sum is rounded as those that travel.

Example:
    2 ranks, 1 token of 8 bf16 elements (1 packet), 2 experts. Rank 0's token goes to expert 1: rank 0 stores the line
    and the packet at rank 1, which stores the id 0 and the packet in row 0. Rank 1's token goes to no expert: rank 1
    stores its line at rank 0, which stores the id −1 for row 1 and waits for nothing more.

Numerics: ordered. Graph-safe: call counters live in the lane. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from triton import next_power_of_2

from tunedcomm.kernels.common.feasibility import Launch, power_of_2, refuse_result
from tunedcomm.kernels.common.lamport import end_call
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    STATE_OFFSET,
    address_of,
    arrive,
    await_peers,
    exchange_flags,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.launch import bind_kernel
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape,
    escape_sentinel,
    escape_sentinels,
    has_escape,
    restore,
    sentinel_mask_of,
    sum_packets,
    weigh_packets,
)
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_from, poll_words, store_packets, store_word
from tunedcomm.kernels.common.variant import Workspace, lane_arguments
from tunedcomm.kernels.moe.lamport import peek_packets
from tunedcomm.kernels.moe.op import BY_RANK, NOT_HERE, Overflow, in_use, sizes_of, within_number
from tunedcomm.kernels.moe.push import (
    FEW,
    GRID,
    RING,
    GridVariant,
    block_barrier,
    limit_of,
    load_word,
    load_words,
    own_number,
    send_number,
    send_words,
    store_words,
    write_limits,
)
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import MAX_WORLD_SIZE, LaneLayout, Room


@triton.jit
def read_line(ids, id_words, weights, token, TOPK: tl.constexpr, EXPERTS: tl.constexpr):
    """The line of an own token: next_power_of_2(TOPK) ids, as many weights (0 where `weights` is), none a sentinel.

    An id that is no expert, and not −1 either, is −2.
    """
    KP: tl.constexpr = next_power_of_2(TOPK)
    at = tl.arange(0, 2 * KP)
    k = at % KP
    expert = load_words(ids, (token * TOPK + k) * id_words, (at < KP) & (k < TOPK), -1)
    expert = tl.where((expert < -1) | (expert >= EXPERTS), -2, expert)
    weight = load_words(weights, token * TOPK + k, (at >= KP) & (k < TOPK) & (weights != 0), 0)
    return tl.where(at < KP, expert, escape_sentinel(weight))


@triton.jit
def owners_of(line, TOPK: tl.constexpr, LOCAL: tl.constexpr):
    """The ranks of a line's experts, −1 elsewhere."""
    KP: tl.constexpr = next_power_of_2(TOPK)
    at = tl.arange(0, 2 * KP)
    return tl.where((at < KP) & (line >= 0), tl.maximum(line, 0) // LOCAL, -1)


@triton.jit
def goes_to(owners, r):
    """True if one of the owners is rank r."""
    return tl.max((owners == r).to(tl.int32), axis=0) > 0


@triton.jit
def write_line(ids_out, weights_out, row, line, rank, wanted, TOPK: tl.constexpr, LOCAL: tl.constexpr):
    """Write a line to the outputs, ids numbered from this rank's first expert; return how many are no expert."""
    KP: tl.constexpr = next_power_of_2(TOPK)
    at = tl.arange(0, 2 * KP)
    k = at % KP
    is_local = owners_of(line, TOPK, LOCAL) == rank
    local_ids = tl.where(is_local, line - rank.to(tl.int32) * LOCAL, -1)
    store_words(ids_out, row * TOPK + k, local_ids, (at < KP) & (k < TOPK) & wanted)
    store_words(weights_out, row * TOPK + k, line, (at >= KP) & (k < TOPK) & (weights_out != 0) & wanted)
    return tl.sum(((at < KP) & (line == -2)).to(tl.int32), axis=0)


@triton.jit
def tell_wrong(cell, wrong):
    """Write the code of `Overflow` if ids were no experts."""
    if wrong > 0:
        tl.store(cell.to(tl.pointer_type(tl.int64)), -wrong.to(tl.int64))


@triton.jit
def await_numbers(own, tokens, numbers, local, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Each rank's number of tokens, once the peers' have come, and the largest; the sentinel is put back."""
    block, blocks, one = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64), tl.arange(0, 1)
    place = local + numbers + block * 4 + one
    others = ((1 << WORLD_SIZE) - 1 - (1 << rank)) + one * 0
    words = poll_words(place, blocks * 4, others.to(tl.int32), timeout_ns, status, WORLD_SIZE)
    block_barrier()  # all warps have polled
    counts, most = (), own
    for r in tl.static_range(WORLD_SIZE):
        send_words(place + r * blocks * 4, one * 0 + SENTINEL, (one == 0) & (rank != r))
        count = tl.where(rank == r, own, tl.sum(words[r], axis=0).to(tl.int64))
        count = tl.minimum(tl.maximum(count, 0), tokens)  # the interpreter goes on after it gave up waiting
        counts, most = counts + (count,), tl.maximum(most, count)  # type: ignore[assignment]
    return counts, most


@triton.jit
def number_of(counts, r, WORLD_SIZE: tl.constexpr):
    """The number of tokens of rank r."""
    found = counts[0]
    for i in tl.static_range(1, WORLD_SIZE):
        found = tl.where(r == i, counts[i], found)
    return found


@triton.jit
def clear_lines(
    ids_out, weights_out, counts, tokens, TOPK: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """Write the lines of tokens that nobody has, ids of −1 and weights of 0."""
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for r in tl.range(0, WORLD_SIZE):
        first, end = (r * tokens + number_of(counts, r, WORLD_SIZE)) * TOPK, (r + 1) * tokens * TOPK
        for start in tl.range(first + block * BLOCK, end, blocks * BLOCK):
            at = start + tl.arange(0, BLOCK)
            store_words(ids_out, at, tl.full((BLOCK,), -1, tl.int32), at < end)
            store_words(weights_out, at, tl.full((BLOCK,), 0, tl.int32), (at < end) & (weights_out != 0))


@triton.jit
def senders_of(counts, token, rank, WORLD_SIZE: tl.constexpr):
    """The peers that have the token, as bits."""
    bits = (rank * 0).to(tl.int32)
    for r in tl.static_range(WORLD_SIZE):
        bits |= ((token < counts[r]) & (rank != r)).to(tl.int32) << r
    return bits


@triton.jit
def load_items(source, start, end, wanted, BLOCK: tl.constexpr, ITEMS: tl.constexpr):
    """ITEMS packets a thread of the row at `source`, 4 words each; all loads before the first store."""
    words = ()
    for item in tl.static_range(ITEMS):
        packet = start + item * BLOCK + tl.arange(0, BLOCK)
        words = words + load_packets(source + packet * 16, (packet < end) & wanted)
    return words


@triton.jit
def store_items(target, start, end, words, wanted, BLOCK: tl.constexpr, ITEMS: tl.constexpr):
    """Store what `load_items` returned to the row at `target`."""
    for item in tl.static_range(ITEMS):
        packet = start + item * BLOCK + tl.arange(0, BLOCK)
        in_row = (packet < end) & wanted
        store_packets(
            target + packet * 16, words[4 * item], words[4 * item + 1], words[4 * item + 2], words[4 * item + 3], in_row
        )


@triton.jit
def poll_late(address, seen, item: tl.constexpr, wanted, r, timeout_ns, status):
    """The packets that `peek_packets` saw, those polled for that had not come; the sentinel is put back."""
    w0, w1, w2, w3 = seen[4 * item], seen[4 * item + 1], seen[4 * item + 2], seen[4 * item + 3]
    late = wanted & ((w0 == SENTINEL) | (w1 == SENTINEL) | (w2 == SENTINEL) | (w3 == SENTINEL))
    sender = tl.zeros(address.shape, tl.int32) + r.to(tl.int32)
    p0, p1, p2, p3 = poll_from(address, late, sender, timeout_ns, status)
    empty = tl.full(address.shape, SENTINEL, tl.int32)
    store_packets(address, empty, empty, empty, empty, wanted)
    return tl.where(late, p0, w0), tl.where(late, p1, w1), tl.where(late, p2, w2), tl.where(late, p3, w3)


@triton.jit
def dispatch_few(
    x, ids, weights, out, ids_out, weights_out, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, arena, stage_bytes, few, cell, own, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
):  # fmt: skip
    """Exchange the first `few` tokens of each rank: push lines and packets, poll the lines, then what they announce.

    NUMBERED: a block sends the number `own`, too, polls the peers' numbers first, and writes `limits` and the lines of
    all tokens that nobody has. The stage: lines by (source rank, part, token), then rows, then masks of packets, both
    by (source rank, token), then numbers by (source rank, block).

    Returns:
        NUMBERED: each rank's number of tokens, and the largest one.
    """
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    LINE: tl.constexpr = 2 * next_power_of_2(TOPK)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    slot = SPLIT * few * (LINE * 4)
    data = (stage + WORLD_SIZE * slot + 15) // 16 * 16
    row_bytes = row_packets * 16
    masks = data + WORLD_SIZE * few * row_bytes
    at = tl.arange(0, LINE)
    sent = at % (LINE // 2) < TOPK
    wrong = tl.sum(at, axis=0) * 0
    if NUMBERED:
        numbers = masks + WORLD_SIZE * few * row_packets * 4
        send_number(own, numbers, peers, rank, WORLD_SIZE)

    for token in tl.range(team, tl.minimum(own, few) if NUMBERED else few, teams):
        line = read_line(ids, id_words, weights, token, TOPK, EXPERTS)
        place = stage + rank * slot + ((part * few + token) * LINE + at) * 4
        for i in tl.static_range(WORLD_SIZE - 1):
            send_words(peers[i] + place, line, sent)
        owners = owners_of(line, TOPK, LOCAL)
        row, staged = rank * tokens + token, rank * few + token
        for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
            words = load_items(x + token * row_bytes, start, row_packets, True, BLOCK, ITEMS)
            for item in tl.static_range(ITEMS):
                packet = start + item * BLOCK + tl.arange(0, BLOCK)
                in_row = packet < row_packets
                w0, w1, w2, w3 = words[4 * item], words[4 * item + 1], words[4 * item + 2], words[4 * item + 3]
                sentinels = sentinel_mask_of(w0, w1, w2, w3)
                w0, w1, w2, w3 = escape(w0), escape(w1), escape(w2), escape(w3)
                escaped = in_row & has_escape(w0, w1, w2, w3)
                for i in tl.static_range(WORLD_SIZE - 1):
                    goes = goes_to(owners, (rank + 1 + i) % WORLD_SIZE)
                    target = peers[i] + data + staged * row_bytes + packet * 16
                    store_packets(target, w0, w1, w2, w3, in_row & goes, REMOTE=True)
                    store_word(peers[i] + masks + (staged * row_packets + packet) * 4, sentinels, escaped & goes)
            store_items(out + row * row_bytes, start, row_packets, words, goes_to(owners, rank), BLOCK, ITEMS)
        wrong += write_line(ids_out, weights_out, row, line, rank, part == 0, TOPK, LOCAL)

    bits = tl.where(sent, (1 << WORLD_SIZE) - 1 - (1 << rank), 0).to(tl.int32)
    counts, most = (), own
    if NUMBERED:
        counts, most = await_numbers(own, tokens, numbers, local, rank, timeout_ns, status, WORLD_SIZE)
        write_limits(limits, own, most)
        clear_lines(ids_out, weights_out, counts, tokens, TOPK, BLOCK, WORLD_SIZE)
    for token in tl.range(team, tl.minimum(most, few) if NUMBERED else few, teams):
        place = stage + ((part * few + token) * LINE + at) * 4
        if NUMBERED:
            bits = tl.where(sent, senders_of(counts, token, rank, WORLD_SIZE), 0)
        lines = poll_words(local + place, slot, bits, timeout_ns, status, WORLD_SIZE)
        block_barrier()  # all warps have polled
        for s in tl.range(1, WORLD_SIZE):
            r = (rank + s) % WORLD_SIZE
            line = lines[0]
            for i in tl.static_range(1, WORLD_SIZE):
                line = tl.where(r == i, lines[i], line)
            if TOPK < LINE // 2:
                line = tl.where(sent, line, -1)  # words that do not travel are 0, an expert's number
            is_there = token < number_of(counts, r, WORLD_SIZE) if NUMBERED else True
            if NUMBERED:
                line = tl.where(is_there, line, -1)
            store_words(local + r * slot, place // 4, tl.full((LINE,), SENTINEL, tl.int32), sent & is_there)
            row = r * tokens + token
            wrong += write_line(ids_out, weights_out, row, line, rank, (part == 0) & is_there, TOPK, LOCAL)
            wanted = goes_to(owners_of(line, TOPK, LOCAL), rank)
            come, beside = local + data + (r * few + token) * row_bytes, local + masks + token * row_packets * 4
            for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
                seen = ()
                for item in tl.static_range(ITEMS):
                    packet = start + item * BLOCK + tl.arange(0, BLOCK)
                    seen = seen + peek_packets(come + packet * 16, (packet < row_packets) & wanted)
                for item in tl.static_range(ITEMS):
                    packet = start + item * BLOCK + tl.arange(0, BLOCK)
                    in_row = (packet < row_packets) & wanted
                    w0, w1, w2, w3 = poll_late(come + packet * 16, seen, item, in_row, r, timeout_ns, status)
                    escaped = (in_row & has_escape(w0, w1, w2, w3)).to(tl.int32)
                    mask_slot = few * row_packets * 4
                    found = poll_words(
                        beside + packet * 4, mask_slot, escaped << r.to(tl.int32), timeout_ns, status, WORLD_SIZE
                    )  # fmt: skip
                    said = found[0]
                    for i in tl.static_range(1, WORLD_SIZE):  # 0 but for the sender's
                        said = said | found[i]
                    empty = tl.full((BLOCK,), SENTINEL, tl.int32)
                    store_word(beside + r * mask_slot + packet * 4, empty, escaped != 0)
                    store_packets(
                        out + row * row_bytes + packet * 16,
                        restore(w0, said, 0), restore(w1, said, 1), restore(w2, said, 2), restore(w3, said, 3), in_row,
                    )  # fmt: skip
    tell_wrong(cell, wrong)
    end_call(local, calls)
    return counts, most


@triton.jit
def dispatch_tokens_lamport_kernel(
    x, ids, weights, out, ids_out, weights_out, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, arena, stage_bytes, cell, number, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
):  # fmt: skip
    """All tokens are few."""
    dispatch_few(
        x, ids, weights, out, ids_out, weights_out, id_words, tokens, row_packets,
        local, peers, rank, timeout_ns, status, arena, stage_bytes, tokens,
        cell, own_number(number, tokens, cell, NUMBERED), limits,
        WORLD_SIZE, TOPK, EXPERTS, SPLIT, BLOCK, ITEMS, NUMBERED,
    )  # fmt: skip


@triton.jit
def dispatch_tokens_push_kernel(
    x, ids, weights, out, ids_out, weights_out, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, gather, num_chunks, cell, number, limits, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, copy piece c − 2. NUMBERED: of the tokens from FEW on, if any rank has them.

    The gather area has a ring for each source rank. An entry is a token's line, once for each part, and its row: flags
    go from block to block, so a block may write only what the same block of the peer has read.
    """
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    LINE: tl.constexpr = 2 * next_power_of_2(TOPK)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    span = (tokens + num_chunks - 1) // num_chunks
    ring = tl.minimum(num_chunks, RING)
    row_bytes = row_packets * 16
    line_bytes: tl.constexpr = (LINE * 4 + 15) // 16 * 16
    lines: tl.constexpr = SPLIT * line_bytes
    entry = lines + row_bytes
    slot = ring * span * entry
    at = tl.arange(0, LINE)
    sent = at % (LINE // 2) < TOPK
    wrong = tl.sum(at, axis=0) * 0
    epoch = read_counter(local, EPOCH_OFFSET)

    own, most, first, pieces = own_number(number, tokens, cell, NUMBERED), tokens, 0, num_chunks
    if NUMBERED:
        first = tl.minimum(tokens, FEW)
        counts, most = dispatch_few(
            x, ids, weights, out, ids_out, weights_out, id_words, tokens, row_packets,
            local, peers, rank, timeout_ns, status, arena, stage_bytes, first, cell, own, limits,
            WORLD_SIZE, TOPK, EXPERTS, PARTS, BLOCK, EACH, NUMBERED,
        )  # fmt: skip
        pieces = (tl.maximum(most - first, 0) + span - 1) // span
    goes_on = pieces > 0 if NUMBERED else True

    # Says that this rank reads its gather area no more.
    if goes_on:
        exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for c in tl.range(0, pieces + 2):
        d = c - 2
        if d >= 0:
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
        lap, behind = (c - c % ring) * span, (d - d % ring) * span
        for i in tl.range(team, span, teams):  # a token of each piece in turn, so that stores travel in the meantime
            token, placed = first + c * span + i, first + d * span + i
            if (c < pieces) & (token < own):
                line = read_line(ids, id_words, weights, token, TOPK, EXPERTS)
                place = gather + rank * slot + (token - first - lap) * entry
                for p in tl.static_range(WORLD_SIZE - 1):
                    send_words(peers[p] + place + part * line_bytes + at * 4, line, sent)
                owners = owners_of(line, TOPK, LOCAL)
                row = rank * tokens + token
                wrong += write_line(ids_out, weights_out, row, line, rank, part == 0, TOPK, LOCAL)
                for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
                    words = load_items(x + token * row_bytes, start, row_packets, True, BLOCK, ITEMS)
                    for p in tl.static_range(WORLD_SIZE - 1):
                        goes = goes_to(owners, (rank + 1 + p) % WORLD_SIZE)
                        store_items(peers[p] + place + lines, start, row_packets, words, goes, BLOCK, ITEMS)
                    store_items(out + row * row_bytes, start, row_packets, words, goes_to(owners, rank), BLOCK, ITEMS)
            if (d >= 0) & (placed < most):
                for s in tl.range(1, WORLD_SIZE):
                    r = (rank + s) % WORLD_SIZE
                    come = local + gather + r * slot + (placed - first - behind) * entry
                    if NUMBERED:
                        is_there = placed < number_of(counts, r, WORLD_SIZE)
                    line = load_words(come + part * line_bytes, at, sent & is_there if NUMBERED else sent, -1)
                    row = r * tokens + placed
                    writes = (part == 0) & is_there if NUMBERED else part == 0
                    wrong += write_line(ids_out, weights_out, row, line, rank, writes, TOPK, LOCAL)
                    wanted = goes_to(owners_of(line, TOPK, LOCAL), rank)
                    for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
                        words = load_items(come + lines, start, row_packets, wanted, BLOCK, ITEMS)
                        store_items(out + row * row_bytes, start, row_packets, words, wanted, BLOCK, ITEMS)
        if c < pieces:
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
    tell_wrong(cell, wrong)
    if goes_on:
        write_counter(local, epoch + 1 + pieces, EPOCH_OFFSET)


@triton.jit
def dispatch_tokens_direct_kernel(
    x, ids, weights, out, ids_out, weights_out, id_words, out_peers, ids_peers, weights_peers, tokens, row_packets,
    local, peers, rank, timeout_ns, status, gather, cell, number, limits, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Write lines and rows into the outputs of all ranks.

    Flag 1 of a block: what this rank's stream did before has ended. Flag 2: the block has sent all it has to. The
    gather area holds a word of every (source rank, block): how many ids of its tokens are no expert.
    """
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    row_bytes = row_packets * 16
    one = tl.arange(0, 1)
    wrong = one * 0
    own, first, goes_on = own_number(number, tokens, cell, NUMBERED), 0, True
    epoch = read_counter(local, EPOCH_OFFSET)
    if NUMBERED:
        first = tl.minimum(tokens, FEW)
        _counts, most = dispatch_few(
            x, ids, weights, out, ids_out, weights_out, id_words, tokens, row_packets,
            local, peers, rank, timeout_ns, status, arena, stage_bytes, first, cell, own, limits,
            WORLD_SIZE, TOPK, EXPERTS, PARTS, BLOCK, EACH, NUMBERED,
        )  # fmt: skip
        goes_on = most > first
    if goes_on:
        exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for token in tl.range(first + team, own, teams):
        line = read_line(ids, id_words, weights, token, TOPK, EXPERTS)
        owners = owners_of(line, TOPK, LOCAL)
        row = rank * tokens + token
        for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
            words = load_items(x + token * row_bytes, start, row_packets, True, BLOCK, ITEMS)
            for i in tl.static_range(WORLD_SIZE - 1):
                goes = goes_to(owners, (rank + 1 + i) % WORLD_SIZE)
                store_items(out_peers[i] + row * row_bytes, start, row_packets, words, goes, BLOCK, ITEMS)
            store_items(out + row * row_bytes, start, row_packets, words, goes_to(owners, rank), BLOCK, ITEMS)
        for i in tl.static_range(WORLD_SIZE - 1):
            peer = (rank + 1 + i) % WORLD_SIZE
            write_line(ids_peers[i], weights_peers[i], row, line, peer, part == 0, TOPK, LOCAL)
        wrong += write_line(ids_out, weights_out, row, line, rank, part == 0, TOPK, LOCAL)
    if goes_on:
        for i in tl.static_range(WORLD_SIZE - 1):
            send_words(peers[i] + gather + (rank * blocks + block) * 4 + one, wrong, one == 0)
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            peer = (rank + 1 + i) % WORLD_SIZE
            wrong += load_words(local + gather, peer * blocks + block + one, one == 0, 0)
    tell_wrong(cell, tl.sum(wrong, axis=0))
    if goes_on:
        write_counter(local, epoch + 2, EPOCH_OFFSET)


@triton.jit
def held_here(held, row, TOPK: tl.constexpr):
    """True if this rank has experts of the token in `row`, be there room for it or not."""
    k = tl.arange(0, next_power_of_2(TOPK))
    return tl.max((load_words(held, row * TOPK + k, k < TOPK, -1) != -1).to(tl.int32), axis=0) > 0


@triton.jit
def parts_held(held, weights, row, TOPK: tl.constexpr, SORTED: tl.constexpr):
    """By k: where this rank's result for the token in `row` stands, its weight, and if there is one; SORTED only."""
    places, factors, there = (), (), ()
    if SORTED:
        for k in tl.static_range(TOPK):
            place = load_word(held, row * TOPK + k).to(tl.int64)
            places = places + (place,)  # type: ignore[assignment]
            factors = factors + (load_word(weights, row * TOPK + k).to(tl.float32, bitcast=True),)  # type: ignore[assignment]
            there = there + (place >= 0,)  # type: ignore[assignment]
    return places, factors, there


@triton.jit
def load_sums(
    results, row, places, factors, there, start, row_packets, wanted,
    TOPK: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """`load_items` of this rank's sum for the token in `row`, whose parts `parts_held` found."""
    if SORTED:
        parts = ()
        for item in tl.static_range(ITEMS):  # all loads before the first sum
            packet = start + item * BLOCK + tl.arange(0, BLOCK)
            for k in tl.static_range(TOPK):
                in_row = (packet < row_packets) & wanted & there[k]
                parts = parts + load_packets(results + (places[k] * row_packets + packet) * 16, in_row)
        words = ()
        for item in tl.static_range(ITEMS):
            of_item = ()
            for w in tl.static_range(4 * TOPK):
                of_item = of_item + (parts[4 * TOPK * item + w],)  # type: ignore[assignment]
            words = words + weigh_packets(of_item, factors, there, TOPK, DTYPE)
        return words
    else:
        return load_items(results + row * (row_packets * 16), start, row_packets, wanted, BLOCK, ITEMS)


@triton.jit
def insert_sums(words, own, rank, r: tl.constexpr, ITEMS: tl.constexpr):
    """The packets of rank r: `words`, or if that is this rank `own`."""
    found = ()
    for w in tl.static_range(4 * ITEMS):
        found = found + (tl.where(rank == r, own[w], words[w]),)  # type: ignore[assignment]
    return found


@triton.jit
def ranks_of(ids, id_words, token, TOPK: tl.constexpr, LOCAL: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """For each rank, whether it has experts of an own token."""
    k = tl.arange(0, next_power_of_2(TOPK))
    expert = load_words(ids, (token * TOPK + k) * id_words, k < TOPK, -1)
    owner = tl.where(expert >= 0, tl.maximum(expert, 0) // LOCAL, -1)
    there = ()
    for r in tl.static_range(WORLD_SIZE):
        there = there + (goes_to(owner, r),)  # type: ignore[assignment]
    return there


@triton.jit
def store_sums(
    y, token, words, start, row_packets, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the ordered sums of ITEMS packets a thread; `words` has every rank's packets in order."""
    for item in tl.static_range(ITEMS):
        parts = ()
        for r in tl.static_range(WORLD_SIZE):
            for w in tl.static_range(4):
                parts = parts + (words[4 * (r * ITEMS + item) + w],)  # type: ignore[assignment]
        packet = start + item * BLOCK + tl.arange(0, BLOCK)
        s0, s1, s2, s3 = sum_packets(parts, DTYPE, False, WORLD_SIZE)
        store_packets(y + (token * row_packets + packet) * 16, s0, s1, s2, s3, packet < row_packets)


@triton.jit
def combine_few(
    results, held, weights, ids, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, arena, stage_bytes, few, own_tokens, most,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Push the rows for the peers' first `most` tokens, then sum the rows of `own_tokens` own ones as they come.

    The stage: a word of every (source rank, block), then rows by (source rank, token), `few` of each rank.
    """
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    row_bytes = row_packets * 16
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    data = stage + WORLD_SIZE * blocks * 16
    one = tl.arange(0, 1)
    for i in tl.static_range(WORLD_SIZE - 1):
        send_words(peers[i] + stage + (rank * blocks + block) * 16 + one, one + 1, one == 0)
    for token in tl.range(team, most, teams):
        for i in tl.static_range(WORLD_SIZE - 1):
            row = (rank + 1 + i) % WORLD_SIZE * tokens + token
            goes = held_here(held, row, TOPK)
            places, factors, held_parts = parts_held(held, weights, row, TOPK, SORTED)
            target = peers[i] + data + (rank * few + token) * row_bytes
            for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
                words = load_sums(
                    results, row, places, factors, held_parts, start, row_packets, goes,
                    TOPK, DTYPE, SORTED, BLOCK, ITEMS,
                )  # fmt: skip
                for item in tl.static_range(ITEMS):
                    packet = start + item * BLOCK + tl.arange(0, BLOCK)
                    w0, w1, w2, w3 = words[4 * item], words[4 * item + 1], words[4 * item + 2], words[4 * item + 3]
                    w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
                    store_packets(target + packet * 16, w0, w1, w2, w3, (packet < row_packets) & goes, REMOTE=True)

    for token in tl.range(team, own_tokens, teams):
        there = ranks_of(ids, id_words, token, TOPK, LOCAL, WORLD_SIZE)
        own_row = rank * tokens + token
        places, factors, held_parts = parts_held(held, weights, own_row, TOPK, SORTED)
        own = results + own_row * row_bytes
        for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
            seen = ()
            for r in tl.static_range(WORLD_SIZE):
                come = local + data + (r * few + token) * row_bytes
                come = come if SORTED else tl.where(rank == r, own, come)
                peeked = there[r] & (rank != r) if SORTED else there[r]
                for item in tl.static_range(ITEMS):
                    packet = start + item * BLOCK + tl.arange(0, BLOCK)
                    seen = seen + peek_packets(come + packet * 16, (packet < row_packets) & peeked)
            if SORTED:
                sums = load_sums(
                    results, own_row, places, factors, held_parts, start, row_packets, True,
                    TOPK, DTYPE, SORTED, BLOCK, ITEMS,
                )  # fmt: skip
            words = ()
            for r in tl.static_range(WORLD_SIZE):
                come = local + data + (r * few + token) * row_bytes
                packets = ()
                for item in tl.static_range(ITEMS):
                    packet = start + item * BLOCK + tl.arange(0, BLOCK)
                    wanted = (packet < row_packets) & there[r] & (rank != r)
                    packets = packets + poll_late(
                        come + packet * 16, seen, r * ITEMS + item, wanted, rank * 0 + r, timeout_ns, status
                    )  # fmt: skip
                words = words + (insert_sums(packets, sums, rank, r, ITEMS) if SORTED else packets)
            store_sums(y, token, words, start, row_packets, DTYPE, BLOCK, ITEMS, WORLD_SIZE)

    others = ((1 << WORLD_SIZE) - 1 - (1 << rank)) + one * 0
    hello = local + stage + block * 16 + one
    poll_words(hello, blocks * 16, others.to(tl.int32), timeout_ns, status, WORLD_SIZE)
    block_barrier()
    for r in tl.static_range(WORLD_SIZE):
        send_words(hello + r * blocks * 16, one * 0 + SENTINEL, (one == 0) & (rank != r))
    end_call(local, calls)


@triton.jit
def combine_tokens_lamport_kernel(
    results, held, weights, ids, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, arena, stage_bytes, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
):  # fmt: skip
    """All tokens are few."""
    combine_few(
        results, held, weights, ids, y, id_words, tokens, row_packets,
        local, peers, rank, timeout_ns, status, arena, stage_bytes, tokens,
        limit_of(limits, 0, tokens, NUMBERED), limit_of(limits, 1, tokens, NUMBERED),
        WORLD_SIZE, TOPK, LOCAL, DTYPE, SORTED, SPLIT, BLOCK, ITEMS,
    )  # fmt: skip


@triton.jit
def combine_tokens_push_kernel(
    results, held, weights, ids, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, gather, num_chunks, limits, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """In round c: push the rows for piece c of every rank's tokens, sum piece c − 1 of the own ones.

    NUMBERED: of the tokens from FEW on, if any rank has them.
    """
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    span = (tokens + num_chunks - 1) // num_chunks
    ring = tl.minimum(num_chunks, RING)
    row_bytes = row_packets * 16
    slot = ring * span * row_bytes
    epoch = read_counter(local, EPOCH_OFFSET)
    own_tokens, most = limit_of(limits, 0, tokens, NUMBERED), limit_of(limits, 1, tokens, NUMBERED)
    first, pieces = 0, num_chunks
    if NUMBERED:
        first = tl.minimum(tokens, FEW)
        combine_few(
            results, held, weights, ids, y, id_words, tokens, row_packets,
            local, peers, rank, timeout_ns, status, arena, stage_bytes, first,
            tl.minimum(own_tokens, first), tl.minimum(most, first),
            WORLD_SIZE, TOPK, LOCAL, DTYPE, SORTED, PARTS, BLOCK, EACH,
        )  # fmt: skip
        pieces = (tl.maximum(most - first, 0) + span - 1) // span
    goes_on = pieces > 0 if NUMBERED else True
    # Says that this rank reads its gather area no more.
    if goes_on:
        exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for c in tl.range(0, pieces + 1):
        d = c - 1
        lap, behind = (c - c % ring) * span, (d - d % ring) * span
        if c < pieces:
            for token in tl.range(first + c * span + team, tl.minimum(most, first + (c + 1) * span), teams):
                for i in tl.static_range(WORLD_SIZE - 1):
                    row = (rank + 1 + i) % WORLD_SIZE * tokens + token
                    goes = held_here(held, row, TOPK)
                    places, factors, held_parts = parts_held(held, weights, row, TOPK, SORTED)
                    target = peers[i] + gather + rank * slot + (token - first - lap) * row_bytes
                    for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
                        words = load_sums(
                            results, row, places, factors, held_parts, start, row_packets, goes,
                            TOPK, DTYPE, SORTED, BLOCK, ITEMS,
                        )  # fmt: skip
                        store_items(target, start, row_packets, words, goes, BLOCK, ITEMS)
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        if d >= 0:
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for summed in tl.range(first + d * span + team, tl.minimum(own_tokens, first + (d + 1) * span), teams):
                there = ranks_of(ids, id_words, summed, TOPK, LOCAL, WORLD_SIZE)
                own_row = rank * tokens + summed
                places, factors, held_parts = parts_held(held, weights, own_row, TOPK, SORTED)
                own = results + own_row * row_bytes
                come = local + gather + (summed - first - behind) * row_bytes
                for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
                    if SORTED:
                        sums = load_sums(
                            results, own_row, places, factors, held_parts, start, row_packets, True,
                            TOPK, DTYPE, SORTED, BLOCK, ITEMS,
                        )  # fmt: skip
                    words = ()
                    for r in tl.static_range(WORLD_SIZE):
                        source = come + r * slot if SORTED else tl.where(rank == r, own, come + r * slot)
                        wanted = there[r] & (rank != r) if SORTED else there[r]
                        packets = load_items(source, start, row_packets, wanted, BLOCK, ITEMS)
                        words = words + (insert_sums(packets, sums, rank, r, ITEMS) if SORTED else packets)
                    store_sums(y, summed, words, start, row_packets, DTYPE, BLOCK, ITEMS, WORLD_SIZE)
    if goes_on:
        write_counter(local, epoch + 1 + pieces, EPOCH_OFFSET)


@triton.jit
def combine_tokens_pull_kernel(
    results, held, ids, y, id_words, input_peers, tokens, row_packets,
    local, peers, rank, timeout_ns, status, limits, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, NUMBERED: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Sum the rows for the own tokens where they are.

    Flag 1 of a block: this rank's rows are complete. Flag 2: the block reads its peers' rows no more.
    """
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    epoch = read_counter(local, EPOCH_OFFSET)
    own_tokens, first, goes_on = limit_of(limits, 0, tokens, NUMBERED), 0, True
    if NUMBERED:
        first = tl.minimum(tokens, FEW)
        most = limit_of(limits, 1, tokens, NUMBERED)
        combine_few(
            results, held, 0, ids, y, id_words, tokens, row_packets,
            local, peers, rank, timeout_ns, status, arena, stage_bytes, first,
            tl.minimum(own_tokens, first), tl.minimum(most, first),
            WORLD_SIZE, TOPK, LOCAL, DTYPE, False, PARTS, BLOCK, EACH,
        )  # fmt: skip
        goes_on = most > first
    if goes_on:
        exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for token in tl.range(first + team, own_tokens, teams):
        there = ranks_of(ids, id_words, token, TOPK, LOCAL, WORLD_SIZE)
        row = (rank * tokens + token) * (row_packets * 16)
        for start in tl.range(part * BLOCK * ITEMS, row_packets, SPLIT * BLOCK * ITEMS):
            words = ()
            for r in tl.static_range(WORLD_SIZE):
                source = address_of(input_peers, results, r, rank, WORLD_SIZE) + row
                words = words + load_items(source, start, row_packets, there[r], BLOCK, ITEMS)
            store_sums(y, token, words, start, row_packets, DTYPE, BLOCK, ITEMS, WORLD_SIZE)
    if goes_on:
        exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
        write_counter(local, epoch + 2, EPOCH_OFFSET)


def are_few(problem: Problem, limits: Limits) -> bool:
    """True if tokens, with masks, may well go through a stage without flags."""
    tokens_bytes = problem.world_size * problem.shape[0] * sizes_of(problem).row_bytes
    return problem.shape[0] <= FEW and 2 * tokens_bytes <= limits.stage_bytes


# Constants of the kernels that send the first tokens of calls with a number without flags, and of other calls.
_WITHOUT_NUMBER: Mapping[str, Value] = {"limits": 0, "NUMBERED": False}
_WITHOUT_FEW: Mapping[str, Value] = {"arena": 0, "stage_bytes": 0, "FEW": 0, "PARTS": 1, "EACH": 1}
_NOWHERE = (0,) * (MAX_WORLD_SIZE - 1)  # peers' addresses of what is not there


class _ByToken(GridVariant):
    """A variant of the layout `tokens`; its kernel has the constant ITEMS.

    Attributes:
        in_buffers: peers address the outputs of ep_dispatch, or the rows that ep_combine is given.
        few: of a call with a number, so many tokens of each rank go without flags, if a stage has room for them.
    """

    by_token = True
    in_buffers = False
    few = FEW

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        if self.in_buffers and (problem.input_kind == "plain" or problem.layout == BY_RANK):
            return "it takes rows of tokens in memory that peers address (ep_buffers)"
        quantized = self.numerics == "quantized"
        return refuse_result(problem, quantized=quantized) or super().refuse(problem, limits)

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        wanted = problem.input_kind == "symmetric"
        return self.in_buffers == wanted and not are_few(problem, limits)

    def token_bytes(self, problem: Problem) -> int:
        return problem.world_size * sizes_of(problem).row_bytes

    def line_bytes(self, problem: Problem) -> int:
        """Bytes of a token's ids and weights as they travel."""
        return 8 * power_of_2(problem.shape[2])

    def packets_held(self, problem: Problem, config: Config) -> int:
        """Packets that a thread holds at once."""
        return int(config["items"])

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        most = 16 if problem.layout == BY_RANK else 8
        if limits.backend == "cuda" and self.packets_held(problem, config) > most:
            return f"{config['items']} packets of {problem.world_size} ranks do not fit into a thread's registers"
        return super().refuse_config(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {**self.widest_grid(problem, limits), "chunk_tokens": 256}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "ITEMS": config["items"], **self.plain}

    def few_bytes(self, problem: Problem, config: Config, few: int, parts: int) -> int:
        """Bytes of a stage in a call with a number, if `few` tokens of each rank go there in `parts` parts."""
        raise NotImplementedError

    def with_number(self, problem: Problem, config: Config, layout: LaneLayout) -> tuple[dict[str, Value], int]:
        """Constants of the kernel for calls with a number, and the bytes of a stage that it takes; none if none fits.

        64 of the few tokens are work for all blocks.
        """
        if not self.plain:
            return {}, 0
        few, parts, each = problem.shape[0], int(config["split"]), int(config["items"])
        if by_flags := "FEW" in self.plain:
            few, packets, threads = min(few, self.few), self.packets(problem), 32 * int(config["num_warps"])
            parts = max(min(int(config["num_blocks"]) // 64, power_of_2(-(-packets // threads)), 8), 1)
            each = 1 if threads > 512 else min(each, power_of_2(-(-packets // (parts * threads))))  # else it spills
        while (needed := self.few_bytes(problem, config, few, parts)) > layout.stage_bytes and few and by_flags:
            few //= 2
        if needed > layout.stage_bytes:
            return {}, 0
        return {"NUMBERED": True, **({"FEW": few, "PARTS": parts, "EACH": each} if by_flags else {})}, needed

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        return super().lane_room(problem, config, layout) | Room(stage=self.with_number(problem, config, layout)[1])

    def numbered(
        self, problem: Problem, config: Config, workspace: Workspace, arguments: tuple[Any, ...]
    ) -> Callable[[], Callable[..., None] | None]:
        """`further` of calls with a number."""
        layout = workspace.layout
        constants, _ = self.with_number(problem, config, layout)
        if not constants:
            return lambda: None
        known = {"arena": layout.arena, "stage_bytes": layout.stage_bytes}
        names = [name for name in self.plain if name not in constants]
        return self.further(problem, config, workspace, arguments, names, known, **dict[str, Any](constants))


class _Lamport(_ByToken):
    name = "tokens_lamport"
    space = Space({**GRID, "items": Choice(1, 2, 4)})
    trailing_arguments = ("arena", "stage_bytes")
    limit_name = "stage_bytes"

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        return are_few(problem, limits)


class _Push(_ByToken):
    name = "tokens_push"
    space = Space({**GRID, "chunk_tokens": PowerOfTwo(1, 1024), "items": Choice(1, 2, 4)})


class _InBuffers(_ByToken):
    """Everything in one piece, past the workspace.

    On two H200 4096 tokens take 171 µs to dispatch and 182 µs to combine with 128 blocks of 8 warps, 196 and 253 µs
    with 24 blocks of 32 warps and one packet a thread.
    """

    space = Space(
        {
            "num_blocks": Choice(1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512), "num_warps": PowerOfTwo(1, 32),
            "split": GRID["split"], "items": Choice(1, 2, 4),
        }
    )  # fmt: skip
    in_buffers = True

    def token_bytes(self, problem: Problem) -> int:
        return 0


class _Dispatch(_ByToken):
    op = "ep_dispatch"
    plain: Mapping[str, Value] = {"number": 0, **_WITHOUT_NUMBER, **_WITHOUT_FEW}

    def few_bytes(self, problem: Problem, config: Config, few: int, parts: int) -> int:
        of_token = parts * self.line_bytes(problem) + self.packets(problem) * (PACKET_BYTES + 4)  # with masks
        return problem.world_size * (few * of_token + 4 * int(config["num_blocks"])) + PACKET_BYTES

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "EXPERTS": sizes_of(problem).experts}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        s, overflow = sizes_of(problem), Overflow.of(workspace.group, workspace.device)
        kernel = bind_kernel(self.request(problem, config), int(config["num_blocks"]), workspace.device)
        sizes = (s.tokens, s.row_bytes // PACKET_BYTES)
        extra = (*self.arguments(problem, config, workspace), overflow.cell.data_ptr())
        given = (None,) * (10 if self.in_buffers else 7)
        arguments = (*given, *sizes, *lane_arguments(problem, workspace), *extra)
        launch = kernel.fix(arguments)
        numbered = self.numbered(problem, config, workspace, arguments)
        on_host, peers_of = workspace.device.type == "cpu", workspace.peers_of

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            overflow.check(workspace)
            x, ids, *rest = inputs
            outputs, limits = outputs[:3], outputs[3:]
            number = rest.pop() if limits and limits[0].numel() else None
            chosen, further, code = launch, [], None
            if number is not None and (of_number := numbered()) is not None:
                chosen, further = of_number, [number.data_ptr(), limits[0].data_ptr()]
            weights = rest[0] if rest else None
            if number is not None and not further:
                ids, weights, code = within_number(ids, weights, number, limits[0])
            at_weights = 0 if weights is None else weights.data_ptr()
            addresses = [output.data_ptr() if output.numel() else 0 for output in outputs]
            peers = [peers_of(each) if each.numel() else _NOWHERE for each in outputs] if self.in_buffers else ()
            words = ids.element_size() // 4
            chosen(stream, x.data_ptr(), ids.data_ptr(), at_weights, *addresses, words, *peers, *further)
            if code is not None:
                overflow.note(code, s.tokens, workspace)
            if on_host:  # the interpreter has run the kernel to its end
                overflow.check(workspace)

        return run


class _Combine(_ByToken):
    op = "ep_combine"
    plain: Mapping[str, Value] = {**_WITHOUT_NUMBER, **_WITHOUT_FEW}

    def few_bytes(self, problem: Problem, config: Config, few: int, parts: int) -> int:
        words = int(config["num_blocks"]) * PACKET_BYTES
        return problem.world_size * (few * sizes_of(problem).row_bytes + words)

    def packets_held(self, problem: Problem, config: Config) -> int:
        items, each = int(config["items"]), problem.world_size
        if problem.layout == BY_RANK and items > 1:  # a thread holds the rows of all experts at once
            each = max(each, problem.shape[2])
        return each * items

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        more: dict[str, Value] = {"LOCAL": sizes_of(problem).local, "DTYPE": problem.dtype}
        if not self.in_buffers:
            more["SORTED"] = problem.layout == BY_RANK
        return {**super().constants(problem, config), **more}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        s, overflow = sizes_of(problem), Overflow.of(workspace.group, workspace.device)
        kernel = bind_kernel(self.request(problem, config), int(config["num_blocks"]), workspace.device)
        sizes = (s.tokens, s.row_bytes // PACKET_BYTES)
        extra, peers_of = self.arguments(problem, config, workspace), workspace.peers_of
        arguments = (*(None,) * 6, *sizes, *lane_arguments(problem, workspace), *extra)
        launch, numbered = kernel.fix(arguments), self.numbered(problem, config, workspace, arguments)
        by_rank, in_buffers = problem.layout == BY_RANK, self.in_buffers

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            overflow.check(workspace)
            chosen, further = launch, []
            if by_rank:
                results, weights, ids, held, *limits = inputs
                factors: tuple[int, ...] = (weights.data_ptr(),)
            else:
                results, held, ids, *limits = inputs
                factors = () if in_buffers else (0,)
            if limits and (of_number := numbered()) is not None:
                chosen, further = of_number, [limits[0].data_ptr()]
            elif limits:
                ids = in_use(ids, limits[0][:1], NOT_HERE)
            peers = (peers_of(results),) if in_buffers else ()
            addresses = (results.data_ptr(), held.data_ptr(), *factors, ids.data_ptr(), outputs[0].data_ptr())
            chosen(stream, *addresses, ids.element_size() // 4, *peers, *further)

        return run


class DispatchTokensLamport(_Lamport, _Dispatch, registered=True):
    summary = "layout tokens, without flags: lines and tokens announce themselves; best for few tokens"
    kernels = (dispatch_tokens_lamport_kernel,)
    plain: Mapping[str, Value] = {"number": 0, **_WITHOUT_NUMBER}

    def token_bytes(self, problem: Problem) -> int:
        return problem.world_size * self.packets(problem) * (PACKET_BYTES + 4)  # with masks

    def further_bytes(self, problem: Problem, config: Config) -> int:
        lines = int(config["split"]) * problem.shape[0] * self.line_bytes(problem)
        return problem.world_size * lines + PACKET_BYTES


class DispatchTokensPush(_Push, _Dispatch, registered=True):
    summary = "layout tokens, in pieces through the peers' memory ordered by flags; for many tokens"
    kernels = (dispatch_tokens_push_kernel,)

    def further_bytes(self, problem: Problem, config: Config) -> int:
        entries = min(self.num_chunks(problem, config), int(RING.value)) * self.span(problem, config)
        lines = problem.world_size * entries * int(config["split"])
        return lines * max(self.line_bytes(problem), PACKET_BYTES)


class CombineTokensLamport(_Lamport, _Combine, registered=True):
    summary = "layouts tokens and rank, without flags: results announce themselves; best for few tokens"
    kernels = (combine_tokens_lamport_kernel,)
    plain = _WITHOUT_NUMBER

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        preferred = super().preferred_config(problem, limits)
        if problem.layout == BY_RANK and problem.shape[0] >= 128:  # it reads a row of every expert
            preferred |= {"num_blocks": 256, "num_warps": 8, "split": 4, "items": 1}
        return preferred

    def further_bytes(self, problem: Problem, config: Config) -> int:
        return problem.world_size * int(config["num_blocks"]) * PACKET_BYTES  # of the words of blocks


class CombineTokensPush(_Push, _Combine, registered=True):
    summary = "layouts tokens and rank, results in pieces through the peers' memory ordered by flags; for many tokens"
    kernels = (combine_tokens_push_kernel,)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        if problem.layout != BY_RANK or problem.shape[0] < 512 or max(problem.shape[2], 2 * problem.world_size) > 8:
            return super().preferred_config(problem, limits)
        items = 2 if problem.world_size == 2 and ITEMSIZE[problem.dtype] == 2 else 1  # more spill
        return {**self.full_grid(problem, limits), "items": items}


class DispatchTokensDirect(_InBuffers, _Dispatch, registered=True):
    name = "tokens_direct"
    summary = "layout tokens, written straight into the peers' buffers; for many tokens"
    kernels = (dispatch_tokens_direct_kernel,)
    trailing_arguments: tuple[str, ...] = ("gather",)

    def further_bytes(self, problem: Problem, config: Config) -> int:
        return 4 * problem.world_size * int(config["num_blocks"])


class CombineTokensPull(_InBuffers, _Combine, registered=True):
    name = "tokens_pull"
    summary = "layout tokens, results read where the peers' experts wrote them; for many tokens"
    kernels = (combine_tokens_pull_kernel,)
    trailing_arguments: tuple[str, ...] = ()
