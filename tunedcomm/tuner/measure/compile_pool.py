"""Compiles coming candidates on CPUs into Triton's cache, so that a gang finds its binaries there.

`python -m tunedcomm.tuner.measure.compile_pool SUPERVISOR_PID FD WORKERS PROTOCOL` is a process that sees no GPU. It
receives requests over the pipe FD and spreads them over worker processes. It ignores errors of the compiler: the gang
meets the same error and records it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from tunedcomm.kernels.common.launch import CompileRequest, compile_request
from tunedcomm.tuner.gang.protocol import PROTOCOL
from tunedcomm.tuner.gang.ranks import die_with_parent, send_kill

_log = logging.getLogger("tunedcomm")
_MAX_WORKERS = 32
# Lower priority than the gangs' threads, whose launches are timed.
_NICENESS = 10
_EXIT_PROTOCOL = 76  # started by another version of tunedcomm


def num_workers() -> int:
    """Half of the CPUs that this process may use, between 1 and 32."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))


class CompilePool:
    """The supervisor's end of a pool of worker processes, whose imports overlap with the first gang's."""

    def __init__(self, workers: int) -> None:
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        pool_end, self._line = multiprocessing.Pipe(duplex=False)
        with pool_end:
            arguments = [str(os.getpid()), str(pool_end.fileno()), str(workers), PROTOCOL]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tunedcomm.tuner.measure.compile_pool", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[pool_end.fileno()],
            )
        self._seen: set[CompileRequest] = set()
        # A starting pool reads nothing and a pipe holds little: this thread waits for the pool, its owner does not.
        self._writer = ThreadPoolExecutor(1, "tunedcomm-compile-pool")

    def submit(self, requests: Iterable[CompileRequest], compute_capability: int) -> int:
        """Hand over the new ones of these requests, in order; returns their number. Does not wait."""
        fresh = [request for request in dict.fromkeys(requests) if request not in self._seen]
        self._seen.update(fresh)
        self._writer.submit(self._write, fresh, compute_capability)
        return len(fresh)

    def _write(self, requests: Sequence[CompileRequest], compute_capability: int) -> None:
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

    def drain(self) -> None:
        """Wait until every request is compiled; no request may follow."""
        self._writer.shutdown()
        self._line.close()
        self._process.wait()

    def close(self) -> None:
        """Kill the pool; its binaries stay in the cache."""
        send_kill(self._process)
        self.drain()


def _prepare_worker(master: int) -> None:
    die_with_parent(master)
    os.nice(_NICENESS)


def _compile(request: CompileRequest, compute_capability: int) -> None:
    """Compile one request in a worker."""
    from triton.backends.compiler import GPUTarget

    # The gang meets the same error and records it.
    with suppress(Exception):
        compile_request(request, GPUTarget("cuda", compute_capability, 32))


def _serve(line: Connection, workers: int) -> None:
    """Receive requests until the other end is closed, then wait for the last compilation."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare_worker, (os.getpid(),)) as executor, suppress(EOFError):
        while True:
            executor.submit(_compile, *line.recv())


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[4] != PROTOCOL:
        sys.exit(_EXIT_PROTOCOL)
    _serve(Connection(int(sys.argv[2])), int(sys.argv[3]))
