"""push: every rank pushes its input to all peers, chunk by chunk through their gather areas; best at large sizes.

A block exchanges flags (whoever has raised its first one has left its calls before, so its gather area is free), then
goes round: in round c it pushes chunk c into its slot of every peer's gather area and, packet by packet in the same
loop, writes out what the peers pushed in round c − 2; at its end it waits for the peers' flags of round c − 1 and then
raises its own. Links and local memory work at the same time, and the flags that a round waits for were raised a whole
round ago. The areas hold `RING` = 4 chunks, so messages of any size fit if they are cut often enough.

Why no chunk is overwritten too early: in round c a block pushes chunk c into the place of chunk c − 4. Before, it
waited for the flags that its counterparts on all peers raised at the end of their round c − 2, in which they wrote out
(read) chunk c − 4. From call to call: a peer pushes only after this rank's first flag of the same call, which this rank
raises after its own call before, and all reads of its gather area, ended. Slot i of a rank's area is that of the peer
i + 1 after it: only this peer's block b writes, and only this rank's block b reads, what lies there at block b's
places, for all blocks have the same places on every rank.

Blocks begin their first chunk at different places, so that they do not all wait for flags, or for their stores to
arrive, at the same time; they go the same number of rounds.

Numerics: ordered (nothing is computed). Graph-safe.
Source: chunked pushes as in NCCL's protocols, with flags in the place of its FIFO.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_gather._common import message_rounds
from tunedcomm.kernels.all_gather._ring import SPACE, bind_ring, refuse_ring, ring_kernel, ring_request
from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.common.packets import packets_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["PUSH"]


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    packets = packets_of(problem.nbytes)
    if limits.backend == "host":
        wish: dict[str, float] = {"num_blocks": 2, "num_warps": 16, "items": 1, "num_chunks": 2}
    else:
        chunks = 2 if packets < 1 << 17 else 8 if packets < 1 << 20 else 32
        wish = {"num_blocks": min(packets / 512, 132), "num_warps": 16, "items": 1, "num_chunks": chunks}
    return closest(wish, SPACE, problem, limits, refuse_ring)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (ring_request(problem, config, multimem=False),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    return bind_ring(problem, config, workspace, multimem=False)


PUSH = register_variant(
    Variant(
        op="all_gather",
        name="push",
        numerics="ordered",
        summary="every rank pushes chunks to all peers and writes out theirs meanwhile; best at large sizes",
        space=SPACE,
        infeasible=refuse_ring,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        kernels=(ring_kernel,),
        compile_requests=_requests,
        num_rounds=message_rounds,
    )
)
