"""Panels: symmetric memory for the matrices of fused GEMMs, made when a plan first needs it; see `symm.layout`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunedcomm.symm.layout import PANEL_DATA, rotate

if TYPE_CHECKING:
    from tunedcomm.spec import Mode
    from tunedcomm.symm.buffer import SymmetricBuffer
    from tunedcomm.symm.workspace import Workspace

__all__ = ["Panels", "panels_of"]

_LEAST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """One lane's panels.

    Attributes:
        local: address on this rank.
        peers: addresses on the other ranks, from rank + 1 on, padded with 0; as in `Lane`.
        multicast: address whose stores reach every rank's panels, or 0.
        buffer: the memory itself.
    """

    local: int
    peers: tuple[int, ...]
    multicast: int
    buffer: SymmetricBuffer

    @property
    def data(self) -> int:
        """Address of the data on this rank."""
        return self.local + PANEL_DATA


# Every panels that a workspace ever had, the largest last: captured graphs may still use the older ones.
_made: weakref.WeakKeyDictionary[Workspace, dict[Mode, list[Panels]]] = weakref.WeakKeyDictionary()


def panels_of(workspace: Workspace, mode: Mode, nbytes: int) -> Panels:
    """A lane's panels with room for `nbytes` of data; collective over the group, never while a graph is captured.

    Raises:
        WorkspaceError: the memory could not be had or mapped.
    """
    from tunedcomm.symm.buffer import (
        allocate,  # kernels import this module, and readers of databases them without torch
    )

    made = _made.setdefault(workspace, {}).setdefault(mode, [])
    if not made or made[-1].buffer.nbytes < nbytes + PANEL_DATA:
        size = max(_LEAST_BYTES, 1 << (nbytes + PANEL_DATA - 1).bit_length())
        buffer = allocate(workspace.group, workspace.device, size)
        addresses, rank = buffer.addresses, workspace.rank
        made.append(Panels(addresses[rank], rotate(addresses, rank), buffer.multicast_address, buffer))
    return made[-1]
