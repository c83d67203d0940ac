"""Agreement of a group's ranks: compare what they have, or fail as one.

Everything here is collective over the group and exchanges Python objects, off the hot path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from tunedcomm import kernels, settings
from tunedcomm.errors import AgreementError, WorkspaceError
from tunedcomm.kernels.common import sync
from tunedcomm.spec import ops, variants

logger = logging.getLogger("tunedcomm")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgreedSettings:
    """The settings that change dispatch: the same on every rank, fixed when the group is made.

    Attributes:
        device: `cuda` or `cpu`.
        interpreted: kernels were made for Triton's interpreter.
        mode, forced, borrow, nan_check, node_of_rank, peer_timeout_s, workspace_bytes: the environment variables.
        sources: variant to source hash, so that ranks with different code do not choose from the same rows differently.
    """

    device: str
    interpreted: bool
    mode: str
    forced: Mapping[str, str]
    borrow: tuple[str, ...]
    nan_check: bool
    node_of_rank: tuple[int, ...]
    peer_timeout_s: float
    workspace_bytes: int
    sources: Mapping[str, str]

    @classmethod
    def read(cls, device: str) -> AgreedSettings:
        """The settings of this rank.

        Raises:
            SettingError: a variable holds a value that it does not take.
        """
        every = [variant for op in ops() for variant in variants(op).values()]
        return cls(
            device=device,
            interpreted=bool(sync.INTERPRET),
            mode=settings.mode(),
            forced=settings.forced_all(),
            borrow=settings.borrow(),
            nan_check=settings.nan_check(),
            node_of_rank=settings.node_of_rank(),
            peer_timeout_s=settings.peer_timeout_s(),
            workspace_bytes=settings.workspace_bytes(),
            sources={f"{variant.op}.{variant.name}": kernels.source_hash(variant) for variant in every},
        )

    def fields(self) -> dict[str, Any]:
        """The values to compare, one for each variable and source."""
        values = asdict(self)
        sources = values.pop("sources")
        return {**values, **{f"source hash of {name}": text for name, text in sources.items()}}


def exchange(group: dist.ProcessGroup, value: object) -> list[Any]:
    """Every rank's `value`, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_every_rank(group: dist.ProcessGroup, what: str, make: Callable[[], T]) -> list[T]:
    """`make()` of every rank, by rank.

    Raises:
        Exception: what the caller's own `make` raised, once the other ranks know: they would wait for it.
        AgreementError: another rank's `make` raised.
    """
    mine, failure = None, None
    try:
        mine = make()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    theirs = exchange(group, (mine, failure and f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        try:
            raise failure
        finally:
            # A frame that holds its own exception is a cycle: it would keep the group alive to the very end of the
            # interpreter, which gloo's threads then abort.
            failure = None
    for rank, (_, text) in enumerate(theirs):
        if text:
            raise AgreementError(f"rank {rank} of the group could not {what}: {text}")
    return [value for value, _ in theirs]


def agree(group: dist.ProcessGroup, what: str, make: Callable[[], T], fields_of: Callable[[T], Mapping[str, Any]]) -> T:
    """`make()`, whose fields must be equal on every rank.

    Raises:
        Exception: what the caller's own `make` raised.
        AgreementError: another rank's `make` raised, or a field differs; the text names the first that does.
    """
    made: list[T] = []

    def make_fields() -> Mapping[str, Any]:
        made.append(make())
        return fields_of(made[0])

    theirs = on_every_rank(group, f"find out its {what}", make_fields)
    if difference := first_difference(theirs):
        raise AgreementError(
            f"the ranks of the group differ in {what}: {difference}; set the same TUNEDCOMM_* variables and install "
            "the same version and packages on every rank"
        )
    return made[0]


def first_difference(everyone: Sequence[Mapping[str, Any]]) -> str:
    """The first value in which a rank differs from rank 0, in words; "" if none does."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in sorted({*other, *first}):
            if name not in first or name not in other or first[name] != other[name]:
                here, there = (repr(values[name]) if name in values else "not there" for values in (first, other))
                return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    return ""


def make_memory_everywhere(group: dist.ProcessGroup, make: Callable[[], T]) -> T | None:
    """Symmetric memory, or None on every rank if any rank could not have it; a warning says which and why."""
    failure: str | None = None
    made: T | None = None
    try:
        made = make()
    except WorkspaceError as error:
        failure = str(error)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(exchange(group, failure)) if text]
    if failures:
        logger.warning("no symmetric memory, every call goes to the library: %s", "; ".join(failures))
        return None
    return made
