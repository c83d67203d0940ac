"""two_shot: reduce-scatter then all-gather in one kernel, ordered by flags; best at large sizes.

Slice j of the message belongs to rank j.

Plain input: push the own part of every slice into its owner's scatter area, exchange flags, sum the own slice in rank
order and push the result into every peer's gather area, exchange flags, copy the gathered slices to the output. With
`num_chunks` > 1 a block does this chunk by chunk and pushes the next chunk before it waits for the last one, so that
links do not idle while flags travel. The areas hold `RING` chunks, so messages of any size fit if cut often enough.

Why no area is overwritten too early, within a call: in round c a block pushes chunk c into the place of chunk c − 3; in
round c − 1 it waited until all peers had reduced (read) that one. It then reduces chunk c − 1 into the peers' gather
place of chunk c − 4, after it waited for their push of chunk c − 1, which they make after they collected chunk c − 4.
From call to call: a peer pushes the next call's scatter only after its own call ended, in which it waited for this
rank's last flag, set after this rank's last read of its scatter area. It pushes the next call's sums only after this
rank's first flag of that call, which this rank sets after its own call, and all reads of its gather area, ended. The
two areas lie apart for every size, so calls of different sizes do not change this.

Symmetric input in place: flags, read the own slice on all ranks, sum, write it to all ranks, flags. Nobody else touches
that slice in between.

Numerics: ordered (every element is summed once, by its slice's owner). Graph-safe.
Source: the two-shot scheme of NCCL-free serving stacks and PyTorch's symmetric memory operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, slice_packets
from tunedcomm.kernels.common.feasibility import blocks_and_threads, refuse_chunks
from tunedcomm.kernels.common.lane import (
    EPOCH_OFFSET,
    address_of,
    arrive,
    await_peers,
    block_range,
    read_counter,
    write_counter,
)
from tunedcomm.kernels.common.packets import insert_own, num_packets, read_elements, sum_packets, write_elements
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace


RING = tl.constexpr(3)


@triton.jit
def two_shot_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    x0, x1, x2, x3, x4, x5, x6, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Plain input. In round c: push chunk c, reduce chunk c − 1, collect chunk c − 2.

    A block's flags count its steps. With C chunks, pushing chunk c is step max(1, 2c) and reducing it min(2c + 3, 2C).
    """
    peers = (q0, q1, q2, q3, q4, q5, q6)
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    lanes, first, step = block_range(BLOCK)
    span = ((share + step - 1) // step + num_chunks - 1) // num_chunks * step
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    for c in tl.range(0, num_chunks + 2):
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(share, (c + 1) * span), step):
                at = start + lanes
                here = at < share
                for i in tl.static_range(WORLD_SIZE - 1):
                    owner = (rank + 1 + i) % WORLD_SIZE
                    w0, w1, w2, w3 = read_elements(x, owner * share + at, numel, here, WIDTH, TAIL)
                    store_packets(peers[i] + scatter + (rank * slot + at - lap) * 16, w0, w1, w2, w3, here)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + tl.maximum(1, 2 * c), WORLD_SIZE)
        if (c >= 1) & (c <= num_chunks):
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + tl.maximum(1, 2 * d), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(share, (d + 1) * span), step):
                at = start + lanes
                here = at < share
                own = read_elements(x, rank * share + at, numel, here, WIDTH, TAIL)
                words = ()
                for i in tl.static_range(WORLD_SIZE):
                    words = words + load_packets(local + scatter + (i * slot + at - lap) * 16, here & (rank != i))
                s0, s1, s2, s3 = sum_packets(insert_own(words, own, rank, WORLD_SIZE), DTYPE, AVG, WORLD_SIZE)
                for i in tl.static_range(WORLD_SIZE - 1):
                    store_packets(peers[i] + gather + (rank * slot + at - lap) * 16, s0, s1, s2, s3, here)
                write_elements(out, rank * share + at, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
            reduced = epoch + tl.minimum(2 * d + 3, 2 * num_chunks)
            arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, reduced, WORLD_SIZE)
        if c >= 2:
            e = c - 2
            lap = (e - e % ring) * span
            await_peers(local, rank, epoch + tl.minimum(2 * e + 3, 2 * num_chunks), timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + e * span, tl.minimum(share, (e + 1) * span), step):
                at = start + lanes
                here = at < share
                for i in tl.static_range(WORLD_SIZE):
                    theirs = here & (rank != i)
                    w0, w1, w2, w3 = load_packets(local + gather + (i * slot + at - lap) * 16, theirs)
                    write_elements(out, i * share + at, numel, w0, w1, w2, w3, theirs, WIDTH, TAIL)
    write_counter(local, epoch + 2 * num_chunks, EPOCH_OFFSET)


@triton.jit
def two_shot_inplace_kernel(
    x, out, numel, local, q0, q1, q2, q3, q4, q5, q6, rank, timeout_ns, status,
    x0, x1, x2, x3, x4, x5, x6, scatter, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Symmetric input in place: read the own slice from all ranks, write its sum to all ranks; `out` is `x`."""
    peers = (x0, x1, x2, x3, x4, x5, x6)
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    lanes, first, step = block_range(BLOCK)
    # Orders what wrote the inputs before the peers' reads.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 1, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    for start in tl.range(first, share, step):
        at = start + lanes
        here = at < share
        packet = rank * share + at
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = address_of(peers, x, i, rank, WORLD_SIZE)
            words = words + read_elements(source, packet, numel, here, WIDTH, TAIL)
        s0, s1, s2, s3 = sum_packets(words, DTYPE, AVG, WORLD_SIZE)
        for i in tl.static_range(WORLD_SIZE - 1):
            write_elements(peers[i], packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
        write_elements(x, packet, numel, s0, s1, s2, s3, here, WIDTH, TAIL)
    # Orders the sums written to this rank before whatever follows this kernel.
    arrive(local, q0, q1, q2, q3, q4, q5, q6, rank, epoch + 2, WORLD_SIZE)
    await_peers(local, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    write_counter(local, epoch + 2, EPOCH_OFFSET)


def _on_peers(problem: Problem) -> bool:
    return problem.input_kind == "symmetric" and problem.in_place


class TwoShot(AllReduceVariant):
    name = "two_shot"
    summary = "reduce-scatter then all-gather ordered by flags, chunks overlapped; best at large sizes"
    kernels: tuple[Any, ...] = (two_shot_kernel, two_shot_inplace_kernel)
    space = Space(
        {
            "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
            "num_warps": PowerOfTwo(4, 16),
            "items": Choice(1, 2, 4),
            "num_chunks": PowerOfTwo(1, 16),
        }
    )
    sliced = True
    areas = ("scatter", "gather")

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        chunks, blocks = int(config["num_chunks"]), int(config["num_blocks"])
        per_block = 32 * int(config["num_warps"]) * int(config["items"])
        if per_block > 1024:
            return "more than 1024 packets a block at once spill registers"
        if _on_peers(problem):
            if chunks > 1:
                return "in place on symmetric memory there is nothing to overlap: only num_chunks=1"
        elif reason := refuse_chunks(
            problem, limits, rounds=self.num_rounds(problem, config), chunks=chunks, blocks=blocks,
            per_block=per_block, slots=problem.world_size, ring=RING.value,
        ):  # fmt: skip
            return reason
        return blocks_and_threads(config, limits, slice_packets(problem), most_rounds=64 * chunks)

    def wish(self, problem: Problem, limits: Limits) -> dict[str, float]:
        share = slice_packets(problem)
        if limits.backend == "host":
            return {"num_blocks": 2, "num_warps": 16, "items": 1, "num_chunks": 2}
        chunks = 1 if _on_peers(problem) or share < 132 * 512 * 8 else 4 if share < 1 << 21 else 16
        return {"num_blocks": min(share / 512, 132), "num_warps": 16, "items": 1, "num_chunks": chunks}

    def kernel(self, problem: Problem) -> Any:
        return two_shot_inplace_kernel if _on_peers(problem) else two_shot_kernel

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "SYMMETRIC": _on_peers(problem)}

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[int, ...]:
        return *super().arguments(problem, config, workspace), int(config["num_chunks"])


TWO_SHOT = TwoShot().register()
