"""A group's control block: the shared words by which ranks on one host tell each other that the group has ended.

Every rank has a page that all ranks of the group map:

    status   STATUS_BYTES   word 0 is not 0 once waits are to end; see `kernels.common.sync`
    process  4 int64        process id, start time, namespace of process ids, state
    reason   2 int64, text  kind and length of the reason why this rank ended the group

`abort` writes the caller's reason and then word 0 of every rank. Every wait looks at word 0 of its own rank: kernels,
interpreted or in captured graphs, and the host's. So does every call before it begins. Data that has come is used all
the same: a rank that ends the group publishes nothing afterwards.

A thread of every process looks twice a second for peers that are gone: dead, or at the end of their program. It then
ends the group here, after a grace in which waits for data that the peer left can end by themselves.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from tunedcomm.errors import AgreementError, GroupAbortedError, GroupError, PeerTimeoutError, WorkspaceError
from tunedcomm.hardware import process_start
from tunedcomm.spec import Mode, Problem, ops
from tunedcomm.symm.buffer import allocate_on_host
from tunedcomm.symm.exchange import AFTERWARDS
from tunedcomm.symm.layout import LANES, STATUS_BYTES

_PAGE = mmap.PAGESIZE
_PID, _START, _NAMESPACE, _STATE, _KIND, _LENGTH = range(STATUS_BYTES // 8, STATUS_BYTES // 8 + 6)  # int64 of a page
_TEXT = (_LENGTH + 1) * 8
_ENDED, _RELEASED = 1, 2  # states
_ABORTED, _TIMED_OUT, _DIFFERED = 1, 2, 3  # kinds
_PATIENCE_S, _BOTH = 0.2, 2  # until the calls of two ranks that differ are known
_WATCH_S, _GRACE_S, _GRACE_OF_RELEASED_S = 0.4, 0.6, 10.0
_WHERE: dict[Mode, str] = {"eager": "called eagerly", "graph": "captured in a graph"}


def refuse_nested(what: str) -> NoReturn:
    """Refuse a call within a call."""
    raise GroupError(
        f"{what} was called by a signal handler, finaliser or hook while another call of its group was under way on "
        "the same thread. Nothing was launched, and the group can be used on; make the call after the other one"
    )


def _process() -> tuple[int, int, int]:
    """This process as its page has it; zeros where /proc does not say."""
    with contextlib.suppress(OSError):
        return os.getpid(), process_start(os.getpid()) or 0, os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    return 0, 0, 0


class Control:
    """One rank's view of its group's control block; made by `share`, or for one rank alone by `alone`.

    Args:
        pages: of every rank that maps them, the caller's at `place`.
        timeout_ns: bound of waits, for error messages.
        names: ranks in error messages.
        owner: kept alive with this object.

    Attributes:
        interpreting: the thread on which a kernel of the group is being interpreted, or 0.
        status: the words of this rank that kernels look at; word 0 is not 0 once the group has ended.
        address: of `status`.
    """

    def __init__(
        self, pages: Sequence[memoryview], place: int, *, timeout_ns: int, names: Sequence[int], owner: object = None
    ) -> None:
        self.timeout_ns, self._names, self._rank, self._owner = timeout_ns, tuple(names), names[place], owner
        self._own, self._place, self.interpreting = pages[place], place, 0
        self._words = [page.cast("q") for page in pages]
        self._statuses = [page[:STATUS_BYTES].cast("i") for page in pages]
        self._texts = [page[_TEXT:] for page in pages]
        self.status = self._statuses[place]
        self.address = int(torch.frombuffer(self._own, dtype=torch.uint8).data_ptr())
        self._callers = [(op, mode) for op in sorted(ops()) for mode in LANES]
        self._seen_gone: dict[int, float] = {}  # place of a peer to the time when it was first seen to be gone
        own_words = self._words[place]
        own_words[_START], own_words[_NAMESPACE], own_words[_PID] = (found := _process())[1], found[2], found[0]
        _controls.append(weakref.ref(self, _controls.remove))
        _start_watching()

    @classmethod
    def alone(cls, rank: int) -> Control:
        """The control block of a rank whose peers share no memory with it."""
        return cls([memoryview(bytearray(_PAGE))], 0, timeout_ns=0, names=[rank])

    @classmethod
    def share(
        cls, group: dist.ProcessGroup, device: torch.device, *, timeout_ns: int, names: Sequence[int] | None = None
    ) -> Control:
        """The control block of a group whose ranks run on one host; collective over the group.

        Raises:
            WorkspaceError: no shared memory, on every rank; or CUDA cannot register it, perhaps on this rank alone.
        """
        buffer = allocate_on_host(group, _PAGE)
        whole, base = memoryview(buffer.owner), buffer.addresses[0]  # type: ignore[arg-type]
        pages = [whole[address - base : address - base + _PAGE] for address in buffer.addresses]
        names = names or range(buffer.world_size)
        control = cls(pages, buffer.rank, timeout_ns=timeout_ns, names=names, owner=buffer)
        if device.type == "cuda":
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if code := int(runtime.cudaHostRegister(base, len(pages) * _PAGE, 0)):
                raise WorkspaceError(f"cudaHostRegister refused the group's control block with error {code}")
            weakref.finalize(control, runtime.cudaHostUnregister, base).atexit = False
        return control

    def status_argument(self, problem: Problem) -> int:
        """The kernels' argument `status`: the block's address plus the number of the problem's op and mode."""
        return self.address + 1 + self._callers.index((problem.op, problem.mode))

    def abort(self, text: str, *, timed_out: bool = False) -> None:
        """End the group on every rank that maps the block, for the reason `text`; a reason given before stays."""
        self._end_with(_TIMED_OUT if timed_out else _ABORTED, text)

    def disagree(self, call: str) -> NoReturn:
        """End the group because this rank makes another call than a peer at the same time.

        Raises:
            AgreementError: with the calls of both.
        """
        self._end_with(_DIFFERED, f"rank {self._rank} calls {call}")
        self.check()
        raise AssertionError  # the group has ended

    def _end_with(self, kind: int, text: str) -> None:
        self.status[0] = 1
        own_words = self._words[self._place]
        if not own_words[_KIND]:
            said = text.encode()[: len(self._texts[0])]
            self._texts[self._place][: len(said)] = said
            own_words[_LENGTH] = len(said)
            own_words[_KIND] = kind
        for status in self._statuses:
            status[0] = 1

    def end(self, *, released: bool = False) -> None:
        """Tell the peers that this rank makes no more calls on what was set up."""
        own_words = self._words[self._place]
        own_words[_STATE] = own_words[_STATE] or (_RELEASED if released else _ENDED)

    def check(self, call: str = "") -> None:
        """Raise if the group has ended; `call` is the one that it ends, which other ranks may want to name.

        Raises:
            PeerTimeoutError: a rank waited too long for a peer, or a peer is gone.
            GroupAbortedError: an exception ended a call of some rank midway.
            AgreementError: the ranks made different calls.
            GroupError: this rank has released what was set up.
        """
        if not self.status[0]:
            return
        if self._differed():
            if call:
                self._end_with(_DIFFERED, f"rank {self._rank} calls {call}")
            end_s = time.monotonic() + _PATIENCE_S
            while len(self._differed()) < _BOTH and time.monotonic() < end_s:
                time.sleep(0.001)
            raise AgreementError(
                f"the ranks of the group call differently: {', '.join(self._differed())}. On every rank make the same "
                f"calls in the same order, with the same shapes, dtypes and options. {AFTERWARDS}"
            )
        others = [place for place in range(len(self._words)) if place != self._place]
        for place in (self._place, *others):
            words = self._words[place]
            if words[_KIND]:
                raise (PeerTimeoutError if words[_KIND] == _TIMED_OUT else GroupAbortedError)(self._text_of(place))
        if self._words[self._place][_STATE]:
            raise GroupError("this rank has released the group's communicator; the group's next call makes a new one")
        raise PeerTimeoutError(self.timeout_text(self._missed() or "a rank did not come"))

    def _differed(self) -> list[str]:
        """The calls of ranks that found that a peer makes another one."""
        return [self._text_of(place) for place, words in enumerate(self._words) if words[_KIND] == _DIFFERED]

    def _text_of(self, place: int) -> str:
        return bytes(self._texts[place][: self._words[place][_LENGTH]]).decode(errors="replace")

    def timeout_text(self, missed: str) -> str:
        """The text of an error after a wait for peers that was too long; `missed` says for which ranks."""
        return (
            f"rank {self._rank} waited more than {self.timeout_ns / 1e9:g} s for its peers: {missed} of the group of "
            f"{len(self._names)}. Such a rank died, or did not make the same call. {AFTERWARDS}, or raise "
            "TUNEDCOMM_PEER_TIMEOUT_S if the peer was only slow"
        )

    def _missed(self) -> str:
        """The calls and the ranks that kernels noted as missing."""
        by_caller: dict[int, list[str]] = {}
        for name, noted in zip(self._names, self.status[1:], strict=False):
            if noted:
                by_caller.setdefault(noted - 1, []).append(str(name))
        # Word 0 is written last, but a block may still be noting a rank: then the call is not known yet.
        return "; ".join(
            f"{self._callers[caller][0]} ({_WHERE[self._callers[caller][1]]}) missed rank {', '.join(ranks)}"
            for caller, ranks in sorted(by_caller.items())
        )

    def look(self, starts: dict[int, int | None]) -> None:
        """End the group if a peer has been gone for a while; `starts` keeps what is known of processes."""
        own_words = self._words[self._place]
        if self.status[0] or own_words[_PID] != os.getpid():
            return
        for place, words in enumerate(self._words):
            if place == self._place or not words[_PID] or words[_NAMESPACE] != own_words[_NAMESPACE]:
                continue
            pid, state = words[_PID], words[_STATE]
            if pid not in starts:
                starts[pid] = process_start(pid)
            if not state and starts[pid] == words[_START]:
                continue
            grace_s = _GRACE_OF_RELEASED_S if state == _RELEASED else _GRACE_S
            if time.monotonic() - self._seen_gone.setdefault(place, time.monotonic()) >= grace_s:
                how = "released the group's communicator" if state == _RELEASED else f"has ended (process {pid})"
                self.abort(
                    f"rank {self._names[place]} of the group of {len(self._names)} {how}, so calls of rank "
                    f"{self._rank} cannot complete. {AFTERWARDS}",
                    timed_out=True,
                )
                return


_controls: list[weakref.ref[Control]] = []
_watcher: threading.Thread | None = None


def _watch() -> None:
    while True:
        time.sleep(_WATCH_S)
        starts: dict[int, int | None] = {}
        for reference in tuple(_controls):
            if (control := reference()) is not None:
                control.look(starts)
            del control  # it would live until the next round


def _start_watching() -> None:
    global _watcher  # noqa: PLW0603 - one thread a process; a forked child has none
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch, name="tunedcomm-liveness", daemon=True)
        _watcher.start()
