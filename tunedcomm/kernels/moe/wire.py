"""push_quantized: ep_combine in the layouts `tokens` and `rank`, whose rows travel quantised; for many tokens.

The ring, its flags and their proof are as in `tokens_push`. A rank's row for a token, rounded to the results' dtype
first, travels as codes and a scale for every 128 elements. The token's rank quantises its own row, too, and adds what
all rows stand for in rank order.

Numerics: quantized. Graph-safe. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    arrive,
    await_peers,
    exchange_flags,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import PACKET_BYTES, weigh_packets, widen
from tunedcomm.kernels.common.sync import load_packets
from tunedcomm.kernels.common.wire import (
    GROUP_PACKETS,
    load_wire,
    quantise,
    store_wire,
    sum_wires,
    wire_packets,
    write_values,
)
from tunedcomm.kernels.moe.op import BY_RANK, sizes_of
from tunedcomm.kernels.moe.push import IN_PIECES, RING, GridVariant
from tunedcomm.kernels.moe.tokens import _Combine, _Push, held_here, parts_held, ranks_of
from tunedcomm.space import Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem


@triton.jit
def values_of(
    results, row, places, factors, there, packet, row_packets, mask,
    TOPK: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sixteen elements a packet of this rank's row for the token in `row`, in fp32, as `read_values` returns them."""
    values = ()
    for j in tl.static_range(WIDTH):
        at = packet * WIDTH + j
        if SORTED:
            parts = ()
            for k in tl.static_range(TOPK):
                parts = parts + load_packets(results + (places[k] * row_packets + at) * 16, mask & there[k])
            words = weigh_packets(parts, factors, there, TOPK, DTYPE)
        else:
            words = load_packets(results + (row * row_packets + at) * 16, mask)
        for w in tl.static_range(4):
            low, high = widen(words[w], DTYPE)
            values = values + (low,)  # type: ignore[assignment]
            if DTYPE != "float32":
                values = values + (high,)  # type: ignore[assignment]
    return values


@triton.jit
def combine_tokens_quantized_kernel(
    results, held, weights, ids, y, id_words, tokens, row_packets,
    local, peers, rank, timeout_ns, status, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, DTYPE: tl.constexpr, SORTED: tl.constexpr,
    WIRE: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push the rows for piece c of every rank's tokens, sum piece c − 1 of the own ones.

    The gather area has a ring of codes for each source rank, then one of scales for each.
    """
    block, blocks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    team, teams, part = block // SPLIT, blocks // SPLIT, block % SPLIT
    span = (tokens + num_chunks - 1) // num_chunks
    ring = tl.minimum(num_chunks, RING)
    wire_row = row_packets // WIDTH
    slot = ring * span * wire_row
    scales = gather + WORLD_SIZE * slot * 16
    epoch = read_counter(local, EPOCH_OFFSET)
    # Says that this rank reads its gather area no more.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for c in tl.range(0, num_chunks + 1):
        d = c - 1
        lap, behind = (c - c % ring) * span, (d - d % ring) * span
        if c < num_chunks:
            for token in tl.range(c * span + team, tl.minimum(tokens, (c + 1) * span), teams):
                for i in tl.static_range(WORLD_SIZE - 1):
                    row = (rank + 1 + i) % WORLD_SIZE * tokens + token
                    goes = held_here(held, row, TOPK)
                    places, factors, there = parts_held(held, weights, row, TOPK, SORTED)
                    for start in tl.range(part * BLOCK, wire_row, SPLIT * BLOCK):
                        packet = start + tl.arange(0, BLOCK)
                        mask = (packet < wire_row) & goes
                        values = values_of(
                            results, row, places, factors, there, packet, row_packets, mask, TOPK, DTYPE, SORTED, WIDTH
                        )  # fmt: skip
                        place = rank * slot + (token - lap) * wire_row + packet
                        store_wire(peers[i] + gather, peers[i] + scales, place, quantise(values, WIRE), mask)
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        if d >= 0:
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for token in tl.range(d * span + team, tl.minimum(tokens, (d + 1) * span), teams):
                row = rank * tokens + token
                come = ranks_of(ids, id_words, token, TOPK, LOCAL, WORLD_SIZE)
                goes = held_here(held, row, TOPK)
                places, factors, there = parts_held(held, weights, row, TOPK, SORTED)
                for start in tl.range(part * BLOCK, wire_row, SPLIT * BLOCK):
                    packet = start + tl.arange(0, BLOCK)
                    mask = packet < wire_row
                    values = values_of(
                        results, row, places, factors, there, packet, row_packets, mask & goes,
                        TOPK, DTYPE, SORTED, WIDTH,
                    )  # fmt: skip
                    own = quantise(values, WIRE)
                    wires = ()
                    for r in tl.static_range(WORLD_SIZE):
                        place = r * slot + (token - behind) * wire_row + packet
                        wire = load_wire(local + gather, local + scales, place, mask & come[r] & (rank != r))
                        for w in tl.static_range(5):
                            wires = wires + (tl.where(rank == r, own[w], wire[w]),)  # type: ignore[assignment]
                    sums = sum_wires(wires, 0, WORLD_SIZE, WIRE)
                    write_values(
                        y + token * row_packets * 16, packet, wire_row * 16, sums, mask, DTYPE, WIDTH, False, 16
                    )
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class CombineTokensQuantized(_Push, _Combine, registered=True):
    name = "push_quantized"
    summary = "layouts tokens and rank, rows travel quantised in pieces ordered by flags; only where wire= asks for it"
    numerics = "quantized"
    kernels = (combine_tokens_quantized_kernel,)
    plain: Mapping[str, Value] = {}
    space = Space(IN_PIECES)

    def is_usual(self, problem: Problem, limits: Limits) -> bool:
        return True

    def packets(self, problem: Problem) -> int:
        return wire_packets(problem.shape[1])

    def token_bytes(self, problem: Problem) -> int:
        scales = self.packets(problem) // int(GROUP_PACKETS.value)
        return problem.world_size * (self.packets(problem) * PACKET_BYTES + 4 * scales)

    def packets_held(self, problem: Problem, config: Config) -> int:
        return 1

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            **GridVariant.constants(self, problem, config),
            "LOCAL": sizes_of(problem).local,
            "DTYPE": problem.dtype,
            "SORTED": problem.layout == BY_RANK,
            "WIRE": problem.scaling,
            "WIDTH": ITEMSIZE[problem.dtype],
        }
