"""The queue of a group's asynchronous calls, and how a call's launches are kept for it.

`put_off` makes a call and keeps its launches, which `when_due` would run at once. `Queue` runs them on its thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

from tunedcomm.symm.ring import background

Job: TypeAlias = Callable[[], object]


class _Thread(threading.local):
    """State of one thread: its queue, and where its launches are kept."""

    queue: Queue | None = None
    later: list[Job] | None = None


_thread = _Thread()


def put_off(call: Callable[[], Any]) -> tuple[Any, list[Job]]:
    """The result of `call`, and its launches and what follows them, which are left to do; all else has been done."""
    jobs: list[Job] = []
    _thread.later = jobs
    try:
        return call(), jobs
    finally:
        _thread.later = None


def is_putting_off() -> bool:
    """True while `put_off` makes a call on this thread."""
    return _thread.later is not None


def when_due(job: Job) -> None:
    """Run a call's launch, or what follows it, at once, or keep it for `put_off`."""
    if _thread.later is None:
        job()
    else:
        _thread.later.append(job)


class Queue:
    """The asynchronous calls of a group that wait for peers, on a thread of their own, in the order of the program.

    The interpreter finishes them before it ends. They see the caller's inference mode, context variables and number of
    threads; gradients are not recorded.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    @property
    def is_current(self) -> bool:
        """True on the queue's thread, where callbacks of futures run; the calls before have ended there."""
        return _thread.queue is self

    @property
    def is_busy(self) -> bool:
        """True while a call waits or runs."""
        return self._last is not None and not self._last.done()

    def join(self) -> None:
        """Wait for the calls so far."""
        if self._last is not None and not self.is_current:
            self._last.result()
            self._last = None

    def add(self, job: Job) -> Future[None]:
        """Run `job`, which raises nothing, after the calls before it."""
        inference, num_threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

        def run() -> None:
            _thread.queue = self
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            try:
                with torch.inference_mode(inference), torch.no_grad():
                    job()
            finally:
                background.pop()

        background.append(True)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="tunedcomm")
        try:
            self._last = self._thread.submit(contextvars.copy_context().run, run)
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            run()
            self._last = Future()
            self._last.set_result(None)
        return self._last
