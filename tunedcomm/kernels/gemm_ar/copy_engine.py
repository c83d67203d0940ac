"""copy_engine: the library's GEMM part by part; copy engines move the parts' shares to their owners, and the sums back.

The rows of the result are cut into parts, each into one share for every rank. On the caller's stream:

    GEMM 0, GEMM 1, sum 0, GEMM 2, sum 1, …, the last sum

Products go into the result. As soon as part c is there, copy engines push its shares into their owners' slots (panels),
each followed by the call's number as a flag, during GEMM c + 1. Sum c waits for the flags, adds the slots and the own
share in rank order, puts the sums into the result and into the panels, and announces them to all peers. A side stream
waits for all their announcements; then copy engines pull the peers' sums into the result, during GEMM c + 2. So only
the way of the last part is not hidden; `taper` halves it.

No rank waits in a circle: pushes wait for the begin and for GEMMs, sums for pushes, pulls for sums; each is queued
behind what it waits for, on whatever streams share a hardware queue. Pulls overwrite rows that peers were to sum only
after their sum, which is after the push that reads them. Panels are written again only after the next call's begin:
all ranks have joined the streams that read them by then.

Numerics: library (its products; sums are ordered and made once, so all ranks get the same bits). Graph-safe: side
streams fork from the caller's and join it; flags hold call numbers.
Source: two-shot all_reduce over decomposed GEMMs, our own arrangement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels._copies import Copies, copies_of
from tunedcomm.kernels._data import PACKET_BYTES, sum_packets
from tunedcomm.kernels._host import Launch, closest
from tunedcomm.kernels._launch import CompileRequest, bind_kernel
from tunedcomm.kernels._matmul import bind_product, operands_of, out_itemsize, refuse_gemm, wanted_of
from tunedcomm.kernels._panels import (
    announce,
    await_chunk_of_all,
    begin_panels_kernel,
    begin_request,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.kernels._sync import load_packets, store_packets
from tunedcomm.kernels.all_reduce_bias._common import with_bias
from tunedcomm.kernels.gemm_ar._parts import TILE, inputs_of_rows, parts_of
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant
from tunedcomm.symm.layout import PANEL_CHUNKS, PANEL_DATA, PANEL_NUMBER_OFFSET
from tunedcomm.symm.panels import panels_of

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace

__all__ = ["COPY_ENGINE"]

# Events: the caller's stream, the begin, a part's product, its sum, all peers' sums; then the ends of the side streams.
_HERE, _BEGUN, _MADE, _SUMMED, _READY, _DONE = range(6)
_SUM_WARPS = 16


@triton.jit
def sum_share_kernel(
    own, bias, row, first, slots, slot_bytes, sums, packets, panels, p0, p1, p2, p3, p4, p5, p6, rank, part, ready,
    timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one share of `packets` packets, at address `own` and in the slots, into `own` and `sums`; announce it.

    Args:
        bias, row, first: the bias, packets of a row of the result, and the share's first packet in it.
        part, ready: chunks by which the slots, and these sums, are announced.
    """
    number = call_number(panels)
    await_chunk_of_all(panels, part, rank, number, timeout_ns, status, WORLD_SIZE)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, packets, step):
        packet = start + lanes
        here = packet < packets
        words = ()
        for i in tl.static_range(WORLD_SIZE):
            source = tl.where(rank == i, own, slots + i * slot_bytes)
            words = words + load_packets(source + packet * 16, here)
        s = sum_packets(words, DTYPE, False, WORLD_SIZE)
        if BIAS:
            s = with_bias(s, bias, first + packet, row, here, DTYPE)
        store_packets(own + packet * 16, s[0], s[1], s[2], s[3], here)
        store_packets(sums + packet * 16, s[0], s[1], s[2], s[3], here)
    if is_last(panels, part, tl.num_programs(0)):
        announce(p0, p1, p2, p3, p4, p5, p6, rank, ready, number, WORLD_SIZE)


@triton.jit
def await_all_kernel(panels, chunk, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """One block: chunk `chunk` of every peer is here."""
    await_chunk_of_all(panels, chunk, rank, call_number(panels), timeout_ns, status, WORLD_SIZE)


_SPACE = Space(
    {
        "chunks": Choice(1, 2, 3, 4, 6, 8),
        "taper": Choice(False, True),
        "num_streams": Choice(1, 2, 3),
        "num_blocks": Choice(1, 66, 132, 264),
    }
)


@dataclass(frozen=True, slots=True)
class _Part:
    """Addresses are those of this rank's panels, or offsets from them in the peers'.

    Attributes:
        row, rows: of the result.
        shares: byte in the result, and bytes, of each rank's share.
        slots, sums: offsets in the panels.
        slot: bytes from one slot to the next.
        total: `(stream, own share, bias)` to the sum.
        ready: `(stream)` waits until all peers have summed.
    """

    row: int
    rows: int
    shares: tuple[tuple[int, int], ...]
    slots: int
    sums: int
    slot: int
    total: Callable[..., None]
    ready: Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Job:
    """What a launch needs besides its tensors.

    Attributes:
        multiply: `(inputs, result)` to the library's product.
        begin: `(stream)`.
        local, peers: addresses of the panels, the own ones and those of rank + 1, rank + 2, …
        pushing, pulling: side streams.
    """

    problem: Problem
    rank: int
    copies: Copies
    multiply: Callable[[tuple[Any, ...], torch.Tensor], object]
    begin: Callable[[int], None]
    local: int
    peers: tuple[int, ...]
    parts: tuple[_Part, ...]
    pushing: tuple[int, ...]
    pulling: tuple[int, ...]

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        """See the module's text."""
        copies, out, bias = self.copies, outputs[0], operands_of(self.problem, inputs).bias
        target, added = out.data_ptr(), 0 if bias is None else bias.data_ptr()
        copies.record(_HERE, stream)
        copies.wait(self.pushing[0], _HERE)
        self.begin(self.pushing[0])
        copies.record(_BEGUN, self.pushing[0])
        for number, part in enumerate(self.parts):
            rows = out[part.row : part.row + part.rows]
            self.multiply(inputs_of_rows(self.problem, inputs, part.row, part.rows), rows)
            self._push(number, part, target, stream)
            if number:
                self._finish(self.parts[number - 1], target, added, stream)
            else:
                copies.wait(stream, _BEGUN)
        self._finish(self.parts[-1], target, added, stream)
        for number, side in enumerate((*self.pushing, *self.pulling)):
            copies.record(_DONE + number, side)
            copies.wait(stream, _DONE + number)

    def _owners(self) -> Iterable[tuple[int, int, int]]:
        """Step, rank and panels of each peer, from rank + 1 on."""
        world_size = self.problem.world_size
        return ((step, (self.rank + 1 + step) % world_size, peer) for step, peer in enumerate(self.peers))

    def _push(self, number: int, part: _Part, target: int, stream: int) -> None:
        """The peers' shares of a part, once it is multiplied."""
        copies, flag = self.copies, (self.rank * PANEL_CHUNKS + number) * 8
        copies.record(_MADE, stream)
        for side in self.pushing:
            copies.wait(side, _BEGUN)
            copies.wait(side, _MADE)
        for step, owner, peer in self._owners():
            side = self.pushing[step % len(self.pushing)]
            at, nbytes = part.shares[owner]
            if nbytes:
                copies.copy(side, peer + part.slots + self.rank * part.slot, target + at, nbytes)
            copies.copy(side, peer + flag, self.local + PANEL_NUMBER_OFFSET, 8)

    def _finish(self, part: _Part, target: int, bias: int, stream: int) -> None:
        """The own share's sum; then the peers' sums, once they are there."""
        copies = self.copies
        part.total(stream, target + part.shares[self.rank][0], bias)
        copies.record(_SUMMED, stream)
        copies.wait(self.pulling[0], _SUMMED)
        part.ready(self.pulling[0])
        copies.record(_READY, self.pulling[0])
        for side in self.pulling[1:]:
            copies.wait(side, _READY)
        for step, owner, peer in self._owners():
            at, nbytes = part.shares[owner]
            if nbytes:
                copies.copy(self.pulling[step % len(self.pulling)], target + at, peer + part.sums, nbytes)


def _slot(problem: Problem, rows: int) -> int:
    """Bytes of a rank's share of so many rows, of the last rank's at most."""
    packets = rows * problem.shape[1] * out_itemsize(problem) // PACKET_BYTES
    return -(-packets // problem.world_size) * PACKET_BYTES


def _room(problem: Problem, config: Config) -> int:
    """Bytes of panels: a slot of every rank, and the sums."""
    return sum((problem.world_size + 1) * _slot(problem, rows) for _, rows in parts_of(problem, config))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_gemm(problem, limits, panel_bytes=_room(problem, config), descriptors=False):
        return reason
    row_bytes, wanted = problem.shape[1] * out_itemsize(problem), parts_of(problem, config)
    if len(wanted) != int(config["chunks"]) + bool(config["taper"]):
        return f"{problem.shape[0]} rows make {len(wanted)} parts, not {config['chunks']}"
    if any(rows * row_bytes % PACKET_BYTES for _, rows in wanted):
        return "parts would not begin and end with whole packets"
    if wanted_of(problem).bias and row_bytes % PACKET_BYTES:
        return f"rows of {problem.shape[1]} results are no whole packets, as sums with a bias want"
    if int(config["num_streams"]) > problem.world_size - 1:
        return f"{config['num_streams']} streams, but only {problem.world_size - 1} peers to copy to"
    blocks = int(config["num_blocks"])
    if limits.backend == "host":
        return "interpreted blocks run one after another: only num_blocks=1" if blocks > 1 else None
    if len(wanted) == 1:
        return "with one part nothing overlaps: that is library_tuned"
    least = min(rows for _, rows in wanted)
    if least < TILE:
        return f"{least} rows a part are less than the library's tiles have"
    if blocks == 1 or blocks > 2 * limits.num_sms:
        return f"{blocks} blocks do not suit {limits.num_sms} SMs"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    host = limits.backend == "host"
    wish: dict[str, Any] = {"chunks": 2 if host else min(max(problem.shape[0] // 1024, 2), 8), "taper": False}
    wish |= {"num_streams": 1, "num_blocks": 1 if host else limits.num_sms}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _sum_request(problem: Problem) -> CompileRequest:
    wanted = wanted_of(problem)
    constants: dict[str, Value] = {
        "WORLD_SIZE": problem.world_size,
        "DTYPE": wanted.dtype,
        "BIAS": wanted.bias,
        "BLOCK": 32 * _SUM_WARPS,
    }
    return CompileRequest.of(sum_share_kernel, constants, num_warps=_SUM_WARPS)


def _ready_request(problem: Problem) -> CompileRequest:
    return CompileRequest.of(await_all_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    del config
    return (begin_request(problem.world_size), _sum_request(problem), _ready_request(problem))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    world_size, rank, wanted = problem.world_size, workspace.rank, parts_of(problem, config)
    row_bytes = problem.shape[1] * out_itemsize(problem)
    panels, copies = panels_of(workspace, problem.mode, _room(problem, config)), copies_of(workspace, problem.mode)
    waits = (workspace.timeout_ns, workspace.status_argument(problem))
    total = bind_kernel(_sum_request(problem), int(config["num_blocks"]), workspace.device)
    ready = bind_kernel(_ready_request(problem), 1, workspace.device)
    parts, slots = [], PANEL_DATA
    for number, (row, rows) in enumerate(wanted):
        slot, begin, end = _slot(problem, rows), row * row_bytes, (row + rows) * row_bytes
        starts = [min(begin + owner * slot, end) for owner in range(world_size + 1)]
        shares = tuple((start, stop - start) for start, stop in itertools.pairwise(starts))
        own, nbytes = shares[rank]
        sums, announced = slots + world_size * slot, len(wanted) + number
        places = (row_bytes // PACKET_BYTES, own // PACKET_BYTES, panels.local + slots, slot, panels.local + sums)
        summing = (None, None, *places, nbytes // PACKET_BYTES, panels.local, *panels.peers, rank, number, announced)
        waiting = ready.fix((panels.local, announced, rank, *waits))
        parts.append(_Part(row, rows, shares, slots, sums, slot, total.fix((*summing, *waits)), waiting))
        slots = sums + slot
    streams = int(config["num_streams"])
    return _Job(
        problem=problem,
        rank=rank,
        copies=copies,
        multiply=bind_product(problem),
        begin=bind_begin(problem, workspace, panels),
        local=panels.local,
        peers=panels.peers[: world_size - 1],
        parts=tuple(parts),
        pushing=copies.streams[:streams],
        pulling=copies.streams[streams : 2 * streams],
    )


COPY_ENGINE = register_variant(
    Variant(
        op="gemm_ar",
        name="copy_engine",
        numerics="library",
        summary="cuBLAS part by part; copy engines move shares and sums beside the next parts' GEMMs",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        kernels=(begin_panels_kernel, sum_share_kernel, await_all_kernel),
        compile_requests=_requests,
    )
)
