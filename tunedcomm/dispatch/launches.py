"""Order between a group's eager calls and its graphs, where their kernels cannot be on the GPU at the same time.

Blocks that wait for peers must all be resident. A kernel of the graph lane and one of the eager lane may run side by
side, and then both must fit: else rank 0 may have room only for the one and rank 1 only for the other, and each waits
for a peer that is kept out. So eager kernels are bound to take half of the GPU at most; those that shared memory keeps
from it serve until the group captures its first graph, and no longer. From then on eager kernels are launched in the
ordinary way, without programmatic dependent launch, too: a kernel that lets the next one in before its peers have come
holds the room of two. In graphs it may be so: all that the eager lane ever holds is then one kernel of half of the GPU,
beside which the oldest kernel of the graph finds room on every rank, and when the graph is through the eager one does.

Kernels in graphs may take all of the GPU, for large messages are sent faster so; once such a one has been captured,
graphs and eager calls of the group take turns, in the order in which the host launches them, which is the same on every
rank: the graph waits for the event that every eager call records, and eager calls wait for the event that the graph
records.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["SHARE_OF_EAGER", "LaneOrder"]

Launch: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...], int], None]
# Of the GPU; two kernels that take no more than this fit side by side.
SHARE_OF_EAGER = 0.5


class LaneOrder:
    """Of one group.

    Args:
        begin: a weak reference to what is called when graphs and eager calls begin to take turns; eager plans are to be
            made anew then.

    Attributes:
        taken: they take turns.
    """

    def __init__(self, begin: weakref.WeakMethod[Callable[[], None]]) -> None:
        self.taken = False
        self._begin = begin
        self._events: tuple[Any, Any] | None = None  # of graphs, of eager calls

    def captured(self, launch: Launch) -> Launch:
        """`launch` of a kernel that takes more than its share, for captures; not to be called in one."""
        if self._events is None:
            made: Any = torch.cuda.Event
            self._events = (made(external=True), made(external=True))
            for event in self._events:  # one that was never recorded is made, and waited for, by nobody
                event.record()
        of_graphs, of_eager = self._events

        def capture(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            if not torch.cuda.is_current_stream_capturing():
                launch(inputs, outputs, stream)
                return
            if not self.taken:
                self.taken = True
                if (begin := self._begin()) is not None:
                    begin()
            of_eager.wait()
            launch(inputs, outputs, stream)
            of_graphs.record()

        return capture

    def eager(self, launch: Launch) -> Launch:
        """`launch` of any kernel outside of graphs, once there are turns to take."""
        assert self._events is not None, "turns are taken from the first capture on"
        of_graphs, of_eager = self._events

        def take_turn(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            of_graphs.wait()
            launch(inputs, outputs, stream)
            of_eager.record()

        return take_turn
