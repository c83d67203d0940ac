"""push, two_phase: tokens and results through the peers' memory, ordered by flags, in pieces that overlap.

**ep_dispatch.** A rank writes into every peer's gather area how many tokens each of its experts is sent (a copy for
each block). After a flag each rank knows where every token belongs: behind those of the experts before it, of the ranks
before it, and of the tokens before it. It then writes the place of its tokens among their experts' tokens, and the
tokens themselves, each once however many of the peer's experts it goes to. The peer copies them to their rows. Weights,
if any (WEIGHTED), travel beside the places, those of all tokens to all ranks. A rank's number of tokens (NUMBERED),
read on the device, travels with the counts: so all ranks know the largest number, and send no piece beyond it.

**ep_combine.** A rank writes the results of its experts into their tokens' ranks' gather areas, at (token, k). After
the flag each rank sums the results there.

The order of tokens follows from prefix sums of counts alone, so it is the same whatever the grid. `two_phase` counts in
a kernel of its own: at many tokens that costs less than every block going through all ids again for each token.

Tokens go in pieces of `chunk_tokens` round a ring, so that a config suits any number of them. Block b does the tokens
of team b // SPLIT, and of each the packets of part b % SPLIT; it waits for block b of its peers alone. Blocks of one
team write the same places of tokens with the same values.

ep_combine collects piece c − 1 behind piece c, as in `all_to_all`'s `push`, whose proof holds here. ep_dispatch writes
a token to up to K places and would leave the links idle meanwhile, so it takes a token of piece c and one of piece c −
2 in turn. Own tokens are written to their rows as they are pushed, so the counts have a flag of their own. No slot is
overwritten too early: in round c a block waits for the flags that its counterparts raised at the end of their round c −
2, in which they placed piece c − 4, and then pushes piece c. Of many tokens a thread loads `items` packets before it
stores them: loads wait for memory, and stores in between would keep the next one back.

**With a number** all blocks of all ranks still raise and await the same flags, and leave the same epoch. The number of
pieces follows from the largest number of tokens, which each block has from its counterparts before its first piece; a
rank with fewer tokens raises the flags of pieces for which it has none. ep_combine reads it from the dispatch's result:
all ranks have run one variant, so it is the same on each (the largest number, or T). The ring and a token's slot follow
from the launch alone, and a slot is read only for tokens below their rank's number, which were written in this call.

Numerics: ordered. Graph-safe. Source: own.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from triton import next_power_of_2

from tunedcomm import fp8
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.all_reduce_rms_norm.rows import _store_words
from tunedcomm.kernels.common.feasibility import Launch, power_of_2, refuse_kernels, refuse_residence
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, exchange_flags, read_counter, write_counter
from tunedcomm.kernels.common.launch import SHARE_OF_EAGER, CompileRequest, bind_kernel, residency, within
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape_sentinel,
    escape_sentinels,
    narrow_e4m3,
    packets_of,
    store_bytes,
    weigh_packets,
    widen,
)
from tunedcomm.kernels.common.reference import SUM_DTYPES
from tunedcomm.kernels.common.sync import INTERPRET, as_mask, load_packets, store_packets
from tunedcomm.kernels.common.variant import HOST_GRID, KernelVariant, Workspace, all_gather_single, lane_arguments
from tunedcomm.kernels.moe.op import (
    ALIGNMENT,
    BY_RANK,
    BY_TOKEN,
    MISCOUNTED,
    NOT_HERE,
    Overflow,
    capacity_of,
    in_use,
    sizes_of,
    within_number,
)
from tunedcomm.space import Axis, Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import LaneLayout, Room

RING = tl.constexpr(4)
_RING = int(RING.value)
CHUNK = tl.constexpr(256)  # ids that a block compares at once
SPAN = tl.constexpr(256)  # ids of a block of the kernel that counts
_E4M3_MAX = tl.constexpr(fp8.E4M3_MAX)
_MISCOUNTED = tl.constexpr(MISCOUNTED)


@triton.jit
def load_words(address, index, mask, other):
    """32-bit words of an array."""
    if INTERPRET:
        mask = as_mask(mask)
    return tl.load((address + index * 4).to(tl.pointer_type(tl.int32)), mask=mask, other=other)


@triton.jit
def load_word(address, index):
    """A word of an array, for scalars."""
    return tl.load((address + index * 4).to(tl.pointer_type(tl.int32)))


@triton.jit
def store_words(address, index, values, mask):
    """Store 32-bit words of an array."""
    if INTERPRET:
        mask = as_mask(mask)
    tl.store((address + index * 4).to(tl.pointer_type(tl.int32)), values, mask=mask)


@triton.jit
def send_words(address, words, mask):
    """`store_word` for tensors that several warps hold: Triton stores each element once, and .wt is as relaxed.sys."""
    if INTERPRET:
        mask = as_mask(mask)
    tl.store(address.to(tl.pointer_type(tl.int32)), words, mask=mask, cache_modifier=".wt")


@triton.jit
def block_barrier():
    """Let the whole block see what its threads wrote."""
    if not INTERPRET:
        tl.debug_barrier()


@triton.jit
def own_number(number, tokens, cell, NUMBERED: tl.constexpr):
    """Return this rank's number of tokens: all, or `number` within 0 … `tokens`. Tell `Overflow` of another."""
    if NUMBERED:
        given = load_word(number, 0).to(tl.int64)
        own = tl.minimum(tl.maximum(given, 0), tokens)
        if (given != own) & (tl.program_id(0) == 0):
            tl.store(cell.to(tl.pointer_type(tl.int64)), (given & 0xFFFFFFFF) + _MISCOUNTED)
        return own
    else:
        return tokens


@triton.jit
def limit_of(limits, i: tl.constexpr, tokens, NUMBERED: tl.constexpr):
    """The number of own tokens (0), or one that no rank's exceeds (1)."""
    if NUMBERED:
        return tl.minimum(tl.maximum(load_word(limits, i).to(tl.int64), 0), tokens)
    else:
        return tokens


@triton.jit
def write_limits(limits, own, most):
    """Write what `limit_of` reads."""
    two = tl.arange(0, 2)
    store_words(limits, two, tl.where(two == 0, own, most).to(tl.int32), (two < 2) & (tl.program_id(0) == 0))


@triton.jit
def clear_lines(ids_out, weights_out, first, end, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the lines of no token, ids of −1 and weights of 0, to the rows from `first` to before `end`."""
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for start in tl.range(first * TOPK + block * BLOCK, end * TOPK, blocks * BLOCK):
        at = start + tl.arange(0, BLOCK)
        store_words(ids_out, at, tl.full((BLOCK,), -1, tl.int32), at < end * TOPK)
        store_words(weights_out, at, tl.full((BLOCK,), 0, tl.int32), (at < end * TOPK) & (weights_out != 0))


@triton.jit
def send_number(own, numbers, peers, rank, WORLD_SIZE: tl.constexpr):
    """Send the number of own tokens to the words `numbers` of the peers' gather areas, one of each (rank, block)."""
    one, place = tl.arange(0, 1), (rank * tl.num_programs(0) + tl.program_id(0)) * 4
    for i in tl.static_range(WORLD_SIZE - 1):
        send_words(peers[i] + numbers + place + one, one + own.to(tl.int32), one == 0)


@triton.jit
def number_of(numbers, r, tokens):
    """The number that the same block of rank r sent.

    It is bounded again: threads that did not miss rank r go on when others gave up waiting, and its number never came.
    """
    sent = load_word(numbers, r * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    return tl.minimum(tl.maximum(sent, 0), tokens)


@triton.jit
def largest_number(numbers, own, tokens, rank, WORLD_SIZE: tl.constexpr):
    """The largest number of tokens of any rank; the peers' numbers have come."""
    most = own
    for s in tl.range(1, WORLD_SIZE):
        most = tl.maximum(most, number_of(numbers, (rank + s) % WORLD_SIZE, tokens))
    return most


@triton.jit
def finish_numbers(
    numbers, ids_out, weights_out, limits, own, most, tokens, rank,
    TOPK: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Write `limits` and the lines of tokens that nobody has."""
    write_limits(limits, own, most)
    for r in tl.range(0, WORLD_SIZE):
        count = own
        if r != rank:
            count = number_of(numbers, r, tokens)
        clear_lines(ids_out, weights_out, r * tokens + count, (r + 1) * tokens, TOPK, BLOCK)


@triton.jit
def count_before(ids, id_words, first, token, TOPK: tl.constexpr):
    """(experts of a token, tokens of each that come before it, from the token `first` on)."""
    k = tl.arange(0, next_power_of_2(TOPK))
    at = token * TOPK + k
    own_ids = load_words(ids, at * id_words, k < TOPK, -1)
    count = tl.zeros((next_power_of_2(TOPK),), tl.int32)
    end = (token + 1) * TOPK
    for start in tl.range(first * TOPK, end, CHUNK):
        q = start + tl.arange(0, CHUNK)
        earlier_ids = load_words(ids, q * id_words, q < end, -2)
        same = (earlier_ids[None, :] == own_ids[:, None]) & (q[None, :] < at[:, None])
        count += tl.sum(same.to(tl.int32), axis=1)
    return own_ids, count


@triton.jit
def count_all(ids, id_words, first, end, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """Count the ids from `first` to before `end` by expert; the last count is of numbers that are no id."""
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    counts = tl.zeros((BINS,), tl.int32)
    wrong = 0
    for start in tl.range(first, end, CHUNK):
        q = start + tl.arange(0, CHUNK)
        expert = load_words(ids, q * id_words, q < end, -1)
        named = (expert >= 0) & (expert < EXPERTS)
        counts += tl.histogram(tl.where(named, expert, EXPERTS), BINS)
        wrong += tl.sum(((expert < -1) | (expert >= EXPERTS)).to(tl.int32), axis=0)
    return tl.where(tl.arange(0, BINS) == EXPERTS, wrong, counts)


@triton.jit
def count_kernel(
    ids, id_words, num_ids, counted, number, EXPERTS: tl.constexpr, TOPK: tl.constexpr, NUMBERED: tl.constexpr
):
    """Block j: how many equal ids come before each id of its span; the last block: how many there are in all.

    `counted` holds what `count_all` returns for all ids, then a word for each id. NUMBERED: of `number` tokens alone.
    """
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    first = tl.program_id(0) * SPAN
    if NUMBERED:
        num_ids = limit_of(number, 0, num_ids // TOPK, True) * TOPK
        first = tl.minimum(first, num_ids)
    earlier = count_all(ids, id_words, 0, first, EXPERTS, 16 * SPAN)
    offsets = tl.arange(0, SPAN)
    at = first + offsets
    expert = load_words(ids, at * id_words, at < num_ids, -1)
    same = (expert[None, :] == expert[:, None]) & (offsets[None, :] < offsets[:, None])
    named = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)
    before = tl.gather(earlier, named, 0) + tl.sum(same.to(tl.int32), axis=1)
    store_words(counted + BINS * 4, at, before, at < num_ids)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        bins = tl.arange(0, BINS)
        store_words(counted, bins, earlier + count_all(ids, id_words, first, num_ids, EXPERTS, SPAN), bins < BINS)


@triton.jit
def place_of(ids, id_words, token, counted, TOPK: tl.constexpr, EXPERTS: tl.constexpr, COUNTED: tl.constexpr):
    """(experts of a token, own tokens of each that come before it)."""
    if COUNTED:
        k = tl.arange(0, next_power_of_2(TOPK))
        at = token * TOPK + k
        own_ids = load_words(ids, at * id_words, k < TOPK, -1)
        return own_ids, load_words(counted + next_power_of_2(EXPERTS + 1) * 4, at, k < TOPK, 0)
    else:
        return count_before(ids, id_words, 0, token, TOPK)


@triton.jit
def narrow_pair(low, high, scale):
    """Two quotients, each rounded, as two e4m3 in the low half of a word."""
    return narrow_e4m3(tl.div_rn(low, scale), tl.div_rn(high, scale))


@triton.jit
def quantise_kernel(
    x, wire, tokens, row_packets, wire_bytes,
    DTYPE: tl.constexpr, PACKETS: tl.constexpr, GROUPS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write rows as they travel: in e4m3, then a scale for each of SCALES groups of PACKETS / GROUPS packets of x."""
    packet = tl.arange(0, PACKETS)
    mask = packet < row_packets
    BYTES: tl.constexpr = 4 if DTYPE == "float32" else 8
    group = tl.arange(0, GROUPS)
    for token in tl.range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0).to(tl.int64)):
        words = load_packets(x + (token * row_packets + packet) * 16, mask)
        most = tl.zeros((PACKETS,), tl.float32)
        e = ()
        for w in tl.static_range(4):
            low, high = widen(words[w], DTYPE)
            most = tl.maximum(most, tl.abs(low))
            e = e + (low,)  # type: ignore[assignment]
            if DTYPE != "float32":
                most = tl.maximum(most, tl.abs(high))
                e = e + (high,)  # type: ignore[assignment]
        most = tl.max(tl.reshape(most, (GROUPS, PACKETS // GROUPS)), axis=1)
        scale = tl.where(most > 0, tl.div_rn(most, tl.full((GROUPS,), _E4M3_MAX, tl.float32)), 1.0)
        out = wire + token * wire_bytes
        at = (out + row_packets * BYTES + group * 4).to(tl.pointer_type(tl.float32))
        tl.store(at, scale, mask=group < SCALES)
        each = tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, PACKETS // GROUPS)), (PACKETS,))
        first = narrow_pair(e[0], e[1], each) | (narrow_pair(e[2], e[3], each) << 16)  # type: ignore[misc]
        second = first
        if DTYPE != "float32":
            second = narrow_pair(e[4], e[5], each) | (narrow_pair(e[6], e[7], each) << 16)  # type: ignore[misc]
        _store_words(out + packet * BYTES, first, second, mask, BYTES // 4)


@triton.jit
def tell_overflow(
    counts, capacity, alignment, cell, WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write the code of `Overflow` if an expert of any rank has no room; `counts` are those of all ranks together."""
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    expert = tl.arange(0, BINS)
    real = expert < EXPERTS
    counts = counts.to(tl.int64)
    begins = tl.zeros((BINS,), tl.int64)
    if not PADDED:
        aligned = (counts + alignment - 1) // alignment * alignment
        for d in tl.static_range(WORLD_SIZE):
            on_rank = real & (expert // LOCAL == d)
            rows = tl.where(on_rank, aligned, 0)
            begins = tl.where(on_rank, tl.cumsum(rows, 0) - rows, begins)
    over = real & (counts > 0) & (begins + counts > capacity)
    first = tl.min(tl.where(over, expert, BINS), axis=0).to(tl.int64)
    count = tl.sum(tl.where(expert == first, counts, 0), axis=0)
    wrong = tl.sum(tl.where(expert == EXPERTS, counts, 0), axis=0)
    code = tl.where(wrong > 0, -wrong, tl.where(first < BINS, ((first + 1) << 40) | count, 0))
    p = cell.to(tl.pointer_type(tl.int64))
    if code != 0:
        tl.store(p + 1, capacity)
        tl.store(p, code)


@triton.jit
def share_counts(own, area, peers, rank, own_counts, WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr):
    """Write this block's copy of the own counts to `own` and the peers' `area`; they need those of their experts alone.

    Block 0 writes all of them, so that its counterparts can tell of an overflow on any rank.
    """
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    at = (rank * blocks + block) * BINS + bins
    store_words(own, at, own_counts, bins <= EXPERTS)
    for i in tl.static_range(WORLD_SIZE - 1):
        wanted = (bins // LOCAL == (rank + 1 + i) % WORLD_SIZE) | (block == 0)
        send_words(peers[i] + area + at * 4, own_counts, wanted & (bins <= EXPERTS))


@triton.jit
def fill_table(
    shared, table, counts_out, offsets_out, rank, capacity, alignment, cell,
    WORLD_SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write this block's `table`: the first row of every (source rank, expert of this rank).

    `shared` holds the counts of all ranks, of every block BINS words each. Block 0 has those of all experts, and fills
    in the outputs that follow from them.
    """
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    WIDTH: tl.constexpr = next_power_of_2(LOCAL)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for r in tl.static_range(WORLD_SIZE):
        total += load_words(shared, (r * blocks + block) * BINS + rank * LOCAL + e, e < LOCAL, 0)
    if PADDED:
        begins = e.to(tl.int64) * capacity
        ends = begins + capacity
    else:
        aligned = (total.to(tl.int64) + alignment - 1) // alignment * alignment
        ends = tl.cumsum(aligned, 0)
        begins = ends - aligned
    if block == 0:
        store_words(counts_out, e, total, e < LOCAL)
        store_words(offsets_out, e, begins.to(tl.int32), e < LOCAL)
        store_words(offsets_out, e + 1, ends.to(tl.int32), e == LOCAL - 1)
        bins = tl.arange(0, BINS)
        every = tl.zeros((BINS,), tl.int32)
        for r in tl.static_range(WORLD_SIZE):
            every += load_words(shared, r * blocks * BINS + bins, bins <= EXPERTS, 0)
        tell_overflow(every, capacity, alignment, cell, WORLD_SIZE, EXPERTS, PADDED)
    row = begins.to(tl.int32)
    for r in tl.static_range(WORLD_SIZE):
        store_words(table, r * WIDTH + e, row, e < LOCAL)
        row += load_words(shared, (r * blocks + block) * BINS + rank * LOCAL + e, e < LOCAL, 0)
    block_barrier()


@triton.jit
def send_token(
    token, source, ids, id_words, tokens, counted, peers, rank, places, place_at, table, out, scales, rows, capacity,
    row_packets, wire_packets, part, weights, weights_out, weights_at,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr, SCALES: tl.constexpr, PADDED: tl.constexpr,
    COUNTED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Push a token to the ranks that have experts of it, at `place_at`, with its places; write it to its rows here.

    `table` has the first row of each own expert for this rank's tokens. Weights, unless `weights` is 0, go to all
    ranks, by part 0 alone.
    """
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    k = tl.arange(0, next_power_of_2(TOPK))
    if WEIGHTED:  # before what other loads are waited for
        weighs = (k < TOPK) & (part == 0) & (weights != 0)
        weight = load_words(weights, token * TOPK + k, weighs, 0)
    experts, before = place_of(ids, id_words, token, counted, TOPK, EXPERTS, COUNTED)
    owner = tl.where((experts >= 0) & (experts < EXPERTS), experts // LOCAL, -1)
    own = owner == rank
    expert = tl.where(own, experts % LOCAL, 0)
    row = load_words(table, expert, own, 0).to(tl.int64) + before
    limit = (expert.to(tl.int64) + 1) * capacity if PADDED else capacity
    row = tl.where(own, tl.where(row < limit, row, -2), -1)
    at = rank * tokens + token
    store_words(rows, at * TOPK + k, row.to(tl.int32), (k < TOPK) & (part == 0))
    if WEIGHTED:
        weight = escape_sentinel(weight)
        store_words(weights_out, at * TOPK + k, weight, weighs)
    targets = ()
    for i in tl.static_range(TOPK):
        targets = targets + (tl.sum(tl.where(k == i, row, 0), axis=0),)  # type: ignore[assignment]
    goes = ()
    for i in tl.static_range(WORLD_SIZE - 1):
        of_peer = owner == (rank + 1 + i) % WORLD_SIZE
        place = tl.where(of_peer, before * LOCAL + experts % LOCAL, -1)
        send_words(peers[i] + places + (at * next_power_of_2(TOPK) + k) * 4, place, k < TOPK)
        if WEIGHTED:
            send_words(peers[i] + weights_at + (at * next_power_of_2(TOPK) + k) * 4, weight, weighs)
        goes = goes + (tl.max(of_peer.to(tl.int32), axis=0),)  # type: ignore[assignment]
    threads = tl.arange(0, BLOCK)
    for start in tl.range(part * BLOCK * ITEMS, wire_packets, SPLIT * BLOCK * ITEMS):
        words = ()
        for item in tl.static_range(ITEMS):  # all loads before the first store
            loaded = start + item * BLOCK + threads
            words = words + load_packets(source + loaded * 16, loaded < wire_packets)
        for item in tl.static_range(ITEMS):
            packet = start + item * BLOCK + threads
            in_row = packet < wire_packets
            w0, w1, w2, w3 = words[4 * item], words[4 * item + 1], words[4 * item + 2], words[4 * item + 3]  # type: ignore[var-annotated]
            for i in tl.static_range(WORLD_SIZE - 1):
                store_packets(peers[i] + place_at + packet * 16, w0, w1, w2, w3, in_row & (goes[i] > 0))
            write_token(out, scales, targets, packet, (w0, w1, w2, w3), in_row, row_packets, TOPK, SCALES)


@triton.jit
def rows_of_token(table, places, rows, part, capacity, TOPK: tl.constexpr, LOCAL: tl.constexpr, PADDED: tl.constexpr):
    """The rows of a token by k, also written to `rows`, and if it came here at all, be there room or not.

    `table` and `places` belong to its source rank.
    """
    targets, sent = (), False
    for i in tl.static_range(TOPK):
        place = load_word(places, i)
        expert = tl.maximum(place, 0) % LOCAL
        row = load_word(table, expert).to(tl.int64) + tl.maximum(place, 0) // LOCAL
        limit = (expert + 1) * capacity if PADDED else capacity
        targets = targets + (tl.where(place < 0, -1, tl.where(row < limit, row, -2)),)  # type: ignore[assignment]
        sent = sent | (place >= 0)
    if part == 0:
        for i in tl.static_range(TOPK):
            tl.store((rows + i * 4).to(tl.pointer_type(tl.int32)), targets[i].to(tl.int32))
    return targets, sent


@triton.jit
def write_token(out, scales, targets, packet, words, in_row, row_packets, TOPK: tl.constexpr, SCALES: tl.constexpr):
    """Write packets of a token, as it travels, to its rows."""
    for i in tl.static_range(TOPK):
        row = targets[i]
        there = in_row & (row >= 0)
        is_token = there & (packet < row_packets)
        store_packets(out + (row * row_packets + packet) * 16, words[0], words[1], words[2], words[3], is_token)
        if SCALES > 0:
            behind = (packet - row_packets) * 16
            left = SCALES * 4 - behind
            place = scales + row * (SCALES * 4) + behind
            store_bytes(place, left, words[0], words[1], words[2], words[3], there & (behind >= 0), 4)


@triton.jit
def dispatch_kernel(
    x, ids, out, scales, counts_out, offsets_out, rows, id_words, capacity, alignment, tokens, row_packets,
    wire_packets, local, peers, rank, timeout_ns, status, gather, num_chunks, counted, cell, weights, weights_out,
    number, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, EXPERTS: tl.constexpr, SCALES: tl.constexpr, PADDED: tl.constexpr,
    COUNTED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr, WEIGHTED: tl.constexpr,
    NUMBERED: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c and place its own tokens, place piece c − 2 of the peers."""
    BINS: tl.constexpr = next_power_of_2(EXPERTS + 1)
    LOCAL: tl.constexpr = EXPERTS // WORLD_SIZE
    KP: tl.constexpr = next_power_of_2(TOPK)
    WIDTH: tl.constexpr = next_power_of_2(LOCAL)
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    threads = tl.arange(0, BLOCK)
    span = (tokens + num_chunks - 1) // num_chunks
    ring = tl.minimum(num_chunks, RING)
    # The gather area: counts, this rank's tables, places, tokens, in the shape of places weights, numbers of tokens.
    tables = gather + WORLD_SIZE * blocks * BINS * 4
    places = tables + WORLD_SIZE * blocks * WIDTH * 4
    data = (places + WORLD_SIZE * tokens * KP * 4 + 15) // 16 * 16
    wire_bytes = wire_packets * 16
    slot = ring * span * wire_bytes
    weights_at = data + WORLD_SIZE * slot
    numbers = weights_at + WORLD_SIZE * tokens * KP * 4
    own, most, pieces = own_number(number, tokens, cell, NUMBERED), tokens, num_chunks
    epoch = read_counter(local, EPOCH_OFFSET)

    # Says that this rank reads its gather area no more.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    if COUNTED:
        bins = tl.arange(0, BINS)
        own_counts = load_words(counted, bins, bins < BINS, 0)
    else:
        own_counts = count_all(ids, id_words, 0, own * TOPK, EXPERTS, CHUNK)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    share_counts(local + gather, gather, peers, rank, own_counts, WORLD_SIZE, EXPERTS)
    if NUMBERED:
        send_number(own, numbers, peers, rank, WORLD_SIZE)
    exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    if NUMBERED:
        most = largest_number(local + numbers, own, tokens, rank, WORLD_SIZE)
        pieces = (most + span - 1) // span
    table = local + tables + block * (WORLD_SIZE * WIDTH * 4)
    fill_table(
        local + gather, table, counts_out, offsets_out, rank, capacity, alignment, cell, WORLD_SIZE, EXPERTS, PADDED
    )  # fmt: skip

    for c in tl.range(0, pieces + 2):
        d = c - 2
        if d >= 0:
            await_peers(local, rank, epoch + 3 + d, timeout_ns, status, WORLD_SIZE)
        lap, behind = (c - c % ring) * span, (d - d % ring) * span
        for i in tl.range(team, span, teams):  # a token of each piece in turn, so that stores travel in the meantime
            token, placed = c * span + i, d * span + i
            if (c < pieces) & (token < own):
                send_token(
                    token, x + token * wire_bytes, ids, id_words, tokens, counted, peers, rank, places,
                    data + rank * slot + (token - lap) * wire_bytes, table + rank * (WIDTH * 4), out, scales, rows,
                    capacity, row_packets, wire_packets, part, weights, weights_out, weights_at,
                    WORLD_SIZE, TOPK, EXPERTS, SCALES, PADDED, COUNTED, SPLIT, BLOCK, ITEMS, WEIGHTED,
                )  # fmt: skip
            if (d >= 0) & (placed < most):
                for s in tl.range(1, WORLD_SIZE):
                    r = (rank + s) % WORLD_SIZE
                    at = r * tokens + placed
                    writer = part
                    if NUMBERED:
                        is_there = placed < number_of(local + numbers, r, tokens)
                        writer = tl.where(is_there, part, SPLIT)  # no part writes of a token that nobody has
                    if WEIGHTED:
                        k = tl.arange(0, KP)
                        of_first = (k < TOPK) & (writer == 0) & (weights != 0)
                        weight = load_words(local + weights_at, at * KP + k, of_first, 0)
                    targets, wanted = rows_of_token(
                        table + r * (WIDTH * 4), local + places + at * (KP * 4), rows + at * (TOPK * 4), writer,
                        capacity, TOPK, LOCAL, PADDED,
                    )  # fmt: skip
                    if NUMBERED:
                        wanted = wanted & is_there
                    if WEIGHTED:
                        store_words(weights_out, at * TOPK + k, weight, of_first)
                    come = local + data + r * slot + (placed - behind) * wire_bytes
                    for start in tl.range(part * BLOCK * ITEMS, wire_packets, SPLIT * BLOCK * ITEMS):
                        words = ()
                        for item in tl.static_range(ITEMS):  # all loads before the first store
                            packet = start + item * BLOCK + threads
                            words = words + load_packets(come + packet * 16, (packet < wire_packets) & wanted)
                        for item in tl.static_range(ITEMS):
                            packet = start + item * BLOCK + threads
                            in_row = (packet < wire_packets) & wanted
                            own_words = (words[4 * item], words[4 * item + 1], words[4 * item + 2], words[4 * item + 3])
                            write_token(out, scales, targets, packet, own_words, in_row, row_packets, TOPK, SCALES)
        if c < pieces:
            arrive(peers, rank, epoch + 3 + c, WORLD_SIZE)
    if NUMBERED:
        finish_numbers(local + numbers, rows, weights_out, limits, own, most, tokens, rank, TOPK, BLOCK, WORLD_SIZE)
    write_counter(local, epoch + 2 + pieces, EPOCH_OFFSET)


@triton.jit
def send_results(
    token, results, rows, tokens, peers, rank, place, row_packets, part,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, POLLED: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the results for a token of every other rank to `place` there; POLLED: without the sentinel."""
    for i in tl.static_range(WORLD_SIZE - 1):
        asked = rows + ((rank + 1 + i) % WORLD_SIZE * tokens + token) * (TOPK * 4)
        found = ()
        for k in tl.static_range(TOPK):
            found = found + (load_word(asked, k).to(tl.int64),)  # type: ignore[assignment]
        for start in tl.range(part * BLOCK, row_packets, SPLIT * BLOCK):
            packet = start + tl.arange(0, BLOCK)
            in_row = packet < row_packets
            words = ()
            for k in tl.static_range(TOPK):  # all loads before the first store
                words = words + load_packets(results + (found[k] * row_packets + packet) * 16, in_row & (found[k] >= 0))
            for k in tl.static_range(TOPK):
                w0, w1, w2, w3 = words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]  # type: ignore[var-annotated]
                if POLLED:
                    w0, w1, w2, w3 = escape_sentinels(w0, w1, w2, w3)
                at = peers[i] + place + (k * row_packets + packet) * 16
                store_packets(at, w0, w1, w2, w3, in_row & (found[k] != -1), REMOTE=POLLED)


@triton.jit
def parts_of_sum(results, weights, ids, rows, id_words, at, come, row_bytes, TOPK: tl.constexpr):
    """Find the parts of a token's sum by k; its first id is at `at`.

    Returns addresses (those of other ranks' results stand from `come` on), weights, which experts are named, of which
    of them there is a result, and the expert where the result is another rank's, else -1.
    """
    sources, weight, valid, there, remote = (), (), (), (), ()
    for k in tl.static_range(TOPK):
        own = load_word(rows, k).to(tl.int64)
        expert = load_word(ids, (at + k) * id_words)
        sources = sources + (tl.where(own >= 0, results + own * row_bytes, come + k * row_bytes),)  # type: ignore[assignment]
        weight = weight + (load_word(weights, at + k).to(tl.float32, bitcast=True),)  # type: ignore[assignment]
        valid = valid + (expert >= 0,)  # type: ignore[assignment]
        there = there + ((expert >= 0) & (own != -2),)  # type: ignore[assignment]
        remote = remote + (tl.where(own == -1, expert, -1),)  # type: ignore[assignment]
    return sources, weight, valid, there, remote


@triton.jit
def combine_kernel(
    results, weights, ids, rows, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, gather, num_chunks, limits,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, DTYPE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    NUMBERED: tl.constexpr,
):  # fmt: skip
    """In round c: push the results for piece c of every rank's tokens, sum piece c − 1 of the own ones."""
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    threads = tl.arange(0, BLOCK)
    span = (tokens + num_chunks - 1) // num_chunks
    ring = tl.minimum(num_chunks, RING)
    row_bytes = row_packets * 16
    epoch = read_counter(local, EPOCH_OFFSET)
    own_tokens, most, pieces = limit_of(limits, 0, tokens, NUMBERED), limit_of(limits, 1, tokens, NUMBERED), num_chunks
    if NUMBERED:
        pieces = (most + span - 1) // span
    # Says that this rank reads its gather area no more.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for c in tl.range(0, pieces + 1):
        if c < pieces:
            lap = (c - c % ring) * span
            for token in tl.range(c * span + team, tl.minimum(most, (c + 1) * span), teams):
                send_results(
                    token, results, rows, tokens, peers, rank, gather + (token - lap) * TOPK * row_bytes, row_packets,
                    part, WORLD_SIZE, TOPK, False, SPLIT, BLOCK,
                )  # fmt: skip
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        if c >= 1:
            d = c - 1
            behind = (d - d % ring) * span
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for summed in tl.range(d * span + team, tl.minimum(own_tokens, (d + 1) * span), teams):
                sources, weight, valid, there, _ = parts_of_sum(
                    results, weights, ids, rows + (rank * tokens + summed) * (TOPK * 4), id_words, summed * TOPK,
                    local + gather + (summed - behind) * TOPK * row_bytes, row_bytes, TOPK,
                )  # fmt: skip
                for begin in tl.range(part * BLOCK, row_packets, SPLIT * BLOCK):
                    at = begin + threads
                    words = ()
                    for k in tl.static_range(TOPK):
                        words = words + load_packets(sources[k] + at * 16, (at < row_packets) & there[k])
                    w0, w1, w2, w3 = weigh_packets(words, weight, valid, TOPK, DTYPE)
                    store_packets(y + summed * row_bytes + at * 16, w0, w1, w2, w3, at < row_packets)
    write_counter(local, epoch + 1 + pieces, EPOCH_OFFSET)


def quantise_request(problem: Problem) -> CompileRequest:
    """The binary that quantises tokens."""
    width = power_of_2(packets_of(problem.shape[1] * ITEMSIZE[problem.dtype]))
    groups = width // packets_of(fp8.GROUP * ITEMSIZE[problem.dtype]) if problem.scaling == "group128" else 1
    scales = sizes_of(problem).num_scales
    constants: dict[str, Value] = {"DTYPE": problem.dtype, "PACKETS": width, "GROUPS": groups, "SCALES": scales}
    return CompileRequest.of(quantise_kernel, constants, num_warps=4 if width <= 512 else 8)


FEW = 128  # tokens; up to here packets without flags are tried first
GRID: Mapping[str, Axis] = {
    "num_blocks": PowerOfTwo(1, 512),
    "num_warps": PowerOfTwo(1, 16),
    "split": Choice(1, 2, 4, 8),
}
IN_PIECES: Mapping[str, Axis] = {**GRID, "chunk_tokens": PowerOfTwo(1, 1024)}


class _ByMode(dict[str, "_Further"]):
    """Mode to the last launch of a form of a problem; lives as long as one of them."""


class _Further:
    """The launch of calls with more arguments, as weights, bound by the first of these calls outside of captures.

    So nobody else waits for its compilation. Nothing can be bound inside a capture, so an eager call binds the launch
    of captured calls, too.
    """

    def __init__(self, request: CompileRequest, num_blocks: int, workspace: Workspace, arguments: tuple[Any, ...]):
        self._request, self._num_blocks, self._device = request, num_blocks, workspace.device
        self._arguments, self._plain = arguments, residency()
        self._is_bound = False
        self._launch: Callable[..., None] | None = None
        self.by_mode = _ByMode()

    def bind(self) -> None:
        """Bind it, once. There is no launch if the kernel would take more of the GPU than the one of other calls.

        Whether launches wait their turn was decided by that kernel's share.
        """
        if self._is_bound:
            return
        self._is_bound = True
        plain = self._plain
        limit = 1.0 if plain is None else max(plain.share, min(plain.limit, SHARE_OF_EAGER))
        with within(limit) as taken, contextlib.suppress(InfeasibleError):
            kernel = bind_kernel(self._request, self._num_blocks, self._device)
            if taken.share <= limit:
                self._launch = kernel.fix(self._arguments)

    def launch(self) -> Callable[..., None] | None:
        """The launch, or None where there is none."""
        import torch

        if not self._is_bound and not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            for each in (self, *self.by_mode.values()):
                each.bind()
        return self._launch


# Workspace to (eager problem, kernel, forms) to their launches.
_further: weakref.WeakKeyDictionary[
    Workspace, weakref.WeakValueDictionary[tuple[Problem, str, tuple[str, ...]], _ByMode]
]
_further = weakref.WeakKeyDictionary()


class GridVariant(KernelVariant):
    """A variant whose grid shares out tokens among teams of blocks, and a token's packets among those of a team.

    Attributes:
        by_token: serves the layouts `tokens` and `rank`, and no other.
        plain: constants in the place of the arguments that a kernel has for some calls alone.
    """

    by_token = False
    plain: Mapping[str, Value] = {}
    trailing_arguments: tuple[str, ...] = ("gather", "num_chunks")
    limit_name = "staging_bytes"  # the field of `Limits`
    host_preferred: Mapping[str, float] = {**HOST_GRID, "chunk_tokens": 32, "split": 1, "items": 1}
    most_registers = 255

    def packets(self, problem: Problem) -> int:
        """Packets of a token as it travels: its own, and its scales'."""
        s = sizes_of(problem)
        return s.row_bytes // PACKET_BYTES + packets_of(4 * s.num_scales)

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        """True if the variant may run until something is measured; of several the first by name does."""
        return True

    def default_beats_library(self, problem: Problem, limits: Limits) -> bool:
        if limits.backend != "cuda" or not self.is_usual(problem, limits):
            return False
        return self.infeasible(problem, self.default(problem, limits), limits) is None

    def token_bytes(self, problem: Problem) -> int:
        """Bytes of the workspace for a token of every rank."""
        raise NotImplementedError

    def further_bytes(self, problem: Problem, config: Config) -> int:
        """Bytes of the workspace for all else."""
        return 0

    def optional_bytes(self, problem: Problem, config: Config) -> int:
        """Bytes of the gather area, behind all else, for calls that are not plain."""
        return 0

    def further(
        self,
        problem: Problem,
        config: Config,
        workspace: Workspace,
        arguments: tuple[Any, ...],
        given: Collection[str],
        known: Mapping[str, int] = {},
        request: CompileRequest | None = None,
        num_blocks: int = 0,
        **constants: Any,
    ) -> Callable[[], Callable[..., None] | None]:
        """`_Further.launch` of a kernel with `constants` that takes the arguments `given`, too.

        Calls bring those that are not `known`. It gives None also where there is no such kernel, or no memory for it.
        `request` and `num_blocks` name a kernel that is not the main one.
        """
        room = workspace.layout.staging_bytes
        if not self.plain or self.staged(problem, config) + self.optional_bytes(problem, config) > room:
            return lambda: None
        request, num_blocks = request or self.request(problem, config), num_blocks or self.num_blocks(problem, config)
        kept = {name: value for name, value in request.constants if name not in given}
        request = replace(request, constants=tuple(sorted({**kept, **constants}.items())))
        made = _Further(request, num_blocks, workspace, (*arguments, *map(known.get, given)))
        of_group = _further.setdefault(workspace, weakref.WeakValueDictionary())
        key = replace(problem, mode="eager"), request.function, tuple(given)
        made.by_mode = of_group.setdefault(key, made.by_mode)
        made.by_mode[problem.mode] = made
        return made.launch

    def num_chunks(self, problem: Problem, config: Config) -> int:
        """Pieces of a call."""
        tokens = problem.shape[0]
        return max(-(-tokens // int(config.get("chunk_tokens", max(tokens, 1)))), 1)

    def span(self, problem: Problem, config: Config) -> int:
        """Tokens of a piece: of all but the last one."""
        return -(-problem.shape[0] // self.num_chunks(problem, config))

    def staged(self, problem: Problem, config: Config) -> int:
        """Bytes of the workspace that a call takes."""
        chunks = self.num_chunks(problem, config)
        held = min(chunks, _RING) * -(-problem.shape[0] // chunks)
        return self.further_bytes(problem, config) + held * self.token_bytes(problem)

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        nbytes = self.staged(problem, config)
        if self.limit_name == "stage_bytes":
            return Room(stage=nbytes)
        more = self.optional_bytes(problem, config)
        return Room(gather=min(nbytes + more, layout.staging_bytes) if more else nbytes)

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        return super().arguments(problem, {**config, "num_chunks": self.num_chunks(problem, config)}, workspace)

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        if reason := refuse_kernels(problem, limits, SUM_DTYPES, ("", "sum")):
            return reason
        if self.by_token != (problem.layout in (BY_TOKEN, BY_RANK)):
            return "it serves layouts tokens and rank" if self.by_token else "tokens_lamport and tokens_push serve it"
        if (row_bytes := sizes_of(problem).row_bytes) % PACKET_BYTES:
            return f"kernels move tokens of whole packets of {PACKET_BYTES} bytes, not of {row_bytes} bytes"
        if "chunk_tokens" not in self.space.names and (
            (needed := problem.shape[0] * self.token_bytes(problem)) > (room := getattr(limits, self.limit_name))
        ):
            return f"its tokens need {needed} bytes of a workspace with room for {room} of them"
        return None

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        blocks, split, threads = int(config["num_blocks"]), int(config["split"]), 32 * int(config["num_warps"])
        tokens = problem.shape[0]
        most = power_of_2(tokens)  # configs of powers of two also suit what is between those
        chunk = int(config.get("chunk_tokens", most))
        if blocks % split:
            return f"{blocks} blocks are not shared equally by the {split} parts of a token"
        if chunk > most or blocks // split > chunk:
            return f"{tokens} tokens leave some of {blocks} blocks or a piece of {chunk} tokens without work"
        items = (int(config.get("items", 1)) + 1) // 2  # tokens in fp8 have half as many packets
        if (split * items - 1) * threads >= self.packets(problem):
            return f"{self.packets(problem)} packets of a token leave some threads of {split} blocks without work"
        if (needed := self.staged(problem, config)) > (room := getattr(limits, self.limit_name)):
            return f"{tokens} tokens need {needed} bytes of a workspace with room for {room} of them"
        if limits.backend == "cuda" and self.num_rounds(problem, config) > 1024:
            return f"{tokens} tokens need more than 1024 rounds of {blocks} blocks"
        return None

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_residence(config, limits)

    def num_rounds(self, problem: Problem, config: Config) -> int:
        teams, chunks = max(int(config["num_blocks"]) // int(config["split"]), 1), self.num_chunks(problem, config)
        return -(-problem.shape[0] // (chunks * teams)) * chunks

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        tokens, packets = problem.shape[0], self.packets(problem)
        warps = 2 if packets <= 64 else 4 if packets <= 256 else 8
        split = max(min(128 // max(tokens, 1), packets // (32 * warps), 8), 1)
        grid = {"num_blocks": min(tokens * split, 128), "num_warps": warps, "split": split}
        return {**grid, "chunk_tokens": power_of_2(max(tokens, 1)), "items": 1}

    def widest_grid(self, problem: Problem, limits: Limits) -> dict[str, float]:
        """Up to 128 blocks, whose threads hold several packets where tokens are many; on few SMs, of more warps."""
        tokens, packets, most, widest, each = max(problem.shape[0], 1), self.packets(problem), 128, 8, 2
        if limits.backend == "cuda" and limits.num_sms < 64:
            sizes = map(int, dict(self.space.axes)["num_blocks"].values())
            most, widest, each = max(size for size in sizes if size <= limits.num_sms), 32, 1
        split = max(min(128 // tokens, packets // 64, 8), 1)
        warps = min(max(power_of_2(packets // split) // (32 * each), 1), widest)
        items = min(max(packets / (split * 32 * warps), 1), 4)
        return {"num_blocks": min(tokens * split, most), "num_warps": warps, "split": split, "items": items}

    def request(self, problem: Problem, config: Config) -> CompileRequest:
        """The binary, with so few registers that all blocks of a grid of more than 128 are resident."""
        request = super().request(problem, config)
        threads = 32 * int(config["num_warps"]) * -(-int(config["num_blocks"]) // 128)
        return replace(request, max_registers=min(request.max_registers, max(65536 // threads, 24)))

    def full_grid(self, problem: Problem, limits: Limits) -> dict[str, float]:
        """16 warps an SM for many tokens, in pieces for which the ring has room, at least four of them."""
        room = limits.staging_bytes // (int(RING.value) * max(self.token_bytes(problem), 1))
        chunk = min(max(next_power_of_2(room + 1) // 2, 64), 512, next_power_of_2(problem.shape[0]) // 4)
        return {"num_blocks": 512, "num_warps": 4, "split": 512 // chunk, "items": 2, "chunk_tokens": chunk}

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        threads = 32 * int(config["num_warps"])
        return {
            "WORLD_SIZE": problem.world_size, "TOPK": problem.shape[2], "SPLIT": config["split"], "BLOCK": threads
        }  # fmt: skip


class DispatchVariant(GridVariant):
    """A variant of ep_dispatch over `dispatch_kernel` or one with its first arguments."""

    op = "ep_dispatch"
    counts_first = False
    plain: Mapping[str, Value] = {
        "weights": 0, "weights_out": 0, "WEIGHTED": False, "number": 0, "limits": 0, "NUMBERED": False
    }  # fmt: skip

    def token_bytes(self, problem: Problem) -> int:
        return problem.world_size * self.packets(problem) * PACKET_BYTES

    def further_bytes(self, problem: Problem, config: Config) -> int:
        """Of counts, tables and places, from all ranks."""
        s = sizes_of(problem)
        of_block = power_of_2(s.experts + 1) + power_of_2(s.local)
        words = int(config["num_blocks"]) * of_block + s.tokens * power_of_2(s.topk)
        return int(4 * problem.world_size * words + PACKET_BYTES)

    def optional_bytes(self, problem: Problem, config: Config) -> int:
        """Of weights and numbers of tokens, from all ranks."""
        words = problem.shape[0] * power_of_2(problem.shape[2]) + int(config["num_blocks"])
        return 4 * problem.world_size * words

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        s = sizes_of(problem)
        more = {"EXPERTS": s.experts, "SCALES": s.num_scales, "PADDED": problem.layout == "padded"}
        pushed = {"COUNTED": self.counts_first} if "chunk_tokens" in config else {}
        return {**super().constants(problem, config), **more, **pushed, **self.plain, "ITEMS": config["items"]}

    def count_request(self, problem: Problem) -> CompileRequest:
        s = sizes_of(problem)
        constants: dict[str, Value] = {"EXPERTS": s.experts, "TOPK": s.topk, "number": 0, "NUMBERED": False}
        return CompileRequest.of(count_kernel, constants, num_warps=8)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        before = [quantise_request(problem)] if problem.scaling else []
        return [*before, *([self.count_request(problem)] if self.counts_first else []), self.request(problem, config)]

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        s, device, mode = sizes_of(problem), workspace.device, problem.mode
        on_host = device.type == "cpu"
        overflow = Overflow.of(workspace.group, device)
        packets, further = self.packets(problem), functools.partial(self.further, problem, config, workspace)
        quantise = count = None
        recount: Callable[[], Callable[..., None] | None] = lambda: None  # noqa: E731
        wire_nbytes = s.tokens * packets * PACKET_BYTES if problem.scaling else 0
        own_nbytes = 4 * (next_power_of_2(s.experts + 1) + s.tokens * s.topk) if self.counts_first else 0
        wire = workspace.scratch(mode, wire_nbytes + own_nbytes).data_ptr()
        own = wire + wire_nbytes
        if problem.scaling:
            row = s.hidden * ITEMSIZE[problem.dtype] // PACKET_BYTES
            kernel = bind_kernel(quantise_request(problem), 1 if on_host else min(s.tokens, 264), device)
            quantise = kernel.fix((None, wire, s.tokens, row, packets * PACKET_BYTES))
        if self.counts_first:
            num_ids = s.tokens * s.topk
            blocks = max(-(-num_ids // int(SPAN.value)), 1)
            request, fixed = self.count_request(problem), (None, None, num_ids, own)
            count = bind_kernel(request, blocks, device).fix(fixed)
            recount = further(fixed, ("number",), request=request, num_blocks=blocks, NUMBERED=True)
        kernel = bind_kernel(self.request(problem, config), self.num_blocks(problem, config), device)
        sizes = (s.tokens, s.row_bytes // PACKET_BYTES, packets)
        counted = (own,) if "chunk_tokens" in config else ()
        extra = (*self.arguments(problem, config, workspace), *counted, overflow.cell.data_ptr())
        has_forms = "WEIGHTED" in self.plain  # lamport's kernel takes weights or 0 among its first arguments
        arguments = (*(None,) * (10 if has_forms else 12), *sizes, *lane_arguments(problem, workspace), *extra)
        launch = kernel.fix(arguments)
        travelling: tuple[str, ...] = ("weights", "weights_out") if has_forms else ()
        with_weights: dict[str, Any] = {"WEIGHTED": True} if has_forms else {}
        weighted = further(arguments, travelling, **with_weights) if has_forms else None
        numbered = further(arguments, (*travelling, "number", "limits"), **with_weights, NUMBERED=True)
        gather_all, group = all_gather_single(), workspace.group

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            overflow.check(workspace)
            x, ids, *rest = inputs
            weights = rest.pop(0) if outputs[5].numel() else None
            limits = outputs[6] if len(outputs) > 6 and outputs[6].numel() else None
            chosen, counting, code = launch, count, None
            numbers: tuple[int, ...] = ()
            if limits is not None:
                number, of_number, recounting = rest.pop(0), numbered(), recount()
                if of_number is not None and (count is None or recounting is not None):
                    chosen, counting, numbers = of_number, recounting, (number.data_ptr(), limits.data_ptr())
                else:
                    ids, weights, code = within_number(ids, weights, number, limits)
            source, words = x.data_ptr(), ids.element_size() // 4
            if quantise is not None:
                quantise(stream, source)
                source = wire
            if counting is not None:
                counting(stream, ids.data_ptr(), words, *numbers[:1])
            addresses = [tensor.data_ptr() for tensor in (ids, *outputs[:5])]
            sizes = (words, capacity_of(problem, outputs[0]), int(rest[0]) if rest else ALIGNMENT)
            travel: tuple[int, ...] = (0, 0) if weights is None else (weights.data_ptr(), outputs[5].data_ptr())
            if weighted is not None and not numbers:
                chosen = launch if weights is None else weighted() or launch
                if chosen is launch:  # has no arguments for weights
                    travel = ()
                    if weights is not None:
                        gather_all(outputs[5], weights.unsqueeze(0) + 0.0, group=group)  # −0.0 arrives as 0.0
            chosen(stream, source, *addresses, *sizes, *travel, *numbers)
            if code is not None:
                overflow.note(code, s.tokens, workspace)
            if on_host:  # the interpreter has run the kernels to their end
                overflow.check(workspace)

        return run


class Push(DispatchVariant, registered=True):
    name = "push"
    summary = "push through the peers' memory ordered by flags"
    kernels = (dispatch_kernel, quantise_kernel)
    space = Space({**IN_PIECES, "num_warps": PowerOfTwo(1, 8), "items": Choice(1, 2, 4)})

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        return problem.shape[0] <= 2 * FEW

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.shape[0] * problem.shape[2] > 1 << 14:
            return "at more than 16384 ids two_phase, which counts them once, is faster"
        return super().refuse_config(problem, config, limits)


class TwoPhase(DispatchVariant, registered=True):
    name = "two_phase"
    summary = "a kernel counts, another pushes in pieces that overlap; for many tokens"
    kernels = (dispatch_kernel, quantise_kernel, count_kernel)
    space = Push.space
    counts_first = True

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        spills = problem.scaling or problem.world_size > 4
        if problem.shape[0] >= 512 and not spills:
            return self.full_grid(problem, limits)
        return {**super().preferred_config(problem, limits), "items": 1, "chunk_tokens": 256}


class CombineVariant(GridVariant):
    """A variant of ep_combine over `combine_kernel` or one with its first arguments."""

    op = "ep_combine"
    most_registers = 128
    plain: Mapping[str, Value] = {"limits": 0, "NUMBERED": False}

    def token_bytes(self, problem: Problem) -> int:
        return problem.shape[2] * sizes_of(problem).row_bytes

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), **self.plain, "DTYPE": problem.dtype}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        s, overflow = sizes_of(problem), Overflow.of(workspace.group, workspace.device)
        kernel = bind_kernel(self.request(problem, config), int(config["num_blocks"]), workspace.device)
        sizes = (s.tokens, self.packets(problem))
        extra = self.arguments(problem, config, workspace)
        arguments = (*(None,) * 6, *sizes, *lane_arguments(problem, workspace), *extra)
        launch = kernel.fix(arguments)
        numbered = self.further(problem, config, workspace, arguments, ("limits",), NUMBERED=True)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            overflow.check(workspace)
            results, weights, ids, rows, *limits = inputs
            chosen, further = launch, []
            if limits and (of_number := numbered()) is not None:
                chosen, further = of_number, [limits[0].data_ptr()]
            elif limits:
                ids = in_use(ids, limits[0][:1], NOT_HERE)
            addresses = [tensor.data_ptr() for tensor in (results, weights, ids, rows, *outputs)]
            chosen(stream, *addresses, ids.element_size() // 4, *further)

        return run


class CombinePush(CombineVariant, registered=True):
    name = "push"
    summary = "push through the peers' memory ordered by flags, pieces overlapped"
    kernels = (combine_kernel,)
    space = Space(IN_PIECES)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.shape[2] * 4 * (int(config["num_warps"]) // 8) > 64:
            return f"packets of {problem.shape[2]} experts do not fit into the registers of so many threads"
        return super().refuse_config(problem, config, limits)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {**super().preferred_config(problem, limits), "chunk_tokens": 128}
