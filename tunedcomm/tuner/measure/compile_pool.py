"""Compiles coming candidates on CPUs into Triton's cache, so that a gang finds its binaries there.

`python -m tunedcomm.tuner.measure.compile_pool SUPERVISOR_PID WORKERS PROTOCOL` is a process that sees no GPU. It reads
requests as JSON lines from its standard input and spreads them over worker processes. It ignores what fails to compile:
that fails again in the gang, which records it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from types import TracebackType
from typing import IO

from tunedcomm.kernels.common.launch import CompileRequest, compile_request
from tunedcomm.tuner.gang.process import die_with_parent, kill_processes
from tunedcomm.tuner.gang.protocol import PROTOCOL

_log = logging.getLogger("tunedcomm")
_MAX_WORKERS = 32
# Below the gang's own threads, whose launches are being timed.
_NICENESS = 10
_EXIT_PROTOCOL = 76  # started by another version of tunedcomm


def num_workers() -> int:
    """Half of the CPUs that this process may use, between 1 and 32."""
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))


class CompilePool:
    """The supervisor's end of the pool; starts at once, so that its imports overlap with the gang's.

    Args:
        workers: number of worker processes.
    """

    def __init__(self, workers: int) -> None:
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunedcomm.tuner.measure.compile_pool", str(os.getpid()), str(workers), PROTOCOL],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._seen: set[CompileRequest] = set()
        # The pool reads nothing while it starts, and a pipe holds little: its writer waits, its owner must not.
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="tunedcomm-compile-pool", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            while line := self._lines.get():
                stream.write(line)
                if self._lines.empty():
                    stream.flush()
        except (OSError, ValueError) as error:
            if self._process.poll() == _EXIT_PROTOCOL:
                _log.error("tunedcomm was replaced by another version while this command ran: start it again")
            elif self._process.poll() not in (None, 0, -signal.SIGKILL):
                _log.warning("the compile pool is gone (%s); gangs compile for themselves", error)

    def submit(self, requests: Iterable[CompileRequest], compute_capability: int) -> int:
        """Hand over those requests that are new, in order; returns how many those were. Does not wait."""
        fresh = [request for request in dict.fromkeys(requests) if request not in self._seen]
        self._seen.update(fresh)
        for request in fresh:
            self._lines.put(encode(request, compute_capability))
        return len(fresh)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over is compiled; the pool takes nothing more.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout_s`.
        """
        self._end_input()
        self._process.wait(timeout_s)

    def close(self) -> None:
        """End the pool at once; what it has compiled stays in the cache."""
        kill_processes([self._process.pid], 5.0)
        self._end_input()
        self._process.wait()

    def _end_input(self) -> None:
        self._lines.put(b"")
        self._writer.join()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _prepare_worker(master: int) -> None:
    die_with_parent(master)
    os.nice(_NICENESS)


def encode(request: CompileRequest, compute_capability: int) -> bytes:
    """One line of the pool's input."""
    return json.dumps([asdict(request), compute_capability]).encode() + b"\n"


def decode(line: bytes) -> tuple[CompileRequest, int]:
    """Inverse of `encode`."""
    data, compute_capability = json.loads(line)
    constants = tuple((name, value) for name, value in data["constants"])
    return CompileRequest(**{**data, "constants": constants}), compute_capability


def _compile(request: CompileRequest, compute_capability: int) -> None:
    """Compile one request in a worker."""
    from triton.backends.compiler import GPUTarget

    # The gang meets the same error and records it.
    with contextlib.suppress(Exception):
        compile_request(request, GPUTarget("cuda", compute_capability, 32))


def _serve(stream: IO[bytes], workers: int) -> None:
    """Read requests until the stream ends, then wait for the last of them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare_worker, (os.getpid(),)) as executor:
        for line in stream:
            executor.submit(_compile, *decode(line))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[3:] != [PROTOCOL]:
        sys.exit(_EXIT_PROTOCOL)
    _serve(sys.stdin.buffer, int(sys.argv[2]))
