"""copy_engine: the copy engines move everything, ordered by kernels of one block that exchange flags; takes no SMs.

Push: the ring of `all_gather`'s `copy_engine` through the peers' gather areas, with a chunk of its own for each peer;
why no place is overwritten too early is said there, and depends on sizes and flags alone, which are the same.

Pull, of symmetric input only: flags, after which the inputs are there; every rank copies its chunk from every peer's
input; flags, after which nobody reads that input any more. No area is used.

A copy is over, its bytes in the peer's memory, before what waits for it starts: flag kernels release no more than that.

Numerics: ordered (nothing is computed). Graph-safe: side streams fork from the caller's and join it.
Source: as `all_gather`'s.
"""

from __future__ import annotations

from tunedcomm.kernels.all_gather import copy_engine
from tunedcomm.spec import Limits, Problem


class CopyEngine(copy_engine.CopyEngine):
    op = "all_to_all"
    least_for_streams = 0
    first_streams = 3

    def stride(self, problem: Problem) -> int:
        return problem.nbytes

    def refuse_pull(self, problem: Problem, limits: Limits) -> str | None:
        return None if problem.input_kind == "symmetric" else "only symmetric inputs are pulled"


COPY_ENGINE = CopyEngine().register()
