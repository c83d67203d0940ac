"""Agreement of all ranks: `force` makes them run one variant, `check_agreement` compares what they have bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.dispatch.decide import forced_here, forced_ops
from tunedcomm.dispatch.groups import get_communicator, live_communicators
from tunedcomm.errors import AgreementError
from tunedcomm.space import Value
from tunedcomm.spec import get_op, get_variant
from tunedcomm.state import reusable
from tunedcomm.symm.exchange import first_difference


@reusable
def force(op: str, variant: str, config: Mapping[str, Value] | None = None) -> Iterator[None]:
    """Run one variant for every problem of `op` inside the `with` block, the same on every rank.

    Args:
        op, variant: registered names.
        config: a point of the variant's space; by default the variant's own default for each problem.

    Raises:
        UnknownNameError, ConfigError: no such op or variant, or a config outside the space. A problem that the variant
            cannot run raises InfeasibleError when it is called.
    """
    kernels.discover()
    known = get_variant(get_op(op).name, variant)
    clean = None if config is None else known.space.validate(config)
    before = forced_ops.get(op)
    forced_ops[op] = (variant, clean)
    _forget_plans()
    try:
        yield
    finally:
        if before is None:
            del forced_ops[op]
        else:
            forced_ops[op] = before
        _forget_plans()


def _forget_plans() -> None:
    for communicator in live_communicators():
        communicator.forget_plans()


@dataclass(frozen=True, slots=True)
class Agreement:
    """The things that all ranks of a group have in common.

    Attributes:
        world_size: ranks of the group.
        snapshot: digest of the table that they dispatch from.
        settings: environment variables and the like, as they were when the group was made.
        forced: op to what `tunedcomm.force` names for it now.
        plans: each problem that was called so far, with its numerics policy, to the candidate that runs it.
    """

    world_size: int
    snapshot: str
    settings: Mapping[str, Any]
    forced: Mapping[str, str]
    plans: Mapping[str, str]


def check_agreement(group: dist.ProcessGroup | None = None, *, device: torch.device | None = None) -> Agreement:
    """Compare what every rank of a group dispatches from and has bound so far; collective over the group.

    Ranks agree when a group is made, so a difference is a mistake in this library or in how it is called: a call that
    one rank made and another did not, `out=x` or `tunedcomm.force` on one rank alone. Such a group may hang. Not for
    the hot path: it exchanges Python objects, and the ranks wait for each other.

    Args:
        group: process group, by default the default group; made ready if this is its first use.
        device: where its tensors live; by default the current CUDA device, or the CPU where there is none.

    Returns:
        What they agree on, the same on every rank.

    Raises:
        AgreementError: on every rank, naming the first rank that differs from rank 0 and in what.
        NotInitializedError: no default process group.
        GroupError: not a member of the group, or it has no backend for the device.
    """
    communicator = get_communicator(group, device)
    agreed, forced, snapshot = communicator.settings.fields(), forced_here(), communicator.snapshot.digest
    plans = {f"{plan.problem} numerics={plan.policy}": str(plan.candidate) for plan in communicator.plans.values()}
    kinds: dict[str, Mapping[str, Any]] = {
        "snapshot": {"digest": snapshot}, "setting": agreed, "tunedcomm.force": forced, "plan": plans
    }  # fmt: skip
    found = {f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()}
    if difference := first_difference(communicator.exchange(found)):
        raise AgreementError(
            f"the ranks of the group do not agree: {difference}; make the same calls with the same options on every "
            "rank, and tunedcomm.release_communicators() on all of them to begin anew"
        )
    return Agreement(communicator.world_size, snapshot, agreed, forced, plans)
