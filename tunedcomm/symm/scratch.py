"""Scratch: memory of one rank for what a plan needs within a call.

All plans of a lane share it, for their calls follow each other: it is as large as the largest plan wants, however many
sizes a program calls.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tunedcomm.spec import Mode

__all__ = ["scratch_of"]

_LEAST_BYTES = 1 << 20

# All that a workspace ever had, the largest last: plans that were bound before, and their graphs, use the older ones.
_made: weakref.WeakKeyDictionary[Any, dict[Mode, list[torch.Tensor]]] = weakref.WeakKeyDictionary()


def scratch_of(workspace: Any, mode: Mode, nbytes: int) -> torch.Tensor:
    """At least `nbytes` bytes on the workspace's device, uint8; what they hold is lost with the lane's next call.

    Never to be called while a graph is captured, nor for what must outlive a call.
    """
    import torch

    made = _made.setdefault(workspace, {}).setdefault(mode, [])
    if not made or made[-1].nbytes < nbytes:
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        made.append(torch.empty(size, dtype=torch.uint8, device=workspace.device))
    return made[-1]
