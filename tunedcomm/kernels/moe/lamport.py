"""lamport: tokens and results are pushed without flags and announce themselves; best for few tokens.

**ep_dispatch.** Block 0 sends its rank's ids to every peer, and every block pushes its parts of tokens, each once to a
rank. Then every block polls the ids of all ranks: from them alone it knows where a token's rows are, behind those of
the experts before it, of the ranks before it, and of the tokens before it. It polls the packets of its parts and writes
them there. Tokens are escaped, as by `all_to_all`'s `lamport`. The own ids are counted while the others travel.

**Ids have many readers.** All blocks poll the same ids, so none of them may put the sentinel back before the others
have read. Each block that has polled them counts itself in a word of the own stage, which its peers do not know. The
last block has no tokens: it writes counts and offsets, waits until all others have counted themselves, and puts the
sentinel back in the place of the ids and of that word. It also sends weights that travel along, and takes the peers'.

- No word is overwritten before its readers had it. A block counts itself by a release behind a block barrier, after all
  its warps have polled. The last block acquires the complete number and puts the sentinel back behind another barrier,
  so every poll comes before. A packet of a token, its mask or weights has one reader, which puts the sentinel back.
- No old word is taken for a new one. When a call ends, its stage holds nothing but sentinels, as the arena's rule asks,
  so other ops may use it next. Each word is stored once in a call, by one thread.
- A rank may be one call ahead. It then writes the other stage. It comes to this one again in its call k + 2, after its
  call k + 1 polled ids that this rank sent in call k + 1, after all of call k, in stream order. Every block waits for
  ids of every peer, so this holds even if no token travels.
- A number of tokens changes the words that travel, not which do: the ids and weights of all tokens are sent, polled and
  cleared, −1 and 0 in the place of those left out. Who sends and who polls a token both go by these ids. ep_combine has
  no rows of tokens left out, so nobody sends results for them, nobody polls these, and nothing remains in the stage.
- Replays of a graph count calls in the lane as eager calls do. After a lost peer the stage may hold anything: the group
  has ended then.

Blocks wait for block 0 of the peers, and the last one for the others of its own grid, which wait for no block of it.
The interpreter runs blocks in order, so the last one finds all others counted.

**ep_combine.** Results go to (token, k) of the stage of the token's rank, with the sentinel, a −0.0, turned into +0.0:
sums begin with +0.0, so that changes nothing. First all K packets of a sum are looked at together, then those that are
late are waited for. Not every rank has results for every other, so each block also sends each peer a word.

**The word of a block** in ep_combine is polled by all its warps. They put the sentinel back behind a block barrier, or
a slow warp would find it in the place of the word. And it is stored by one thread (`send_words`): what a slow warp
stores again may come after its reader has put the sentinel back, and be read two calls later.

Example:
    ep_dispatch, 2 ranks, 1 token of 8 bf16 elements (1 packet), 4 experts, layout `padded`, capacity 2. Both tokens go
    to expert 1. Rank 1 sends the id 1 and the packet to rank 0, which finds one earlier token with that id, its own,
    and writes the packet to row 1 · 2 + 1. Rank 1 gets the id 1 of rank 0, an expert that is not here: row −1.

Numerics: ordered. Graph-safe: call counters live in the lane.
Source: own; the protocol is as in `all_reduce`'s `lamport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from triton import next_power_of_2

from tunedcomm.kernels.common.feasibility import power_of_2
from tunedcomm.kernels.common.lamport import end_call
from tunedcomm.kernels.common.lane import STATE_OFFSET, read_counter
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape,
    escape_sentinel,
    has_escape,
    packets_of,
    restore,
    sentinel_mask_of,
    weigh_packets,
)
from tunedcomm.kernels.common.sync import (
    INTERPRET,
    SENTINEL,
    load_packets,
    poll_from,
    poll_packets,
    poll_words,
    store_packets,
    store_word,
    wait,
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
    limit_of,
    load_words,
    own_number,
    parts_of_sum,
    quantise_kernel,
    send_results,
    send_words,
    store_words,
    tell_overflow,
    write_limits,
    write_token,
)
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem

NOBODY = tl.constexpr(-0x7FFFFFFF80000000)  # two sentinels as int64


@triton.jit
def own_ids(ids, id_words, packet, num_ids, EXPERTS: tl.constexpr):
    """Packets of the own ids as they travel: −2 for an id of no expert that is not −1, and −1 behind the last id."""
    words = ()
    for w in tl.static_range(4):
        at = packet * 4 + w
        expert = load_words(ids, at * id_words, at < num_ids, -1)
        words = words + (tl.where((expert < -1) | (expert >= EXPERTS), -2, expert),)  # type: ignore[assignment]
    return words


@triton.jit
def in_order(w0, w1, w2, w3):
    """The words of packets in a row."""
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def poll_ids(own_line, lines, slot, packet, mask, q, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """Wait for the peers' ids; line s of the result has the ids of rank (rank + s) mod WORLD_SIZE, `own_line` first."""
    words = poll_packets(lines + packet * 16, slot, mask, rank, timeout_ns, status, WORLD_SIZE)
    come, found = (), (own_line,)
    for i in tl.static_range(WORLD_SIZE):
        line = in_order(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
        come = come + (tl.where(q * 4 < slot, line, -1),)  # type: ignore[assignment]
    for s in tl.static_range(1, WORLD_SIZE):
        line = own_line
        for i in tl.static_range(WORLD_SIZE):
            line = tl.where((rank + s) % WORLD_SIZE == i, come[i], line)
        found = found + (line,)  # type: ignore[assignment]
    block_barrier()  # all warps have polled
    return found


@triton.jit
def count_ids(line, first, COUNT: tl.constexpr, BINS: tl.constexpr):
    """Count how often a line names each of the COUNT experts from `first` on."""
    expert = line - first
    return tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < COUNT))


@triton.jit
def first_rows(counts, capacity, alignment, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """The first row of each expert of this rank, and the row behind its last one, from their counts; int64."""
    if PADDED:
        begins = tl.arange(0, WIDTH).to(tl.int64) * capacity
        return begins, begins + capacity
    else:
        aligned = (counts.to(tl.int64) + alignment - 1) // alignment * alignment
        ends = tl.cumsum(aligned, 0)
        return ends - aligned, ends


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
def take_packets(
    come, beside, mask_slot, seen, item: tl.constexpr, r, in_row, timeout_ns, status, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """The words of packets of rank r that `peek_packets` saw; poll the late ones, and put the sentinel back."""
    w0, w1, w2, w3 = seen[4 * item], seen[4 * item + 1], seen[4 * item + 2], seen[4 * item + 3]
    late = in_row & ((w0 == SENTINEL) | (w1 == SENTINEL) | (w2 == SENTINEL) | (w3 == SENTINEL))
    sender = tl.zeros(come.shape, tl.int32) + r.to(tl.int32)
    p0, p1, p2, p3 = poll_from(come, late, sender, timeout_ns, status)
    w0, w1, w2, w3 = tl.where(late, p0, w0), tl.where(late, p1, w1), tl.where(late, p2, w2), tl.where(late, p3, w3)
    escaped = has_escape(w0, w1, w2, w3) & in_row
    found = poll_words(beside, mask_slot, escaped.to(tl.int32) << sender, timeout_ns, status, WORLD_SIZE)
    said = found[0]
    for i in tl.static_range(1, WORLD_SIZE):  # 0 but for the sender's
        said = said | found[i]
    empty = tl.full(come.shape, SENTINEL, tl.int32)
    store_packets(come, empty, empty, empty, empty, in_row)
    store_word(beside + r * mask_slot, empty, escaped)
    return restore(w0, said, 0), restore(w1, said, 1), restore(w2, said, 2), restore(w3, said, 3)


@triton.jit
def push_tokens(
    x, ids, id_words, first, end, tokens, teams, part, wire_packets, data, masks, peers, rank,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Push a part of every `teams`-th token from `first` to before `end` to the ranks of its experts."""
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    k = tl.arange(0, next_power_of_2(TOPK))
    for token in tl.range(first, end, teams):
        expert = load_words(ids, (token * TOPK + k) * id_words, k < TOPK, -1)
        owner = tl.where((expert >= 0) & (expert < EXPERTS), tl.maximum(expert, 0) // LOCAL, -1)
        row = (rank * tokens + token) * wire_packets
        for start in tl.range(part * BLOCK * ITEMS, wire_packets, SPLIT * BLOCK * ITEMS):
            words = ()
            for item in tl.static_range(ITEMS):  # all loads before the first store
                packet = start + item * BLOCK + tl.arange(0, BLOCK)
                words = words + load_packets(x + (token * wire_packets + packet) * 16, packet < wire_packets)
            for item in tl.static_range(ITEMS):
                packet = start + item * BLOCK + tl.arange(0, BLOCK)
                in_row = packet < wire_packets
                w0, w1, w2, w3 = words[4 * item], words[4 * item + 1], words[4 * item + 2], words[4 * item + 3]  # type: ignore[var-annotated]
                sentinels = sentinel_mask_of(w0, w1, w2, w3)
                w0, w1, w2, w3 = escape(w0), escape(w1), escape(w2), escape(w3)
                escaped = in_row & has_escape(w0, w1, w2, w3)
                for i in tl.static_range(WORLD_SIZE - 1):
                    goes = tl.max((owner == (rank + 1 + i) % WORLD_SIZE).to(tl.int32), axis=0) > 0
                    store_packets(peers[i] + data + (row + packet) * 16, w0, w1, w2, w3, in_row & goes, REMOTE=True)
                    store_word(peers[i] + masks + (row + packet) * 4, sentinels, escaped & goes)


@triton.jit
def tell_counts(
    found, counts_out, offsets_out, capacity, alignment, rank, cell,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the outputs that follow from the ids of all ranks, and the code of `Overflow`."""
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    e = tl.arange(0, WIDTH)
    counts = count_ids(found[0], 0, EXPERTS, BINS)
    wrong = tl.sum((found[0] == -2).to(tl.int32), axis=0)
    for s in tl.static_range(1, WORLD_SIZE):
        counts += count_ids(found[s], 0, EXPERTS, BINS)
        wrong += tl.sum((found[s] == -2).to(tl.int32), axis=0)
    own_counts = tl.gather(counts, tl.minimum(rank * LOCAL + e, EXPERTS - 1).to(tl.int32), 0)
    own_counts = tl.where(e < LOCAL, own_counts, 0)
    begins, ends = first_rows(own_counts, capacity, alignment, PADDED, WIDTH)
    store_words(counts_out, e, own_counts, e < LOCAL)
    store_words(offsets_out, e, begins.to(tl.int32), e < LOCAL)
    store_words(offsets_out, e + 1, ends.to(tl.int32), e == LOCAL - 1)
    every = tl.where(tl.arange(0, BINS) == EXPERTS, wrong, counts)
    tell_overflow(every, capacity, alignment, cell, WORLD_SIZE, EXPERTS, PADDED)


@triton.jit
def words_of(weights, packet, num_words):
    """Packets of an array of fp32, without the sentinel."""
    words = ()
    for w in tl.static_range(4):
        at = packet * 4 + w
        words = words + (escape_sentinel(load_words(weights, at, at < num_words, 0)),)
    return words


@triton.jit
def write_weights(out, r, words, packet, num_words, wanted):
    """Write the packets of rank r to `out`, whose rows may begin within a packet."""
    for w in tl.static_range(4):
        at = packet * 4 + w
        store_words(out, r * num_words + at, words[w], (at < num_words) & wanted)


@triton.jit
def dispatch_lamport_kernel(
    x, ids, out, scales, counts_out, offsets_out, rows, id_words, capacity, alignment, weights, weights_out, tokens,
    row_packets, wire_packets, local, peers, rank, timeout_ns, status, arena, stage_bytes, cell, number, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr, SCALES: tl.constexpr, PADDED: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, ID_PACKETS: tl.constexpr, NUMBERED: tl.constexpr,
):  # fmt: skip
    """Push ids and tokens, poll the peers' ids, find the rows, poll the tokens that go there.

    The last block has no tokens: it exchanges weights (unless `weights` is 0), writes counts and offsets, and puts the
    sentinel back in the place of the ids. The stage: the number of blocks that have polled (the sentinel twice stands
    for 0), then ids, weights, tokens and masks, each by source rank.
    """
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    WIDTH: tl.constexpr = next_power_of_2(LOCAL) if LOCAL > 32 else 32
    KP: tl.constexpr = next_power_of_2(TOPK)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64) - 1
    first, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    calls = read_counter(local, STATE_OFFSET)
    stage = arena + (calls & 1) * stage_bytes
    polled = (local + stage).to(tl.pointer_type(tl.int64))
    lines, slot = stage + 16, (tokens * TOPK + 3) // 4 * 16
    beside_ids = lines + WORLD_SIZE * slot
    data = beside_ids + WORLD_SIZE * slot
    masks = data + WORLD_SIZE * tokens * wire_packets * 16
    packet, q = tl.arange(0, ID_PACKETS).to(tl.int64), tl.arange(0, 4 * ID_PACKETS)
    sent = packet * 16 < slot
    own_tokens = own_number(number, tokens, cell, NUMBERED)
    if NUMBERED:
        write_limits(limits, own_tokens, tokens)

    w0, w1, w2, w3 = own_ids(ids, id_words, packet, own_tokens * TOPK, EXPERTS)
    if block == 0:
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + lines + rank * slot + packet * 16, w0, w1, w2, w3, sent, REMOTE=True)
    own_line = in_order(w0, w1, w2, w3)
    if block == blocks:
        if weights != 0:
            v0, v1, v2, v3 = words_of(weights, packet, own_tokens * TOPK)
            for i in tl.static_range(WORLD_SIZE - 1):
                store_packets(peers[i] + beside_ids + rank * slot + packet * 16, v0, v1, v2, v3, sent, REMOTE=True)
            write_weights(weights_out, rank, (v0, v1, v2, v3), packet, tokens * TOPK, True)
        found = poll_ids(own_line, local + lines, slot, packet, sent, q, rank, timeout_ns, status, WORLD_SIZE)
        tell_counts(
            found, counts_out, offsets_out, capacity, alignment, rank, cell, WORLD_SIZE, EXPERTS, PADDED, WIDTH
        )  # fmt: skip
        empty = tl.full((ID_PACKETS,), SENTINEL, tl.int32)
        if weights != 0:
            come = local + beside_ids + packet * 16
            peer_words = poll_packets(come, slot, sent, rank, timeout_ns, status, WORLD_SIZE)
            for i in tl.static_range(WORLD_SIZE):
                of_rank = (peer_words[4 * i], peer_words[4 * i + 1], peer_words[4 * i + 2], peer_words[4 * i + 3])
                write_weights(weights_out, i, of_rank, packet, tokens * TOPK, rank != i)
                store_packets(come + i * slot, empty, empty, empty, empty, sent & (rank != i))
        one = tl.arange(0, 1)
        wait(local + stage + one, NOBODY + blocks + one, one == 0, one + rank.to(tl.int32), timeout_ns, status)
        for i in tl.static_range(WORLD_SIZE):
            store_packets(local + lines + i * slot + packet * 16, empty, empty, empty, empty, sent & (rank != i))
        tl.store(polled, blocks * 0 + NOBODY)
    else:
        push_tokens(
            x, ids, id_words, first, own_tokens, tokens, teams, part, wire_packets, data, masks, peers, rank,
            WORLD_SIZE, TOPK, EXPERTS, SPLIT, BLOCK, ITEMS,
        )  # fmt: skip
        own = rank.to(tl.int32) * LOCAL  # the first expert here
        counts = (count_ids(own_line, own, LOCAL, WIDTH),)
        found = poll_ids(own_line, local + lines, slot, packet, sent, q, rank, timeout_ns, status, WORLD_SIZE)
        tl.atomic_add(polled, block * 0 + 1, sem="release", scope="gpu")
        total = counts[0]
        for s in tl.static_range(1, WORLD_SIZE):
            counts = counts + (count_ids(found[s], own, LOCAL, WIDTH),)  # type: ignore[assignment]
            total += counts[s]
        begins, _ = first_rows(total, capacity, alignment, PADDED, WIDTH)
        k = tl.arange(0, KP)
        for token in tl.range(first, tokens, teams):
            at = tl.minimum(token * TOPK + k, 4 * ID_PACKETS - 1).to(tl.int32)
            for t in tl.range(0, WORLD_SIZE):
                r = (rank + t) % WORLD_SIZE
                line, base = found[0], begins
                for s in tl.static_range(WORLD_SIZE):
                    line = tl.where(t == s, found[s], line)
                    base += tl.where((rank + s) % WORLD_SIZE < r, counts[s], 0)
                named = tl.where(k < TOPK, tl.gather(line, at, 0), -1)
                expert = named - own
                is_local = (expert >= 0) & (expert < LOCAL)
                expert = tl.where(is_local, expert, 0)
                before = (line[None, :] == named[:, None]) & (q[None, :] < at[:, None])
                row = tl.gather(base, expert, 0) + tl.sum(before.to(tl.int32), axis=1)
                limit = (expert.to(tl.int64) + 1) * capacity if PADDED else capacity
                row = tl.where(is_local, tl.where((row >= 0) & (row < limit), row, -2), -1)
                row_at = r * tokens + token
                store_words(rows, row_at * TOPK + k, row.to(tl.int32), (k < TOPK) & (part == 0))
                wanted = tl.max(is_local.to(tl.int32), axis=0) > 0
                targets = ()
                for i in tl.static_range(TOPK):
                    targets = targets + (tl.sum(tl.where(k == i, row, 0), axis=0),)  # type: ignore[assignment]
                come = local + data + row_at * wire_packets * 16
                source = tl.where(t == 0, x + token * wire_packets * 16, come)
                beside = local + masks + token * wire_packets * 4
                for start in tl.range(part * BLOCK * ITEMS, wire_packets, SPLIT * BLOCK * ITEMS):
                    seen = ()
                    for item in tl.static_range(ITEMS):
                        at_packet = start + item * BLOCK + tl.arange(0, BLOCK)
                        seen = seen + peek_packets(source + at_packet * 16, (at_packet < wire_packets) & wanted)
                    for item in tl.static_range(ITEMS):
                        at_packet = start + item * BLOCK + tl.arange(0, BLOCK)
                        is_token = (at_packet < wire_packets) & wanted
                        if t == 0:
                            words = (seen[4 * item], seen[4 * item + 1], seen[4 * item + 2], seen[4 * item + 3])
                        else:
                            words = take_packets(
                                come + at_packet * 16, beside + at_packet * 4, tokens * wire_packets * 4, seen, item, r,
                                is_token, timeout_ns, status, WORLD_SIZE,
                            )  # fmt: skip
                        write_token(out, scales, targets, at_packet, words, is_token, row_packets, TOPK, SCALES)
    end_call(local, calls)


@triton.jit
def combine_lamport_kernel(
    results, weights, ids, rows, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, arena, stage_bytes, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, NUMBERED: tl.constexpr,
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
    for summed in tl.range(team, limit_of(limits, 0, tokens, NUMBERED), teams):
        sources, weight, valid, there, remote = parts_of_sum(
            results, weights, ids, rows + (rank * tokens + summed) * (TOPK * 4), id_words, summed * TOPK,
            local + data + summed * TOPK * row_bytes, row_bytes, TOPK,
        )  # fmt: skip
        for begin in tl.range(part * BLOCK, row_packets, SPLIT * BLOCK):
            at = begin + threads
            in_row = at < row_packets
            seen = ()
            for k in tl.static_range(TOPK):
                seen = seen + peek_packets(sources[k] + at * 16, in_row & there[k])
            words = ()
            for k in tl.static_range(TOPK):
                w0, w1, w2, w3 = seen[4 * k], seen[4 * k + 1], seen[4 * k + 2], seen[4 * k + 3]  # type: ignore[var-annotated]
                late = (w0 == SENTINEL) | (w1 == SENTINEL) | (w2 == SENTINEL) | (w3 == SENTINEL)
                late = late & in_row & (remote[k] >= 0)
                sender = tl.zeros((BLOCK,), tl.int32) + remote[k] // LOCAL
                p0, p1, p2, p3 = poll_from(sources[k] + at * 16, late, sender, timeout_ns, status)
                store_packets(sources[k] + at * 16, empty, empty, empty, empty, in_row & (remote[k] >= 0))
                words = words + (tl.where(late, p0, w0), tl.where(late, p1, w1))  # type: ignore[assignment]
                words = words + (tl.where(late, p2, w2), tl.where(late, p3, w3))  # type: ignore[assignment]
            y0, y1, y2, y3 = weigh_packets(words, weight, valid, TOPK, DTYPE)
            store_packets(y + summed * row_bytes + at * 16, y0, y1, y2, y3, in_row)

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
    limit_name = "stage_bytes"
    host_preferred: Mapping[str, float] = {**HOST_GRID, "split": 1}

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        return problem.shape[0] <= FEW


class DispatchLamport(_Lamport, DispatchVariant, registered=True):
    summary = "push without flags: ids and tokens announce themselves; best for few tokens"
    kernels = (dispatch_lamport_kernel, quantise_kernel)
    plain: Mapping[str, Value] = {"number": 0, "limits": 0, "NUMBERED": False}
    space = Space({**GRID, "items": Choice(1, 2, 4)})

    def token_bytes(self, problem: Problem) -> int:
        return super().token_bytes(problem) // PACKET_BYTES * (PACKET_BYTES + 4)  # with masks

    def further_bytes(self, problem: Problem, config: Config) -> int:
        """Of ids and weights, and of the number of blocks that have polled the ids."""
        s = sizes_of(problem)
        return PACKET_BYTES * (1 + 2 * problem.world_size * packets_of(4 * s.tokens * s.topk))

    def id_packets(self, problem: Problem, config: Config) -> int:
        """Packets of a rank's ids that a block holds, a power of two: one or more a thread."""
        s = sizes_of(problem)
        return max(power_of_2(packets_of(4 * s.tokens * s.topk)), 32 * int(config["num_warps"]))

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config["num_blocks"]) + 1  # with the one that counts

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        warps, items = int(config["num_warps"]), int(config["items"])
        ids = 4 * problem.world_size * self.id_packets(problem, config) // (32 * warps)
        if ids + 4 * items > (40 if warps <= 8 else 20):
            return f"{ids} ids of all ranks and {items} packets do not fit into the registers of each of {warps} warps"
        return super().refuse_config(problem, config, limits)

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        counting = 1 if limits.backend == "cuda" else 0
        return super().refuse_grid(problem, {**config, "num_blocks": int(config["num_blocks"]) + counting}, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return self.widest_grid(problem, limits)

    def constants(self, problem: Problem, config: Config) -> dict[str, Any]:
        return {**super().constants(problem, config), "ID_PACKETS": self.id_packets(problem, config)}


class CombineLamport(_Lamport, CombineVariant, registered=True):
    summary = "push without flags: results announce themselves; best for few tokens"
    kernels = (combine_lamport_kernel,)

    def further_bytes(self, problem: Problem, config: Config) -> int:
        return problem.world_size * int(config["num_blocks"]) * PACKET_BYTES  # of the words of blocks

    def constants(self, problem: Problem, config: Config) -> dict[str, Any]:
        return {**super().constants(problem, config), "LOCAL": sizes_of(problem).local}
