"""Compiles coming candidates on CPUs into Triton's cache, so that a gang finds its binaries there.

`python -m tunedcomm.tuner.measure.compile_pool SUPERVISOR_PID FD WORKERS PROTOCOL` is a process that sees no GPU. It
receives requests over the pipe FD and spreads them over worker processes. It writes a line for each one that is done:
empty, or the compiler's error. A gang meets the same error and records it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from tunedcomm.kernels.common.launch import CompileRequest, SharedGrid, compile_request
from tunedcomm.tuner.gang.protocol import PROTOCOL
from tunedcomm.tuner.gang.ranks import die_with_parent, rank_environment, send_kill

_log = logging.getLogger("tunedcomm")
_MAX_WORKERS = 32
# Lower priority than the gangs' threads, whose launches are timed.
_NICENESS = 10
_MOST_SAID = 300
_EXIT_PROTOCOL = 76  # started by another version of tunedcomm


def num_workers(most: int = _MAX_WORKERS) -> int:
    """Half of the CPUs that this process may use, between 1 and `most`."""
    return max(1, min(most, len(os.sched_getaffinity(0)) // 2))


class CompilePool:
    """The supervisor's end of a pool of worker processes, whose imports overlap with the first gang's."""

    def __init__(self, workers: int) -> None:
        changes = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        pool_end, self._line = multiprocessing.Pipe(duplex=False)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        with pool_end:
            arguments = [str(os.getpid()), str(pool_end.fileno()), str(workers), PROTOCOL]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tunedcomm.tuner.measure.compile_pool", *arguments],
                env=rank_environment(changes),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[pool_end.fileno()],
            )
        self._seen: set[CompileRequest | SharedGrid] = set()
        # A starting pool reads nothing and a pipe holds little: this thread waits for the pool, its owner does not.
        self._writer = ThreadPoolExecutor(1, "tunedcomm-compile-pool")

    def submit(self, requests: Iterable[CompileRequest | SharedGrid], compute_capability: int) -> int:
        """Hand over the new ones of these requests, in order; returns their number. Does not wait."""
        fresh = [request for request in dict.fromkeys(requests) if request not in self._seen]
        self._seen.update(fresh)
        self._writer.submit(self._write, fresh, compute_capability)
        return len(fresh)

    def _write(self, requests: Sequence[CompileRequest | SharedGrid], compute_capability: int) -> None:
        try:
            for request in requests if not self._line.closed else ():
                self._line.send((request, compute_capability))
        except OSError as error:
            self._line.close()
            code = self._process.wait()
            if code == _EXIT_PROTOCOL:
                _log.error("tunedcomm was replaced by another version while this command ran: start it again")
            elif code != -signal.SIGKILL:
                _log.warning("the compile pool is gone (%s); gangs compile for themselves", error)

    def outcomes(self) -> list[str]:
        """One line for each request that is done, in any order: empty, or the compiler's error."""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), size, 0).decode(errors="replace").splitlines()

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until every request is compiled, at most this long; no request may follow. True if all are."""
        with suppress(RuntimeError):  # called again
            self._writer.submit(self._line.close)
            self._writer.shutdown(wait=False)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def close(self) -> None:
        """Kill the pool; its binaries stay in the cache."""
        send_kill(self._process)
        self.drain()


def _prepare_worker(master: int) -> None:
    die_with_parent(master)
    os.nice(_NICENESS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what compilers print is no outcome


def _compile(request: CompileRequest | SharedGrid, compute_capability: int) -> str:
    """Compile one request in a worker; returns the compiler's error in one line, or ""."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", compute_capability, 32)
    try:
        if isinstance(request, SharedGrid):
            request.compile(target)
        else:
            compile_request(request, target)
    except Exception as error:  # noqa: BLE001 - the gang meets the same error and records it
        return " ".join(f"{request}: {type(error).__name__}: {error}".split())[:_MOST_SAID]
    return ""


def _report(done: Future[str]) -> None:
    with suppress(Exception):  # the worker is gone
        os.write(1, f"{done.result()}\n".encode())


def _serve(line: Connection, workers: int) -> None:
    """Receive requests until the other end is closed, then wait for the last compilation."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare_worker, (os.getpid(),)) as executor, suppress(EOFError):
        while True:
            executor.submit(_compile, *line.recv()).add_done_callback(_report)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[4] != PROTOCOL:
        sys.exit(_EXIT_PROTOCOL)
    _serve(Connection(int(sys.argv[2])), int(sys.argv[3]))
