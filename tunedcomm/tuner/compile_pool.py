"""Compiles coming candidates on CPUs into Triton's cache, so that a gang finds its binaries there.

The pool is a process of its own (`python -m tunedcomm.tuner.compile_pool SUPERVISOR_PID`) that sees no GPU, reads
pickled `(request, compute capability)` pairs from its standard input and spreads them over worker processes. What fails
to compile here fails again in the gang, which records it; so failures are only counted.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import IO, Any

from tunedcomm.tuner.processes import die_with_parent, kill_processes

__all__ = ["CompilePool", "num_workers"]

_log = logging.getLogger("tunedcomm")
_MAX_WORKERS = 32
# Below the gang's own threads, whose launches are being timed.
_NICENESS = 10


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
            [sys.executable, "-m", "tunedcomm.tuner.compile_pool", str(os.getpid()), str(workers)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._seen: set[Any] = set()

    def submit(self, requests: Iterable[Any], compute_capability: int) -> int:
        """Hand over those requests that are new, in order; returns how many those were."""
        stream = self._process.stdin
        assert stream is not None
        fresh = [request for request in dict.fromkeys(requests) if request not in self._seen]
        self._seen.update(fresh)
        try:
            for request in fresh:
                pickle.dump((request, compute_capability), stream)
            stream.flush()
        except OSError as error:
            _log.warning("the compile pool is gone (%s); the gang compiles for itself", error)
        return len(fresh)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything handed over is compiled; the pool takes nothing more.

        Raises:
            subprocess.TimeoutExpired: it took longer than `timeout_s`.
        """
        self._close_stdin()
        self._process.wait(timeout_s)

    def close(self) -> None:
        """End the pool at once; what it has compiled stays in the cache."""
        kill_processes([self._process.pid], 5.0)
        self._close_stdin()
        self._process.wait()

    def _close_stdin(self) -> None:
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


def _compile(request: Any, compute_capability: int) -> bool:
    """Compile one request in a worker; True if it worked."""
    from triton.backends.compiler import GPUTarget

    from tunedcomm.kernels._launch import compile_request

    try:
        compile_request(request, GPUTarget("cuda", compute_capability, 32))
    except Exception:  # noqa: BLE001 - the gang meets the same error and records it
        return False
    return True


def _serve(stream: IO[bytes], workers: int) -> None:
    """Read requests until the stream ends, then wait for the last of them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare_worker, (os.getpid(),)) as executor:
        while True:
            try:
                request, compute_capability = pickle.load(stream)  # noqa: S301 - from our own parent process
            except EOFError:
                return
            executor.submit(_compile, request, compute_capability)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    _serve(sys.stdin.buffer, int(sys.argv[2]))
