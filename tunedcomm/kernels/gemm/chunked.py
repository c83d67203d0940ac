"""gemm_ar by the library's GEMM, a part of the rows at a time; each part is reduced while the next one is multiplied.

Products go into the result. GEMMs of the library wait for nothing, so whatever SMs a reduction wants become free.

**chunked.** A side stream waits for each part and reduces it in place by one of this library's all_reduce kernels, on a
few SMs. All that uses the lane is on that one side stream, in the same order on every rank; it forks from the caller's
stream after the calls before and joins it in the end.

**copy_engine.** Each part is cut into one share for every rank. On the caller's stream:

    GEMM 0, GEMM 1, sum 0, GEMM 2, sum 1, …, the last GEMM, the last sum but one, all_reduce of the last part

As soon as part c is there, copy engines push its shares into their owners' slots in the panels, each followed by the
call's number as a flag, during GEMM c + 1. Sum c waits for the flags and adds the slots and the own share in rank
order. During GEMM c + 2 the sums go round (`gather`): copy engines push them into the peers' panels, again with flags,
and a side stream that waits for those copies them into the result; or sum c leaves them in the own panels and announces
them, and the peers' copy engines pull them, which is one copy less on a slower way. Nothing hides what the last part
costs, so it is reduced by this library's all_reduce kernel, which has all SMs then. With two `gemm_streams` every other
GEMM goes to a stream of its own, so that a part's first tiles take the SMs that the last tiles of the one before leave;
sums go to one of a higher priority.

No rank waits in a circle: pushes wait for the begin and for GEMMs, sums for pushes, gathers for sums; each is queued
behind what it waits for, on whatever streams share a hardware queue. Gathers overwrite rows that peers were to sum only
after their sum, which is after the push that reads them. Panels are written again only after a begin, when all ranks
have joined the streams that read them; where peers pull, a call ends with one of its own.

Numerics: library (its products; sums are ordered and made once, so all ranks get the same bits). Graph-safe: side
streams fork from the caller's and join it; flags hold call numbers. Lane rules: those of the all_reduce kernels; begin
and all_reduce follow each other.
Source: decomposed GEMM and collective as in PyTorch's asynchronous tensor parallelism, with collectives of our own;
two-shot all_reduce over decomposed GEMMs, our own arrangement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from tunedcomm.kernels.all_reduce.bias import with_bias
from tunedcomm.kernels.common.copies import copies_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES, sum_packets
from tunedcomm.kernels.common.sync import load_packets, store_packets
from tunedcomm.kernels.common.variant import VariantBase
from tunedcomm.kernels.gemm.library import (
    REDUCE_KERNELS,
    adds_bias,
    bind_reduction,
    reduction_of,
    refuse_reduction,
    usual_reduction,
)
from tunedcomm.kernels.gemm.op import bind_product, operands_of, out_itemsize, ready_to_cut, refuse_gemm, wanted_of
from tunedcomm.kernels.gemm.panels import (
    Sender,
    announce,
    await_chunk_of_all,
    begin_panels_kernel,
    begin_request,
    bind_begin,
    call_number,
    is_last,
)
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import PANEL_DATA

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace

_TILE = 128  # rows of the library's tiles
_SUM_WARPS = 16


@triton.jit
def sum_share_kernel(
    own, bias, row, first, slots, slot_bytes, sums, packets, panels, p0, p1, p2, p3, p4, p5, p6, rank, part, ready,
    timeout_ns, status,
    WORLD_SIZE: tl.constexpr, DTYPE: tl.constexpr, BIAS: tl.constexpr, PULLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one share of `packets` packets, at address `own` and in the slots, into `own`.

    Those that peers will pull also into `sums`, and announced.

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
        if PULLED:
            store_packets(sums + packet * 16, s[0], s[1], s[2], s[3], here)
    if PULLED:
        last = is_last(panels, part, tl.num_programs(0))
        if last:
            announce(p0, p1, p2, p3, p4, p5, p6, rank, ready, number, WORLD_SIZE)


@triton.jit
def await_all_kernel(panels, chunk, rank, timeout_ns, status, WORLD_SIZE: tl.constexpr):
    """One block: chunk `chunk` of every peer is here."""
    await_chunk_of_all(panels, chunk, rank, call_number(panels), timeout_ns, status, WORLD_SIZE)


def _parts_of(problem: Problem, config: Config) -> list[tuple[int, int]]:
    """First row and number of rows of each of `chunks` parts, of whole tiles if they are many.

    With `taper` the last one is cut in two. No rows are one part without any.
    """
    m = problem.shape[0]
    step = max(1, _whole_tiles(-(-m // int(config["chunks"]))))
    parts = [(row, min(step, m - row)) for row in range(0, max(1, m), step)]
    if config.get("taper", False):
        row, rows = parts.pop()
        first = min(_whole_tiles(-(-rows // 2)), rows)
        parts += [(row, first), *([(row + first, rows - first)] if first < rows else [])]
    return parts


def _whole_tiles(rows: int) -> int:
    """Rounded up to tiles, if it is more than one."""
    tile = _TILE if rows > _TILE else 1
    return -(-rows // tile) * tile


def _refuse_parts(problem: Problem, config: Config) -> str | None:
    """Why the result is not cut into such parts, or None."""
    row_bytes, wanted = problem.shape[1] * out_itemsize(problem), _parts_of(problem, config)
    if len(wanted) != int(config["chunks"]) + bool(config.get("taper", False)):
        return f"{problem.shape[0]} rows make {len(wanted)} parts, not {config['chunks']}"
    if any(row * row_bytes % PACKET_BYTES for row, _ in wanted):
        return "parts would not begin with whole packets"
    return None


def _inputs_of_rows(problem: Problem, inputs: tuple[Any, ...], row: int, rows: int) -> tuple[Any, ...]:
    """A launch's inputs with some rows of A only."""
    given = list(inputs)
    given[0] = inputs[0][row : row + rows]
    if problem.scaling == "rowwise":
        given[-2] = inputs[-2][row : row + rows]
    return tuple(given)


class Chunked(VariantBase):
    op = "gemm_ar"
    name = "chunked"
    numerics = "library"
    summary = "cuBLAS part by part; each part is reduced by kernels on few SMs beside the next one's GEMM"
    kernels = REDUCE_KERNELS
    space = Space(
        {
            "chunks": Choice(2, 4, 8),
            "algorithm": Choice("two_shot", "two_shot_lamport"),
            "num_blocks": Choice(1, 2, 8, 16, 32, 64),
            "num_warps": Choice(8, 16),
            "num_chunks": Choice(1, 2, 4),
        }
    )

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gemm(problem, limits, panel_bytes=0, descriptors=False):
            return reason
        if reason := _refuse_parts(problem, config):
            return reason
        parts = _parts_of(problem, config)
        if limits.backend == "cuda" and parts[0][1] < _TILE:
            return f"{parts[0][1]} rows a part are less than the library's tiles have"
        for rows in {rows for _, rows in parts}:
            if reason := refuse_reduction(problem, config, limits, rows):
                return f"parts of {rows} rows: {reason}"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        wish: dict[str, Any] = {"algorithm": "two_shot", "num_warps": 16, "num_chunks": 1}
        if limits.backend == "host":
            return {**wish, "num_blocks": 2, "chunks": 2}
        return {**wish, "num_blocks": 16, "chunks": min(max(problem.shape[0] // 512, 2), 8)}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config["num_blocks"])

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        sizes = {rows for _, rows in _parts_of(problem, config)}
        asked = [request for rows in sizes for request in reduction_of(problem, config, rows).compile_requests()]
        return tuple(dict.fromkeys(asked))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        wanted = _parts_of(problem, config)
        sizes = sorted({rows for _, rows in wanted})
        reductions = {rows: bind_reduction(problem, config, workspace, rows) for rows in sizes}
        copies, multiply = copies_of(workspace, problem.mode), bind_product(problem)
        fused, side = adds_bias(problem, str(config["algorithm"])), copies.streams[0]
        here, done = 0, 1  # events

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            """See the module's text."""
            out, bias = outputs[0], operands_of(problem, inputs).bias
            added = bias.data_ptr() if fused else 0
            for row, rows in wanted:
                part = out[row : row + rows]
                multiply(_inputs_of_rows(problem, inputs, row, rows), part)
                copies.record(here, stream)
                copies.wait(side, here)
                reductions[rows](side, part.data_ptr(), added)
            copies.record(done, side)
            copies.wait(stream, done)
            if bias is not None and not fused:
                out.add_(bias)

        return run


# Events: the caller's stream, the begin, a part's product (of every other one beside), its sum, all peers' sums; then
# the ends of the side streams.
_HERE, _BEGUN, _MADE, _MADE_BESIDE, _SUMMED, _READY, _DONE = range(7)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part but the last. Addresses are those of this rank's panels, or offsets from them in the peers'.

    Attributes:
        row, rows: of the result.
        shares: byte in the result, and bytes, of each rank's share.
        chunk, gathered: by which its shares, and its sums, are announced.
        slots, sums: offsets in the panels.
        slot: bytes from one slot to the next.
        total: `(stream, own share, bias)` to the sum.
        ready: `(stream)` waits until all peers' sums are announced.
    """

    row: int
    rows: int
    shares: tuple[tuple[int, int], ...]
    chunk: int
    gathered: int
    slots: int
    sums: int
    slot: int
    total: Callable[..., None]
    ready: Callable[..., None]


class _Launch:
    """A launch of copy_engine.

    Its side streams: `pushing` for shares, `gathering` for sums, `aside` waits for the peers' sums; `summing` has the
    sums if every other GEMM goes beside the caller's stream, else it is 0.
    """

    def __init__(self, variant: CopyEngine, problem: Problem, config: Config, workspace: Workspace) -> None:
        self.problem, self.rank, self.pulled = problem, workspace.rank, config["gather"] == "pull"
        self.panels = workspace.panels(problem.mode, variant.room(problem, config))
        self.copies, count = copies_of(workspace, problem.mode), int(config["num_streams"])
        self.sender = Sender(self.copies, self.rank, self.panels.local)
        self.multiply = bind_product(problem)
        self.begin = bind_begin(problem, workspace, self.panels)
        self.parts = tuple(self._bind_parts(variant, config, workspace))
        self.tail = _, rows = _parts_of(problem, config)[-1]
        reducing = usual_reduction(problem, rows, host=workspace.device.type == "cpu")
        self.fused = adds_bias(problem, str(reducing["algorithm"]))
        self.reduce_tail = bind_reduction(problem, reducing, workspace, rows)
        streams = self.copies.streams
        self.pushing, self.gathering, self.aside = streams[:count], streams[count : 2 * count], streams[2 * count]
        self.summing = streams[2 * count + 1] if config["gemm_streams"] == 2 else 0

    def _bind_parts(self, variant: CopyEngine, config: Config, workspace: Workspace) -> Iterable[_Part]:
        """All parts but the last."""
        problem, panels, rank, world_size = self.problem, self.panels, self.rank, self.problem.world_size
        row_bytes, wanted = problem.shape[1] * out_itemsize(problem), _parts_of(problem, config)[:-1]
        waits = (workspace.timeout_ns, workspace.status_argument(problem))
        total = bind_kernel(variant.sum_request(problem, config), int(config["num_blocks"]), workspace.device)
        ready = bind_kernel(variant.ready_request(problem), 1, workspace.device)
        slots = PANEL_DATA
        for chunk, (row, rows) in enumerate(wanted):
            slot, begin, end = _slot_bytes(problem, rows), row * row_bytes, (row + rows) * row_bytes
            starts = [min(begin + owner * slot, end) for owner in range(world_size + 1)]
            shares = tuple((start, stop - start) for start, stop in itertools.pairwise(starts))
            own, nbytes = shares[rank]
            sums, gathered = slots + world_size * slot, len(wanted) + chunk
            places = (row_bytes // PACKET_BYTES, own // PACKET_BYTES, panels.local + slots, slot, panels.local + sums)
            summing = (None, None, *places, nbytes // PACKET_BYTES, panels.local, *panels.peers, rank, chunk, gathered)
            ways = total.fix((*summing, *waits)), ready.fix((panels.local, gathered, rank, *waits))
            yield _Part(row, rows, shares, chunk, gathered, slots, sums, slot, *ways)
            slots = sums + (1 if self.pulled else world_size) * slot

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        """See the module's text."""
        copies, out, operands = self.copies, outputs[0], operands_of(self.problem, inputs)
        bias, target = operands.bias, out.data_ptr()
        added = 0 if bias is None else bias.data_ptr()
        inputs = (inputs[0], ready_to_cut(self.problem, operands).b, *inputs[2:])
        copies.record(_HERE, stream)
        copies.wait(self.pushing[0], _HERE)
        self.begin(self.pushing[0])
        copies.record(_BEGUN, self.pushing[0])
        if self.summing:
            copies.wait(copies.beside, _HERE)
            copies.wait(self.summing, _BEGUN)
        for number, part in enumerate(self.parts):
            self._multiply(inputs, out, (part.row, part.rows), number, stream)
            self._scatter(part, self._made(number), target)
            if number:
                self._finish(self.parts[number - 1], target, added, stream)
            else:
                copies.wait(stream, _BEGUN)
        rows = self._multiply(inputs, out, self.tail, len(self.parts), stream)
        self._finish(self.parts[-1], target, added, stream)
        copies.wait(stream, self._made(len(self.parts)))
        self.reduce_tail(stream, rows.data_ptr(), added if self.fused else 0)
        if bias is not None and not self.fused:
            rows.add_(bias)
        self._join(stream)

    def _join(self, stream: int) -> None:
        """The caller's stream goes on once all others are done."""
        sides = [*self.pushing, *self.gathering, self.aside]
        sides += [self.summing, self.copies.beside] if self.summing else []
        for number, side in enumerate(sides):
            self.copies.record(_DONE + number, side)
            self.copies.wait(stream, _DONE + number)
        if self.pulled:  # the peers may still be at it
            self.begin(stream)

    def _multiply(
        self, inputs: tuple[Any, ...], out: torch.Tensor, part: tuple[int, int], number: int, stream: int
    ) -> torch.Tensor:
        """The product of a part (first row, number of rows), made when `_made` says so."""
        rows, given = out[part[0] : sum(part)], _inputs_of_rows(self.problem, inputs, *part)
        away = self._made(number) == _MADE_BESIDE
        with self.copies.current(self.copies.beside) if away else contextlib.nullcontext():
            self.multiply(given, rows)
        self.copies.record(self._made(number), self.copies.beside if away else stream)
        return rows

    def _made(self, number: int) -> int:
        """The event of a part's product, until the next one on its stream."""
        return _MADE_BESIDE if self.summing and number % 2 else _MADE

    def _peers(self, sides: tuple[int, ...]) -> Iterable[tuple[int, int, int]]:
        """Rank and panels of each peer, from rank + 1 on, and one of the side streams in turn."""
        world_size = self.problem.world_size
        for step, peer in enumerate(self.panels.peers[: world_size - 1]):
            yield (self.rank + 1 + step) % world_size, peer, sides[step % len(sides)]

    def _scatter(self, part: _Part, made: int, target: int) -> None:
        """The peers' shares of a part, once the event says that it is multiplied."""
        for side in self.pushing:
            self.copies.wait(side, _BEGUN)
            self.copies.wait(side, made)
        for owner, peer, side in self._peers(self.pushing):
            at, nbytes = part.shares[owner]
            self.sender.send(side, peer, part.chunk, (part.slots + self.rank * part.slot, target + at, nbytes))

    def _finish(self, part: _Part, target: int, bias: int, stream: int) -> None:
        """The own share's sum, after the products made so far, and the way of all sums."""
        copies, (own, nbytes) = self.copies, part.shares[self.rank]
        if self.summing:
            copies.wait(self.summing, _MADE)
            copies.wait(self.summing, _MADE_BESIDE)
        part.total(self.summing or stream, target + own, bias)
        copies.record(_SUMMED, self.summing or stream)
        for side in (*self.gathering, self.aside):
            copies.wait(side, _SUMMED)
        if not self.pulled:
            for _, peer, side in self._peers(self.gathering):
                move = (part.sums + self.rank * part.slot, target + own, nbytes)
                self.sender.send(side, peer, part.gathered, move)
        part.ready(self.aside)
        copies.record(_READY, self.aside)
        if self.pulled:
            for side in self.gathering:
                copies.wait(side, _READY)
        for owner, peer, side in self._peers(self.gathering if self.pulled else (self.aside,)):
            at, nbytes = part.shares[owner]
            source = peer + part.sums if self.pulled else self.panels.local + part.sums + owner * part.slot
            if nbytes:
                copies.copy(side, target + at, source, nbytes)


def _slot_bytes(problem: Problem, rows: int) -> int:
    """Bytes of a rank's share of so many rows, of the last rank's at most."""
    packets = rows * problem.shape[1] * out_itemsize(problem) // PACKET_BYTES
    return -(-packets // problem.world_size) * PACKET_BYTES


class CopyEngine(VariantBase):
    op = "gemm_ar"
    name = "copy_engine"
    numerics = "library"
    summary = "cuBLAS part by part; copy engines move shares and sums beside the next parts' GEMMs"
    kernels = (begin_panels_kernel, sum_share_kernel, await_all_kernel, *REDUCE_KERNELS)
    space = Space(
        {
            "chunks": Choice(2, 3, 4, 6, 8),
            "taper": Choice(False, True),
            "gather": Choice("push", "pull"),
            "gemm_streams": Choice(1, 2),
            "num_streams": Choice(1, 2, 3),
            "num_blocks": Choice(1, 66, 132, 264),
        }
    )

    def room(self, problem: Problem, config: Config) -> int:
        """Bytes of panels: of each part but the last a slot of every rank, and the sums, the own ones or all."""
        slots = problem.world_size + (1 if config["gather"] == "pull" else problem.world_size)
        return sum(slots * _slot_bytes(problem, rows) for _, rows in _parts_of(problem, config)[:-1])

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gemm(problem, limits, panel_bytes=self.room(problem, config), descriptors=False):
            return reason
        if reason := _refuse_parts(problem, config):
            return reason
        if wanted_of(problem).bias and problem.shape[1] * out_itemsize(problem) % PACKET_BYTES:
            return f"rows of {problem.shape[1]} results are no whole packets, as sums with a bias want"
        if int(config["num_streams"]) > problem.world_size - 1:
            return f"{config['num_streams']} streams, but only {problem.world_size - 1} peers to copy to"
        parts, blocks, host = _parts_of(problem, config), int(config["num_blocks"]), limits.backend == "host"
        tail = parts[-1][1]
        if reason := refuse_reduction(problem, usual_reduction(problem, tail, host=host), limits, tail):
            return f"the last {tail} rows: {reason}"
        if host:
            return "interpreted blocks run one after another: only num_blocks=1" if blocks > 1 else None
        if (least := min(rows for _, rows in parts)) < _TILE:
            return f"{least} rows a part are less than the library's tiles have"
        if blocks == 1 or blocks > 2 * limits.num_sms:
            return f"{blocks} blocks do not suit {limits.num_sms} SMs"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        wish: dict[str, Any] = {"taper": False, "gather": "push", "num_streams": 1}
        if limits.backend == "host":
            return {**wish, "chunks": 2, "gemm_streams": 1, "num_blocks": 1}
        chunks = min(max(problem.shape[0] // 1024, 2), 8)
        return {**wish, "chunks": chunks, "gemm_streams": 2, "num_blocks": limits.num_sms}

    def sum_request(self, problem: Problem, config: Config) -> CompileRequest:
        wanted = wanted_of(problem)
        constants: dict[str, Value] = {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": wanted.dtype,
            "BIAS": wanted.bias,
            "PULLED": config["gather"] == "pull",
            "BLOCK": 32 * _SUM_WARPS,
        }
        return CompileRequest.of(sum_share_kernel, constants, num_warps=_SUM_WARPS)

    def ready_request(self, problem: Problem) -> CompileRequest:
        return CompileRequest.of(await_all_kernel, {"WORLD_SIZE": problem.world_size}, num_warps=1)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        tail = _parts_of(problem, config)[-1][1]
        own = (begin_request(problem.world_size), self.sum_request(problem, config), self.ready_request(problem))
        return (*own, *reduction_of(problem, usual_reduction(problem, tail), tail).compile_requests())

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        return _Launch(self, problem, config, workspace)


CHUNKED = Chunked().register()
COPY_ENGINE = CopyEngine().register()
