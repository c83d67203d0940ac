"""push: all_to_all and all_to_all_v through the peers' gather areas, ordered by flags; best at large sizes.

A rank pushes a piece of each peer's chunk into its slot of that peer's gather area, raises a flag, and copies what the
peers pushed to it to the result. With `num_chunks` > 1 a block does this piece by piece and pushes the next piece
before it waits for the last one, so that links do not idle while flags travel. Slots hold `RING` pieces, so messages
of any size fit if cut often enough. There is a slot for each peer and none for the rank itself, whose own chunk is
copied straight while the first flags travel.

Why no slot is overwritten too early, within a call: in round c a block pushes piece c into the place of piece c − 4. In
round c − 1 it waited for the flags that its counterparts raised after they pushed piece c − 2; before that, in their
round c − 3, they had copied piece c − 4 away.
From call to call: no rank pushes before it has seen every peer's first flag of this call, which a peer raises after its
last kernel, and all reads of its gather area, ended.

all_to_all_v goes round the same ring, in which chunks end early. How the message is cut, how many flags are raised and
where the slots lie follow from the problem's bound, which all ranks know alike; a rank's own counts, arguments of the
launch, only say which packets it pushes and which it copies away. So a rank that sends nothing still raises every flag
and waits for every peer, and no slot is overwritten too early for the same reasons.

Numerics: ordered (bits are moved). Graph-safe.
Source: own; the ring is `all_reduce`'s `two_shot`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_to_all.op import AllToAllVariant, row_alignment
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, block_range, read_counter, write_counter
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.packets import load_bytes, store_bytes
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PushRingVariant, Workspace
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Problem
from tunedcomm.symm.layout import rotate

RING = tl.constexpr(4)


@triton.jit
def push_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, collect piece c − 1. Slot s of a gather area holds what rank + 1 + s sent.

    Example:
        2 ranks, 8 fp32 elements each: chunk j is packet j, 1 piece. Each rank copies the chunk that it keeps while the
        first flags travel. Round 0: rank 0 stores packet 1 into slot 0 of rank 1's gather area, rank 1 stores packet 0
        into slot 0 of rank 0's. Round 1: rank 0 writes slot 0 to bytes 16 … 31 of its output, rank 1 to bytes 0 … 15.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    nbytes = nbytes.to(tl.int64)
    total = (nbytes + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    # 1. Tell the peers that this rank reads its gather area no more; copy the own chunk until all have said so.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        left = nbytes - packet * 16
        w0, w1, w2, w3 = load_bytes(x + rank * nbytes + packet * 16, left, mask, ALIGN)
        store_bytes(out + rank * nbytes + packet * 16, left, w0, w1, w2, w3, mask, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + 1):
        # 2. Push piece c of every peer's chunk.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(total, (c + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                    chunk = x + (rank + 1 + i) % WORLD_SIZE * nbytes
                    words = words + load_bytes(chunk + packet * 16, nbytes - packet * 16, mask, ALIGN)
                for i in tl.static_range(WORLD_SIZE - 1):  # this rank comes (WORLD_SIZE - 2 - i) + 1 after the peer
                    place = peers[i] + gather + ((WORLD_SIZE - 2 - i) * slot + packet - lap) * 16
                    store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        # 3. Write out piece c − 1 of what the peers pushed.
        if c >= 1:
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(total, (d + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):
                    words = words + load_packets(local + gather + (i * slot + packet - lap) * 16, mask)
                for i in tl.static_range(WORLD_SIZE - 1):
                    place = out + (rank + 1 + i) % WORLD_SIZE * nbytes + packet * 16
                    w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
                    store_bytes(place, nbytes - packet * 16, w0, w1, w2, w3, mask, ALIGN)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


@triton.jit
def _largest(sizes, bound):
    """Packets of the largest of the peers' chunks, at most `bound`."""
    largest = tl.maximum(tl.maximum(sizes[0], sizes[1]), tl.maximum(sizes[2], sizes[3]))
    largest = tl.maximum(largest, tl.maximum(tl.maximum(sizes[4], sizes[5]), sizes[6]))
    return tl.minimum((largest + 15) // 16, bound)


@triton.jit
def push_counts_kernel(
    x, out, nbytes, local, peers, rank, timeout_ns, status, gather, num_chunks,
    own_from, own_to, own_bytes, send_from, send_bytes, recv_to, recv_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c, collect piece c − 1. Slot s of a gather area holds what rank + 1 + s sent.

    For the peer rank + 1 + i: `send_bytes[i]` bytes from `send_from[i]` of the input on are sent, `recv_bytes[i]` bytes
    come to `recv_to[i]` of the result. No chunk has more than `nbytes`.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    total = (nbytes.to(tl.int64) + 15) // 16
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span
    send_packets = _largest(send_bytes, total)
    recv_packets = _largest(recv_bytes, total)

    # 1. Tell the peers that this rank reads its gather area no more; copy the own chunk until all have said so.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    for start in tl.range(first, (own_bytes.to(tl.int64) + 15) // 16, stride):
        at = (start + offsets) * 16
        mask = at < own_bytes
        w0, w1, w2, w3 = load_bytes(x + own_from + at, own_bytes - at, mask, ALIGN)
        store_bytes(out + own_to + at, own_bytes - at, w0, w1, w2, w3, mask, ALIGN)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + 1):
        # 2. Push piece c of every peer's chunk.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(send_packets, (c + 1) * span), stride):
                packet = start + offsets
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                    left = send_bytes[i] - packet * 16
                    words = words + load_bytes(x + send_from[i] + packet * 16, left, left > 0, ALIGN)
                for i in tl.static_range(WORLD_SIZE - 1):  # this rank comes (WORLD_SIZE - 2 - i) + 1 after the peer
                    place = peers[i] + gather + ((WORLD_SIZE - 2 - i) * slot + packet - lap) * 16
                    mask = packet * 16 < send_bytes[i]
                    store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)
            arrive(peers, rank, epoch + 2 + c, WORLD_SIZE)
        # 3. Write out piece c − 1 of what the peers pushed.
        if c >= 1:
            d = c - 1
            lap = (d - d % ring) * span
            await_peers(local, rank, epoch + 2 + d, timeout_ns, status, WORLD_SIZE)
            for start in tl.range(first + d * span, tl.minimum(recv_packets, (d + 1) * span), stride):
                packet = start + offsets
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):
                    mask = packet * 16 < recv_bytes[i]
                    words = words + load_packets(local + gather + (i * slot + packet - lap) * 16, mask)
                for i in tl.static_range(WORLD_SIZE - 1):
                    left = recv_bytes[i] - packet * 16
                    w0, w1, w2, w3 = words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]
                    store_bytes(out + recv_to[i] + packet * 16, left, w0, w1, w2, w3, left > 0, ALIGN)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class Push(PushRingVariant, AllToAllVariant, registered=True):
    name = "push"
    summary = "push through the peers' memory ordered by flags, pieces overlapped; best at large sizes"
    kernels = (push_kernel,)
    ring = RING.value


def _places(counts: Sequence[int], width: int, rank: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """(own place, own bytes, the peers' places, their bytes) of chunks that lie one after another, for the kernel."""
    sizes = [count * width for count in counts]
    starts = [0, *accumulate(sizes)]
    return starts[rank], sizes[rank], rotate(tuple(starts[:-1]), rank), rotate(tuple(sizes), rank)


class PushV(Push, registered=True):
    """Of all_to_all_v; a graph replays the counts of its capture."""

    op = "all_to_all_v"
    summary = "push through the peers' memory ordered by flags, pieces overlapped"
    kernels = (push_counts_kernel,)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().constants(problem, config), "ALIGN": row_alignment(problem)}

    def arguments(self, problem: Problem, config: Config, workspace: Workspace) -> tuple[Any, ...]:
        counts = (None,) * 7  # every call brings them: own_from, own_to, own_bytes and four tuples
        return (*super().arguments(problem, config, workspace), *counts)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        bound = super().bind(problem, config, workspace)
        assert isinstance(bound, AddressLaunch), "inputs of all_to_all_v are plain"
        launch, width, rank = bound.by_address, ITEMSIZE[problem.dtype], workspace.rank

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, send, recv = inputs
            own_from, own_bytes, send_from, send_bytes = _places(send.tolist(), width, rank)
            own_to, _, recv_to, recv_bytes = _places(recv.tolist(), width, rank)
            counts = (own_from, own_to, own_bytes, send_from, send_bytes, recv_to, recv_bytes)
            launch(stream, x.data_ptr(), outputs[0].data_ptr(), *counts)

        return run
