"""Copies by a GPU's copy engines, on side streams that fork from and join the caller's; by `memmove` on the host.

Addresses may be a peer's: addresses of symmetric memory are addresses of this process. All goes straight to the driver,
which takes raw addresses and streams, is captured like any other work, and costs a microsecond a call. Streams and
events belong to a lane of a workspace and are made once: calls of one lane are in order, so each call may record events
anew. Lanes do not share them, for then calls of two groups could wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunedcomm.errors import TunedCommError
from tunedcomm.kernels.common.feasibility import RING

if TYPE_CHECKING:
    from tunedcomm.spec import Mode
    from tunedcomm.symm.workspace import Workspace

NUM_STREAMS = 9
NUM_EVENTS = 32  # for what begins and ends within one call
EVENTS_OF_PROGRESS = (NUM_EVENTS, NUM_EVENTS + 1)  # of a gather that goes on while other calls come
_NON_BLOCKING = 1  # of cuStreamCreate: no order with the legacy default stream
_DISABLE_TIMING = 2  # of cuEventCreate
_AT_LEAST = 0  # of cuStreamWaitValue32


class Copies:
    """Copies of one lane on side streams. This class is the host's: every call is done when it returns.

    Attributes:
        streams: handles of `NUM_STREAMS` side streams.
        beside: handle of one for what the library computes, of no higher priority than the caller's.
    """

    streams: tuple[int, ...] = (0,) * NUM_STREAMS
    beside = 0

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Queue a copy of `nbytes` between two addresses."""
        ctypes.memmove(target, source, nbytes)

    def record(self, event: int, stream: int) -> None:
        """Let event number `event` (below `NUM_EVENTS`) stand for all that is queued on `stream` now."""

    def wait(self, stream: int, event: int) -> None:
        """Hold back what is queued on `stream` from now on until what `event` stands for is done."""

    def fork(self, stream: int, sides: Iterable[int], event: int) -> None:
        """Hold back side streams until all that is queued on `stream` now is done."""
        self.record(event, stream)
        for side in sides:
            self.wait(side, event)

    def join(self, sides: Iterable[int], stream: int, first_event: int) -> None:
        """Hold back `stream` until all that is queued on side streams now is done; takes an event for each."""
        for event, side in enumerate(sides, first_event):
            self.record(event, side)
            self.wait(stream, event)

    def current(self, stream: int) -> AbstractContextManager[object]:
        """A block in which torch queues its work on this side stream."""
        return contextlib.nullcontext()

    def await_count(self, stream: int, counter: int, count: int) -> None:
        """Hold back `stream` until the int32 at address `counter` is at least `count`; takes no SM.

        Launch what counts before: streams may share a queue of the GPU. On the host kernels have ended when a count is
        asked for, so it must have been reached.
        """
        found = ctypes.c_int32.from_address(counter).value
        if found < count:
            raise TunedCommError(f"a counter is {found} where {count} were to be counted; please report this")

    def clear(self, stream: int, address: int, words: int) -> None:
        """Queue the zeroing of 4-byte words; may take an SM, so no running kernel may wait for what comes after it."""
        ctypes.memset(address, 0, 4 * words)


@functools.cache
def _driver() -> Any:
    """The driver, with the argument types of the functions called here."""
    library = ctypes.CDLL("libcuda.so.1")
    handle, address, uint = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
    library.cuMemcpyAsync.argtypes = [address, address, ctypes.c_size_t, handle]
    library.cuCtxGetStreamPriorityRange.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)]
    library.cuStreamCreateWithPriority.argtypes = [ctypes.POINTER(handle), uint, ctypes.c_int]
    library.cuStreamDestroy_v2.argtypes = [handle]
    library.cuEventCreate.argtypes = [ctypes.POINTER(handle), uint]
    library.cuEventDestroy_v2.argtypes = [handle]
    library.cuEventRecord.argtypes = [handle, handle]
    library.cuStreamWaitEvent.argtypes = [handle, handle, uint]
    library.cuStreamWaitValue32_v2.argtypes = [handle, address, ctypes.c_uint32, uint]
    library.cuMemsetD32Async.argtypes = [address, uint, ctypes.c_size_t, handle]
    return library


def _check(result: int, what: str) -> None:
    if result != 0:
        raise TunedCommError(
            f"the CUDA driver refused {what} (CUresult {result}); run with CUDA_LAUNCH_BLOCKING=1 to find the "
            "call that failed first, or leave copy engines out with tunedcomm.force()"
        )


def _new_stream(*, urgent: bool) -> int:
    """A stream of the highest priority, for copies that peers wait for, or of the lowest, for products."""
    handle, least, greatest = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)), "to name priorities")
    priority = greatest if urgent else least
    _check(_driver().cuStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority), "a stream")
    return int(handle.value or 0)


def _new_event() -> int:
    handle = ctypes.c_void_p()
    _check(_driver().cuEventCreate(ctypes.byref(handle), _DISABLE_TIMING), "an event")
    return int(handle.value or 0)


def _destroy(streams: tuple[int, ...], events: tuple[int, ...]) -> None:
    """Destroy streams and events; the driver finishes what is still queued first."""
    library = _driver()
    for stream in streams:
        library.cuStreamDestroy_v2(stream)
    for event in events:
        library.cuEventDestroy_v2(event)


class _DeviceCopies(Copies):
    """Streams and events of the current device."""

    def __init__(self) -> None:
        library = _driver()
        self.streams = tuple(_new_stream(urgent=True) for _ in range(NUM_STREAMS))
        self.beside = _new_stream(urgent=False)
        self.events = tuple(_new_event() for _ in range(NUM_EVENTS + len(EVENTS_OF_PROGRESS)))
        self._copy, self._record, self._wait = library.cuMemcpyAsync, library.cuEventRecord, library.cuStreamWaitEvent

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        _check(self._copy(target, source, nbytes, stream), "a copy")

    def record(self, event: int, stream: int) -> None:
        _check(self._record(self.events[event], stream), "to record an event")

    def wait(self, stream: int, event: int) -> None:
        _check(self._wait(stream, self.events[event], 0), "to wait for an event")

    def current(self, stream: int) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.stream(torch.cuda.get_stream_from_external(stream))

    def await_count(self, stream: int, counter: int, count: int) -> None:
        _check(_driver().cuStreamWaitValue32_v2(stream, counter, count, _AT_LEAST), "to wait for a count")

    def clear(self, stream: int, address: int, words: int) -> None:
        _check(_driver().cuMemsetD32Async(address, 0, words, stream), "to clear counters")


_lanes: weakref.WeakKeyDictionary[Workspace, dict[Mode, _DeviceCopies]] = weakref.WeakKeyDictionary()


def copies_of(workspace: Workspace, mode: Mode) -> Copies:
    """The queues of a lane, made when they are first asked for; never while a graph is captured."""
    if workspace.device.type == "cpu":
        return Copies()
    import torch

    lanes = _lanes.setdefault(workspace, {})
    if mode not in lanes:
        with torch.cuda.device(workspace.device):
            made = lanes[mode] = _DeviceCopies()
        # Not at exit, when the driver may be gone.
        weakref.finalize(workspace, _destroy, (*made.streams, made.beside), made.events).atexit = False
    return lanes[mode]


_HERE, _SENT = 0, 1  # events of a `ChunkSender`: of the caller's stream; of its side streams, for 3 chunks in turn
FREE_EVENT = _SENT + 3 * NUM_STREAMS  # the first that it leaves to others


@dataclass(frozen=True, slots=True)
class ChunkSender:
    """Sends one rank's data to each peer, chunk by chunk on side streams; each call brings the input's address.

    Attributes:
        copies: the lane's queues.
        num_streams: side streams that carry what crosses the links.
        rank: the sender.
        nbytes: bytes that it has for each rank.
        stride: bytes of the input from what goes to one rank to what goes to the next; 0 where all get the same.
        targets: addresses of the sender's places in the areas of rank + 1, rank + 2, …
        chunk, num_chunks: bytes of a chunk, and how many there are; `RING` of them have a place at once.
    """

    copies: Copies
    num_streams: int
    rank: int
    nbytes: int
    stride: int
    targets: tuple[int, ...]
    chunk: int
    num_chunks: int

    @property
    def sides(self) -> tuple[int, ...]:
        return self.copies.streams[: self.num_streams]

    def rank_at(self, turn: int) -> int:
        return (self.rank + 1 + turn) % (len(self.targets) + 1)

    def extent(self, c: int) -> tuple[int, int]:
        """(start, bytes) of chunk `c`."""
        start = c * self.chunk
        return start, min(self.chunk, self.nbytes - start)

    def place(self, c: int) -> int:
        """Offset of chunk `c` from a rank's place in an area."""
        return c % min(self.num_chunks, RING) * self.chunk

    def fork(self, stream: int, sides: Iterable[int]) -> None:
        """Let side streams go on from here; only streams that will have work, for a capture must join every one."""
        self.copies.fork(stream, sides, _HERE)

    def send(self, c: int, x: int) -> None:
        """Push chunk `c` to all peers."""
        start, size = self.extent(c)
        for turn, target in enumerate(self.targets):
            source = x + self.rank_at(turn) * self.stride + start
            self.copies.copy(self.copies.streams[turn % self.num_streams], target + self.place(c), source, size)
        self.note_sent(c)

    def note_sent(self, c: int) -> None:
        """Let `await_sent` wait for what is queued on the side streams now."""
        for index, side in enumerate(self.sides):
            self.copies.record(_SENT + index + c % 3 * NUM_STREAMS, side)

    def await_sent(self, c: int, stream: int) -> None:
        """Hold back `stream` until this rank's chunk `c` is out."""
        for index in range(self.num_streams):
            self.copies.wait(stream, _SENT + index + c % 3 * NUM_STREAMS)
