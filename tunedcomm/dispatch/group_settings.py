"""The settings of a group, which every rank reads alike, and the open blocks of `tunedcomm.numerics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm import kernels, settings
from tunedcomm.kernels.common import sync
from tunedcomm.selection.snapshot import gc_paused
from tunedcomm.spec import NumericsPolicy
from tunedcomm.symm.exchange import timeout_s_of

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
    # Ranks may differ in these; read here, so that a wrong value ends the set-up on every rank.
    nvtx: bool = field(default_factory=settings.nvtx)
    log_level: str | None = field(default_factory=settings.log_level)
    sources: Mapping[str, str] = field(default_factory=_source_hashes)

    @classmethod
    def read(cls, group: dist.ProcessGroup, device: torch.device) -> AgreedSettings:
        """The settings of a group, as they are now."""
        return cls(device.type, settings.peer_timeout_s() or timeout_s_of(group))

    def by_variable(self) -> dict[str, Any]:
        """`fields`, each with its variable in the name."""
        named = {name: getattr(getattr(settings, name, None), "name", "") for name in self.fields()}
        return {f"{name} ({named[name]})" if named[name] else name: value for name, value in self.fields().items()}

    def fields(self) -> dict[str, Any]:
        """The values to compare, one for each variable and source."""
        values = asdict(self)
        sources, _, _ = (values.pop(name) for name in ("sources", "nvtx", "log_level"))
        block = {"tunedcomm.numerics": policies[-1]} if policies else {}
        return {**values, **block, **{f"source hash of {name}": text for name, text in sources.items()}}
