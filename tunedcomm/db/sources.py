"""Whether what was stored is of the kernels as they are now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tunedcomm.db.rows import StoredVariant

__all__ = ["SourceHash", "is_current"]

# Op and variant to the hash of its source as it is now; None for a variant that this tunedcomm does not have.
SourceHash: TypeAlias = Callable[[str, str], str | None]
_LIBRARY = "library"


def is_current(variant: StoredVariant | None, source_hash: SourceHash) -> bool | None:
    """False if a stored variant's source has changed since, None if this tunedcomm does not have the variant.

    The library is what the machine has, however this tunedcomm calls it: its trials never grow stale.
    """
    current = None if variant is None else source_hash(variant.op, variant.name)
    if variant is None or current is None:
        return None
    return variant.name == _LIBRARY or current == variant.source_hash
