"""Wrappers of launches, which `Communicator.wrap` puts around them.

**Lane order.** Blocks that wait for peers must all be resident. A kernel of the graph lane and one of the eager lane
may run side by side, and then both must fit: else rank 0 may have room only for the one and rank 1 only for the
other, and each waits for a peer that is kept out. So eager kernels are bound to take half of the GPU at most. Some
cannot, for the shared memory that they need; these run until the group captures its first graph, and are refused from
then on. From then on eager kernels are also launched without programmatic dependent launch, by which a kernel lets the
next one in while it still waits for peers, so that both hold room. Kernels in graphs may keep it: the eager lane holds
at most one kernel of half of the GPU, beside which the oldest kernel of the graph finds room on every rank; when the
graph is done, so does the eager kernel.

Kernels in graphs may take all of the GPU, for large messages are sent faster so. Once such a one has been captured,
graphs and eager calls of the group take turns in the order in which the host launches them, which is the same on
every rank: the graph waits for the event that every eager call records, and eager calls wait for the graph's event.

**NaN check** (TUNEDCOMM_NAN_CHECK). Eager calls count NaN on their stream, wait for the count and raise before the
collective is launched. In a capture nothing can be waited for: the count is captured too, every replay adds its
count to a sum that it copies to pinned host memory, and the group's next call raises.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tunedcomm.db.misses import Counter
from tunedcomm.errors import NanInputError
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.spec import Problem, get_op, ops
from tunedcomm.symm.control import refuse_nested

if TYPE_CHECKING:
    from tunedcomm.symm.control import Control
    from tunedcomm.symm.ring import HostRing

# Not empty while any group is intercepted.
intercepted: list[bool] = []


class _Thread(threading.local):
    """State of one thread: whether its calls are intercepted."""

    intercepts = True


_thread = _Thread()


class no_intercept:  # noqa: N801 - used as torch.no_grad is
    """A block whose calls on `torch.distributed` are not intercepted on this thread."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _thread.intercepts
        _thread.intercepts = False

    def __exit__(self, *error: object) -> None:
        _thread.intercepts = self._before


def may_intercept() -> bool:
    """True outside of `no_intercept()`."""
    return _thread.intercepts


def around(launch: Launch, wrap: Callable[..., Callable[..., None]], *arguments: Any) -> Launch:
    """`wrap(launch, *arguments)`, a function that passes on whatever it gets; a launch by address stays one."""
    if isinstance(launch, AddressLaunch):
        return replace(launch, by_address=wrap(launch.by_address, *arguments))
    return wrap(launch, *arguments)


def in_range(launch: Callable[..., None], name: str) -> Callable[..., None]:
    """Launch in an NVTX range."""

    def launch_in_range(*arguments: Any) -> None:
        with torch.cuda.nvtx.range(name):
            launch(*arguments)

    return launch_in_range


def interpreted(launch: Callable[..., None], what: str, control: Control, ring: HostRing | None) -> Callable[..., None]:
    """Launch the candidate `what` in the interpreter: afterwards it has run, so a peer that did not come is known."""

    def launch_and_check(*arguments: Any) -> None:
        thread = threading.get_ident()
        if control.interpreting == thread or (ring is not None and ring.is_mine()):
            refuse_nested(what)
        control.interpreting = thread
        try:
            launch(*arguments)
        finally:
            control.interpreting = 0
        control.check()

    return launch_and_check


def after(launch: Callable[..., None], meet: Callable[[], None]) -> Callable[..., None]:
    """Launch after a meeting: what waits in the library would not see that a peer ended the group."""

    def meet_and_launch(*arguments: Any) -> None:
        meet()
        launch(*arguments)

    return meet_and_launch


def counted(launch: Callable[..., None], counter: Counter) -> Callable[..., None]:
    """Count the calls of an untuned problem."""

    def count_and_launch(*arguments: Any) -> None:
        counter.count += 1
        launch(*arguments)

    return count_and_launch


def undisturbed(launch: Launch, device_type: str) -> Launch:
    """Launch whatever the surroundings: nothing of it is intercepted, and autocast rounds no inputs of its products."""

    def run_own(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        if not intercepted:
            launch(inputs, outputs, stream)
            return
        with no_intercept():
            launch(inputs, outputs, stream)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        if not torch.is_autocast_enabled(device_type):
            run_own(inputs, outputs, stream)
            return
        with torch.autocast(device_type, enabled=False):
            run_own(inputs, outputs, stream)

    return run


class LaneOrder:
    """The order between a group's graphs and its eager calls.

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
            for event in self._events:  # nobody waits for an event that was never recorded
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


def _count(tensor: torch.Tensor) -> torch.Tensor:
    """The number of elements that are NaN, on the tensor's device."""
    return torch.isnan(tensor.float() if tensor.element_size() == 1 else tensor).sum()  # torch compares no 8-bit floats


class NanWatch:
    """The check of one group's inputs.

    Args:
        device: where the group's tensors live.
        rank: the caller's rank in the group.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._rank, self._ops = rank, sorted(ops())
        # NaN that replays have found, by op: where they add, what they copied to the host, and what was raised.
        self._found = torch.zeros(len(self._ops), dtype=torch.int64, device=device)
        self._copied = torch.zeros_like(self._found, device="cpu", pin_memory=device.type == "cuda")
        self._raised = torch.zeros_like(self._found, device="cpu")
        # In a capture nothing may be loaded.
        self._found[0] += _count(torch.zeros(1, dtype=torch.float32, device=device))

    def guard(self, problem: Problem, launch: Launch) -> Launch:
        """`launch` after a look at its inputs; those that hold no floating-point numbers are let through."""
        row, spec = self._ops.index(problem.op), get_op(problem.op)

        def floats(inputs: tuple[Any, ...]) -> list[torch.Tensor]:
            cleared = spec.mask_unspecified(problem, inputs, ())[0]  # fused ops have numbers among their inputs
            return [value for value in cleared if isinstance(value, torch.Tensor) and value.is_floating_point()]

        def look_and_launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            self.check()
            if found := sum(int(_count(tensor)) for tensor in floats(inputs)):
                raise NanInputError(
                    f"{problem.op}: {found} NaN in the input of rank {self._rank}. This rank did not make the call, so "
                    "its group ends: find where the NaN comes from, or unset TUNEDCOMM_NAN_CHECK to let it through"
                )
            launch(inputs, outputs, stream)

        def count_and_launch(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            self.check()
            for tensor in floats(inputs):
                self._found[row] += _count(tensor)
            self._copied.copy_(self._found, non_blocking=True)
            launch(inputs, outputs, stream)

        return count_and_launch if problem.mode == "graph" else look_and_launch

    def check(self) -> None:
        """Raise if replayed graphs found NaN, once.

        Raises:
            NanInputError: names the op, the rank and how many replays found since the last error.
        """
        new = self._copied - self._raised
        if not new.any():
            return
        self._raised += new
        said = "; ".join(f"{op}: {count} NaN" for op, count in zip(self._ops, new.tolist(), strict=True) if count)
        raise NanInputError(
            f"{said} in the input of rank {self._rank}, in a captured graph that was replayed before this call. The "
            "replay sent them on: find where they come from, or unset TUNEDCOMM_NAN_CHECK to let them through"
        )
