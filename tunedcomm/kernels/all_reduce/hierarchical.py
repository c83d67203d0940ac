"""hierarchical: all_reduce of a group that spans several nodes; what crosses between them is a share of the message.

Slice l of the message belongs to local rank l of every node. Three steps, on one stream: the ranks of a node push slice
l to its owner there, who sums it in rank order; the library reduces each slice over its owners on all nodes; the owners
push the result to the ranks of their node. Messages above the staging go in pieces, one after another.

Why no area is overwritten too early: the scatter area may be written from a call's start, since in the call before
every peer raised the flag of the gather kernel, after which it reads its scatter area no more, and this rank waited for
it. The gather area of a peer is written only after the scatter kernel has seen that peer's flag of the same piece,
which the peer raises after it has read what the piece before left there. Within a node the lane has no other users but
keeps the common rules.

Numerics: library. A slice's sum on a node is made once, the library gives the same bits to all owners of a slice, and
what is gathered is copied, so all ranks of all nodes have the same bits. For avg the mean of the nodes' means is taken,
which is the mean, for nodes have the same number of ranks. Graph-safe where the library is.
A lost peer ends the waits of its node; what then waits in the library is ended by the library's own time-out.
Source: the two-level scheme of NCCL, Horovod and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.op import AllReduceVariant, library_reduction
from tunedcomm.kernels.common.feasibility import Launch, blocks_and_threads
from tunedcomm.kernels.common.lane import EPOCH_OFFSET, block_range, exchange_flags, read_counter, write_counter
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import (
    PACKET_BYTES,
    insert_own,
    num_packets,
    packets_of,
    read_elements,
    sum_packets,
    write_elements,
)
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import lane_arguments
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import MAX_WORLD_SIZE, LaneLayout, Room

if TYPE_CHECKING:
    from tunedcomm.symm.nodes import NodeGroups


@triton.jit
def scatter_slices_kernel(
    x, numel, local, peers, rank, timeout_ns, status, scatter, gather,
    RANKS: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr, AVG: tl.constexpr, TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the node's slices to their owners, sum the own one into slot `rank` of the own gather area."""
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + RANKS - 1) // RANKS
    offsets, first, stride = block_range(BLOCK)
    # 1. Push slice j to rank j of the node.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        words = ()
        for i in tl.static_range(RANKS - 1):  # all loads before the first store
            owner = (rank + 1 + i) % RANKS
            words = words + read_elements(x, owner * share + at, numel, mask, WIDTH, TAIL)
        for i in tl.static_range(RANKS - 1):
            place = peers[i] + scatter + (rank * share + at) * 16
            store_packets(place, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3], mask)
    # 2. Exchange flags. Releases what was pushed, acquires what the peers pushed.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, RANKS)
    # 3. Sum the own slice in rank order.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        own = read_elements(x, rank * share + at, numel, mask, WIDTH, TAIL)
        parts = ()
        for i in tl.static_range(RANKS):
            parts = parts + load_packets(local + scatter + (i * share + at) * 16, mask & (rank != i))
        s0, s1, s2, s3 = sum_packets(insert_own(parts, own, rank, RANKS), DTYPE, AVG, RANKS)
        store_packets(local + gather + (rank * share + at) * 16, s0, s1, s2, s3, mask)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


@triton.jit
def gather_slices_kernel(
    out, numel, local, peers, rank, timeout_ns, status, gather,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the own slice from the own gather area to the peers', and copy all slices from there to the output."""
    epoch = read_counter(local, EPOCH_OFFSET)
    share = (num_packets(numel, WIDTH) + RANKS - 1) // RANKS
    offsets, first, stride = block_range(BLOCK)
    # 1. Push the own slice to every peer of the node, copy it to the output.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        place = gather + (rank * share + at) * 16
        w0, w1, w2, w3 = load_packets(local + place, mask)
        for i in tl.static_range(RANKS - 1):
            store_packets(peers[i] + place, w0, w1, w2, w3, mask)
        write_elements(out, rank * share + at, numel, w0, w1, w2, w3, mask, WIDTH, TAIL)
    # 2. Exchange flags. Releases what was pushed, acquires what the peers pushed; the scatter area is read no more.
    exchange_flags(local, peers, rank, epoch + 1, timeout_ns, status, RANKS)
    # 3. Copy the peers' slices to the output.
    for start in tl.range(first, share, stride):
        at = start + offsets
        mask = at < share
        for i in tl.static_range(RANKS - 1):
            packet = (rank + 1 + i) % RANKS * share + at
            w0, w1, w2, w3 = load_packets(local + gather + packet * 16, mask)
            write_elements(out, packet, numel, w0, w1, w2, w3, mask, WIDTH, TAIL)
    write_counter(local, epoch + 1, EPOCH_OFFSET)


def _piece_numel(problem: Problem, config: Config, staging_bytes: int) -> int:
    """Elements of one piece: what the staging holds, all slices whole packets."""
    ranks = int(config["ranks_per_node"])
    share = staging_bytes // (ranks * PACKET_BYTES)
    return min(share * ranks * (PACKET_BYTES // ITEMSIZE[problem.dtype]), problem.numel)


class Hierarchical(AllReduceVariant, registered=True):
    """The two kernels on the ranks of a node (`Workspace.nodes`), with the library's all_reduce between them."""

    name = "hierarchical"
    numerics = "library"
    summary = "over several nodes: reduce-scatter and all-gather within them, NCCL (gloo on CPUs) between them"
    kernels = (scatter_slices_kernel, gather_slices_kernel)
    space = Space(
        {
            "ranks_per_node": Choice(*range(2, MAX_WORLD_SIZE + 1)),
            "num_blocks": Choice(1, 2, 8, 32, 64, 132),
            "num_warps": Choice(8, 16),
        }
    )

    host_preferred: Mapping[str, float] = {"num_blocks": 2}

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        ranks = limits.ranks_per_node
        if ranks == 0:
            return "the group does not span several nodes with the same number of ranks, or these share no memory"
        return super().refuse(replace(problem, world_size=ranks), replace(limits, symmetric=True))

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if config["ranks_per_node"] != limits.ranks_per_node:
            return f"nodes have {limits.ranks_per_node} ranks, not {config['ranks_per_node']}"
        piece = _piece_numel(problem, config, limits.staging_bytes) * ITEMSIZE[problem.dtype]
        share = -(-packets_of(piece) // limits.ranks_per_node)
        return blocks_and_threads(config, limits, share, max_rounds=256)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, float]:
        ranks = max(limits.ranks_per_node, 2)
        share = -(-packets_of(problem.nbytes) // ranks)
        return {"ranks_per_node": ranks, "num_blocks": min(share / 512, 132), "num_warps": 16}

    def lane_room(self, problem: Problem, config: Config, layout: LaneLayout) -> Room:
        ranks, piece = int(config["ranks_per_node"]), _piece_numel(problem, config, layout.staging_bytes)
        nbytes = -(-packets_of(piece * ITEMSIZE[problem.dtype]) // ranks) * ranks * PACKET_BYTES
        return Room(scatter=nbytes, gather=nbytes)

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Not known: the grid goes round once and more for each piece."""
        return 0

    def compile_requests(self, problem: Problem, config: Config) -> tuple[CompileRequest, CompileRequest]:
        constants = {**self.constants(problem, config), "RANKS": int(config["ranks_per_node"])}
        del constants["WORLD_SIZE"]
        warps = int(config["num_warps"])
        scatter = CompileRequest.of(scatter_slices_kernel, constants, num_warps=warps)
        kept = {name: constants[name] for name in ("RANKS", "WIDTH", "TAIL", "BLOCK")}
        return scatter, CompileRequest.of(gather_slices_kernel, kept, num_warps=warps)

    def bind(self, problem: Problem, config: Config, workspace: Any) -> Launch:
        groups: NodeGroups = workspace.nodes
        workspace, blocks = groups.workspace, int(config["num_blocks"])
        layout, width, lane = workspace.layout, ITEMSIZE[problem.dtype], lane_arguments(problem, workspace)
        requests = self.compile_requests(problem, config)
        to_owners, to_peers = (bind_kernel(request, blocks, workspace.device) for request in requests)
        scatter = to_owners.fix((None, None, *lane, layout.scatter, layout.gather))
        gather = to_peers.fix((None, None, *lane, layout.gather))
        reduce, area = library_reduction(problem.reduction, groups.across), workspace.buffers[problem.mode].local
        piece, dtype = _piece_numel(problem, config, layout.staging_bytes), problem.dtype

        def own_slice(numel: int) -> Any:
            """The own slot of the own gather area, as elements."""
            import torch

            nbytes = -(-packets_of(numel * width) // int(config["ranks_per_node"])) * PACKET_BYTES
            start = layout.gather + workspace.rank * nbytes
            return area[start : start + nbytes].view(getattr(torch, dtype))

        on_host = workspace.device.type == "cpu"
        extents = [(start, min(piece, problem.numel - start)) for start in range(0, problem.numel, piece)]
        pieces = [(start * width, numel, own_slice(numel)) for start, numel in extents]

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, out = inputs[0].data_ptr(), outputs[0].data_ptr()
            for offset, numel, slice_of_piece in pieces:
                scatter(stream, x + offset, numel)
                if on_host:
                    workspace.check_peers()  # the library would wait for ranks that gave up as this one did
                reduce(slice_of_piece)
                gather(stream, out + offset, numel)

        return run
