"""multimem: as `push`, but one store reaches every rank's gather area through the switch.

A rank's own gather area gets its own chunks too, in a slot that nobody reads. Each rank may store only when all have
raised their first flag of the call, which `push` waits for as well; the rest of its proof holds word for word.

Numerics: ordered (nothing is computed). Graph-safe. Refused where the fabric reports no multicast.
Source: NVLink SHARP as PyTorch's multimem operators use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_gather._common import message_rounds
from tunedcomm.kernels.all_gather._ring import SPACE, bind_ring, refuse_ring, ring_kernel, ring_request
from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks, refuse_multicast
from tunedcomm.kernels.common.packets import packets_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["MULTIMEM"]


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    return refuse_multicast(limits) or refuse_ring(problem, config, limits, multimem=True)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    packets = packets_of(problem.nbytes)
    chunks = 1 if packets < 1 << 17 else 32
    wish = {"num_blocks": min(packets / 256, 32), "num_warps": 8, "items": 1, "num_chunks": chunks}
    return closest(wish, SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return (ring_request(problem, config, multimem=True),)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    return bind_ring(problem, config, workspace, multimem=True)


MULTIMEM = register_variant(
    Variant(
        op="all_gather",
        name="multimem",
        numerics="ordered",
        summary="every rank's one store reaches all ranks (NVLink multicast)",
        space=SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        kernels=(ring_kernel,),
        compile_requests=_requests,
        num_rounds=message_rounds,
    )
)
