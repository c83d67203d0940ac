"""Asking the ranks of a group whether they would all run the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.dispatch.dispatcher import forced_here
from tunedcomm.errors import AgreementError

__all__ = ["Agreement", "check_agreement"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a group have in common.

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
    mine = _standing(communicator)
    everyone = communicator.exchange(mine)
    _compare(everyone)
    return Agreement(
        world_size=communicator.world_size,
        snapshot=communicator.snapshot.digest,
        settings=communicator.settings.fields(),
        forced=mine["tunedcomm.force"],
        plans=mine["plan"],
    )


def _standing(communicator: Communicator) -> dict[str, dict[str, Any]]:
    """What must be equal on every rank, by kind and name."""
    plans = {
        f"{plan.problem} numerics={plan.policy}": str(plan.decision.candidate) for plan in communicator.plans.values()
    }
    return {
        "snapshot": {"digest": communicator.snapshot.digest},
        "setting": communicator.settings.fields(),
        "tunedcomm.force": forced_here(),
        "plan": plans,
    }


def _compare(everyone: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for kind, theirs in other.items():
            for name in sorted({*theirs, *first[kind]}):
                if theirs.get(name) != first[kind].get(name):
                    raise AgreementError(
                        f"the ranks of the group do not agree: {kind} {name} is {_value(first[kind], name)} on rank 0 "
                        f"and {_value(theirs, name)} on rank {rank}; make the same calls with the same options on "
                        "every rank, and tunedcomm.release_communicators() on all of them to begin anew"
                    )


def _value(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not there"
