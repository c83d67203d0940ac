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

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_gather.copy_engine import (
    MOST_CHUNKS,
    CopyJob,
    flags_kernel,
    flags_request,
    make_job,
    refuse_pushes,
)
from tunedcomm.kernels.common.feasibility import Launch, closest, refuse_moves
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["COPY_ENGINE"]


@dataclass(frozen=True, slots=True)
class _ExchangeJob(CopyJob):
    """A job whose peers are each sent a chunk of the input of their own; its `x` is the address of the own chunk."""

    def source_for(self, step: int, x: int) -> int:
        return x + (self.rank_at(step) - self.rank) * self.nbytes


_SPACE = Space(
    {
        "direction": Choice("push", "pull"),
        "num_streams": Choice(1, 2, 3, 7),
        "num_chunks": PowerOfTwo(1, MOST_CHUNKS),
    }
)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_moves(problem, limits):
        return reason
    if int(config["num_streams"]) > problem.world_size - 1:
        return f"{config['num_streams']} streams, but only {problem.world_size - 1} peers to copy to"
    if config["direction"] == "pull":
        if config["num_chunks"] != 1:
            return "pulls are not cut: only num_chunks=1"
        return None if problem.input_kind == "symmetric" else "only symmetric inputs are pulled"
    return refuse_pushes(problem, config, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    chunks = 1 if problem.nbytes < 4 << 20 else 8 if problem.nbytes < 64 << 20 else MOST_CHUNKS
    pulls = problem.input_kind == "symmetric"
    wish: dict[str, Any] = {"direction": "pull" if pulls else "push", "num_chunks": 1 if pulls else chunks}
    return closest({**wish, "num_streams": 3}, _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    del config
    return (flags_request(problem),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    job = make_job(problem, config, workspace, _ExchangeJob)
    own = workspace.rank * problem.nbytes

    def push(stream: int, x: int, out: int) -> None:
        job.push(stream, x + own, out)

    if config["direction"] == "push":
        return AddressLaunch(push)
    peers_of, num_peers = workspace.peers_of, problem.world_size - 1

    def pull(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        x = inputs[0]
        sources = tuple(peer + own for peer in peers_of(x)[:num_peers])
        job.pull(stream, x.data_ptr() + own, outputs[0].data_ptr(), sources)

    return pull


COPY_ENGINE = register_variant(
    Variant(
        op="all_to_all",
        name="copy_engine",
        numerics="ordered",
        summary="the copy engines move everything, between exchanges of flags; takes no SMs",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: 0,
        kernels=(flags_kernel,),
        compile_requests=_requests,
    )
)
