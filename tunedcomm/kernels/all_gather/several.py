"""all_gather_list: several tensors of any dtypes are gathered in one launch; its variants.

Inputs are up to 8 tensors, outputs as many, each as of all_gather. The canonical shape is the bytes of a rank, the
tensors one after another, each from a multiple of 16 on. The layout is the largest of 16, 4, 2 and 1 bytes that divides
the size of each. The sizes themselves are arguments of the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_gather.op import HostOneShot
from tunedcomm.kernels.common.feasibility import Launch, packets_a_block
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.lamport import begin_call, end_call, launch_next
from tunedcomm.kernels.common.lane import block_range
from tunedcomm.kernels.common.launch import AddressLaunch, Argument
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    escape,
    escaped_slots,
    has_escape,
    packets_of,
    restore,
    sentinel_mask_of,
    store_bytes,
)
from tunedcomm.kernels.common.reference import draw_any, register_move
from tunedcomm.kernels.common.sync import SENTINEL, load_packets, poll_packets, poll_words, store_packets, store_word
from tunedcomm.kernels.common.variant import (
    LamportVariant,
    LibraryVariant,
    MoveVariant,
    Workspace,
    all_gather_single,
    together,
)
from tunedcomm.space import Config, Value
from tunedcomm.spec import Problem, register_op

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 8
ALIGNMENTS = ("16", "4", "2", "1")
_TENSORS = tl.constexpr(MAX_TENSORS)


def aligned(nbytes: int) -> int:
    """Bytes that a tensor takes of a rank's."""
    return packets_of(nbytes) * PACKET_BYTES


def _sample_sizes(problem: Problem) -> list[int]:
    """Bytes of three tensors."""
    align, packets = int(problem.layout), packets_of(problem.nbytes)
    first, second = packets // 2, packets // 3
    last = packets - first - second
    return [first * PACKET_BYTES, second * PACKET_BYTES, last * PACKET_BYTES - (align if align < PACKET_BYTES else 0)]


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    values = draw_any(replace(problem, dtype="uint8"), aligned(problem.nbytes), rank, seed, kind, device)
    return tuple(values[:size].clone() for size in _sample_sizes(problem))


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    n = problem.world_size
    return tuple(torch.empty(n * size, dtype=torch.uint8, device=device) for size in _sample_sizes(problem))


def _received(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(map(torch.cat, zip(*inputs, strict=True)))


_OP = register_move(
    "all_gather_list",
    "every rank gets all ranks' inputs of several tensors, each one after another in rank order",
    shape_help="bytes of one rank's tensors, each rounded up to 16, e.g. 12288",
    make_inputs=_make_inputs,
    make_outputs=_make_outputs,
    received=lambda problem, inputs, rank: _received(problem, inputs, rank)[0],
    largest_mib=1,
)
ALL_GATHER_LIST = register_op(
    replace(
        _OP,
        dtypes=("uint8",),
        layouts=ALIGNMENTS,
        ordered_reference=_received,
        reference=lambda *arguments: tuple(each.double() for each in _received(*arguments)),
    )
)


@triton.jit
def lamport_list_kernel(
    tensors_from, tensors_to, tensor_bytes, nbytes, local, peers, rank, timeout_ns, status, arena, stage_bytes,
    WORLD_SIZE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """all_gather's `lamport_kernel` over the packets of all tensors as one list.

    Example:
        2 ranks, tensors of 16 and 20 bytes: 3 packets. Rank 1 stores its packets at offsets 48, 64 and 80 of rank 0's
        stage, which writes the first to bytes 16 … 31 of its first output, the others to bytes 20 … 39 of its second.
    """
    calls, stage = begin_call(local, arena, stage_bytes, PDL)
    total = nbytes.to(tl.int64) // 16
    masks = stage + WORLD_SIZE * total * 16
    offsets, first, stride = block_range(BLOCK)

    # 1. Push the own packets, and masks where they have an ESCAPE, to every peer; write the own part of the outputs.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        source, place, left, size = tensor_of(packet, tensors_from, tensors_to, tensor_bytes)
        w0, w1, w2, w3 = load_packets(source, mask)
        sentinels = sentinel_mask_of(w0, w1, w2, w3)
        e0, e1, e2, e3 = escape(w0), escape(w1), escape(w2), escape(w3)
        marked = mask & has_escape(e0, e1, e2, e3)
        for i in tl.static_range(WORLD_SIZE - 1):
            store_packets(peers[i] + stage + (rank * total + packet) * 16, e0, e1, e2, e3, mask, REMOTE=True)
            store_word(peers[i] + masks + (rank * total + packet) * 4, sentinels, marked)
        store_bytes(place + rank * size, left, w0, w1, w2, w3, mask, ALIGN)
    launch_next(PDL)

    # 2. Poll the peers' packets and masks, clear their places, write the packets out.
    for start in tl.range(first, total, stride):
        packet = start + offsets
        mask = packet < total
        _, place, left, size = tensor_of(packet, tensors_from, tensors_to, tensor_bytes)
        arrived = local + stage + packet * 16
        words = poll_packets(arrived, total * 16, mask, rank, timeout_ns, status, WORLD_SIZE)
        slots = escaped_slots(words, WORLD_SIZE)
        sentinels = poll_words(local + masks + packet * 4, total * 4, slots, timeout_ns, status, WORLD_SIZE)
        empty = tl.full((BLOCK,), SENTINEL, tl.int32)
        for i in tl.static_range(WORLD_SIZE):
            peer_mask = mask & (rank != i)
            store_packets(arrived + i * total * 16, empty, empty, empty, empty, peer_mask)
            store_word(local + masks + (i * total + packet) * 4, empty, ((slots >> i) & 1) != 0)
            w0, w1 = restore(words[4 * i], sentinels[i], 0), restore(words[4 * i + 1], sentinels[i], 1)
            w2, w3 = restore(words[4 * i + 2], sentinels[i], 2), restore(words[4 * i + 3], sentinels[i], 3)
            store_bytes(place + i * size, left, w0, w1, w2, w3, peer_mask, ALIGN)
    end_call(local, calls)


@triton.jit
def tensor_of(packet, tensors_from, tensors_to, tensor_bytes):
    """(address in the input, and in rank 0's part of the output, bytes from there on, tensor's bytes) of packets."""
    source, place, left, size = packet * 0, packet * 0, packet * 0, packet * 0
    before = tensor_bytes[0] * 0
    for i in tl.static_range(_TENSORS):
        there = (tensor_bytes[i] + 15) // 16
        inside = (packet >= before) & (packet < before + there)
        at = (packet - before) * 16
        source = tl.where(inside, tensors_from[i] + at, source)
        place = tl.where(inside, tensors_to[i] + at, place)
        left = tl.where(inside, tensor_bytes[i] - at, left)
        size = tl.where(inside, tensor_bytes[i], size)
        before += there
    return source, place, left, size


class Lamport(LamportVariant, MoveVariant, registered=True):
    op = "all_gather_list"
    name = "lamport"
    summary = "one-shot push without flags of all tensors at once"
    kernels = (lamport_list_kernel,)
    packet_bytes = PACKET_BYTES + 4

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        return (None, None, None, aligned(problem.nbytes))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {"WORLD_SIZE": problem.world_size, "ALIGN": int(problem.layout), "BLOCK": packets_a_block(config)}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        bound = super().bind(problem, config, workspace)
        assert isinstance(bound, AddressLaunch), "inputs are plain"
        launch = bound.by_address

        def padded(numbers: Sequence[int]) -> tuple[int, ...]:
            return (*numbers, *(0,) * (MAX_TENSORS - len(numbers)))

        def by_address(stream: int, *arguments: Any) -> None:
            *addresses, sizes = arguments
            count = len(sizes)
            launch(stream, padded(addresses[:count]), padded(addresses[count:]), padded(sizes))

        return AddressLaunch(by_address, _addresses)


def _addresses(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    sizes = tuple(each.nbytes for each in inputs)
    return (*(each.data_ptr() for each in (*inputs, *outputs)), sizes)


class Library(LibraryVariant, registered=True):
    """One all_gather for each tensor, grouped on NCCL. Graph-safe on NCCL."""

    op = "all_gather_list"
    numerics = "ordered"  # nothing is computed

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        gather, group, device = all_gather_single(), workspace.group, workspace.device

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            with together(group, device):
                for x, out in zip(inputs, outputs, strict=True):
                    if x.numel():
                        gather(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=group)

        return run


class Host(HostComposed, registered=True):
    op = "all_gather_list"
    summary = "CPU tensors: copies into one message, which goes through shared memory"
    algorithms = {"one_shot": HostOneShot.variant}  # noqa: RUF012 - never changed

    def collective_problem(self, problem: Problem) -> Problem:
        return replace(problem, shape=(aligned(problem.nbytes),), dtype="uint8", layout="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        (collective,) = self.collectives(problem, config)
        gather, size, n = collective.bind(workspace), collective.problem.numel, problem.world_size
        sent, got = (torch.empty(shape, dtype=torch.uint8, device="cpu") for shape in ((size,), (n, size)))

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            flat = [x.view(-1).view(torch.uint8) for x in inputs]
            firsts = list(accumulate((aligned(len(x)) for x in flat[:-1]), initial=0))
            for first, x in zip(firsts, flat, strict=True):
                sent[first : first + len(x)].copy_(x)
            gather((sent,), (got,), stream)
            for first, x, out in zip(firsts, flat, outputs, strict=True):
                out.view(-1).view(torch.uint8).view(n, len(x)).copy_(got[:, first : first + len(x)])

        return run
