"""push: shares through the peers' gather areas, ordered by flags, pieces overlapped; for any size.

The ring, its flags and its proof are as in all_to_all's `push`. A gather area holds shares in their own order: the
sender takes packets from where its input has them, the receiver puts them where its output wants them (`packet_at`).
So both transposes happen on the way.

Numerics: ordered (bits are moved). Graph-safe.
Source: own; the ring is all_to_all's `push`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_to_all.push import RING
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, arrive, await_peers, block_range, read_counter, write_counter
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import PushRingVariant
from tunedcomm.kernels.ulysses.op import GATHER, SCATTER, UlyssesVariant


@triton.jit
def packet_at(tensor, packet, owner, unit, WORLD_SIZE: tl.constexpr):
    """Address of packets of the share of rank `owner` in a tensor whose shares lie in units of `unit` packets.

    Example:
        2 ranks, a unit of 3 packets: packets 0 to 3 of rank 1's share lie at 3, 4, 5 and 9.
    """
    # The division in 32 bits takes half as long; a share has fewer than 2^31 packets.
    unit_number = (packet.to(tl.int32) // unit.to(tl.int32)).to(tl.int64)
    return tensor + (packet + (unit_number * (WORLD_SIZE - 1) + owner) * unit) * 16


@triton.jit
def copy_own(
    x, out, total, send_unit, recv_unit, rank, first, stride, offsets, WORLD_SIZE: tl.constexpr
):  # fmt: skip
    """Copy the share that the rank keeps."""
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = load_packets(packet_at(x, packet, rank, send_unit, WORLD_SIZE), mask)
        store_packets(packet_at(out, packet, rank, recv_unit, WORLD_SIZE), w0, w1, w2, w3, mask)


@triton.jit
def push_kernel(
    x, out, total, send_unit, recv_unit, local, peers, rank, timeout_ns, status, gather, num_chunks,
    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In round c: push piece c of every share, collect piece c − 1. Slot s of a gather area: from rank + 1 + s.

    Example:
        2 ranks, ulysses_scatter, B = 1, S = 4, W = 8 in fp32: a token has 2 packets, one for each rank. Rank 0 has the
        tokens 0 and 1, in packets 0 to 3, and pushes packets 1 and 3 into slot 0 of rank 1's gather area. Rank 1 writes
        them to packets 0 and 1 of its output, whose packets 2 and 3 are the own tokens'.
    """
    epoch = read_counter(local, EPOCH_OFFSET)
    total, send_unit, recv_unit = total.to(tl.int64), send_unit.to(tl.int64), recv_unit.to(tl.int64)
    offsets, first, stride = block_range(BLOCK)
    span = ((total + stride - 1) // stride + num_chunks - 1) // num_chunks * stride
    ring = tl.minimum(num_chunks, RING)
    slot = ring * span

    # 1. Tell the peers that this rank reads its gather area no more; copy the own share until all have said so.
    arrive(peers, rank, epoch + 1, WORLD_SIZE)
    copy_own(x, out, total, send_unit, recv_unit, rank, first, stride, offsets, WORLD_SIZE)
    await_peers(local, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)

    for c in tl.range(0, num_chunks + 1):
        # 2. Push piece c of every peer's share.
        if c < num_chunks:
            lap = (c - c % ring) * span
            for start in tl.range(first + c * span, tl.minimum(total, (c + 1) * span), stride):
                packet = start + offsets
                mask = packet < total
                words = ()
                for i in tl.static_range(WORLD_SIZE - 1):  # all loads before the first store
                    owner = (rank + 1 + i) % WORLD_SIZE
                    words = words + load_packets(packet_at(x, packet, owner, send_unit, WORLD_SIZE), mask)
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
                    place = packet_at(out, packet, (rank + 1 + i) % WORLD_SIZE, recv_unit, WORLD_SIZE)
                    store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)
    write_counter(local, epoch + 1 + num_chunks, EPOCH_OFFSET)


class ScatterPush(UlyssesVariant, PushRingVariant, registered=True):
    op = SCATTER
    name = "push"
    summary = "push through the peers' memory ordered by flags, pieces overlapped"
    kernels = (push_kernel,)
    ring = RING.value
    most_registers = 255


class GatherPush(ScatterPush, registered=True):
    op = GATHER
