"""multimem_one_shot, multimem_two_shot: the NVLink switch sums (`multimem.ld_reduce`) and broadcasts (`multimem.st`).

multimem_one_shot: the input is copied into the one-shot area (two areas take turns, as in `one_shot`), the blocks
exchange flags, and each rank loads the sums through the multicast address. Numerics: unordered: each rank's loads are
summed by the switch separately, and nobody promises one order for all.

multimem_two_shot: the input is copied into the scatter area, flags, each rank loads the sums of its slice and stores
them into everybody's gather area with one store, flags, the gathered message is copied to the output. One area of each
kind is enough for the reasons given in `two_shot`, with one addition: the last flags also say that nobody reads the
scatter area any more, because every rank sets them after its own loads. Numerics: library (each element is summed once,
so all ranks get the same bits, in an order that is the switch's).

Graph-safe. Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import AllReduceVariant
from tunedcomm.kernels.common.feasibility import refuse_message, refuse_multicast
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, block_range, exchange_flags, read_counter, write_counter
from tunedcomm.kernels.common.packets import (
    load_reduce,
    mean_packets,
    num_packets,
    read_elements,
    store_all,
    write_elements,
)
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import MULTIMEM_GRID
from tunedcomm.space import Space
from tunedcomm.spec import Limits, Problem


@triton.jit
def multimem_one_shot_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, multicast, area, area_bytes,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the own input, exchange flags, load sums."""
    epoch = read_counter(local, EPOCH_OFFSET)
    own_area = area + (epoch & 1) * area_bytes
    total = num_packets(numel, WIDTH)
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the own input to the own area.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        w0, w1, w2, w3 = read_elements(x, packet, numel, mask, WIDTH, TAIL)
        store_packets(local + own_area + packet * 16, w0, w1, w2, w3, mask)
    # 2. Exchange flags. Releases the copies, acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    # 3. Load every packet's sum over all ranks, which the switch makes.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        sums = load_reduce(multicast, peers, local, own_area + packet * 16, mask, DTYPE, WORLD_SIZE)
        s0, s1, s2, s3 = mean_packets(sums, DTYPE, AVG, WORLD_SIZE)
        write_elements(out, packet, numel, s0, s1, s2, s3, mask, WIDTH, TAIL)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


@triton.jit
def multimem_two_shot_kernel(
    x, out, numel, local, peers, rank, timeout_ns, status, multicast, scatter, gather,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Block b publishes, sums and collects the same positions of every slice, so blocks b wait for each other alone."""
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + WORLD_SIZE - 1) // WORLD_SIZE
    offsets, first, stride = block_range(BLOCK)
    # 1. Copy the own input to the own scatter area.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        for i in tl.static_range(WORLD_SIZE):
            w0, w1, w2, w3 = read_elements(x, i * share + at, numel, mask, WIDTH, TAIL)
            store_packets(local + scatter + (i * share + at) * 16, w0, w1, w2, w3, mask)
    # 2. Exchange flags. Releases the copies, acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, WORLD_SIZE)
    # 3. Load the sums of the own slice, store them into every rank's gather area.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        offset = (rank * share + at) * 16
        sums = load_reduce(multicast, peers, local, scatter + offset, mask, DTYPE, WORLD_SIZE)
        s0, s1, s2, s3 = mean_packets(sums, DTYPE, AVG, WORLD_SIZE)
        store_all(multicast, peers, local, gather + offset, s0, s1, s2, s3, mask, WORLD_SIZE)
    # 4. Exchange flags. Releases the sums, acquires the peers'.
    exchange_flags(local, peers, rank, epoch + 2, timeout_ns, status, WORLD_SIZE)
    # 5. Copy all slices to the output.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        for i in tl.static_range(WORLD_SIZE):
            w0, w1, w2, w3 = load_packets(local + gather + (i * share + at) * 16, mask)
            write_elements(out, i * share + at, numel, w0, w1, w2, w3, mask, WIDTH, TAIL)
    write_counter(local, epoch + 2, EPOCH_OFFSET)


class _Multimem(AllReduceVariant):
    space = Space(MULTIMEM_GRID)

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        room = limits.staging_bytes if self.sliced else limits.one_shot_bytes
        return (
            refuse_multicast(limits)
            or super().refuse(problem, limits)
            or refuse_message(problem.nbytes + 16 * problem.world_size, room)
        )

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        return {"num_blocks": min(self.work_packets(problem) / 256, 32), "num_warps": 8}


class MultimemOneShot(_Multimem, registered=True):
    name = "multimem_one_shot"
    numerics = "unordered"
    summary = "every rank loads sums that the switch makes (NVLink multicast)"
    kernels = (multimem_one_shot_kernel,)
    trailing_arguments = ("multicast", "one_shot", "one_shot_bytes")


class MultimemTwoShot(_Multimem, registered=True):
    name = "multimem_two_shot"
    numerics = "library"
    summary = "the switch sums each slice for its owner, whose one store reaches every rank (NVLink multicast)"
    kernels = (multimem_two_shot_kernel,)
    trailing_arguments = ("multicast", "scatter", "gather")
    sliced = True
