"""The ranks of a group compare what each of them has found before they make anything of it.

Where they differ, or one of them fails, every rank raises and none is left waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tunedcomm import kernels, settings
from tunedcomm.db.targets import warn_once
from tunedcomm.errors import AgreementError, WorkspaceError
from tunedcomm.kernels.common import sync
from tunedcomm.selection.snapshot import gc_paused
from tunedcomm.spec import NumericsPolicy
from tunedcomm.symm.buffer import by_reason
from tunedcomm.symm.exchange import exchange, timeout_s_of

T = TypeVar("T")
# The policies of the blocks of `tunedcomm.numerics` that are open, the innermost last.
policies: list[NumericsPolicy] = []


def _source_hashes() -> dict[str, str]:
    with gc_paused():
        return kernels.source_hashes()


@dataclass(frozen=True, slots=True)
class AgreedSettings:
    """The settings that change dispatch, read when it is made: the same on every rank, fixed when the group is made.

    Attributes:
        device: `cuda` or `cpu`.
        peer_timeout_s: TUNEDCOMM_PEER_TIMEOUT_S, or the process group's own time-out.
        interpreted: kernels were made for Triton's interpreter.
        sources: variant to source hash, so that ranks with different code do not choose from the same rows differently.

    The others are environment variables.

    Raises:
        SettingError: a variable holds a value that it does not take.
    """

    device: str
    peer_timeout_s: float
    interpreted: bool = field(default_factory=lambda: bool(sync.INTERPRET))
    autotune: float | str = field(default_factory=settings.autotune)
    mode: str = field(default_factory=settings.mode)
    forced: Mapping[str, str] = field(default_factory=settings.forced_all)
    borrow: tuple[str, ...] = field(default_factory=settings.borrow)
    check: tuple[int, bool] = field(default_factory=settings.check)
    debug: bool = field(default_factory=settings.debug)
    nan_check: bool = field(default_factory=settings.nan_check)
    node_of_rank: tuple[int, ...] = field(default_factory=settings.node_of_rank)
    numerics: str = field(default_factory=settings.numerics)
    wire: tuple[str, int] | None = field(default_factory=settings.wire)
    workspace_bytes: int = field(default_factory=settings.workspace_bytes)
    nvtx: bool = field(default_factory=settings.nvtx)  # read here, so that a wrong value ends the set-up on every rank
    sources: Mapping[str, str] = field(default_factory=_source_hashes)

    @classmethod
    def read(cls, group: dist.ProcessGroup, device: torch.device) -> AgreedSettings:
        """The settings of a group, as they are now."""
        return cls(device.type, settings.peer_timeout_s() or timeout_s_of(group))

    def fields(self) -> dict[str, Any]:
        """The values to compare, one for each variable and source."""
        values = asdict(self)
        sources, _ = values.pop("sources"), values.pop("nvtx")
        block = {"tunedcomm.numerics": policies[-1]} if policies else {}
        return {**values, **block, **{f"source hash of {name}": text for name, text in sources.items()}}


def on_every_rank(group: dist.ProcessGroup, what: str, make: Callable[[], T]) -> list[T]:
    """`make()` of every rank, by rank.

    Raises:
        Exception: what the caller's own `make` raised, once the other ranks know: they would wait for it.
        AgreementError: another rank's `make` raised.
    """
    made, failure = None, None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    everyone = exchange(group, (made, failure and f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        with contextlib.suppress(AttributeError):
            failure.ends_group = False  # type: ignore[attr-defined]  # every rank raises
        try:
            raise failure
        finally:
            # A frame that holds its own exception is a cycle: it would keep the group alive to the very end of the
            # interpreter, which gloo's threads then abort.
            failure = None
    for rank, (_, text) in enumerate(everyone):
        if text:
            raise AgreementError(f"rank {rank} of the group could not {what}: {text}")
    return [value for value, _ in everyone]


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

    everyone = on_every_rank(group, f"find out its {what}", make_fields)
    if difference := first_difference(everyone):
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
                one, two = (repr(values[name]) if name in values else "not there" for values in (first, other))
                return f"{name} is {one} on rank 0 and {two} on rank {rank}"
    return ""


def make_memory_everywhere(
    group: dist.ProcessGroup, make: Callable[[], T], *, without: str = "every call goes to the library"
) -> T | None:
    """Symmetric memory, or None on every rank if any rank could not have it; rank 0 warns of it, with the reason.

    Args:
        group: process group.
        make: makes the memory; collective.
        without: the consequence in words, for the warning.
    """
    failure: str | None = None
    made: T | None = None
    try:
        made = make()
    except WorkspaceError as error:
        failure = str(error)
    if failed := by_reason(exchange(group, failure)):
        if dist.get_rank(group) == 0:
            warn_once(f"no symmetric memory, {without}: {failed}")
        return None
    return made
