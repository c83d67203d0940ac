"""What the ranks of a group must have in common besides their hardware and their snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tunedcomm import kernels, settings
from tunedcomm.kernels.common import sync
from tunedcomm.spec import ops, variants

__all__ = ["AgreedSettings"]


@dataclass(frozen=True, slots=True)
class AgreedSettings:
    """What changes dispatch besides snapshot and hardware: the same on every rank, fixed when the group is made.

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
        """As they are on this rank.

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
        """What to compare, one entry for each variable and source."""
        values = asdict(self)
        sources = values.pop("sources")
        return {**values, **{f"source hash of {name}": text for name, text in sources.items()}}
