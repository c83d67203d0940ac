"""chunked: the library's GEMM once a shard (or a part of one), each part pushed to its owner as soon as it is done.

Shards are multiplied in the order rank + 1, rank + 2, …, the own one last, each in `chunks` parts by rows, in turn on
`gemm_streams` streams: with two, a part's first tiles take the SMs that the last tiles of the one before leave. A part
for another rank goes into this rank's own panels, behind its slots. A side stream waits for it and pushes it into this
rank's slot at the owner: by a copy engine, followed by a copy of the call's number into the owner's flag (`transport`
copy_engine, which takes no SM), or by a small kernel that raises the flag itself (sm). The own parts go into the own
slot. Then one kernel waits for the peers' flags and sums the slots.

The begin of the call runs on the side stream, before the first push, while the first GEMM is under way: that one writes
to nothing that peers reach. The caller's stream joins the side stream before the sum, so all SMs that the pushes want
are theirs before a kernel spins; GEMMs of the library wait for nothing. So waits end: the peers' pushes depend on the
begin, GEMMs and pushes alone.

Numerics: library (the products, whose order over the depth is cuBLAS's choice; the sums are ordered). Graph-safe: side
streams fork from the caller's and join it; flags hold call numbers.
Source: decomposed GEMM + reduce-scatter as in PyTorch's asynchronous tensor parallelism, flags and sum of our own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.copies import Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, closest, grid_rounds
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.gemm.panels import begin_panels_kernel, begin_request, bind_begin
from tunedcomm.kernels.gemm.problem import (
    Operands,
    operands_of,
    out_itemsize,
    product,
    ready_to_cut,
    wanted_of,
)
from tunedcomm.kernels.gemm.rs_common import refuse, rows_of, slot_bytes, whole_packets
from tunedcomm.kernels.gemm.rs_staged import push_chunk_kernel, sum_slots_kernel
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem, Variant, register_variant
from tunedcomm.symm.layout import PANEL_CHUNKS, PANEL_DATA, PANEL_NUMBER_OFFSET

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace

__all__ = ["CHUNKED"]

# Events: the caller's stream at the begin, a part's product, the second stream of GEMMs; side streams from _DONE on.
_HERE, _MADE, _BESIDE, _DONE = range(4)
_PUSH_WARPS = 16


@dataclass(frozen=True, slots=True)
class _Push:
    """How one part gets to its owner.

    Attributes:
        side: index of the side stream.
        queue: queues the push on a stream.
    """

    side: int
    queue: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Job:
    """What a launch needs besides its tensors.

    Attributes:
        begin: `(stream)`.
        parts: (first row of A, where its product goes, push or None for own parts), in order.
        total: `(stream, result's address)` to the sum.
        num_streams: side streams.
        beside: every other GEMM goes to a stream of its own.
    """

    problem: Problem
    copies: Copies
    begin: Callable[[int], None]
    parts: tuple[tuple[int, torch.Tensor, _Push | None], ...]
    total: Callable[..., None]
    num_streams: int
    beside: bool

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        """See the module's text."""
        given, copies = ready_to_cut(self.problem, operands_of(self.problem, inputs)), self.copies
        sides, aside = copies.streams[: self.num_streams], copies.beside
        copies.record(_HERE, stream)
        copies.wait(sides[0], _HERE)
        self.begin(sides[0])
        copies.record(_DONE, sides[0])
        for side in sides[1:]:
            copies.wait(side, _DONE)
        if self.beside:
            copies.wait(aside, _HERE)
        for number, (row, target, push) in enumerate(self.parts):
            away = self.beside and number % 2 == 1
            with copies.current(aside) if away else contextlib.nullcontext():
                _multiply(self.problem, given, row, target)
            if push is not None:
                copies.record(_MADE, aside if away else stream)
                copies.wait(sides[push.side], _MADE)
                push.queue(sides[push.side])
        if self.beside:
            copies.record(_BESIDE, aside)
            copies.wait(stream, _BESIDE)
        for number, side in enumerate(sides):
            copies.record(_DONE + number, side)
            copies.wait(stream, _DONE + number)
        self.total(stream, outputs[0].data_ptr())


def _multiply(problem: Problem, given: Operands, row: int, target: torch.Tensor) -> None:
    """A part's product, of the rows of A from `row` on."""
    rows = slice(row, row + target.shape[0])
    if problem.scaling == "rowwise":
        given = given._replace(scale_a=given.scale_a[rows])
    product(problem, given, target, given.a[rows])


_SPACE = Space(
    {
        "chunks": Choice(1, 2, 4),
        "transport": Choice("copy_engine", "sm"),
        "gemm_streams": Choice(1, 2),
        "num_streams": Choice(1, 2, 3),
        "push_blocks": Choice(1, 4, 8, 16, 32),
        "num_blocks": Choice(1, 32, 64, 132, 264, 396, 528),
        "num_warps": Choice(4, 8, 16),
    }
)


def _span(problem: Problem, config: Config) -> int:
    """Rows of a part."""
    return -(-rows_of(problem) // int(config["chunks"]))


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits, slots=2 * problem.world_size, descriptors=False):
        return reason
    chunks, streams = int(config["chunks"]), int(config["num_streams"])
    if chunks > 1 and not whole_packets(problem):
        return f"rows of {problem.shape[1]} results are no whole packets, so parts would share some: only chunks=1"
    if -(-rows_of(problem) // _span(problem, config)) != chunks:
        return f"{rows_of(problem)} rows do not make {chunks} parts"
    if chunks > 1 and limits.backend == "cuda" and _span(problem, config) < 128:
        return f"{_span(problem, config)} rows a part are less than the library's tiles have"
    if streams > problem.world_size - 1:
        return f"{streams} streams, but only {problem.world_size - 1} peers to push to"
    by_kernel = config["transport"] == "sm"
    if not by_kernel and int(config["push_blocks"]) > 1:
        return "copy engines have no blocks: only push_blocks=1"
    if by_kernel and int(config["push_blocks"]) == 1 and limits.backend == "cuda":
        return "one block does not fill a link"
    return _unsuited_sum(problem, config, limits)


def _unsuited_sum(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why the grid of the sum does not suit the problem, or None."""
    blocks, threads = int(config["num_blocks"]), 32 * int(config["num_warps"])
    packets = slot_bytes(problem) // PACKET_BYTES
    if limits.backend == "host":
        return "interpreted blocks run one after another: only one of 4 warps" if blocks > 1 or threads > 128 else None
    if blocks * threads > limits.num_sms * 2048:
        return f"{blocks} blocks of {threads} threads do not all fit on {limits.num_sms} SMs at once"
    if (blocks - 1) * threads >= packets and blocks > 1:
        return f"{packets} packets leave some of {blocks} blocks without work"
    if blocks == 1 and packets > 8 * threads:
        return f"one block takes long for {packets} packets"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish: dict[str, Any] = {"chunks": 1, "transport": "copy_engine", "gemm_streams": 1, "push_blocks": 1}
    wish["num_streams"] = min(problem.world_size - 1, 2)
    wish |= {"num_blocks": min(slot_bytes(problem) / 4096, limits.num_sms), "num_warps": 8}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _sum_request(problem: Problem, config: Config) -> CompileRequest:
    wanted = wanted_of(problem).dtype
    constants: dict[str, Value] = {
        "WORLD_SIZE": problem.world_size,
        "DTYPE": wanted,
        "WIDTH": ITEMSIZE[wanted],
        "AVG": problem.reduction == "avg",
        "TAIL": rows_of(problem) * problem.shape[1] * out_itemsize(problem) % PACKET_BYTES != 0,
        "CHUNKS": int(config["chunks"]),
        "BLOCK": 32 * int(config["num_warps"]),
    }
    return CompileRequest.of(sum_slots_kernel, constants, num_warps=int(config["num_warps"]))


def _push_request() -> CompileRequest:
    return CompileRequest.of(push_chunk_kernel, {"BLOCK": 32 * _PUSH_WARPS}, num_warps=_PUSH_WARPS)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    found = (begin_request(problem.world_size), _sum_request(problem, config))
    return (*found, _push_request()) if config["transport"] == "sm" else found


def _pushes(
    problem: Problem, config: Config, workspace: Workspace, panels: Any, copies: Copies
) -> Callable[[int, int, int, int, int], Callable[[int], None]]:
    """`(step, chunk, source, offset in a slot, bytes)` to what queues that push on a stream."""
    rank, own_slot = workspace.rank, PANEL_DATA + workspace.rank * slot_bytes(problem)
    kernel = None
    if config["transport"] == "sm":
        kernel = bind_kernel(_push_request(), int(config["push_blocks"]), workspace.device)

    def push(step: int, chunk: int, source: int, offset: int, nbytes: int) -> Callable[[int], None]:
        owner = panels.peers[step]
        target = owner + own_slot + offset
        if kernel is not None:
            counter = step * int(config["chunks"]) + chunk
            packets = -(-nbytes // PACKET_BYTES)
            return kernel.fix((source, target, packets, panels.local, owner, rank, chunk, counter))
        flag, number = owner + (rank * PANEL_CHUNKS + chunk) * 8, panels.local + PANEL_NUMBER_OFFSET

        def queue(stream: int) -> None:
            copies.copy(stream, target, source, nbytes)
            copies.copy(stream, flag, number, 8)

        return queue

    return push


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch

    world_size, n, slot = problem.world_size, problem.shape[1], slot_bytes(problem)
    rank, rows, span, chunks = workspace.rank, rows_of(problem), _span(problem, config), int(config["chunks"])
    streams, row_bytes = int(config["num_streams"]), n * out_itemsize(problem)
    panels = workspace.panels(problem.mode, 2 * world_size * slot)
    copies, dtype = copies_of(workspace, problem.mode), getattr(torch, wanted_of(problem).dtype)
    push, parts = _pushes(problem, config, workspace, panels, copies), []
    for step in range(world_size):
        owner, own = (rank + 1 + step) % world_size, step == world_size - 1
        base = (rank if own else world_size + step) * slot
        for chunk in range(chunks):
            first, last = chunk * span, min((chunk + 1) * span, rows)
            at, nbytes = PANEL_DATA + base + first * row_bytes, (last - first) * row_bytes
            target = panels.buffer.local[at : at + nbytes].view(dtype).view(last - first, n)
            queued = None
            if not own:
                queued = _Push(step % streams, push(step, chunk, panels.local + at, first * row_bytes, nbytes))
            parts.append((owner * rows + first, target, queued))
    kernel = bind_kernel(_sum_request(problem, config), int(config["num_blocks"]), workspace.device)
    waits = (rank, workspace.timeout_ns, workspace.status_argument(problem))
    packets = span * row_bytes // PACKET_BYTES if chunks > 1 else slot // PACKET_BYTES
    total = kernel.fix((None, rows * n, panels.local, slot, packets, *waits))
    begin = bind_begin(problem, workspace, panels)
    return _Job(problem, copies, begin, tuple(parts), total, streams, config["gemm_streams"] == 2)


def _rounds(problem: Problem, config: Config) -> int:
    return grid_rounds(slot_bytes(problem) // PACKET_BYTES, config)


CHUNKED = register_variant(
    Variant(
        op="gemm_rs",
        name="chunked",
        numerics="library",
        summary="cuBLAS shard by shard, each pushed to its owner during the next; then one sum",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        num_rounds=_rounds,
        kernels=(begin_panels_kernel, push_chunk_kernel, sum_slots_kernel),
        compile_requests=_requests,
    )
)
