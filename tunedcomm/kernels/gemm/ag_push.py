"""A shard pushed by copy engines into all peers' panels, chunk by chunk, each followed by its flag.

A flag is a copy too, of the call's number, from this rank's panels into the peer's: it follows its chunk on the same
side stream, so the chunk is there when the flag is. No SM takes part, so kernels that wait for the flags may hold all
of them. The number is read where the device keeps it, so graphs can be replayed.

The side streams fork from the caller's after the call's beginning, when all peers are done with their panels, and join
it at the end, for what follows may overwrite the shard and count the next call. What is sent is queued before what
waits, so that streams which share one hardware queue do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunedcomm.kernels.common.copies import NUM_STREAMS, Copies, copies_of
from tunedcomm.kernels.gemm.ag_common import rows_of, scales_offset
from tunedcomm.spec import ITEMSIZE, Problem
from tunedcomm.symm.layout import PANEL_CHUNKS, PANEL_DATA, PANEL_NUMBER_OFFSET

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Panels, Workspace

__all__ = ["Gathered", "Pushes", "make_gathered", "make_pushes"]

# Events: the caller's stream, then the end of each side stream.
_HERE, _SENT = 0, 1
_ASIDE = NUM_STREAMS - 1


@dataclass(frozen=True, slots=True)
class Pushes:
    """What pushing needs besides the addresses of the shard and its scales.

    Attributes:
        num_streams: side streams; the peers share them in turn, each has one.
        local, peers: addresses of the panels, the own ones and the peers' in the order in which they are served.
        rows, chunk_rows: of a shard and of a chunk.
        row_bytes: of A.
        scales: offset of the scales in the panels; 0 if rows have none.
    """

    copies: Copies
    num_streams: int
    rank: int
    local: int
    peers: tuple[int, ...]
    rows: int
    chunk_rows: int
    row_bytes: int
    scales: int

    def begin(self, stream: int, a: int, scale_a: int) -> None:
        """Queue all copies, after what is queued on `stream` now."""
        copies, sides = self.copies, self.copies.streams[: self.num_streams]
        copies.record(_HERE, stream)
        for side in sides:
            copies.wait(side, _HERE)
        for step, peer in enumerate(self.peers):
            side = sides[step % self.num_streams]
            for chunk, start in enumerate(range(0, self.rows, self.chunk_rows)):
                self._send(side, peer, chunk, start, a, scale_a)
        for number, side in enumerate(sides):
            copies.record(_SENT + number, side)

    def _send(self, side: int, peer: int, chunk: int, start: int, a: int, scale_a: int) -> None:
        count = min(self.chunk_rows, self.rows - start)
        first = self.rank * self.rows + start
        self.copies.copy(
            side, peer + PANEL_DATA + first * self.row_bytes, a + start * self.row_bytes, count * self.row_bytes
        )
        if self.scales:
            self.copies.copy(side, peer + self.scales + first * 4, scale_a + start * 4, count * 4)
        flag = (self.rank * PANEL_CHUNKS + chunk) * 8
        self.copies.copy(side, peer + flag, self.local + PANEL_NUMBER_OFFSET, 8)

    def end(self, stream: int) -> None:
        """Hold the stream back until everything is sent."""
        for number in range(self.num_streams):
            self.copies.wait(stream, _SENT + number)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The gathered A copied from the panels to where the caller wants it.

    Attributes:
        data: address of the panels' A.
        shard: bytes of a shard.
    """

    copies: Copies
    rank: int
    world_size: int
    data: int
    shard: int

    def begin(self, stream: int, a: int, target: int) -> None:
        """The own shard, beside what follows on `stream`."""
        self.copies.record(_HERE, stream)
        aside = self.copies.streams[_ASIDE]
        self.copies.wait(aside, _HERE)
        self.copies.copy(aside, target + self.rank * self.shard, a, self.shard)
        self.copies.record(_SENT + _ASIDE, aside)

    def end(self, stream: int, target: int) -> None:
        """The others, after what came before on `stream` has waited for them."""
        before, after = self.rank * self.shard, (self.rank + 1) * self.shard
        if before:
            self.copies.copy(stream, target, self.data, before)
        if left := self.world_size * self.shard - after:
            self.copies.copy(stream, target + after, self.data + after, left)
        self.copies.wait(stream, _SENT + _ASIDE)


def make_pushes(
    problem: Problem, workspace: Workspace, panels: Panels, *, num_streams: int, chunk_rows: int,
    order: Sequence[int] | None = None,
) -> Pushes:  # fmt: skip
    """The pushes of a plan.

    Args:
        order: peers, by how many ranks they are ahead; by default rank + 1 first, then rank + 2, …
    """
    ahead = order or range(1, problem.world_size)
    return Pushes(
        copies=copies_of(workspace, problem.mode),
        num_streams=num_streams,
        rank=workspace.rank,
        local=panels.local,
        peers=tuple(panels.peers[step - 1] for step in ahead),
        rows=rows_of(problem),
        chunk_rows=chunk_rows,
        row_bytes=problem.shape[2] * ITEMSIZE[problem.dtype],
        scales=scales_offset(problem) if problem.scaling == "rowwise" else 0,
    )


def make_gathered(problem: Problem, workspace: Workspace, panels: Panels) -> Gathered:
    """The copies of a plan whose caller wants the gathered A."""
    m, _, k = problem.shape
    return Gathered(
        copies=copies_of(workspace, problem.mode),
        rank=workspace.rank,
        world_size=problem.world_size,
        data=panels.data,
        shard=m // problem.world_size * k * ITEMSIZE[problem.dtype],
    )
