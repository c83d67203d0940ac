"""Run a function on several real processes that share a gloo group on this host.

    from harness import run_ranks

    def body(rank: int, world_size: int, numel: int) -> float:
        ...                                   # torch.distributed is initialised here, backend gloo
        return total

    def test_sum() -> None:
        assert run_ranks(3, body, 1024) == [3.0, 3.0, 3.0]

The function may also be named, as `"module:function"`. Arguments and results are pickled. Every rank is a process in
its own session, forked from one that has only imported what all need, or a fresh interpreter where that will not do;
whatever happens, none is left behind when `run_ranks` returns.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from nursery import Request, nursery

# Ranks that wait for one that died should learn of it from us, not sit in their own time-out; a short grace lets the
# others finish, so that an error on every rank is reported from every rank.
_GRACE_S = 3.0


class RankError(AssertionError):
    """One or more ranks raised, died or ran past the time limit."""


def run_ranks(
    world_size: int,
    function_path: str | Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: dict[str, str] | None = None,
    killed: Collection[int] = (),
    fresh: bool = False,
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on `world_size` processes and return their results in rank order.

    Args:
        world_size: number of processes.
        function_path: a top-level function of an importable module, or its `"module:function"`.
        args: passed on, pickled.
        timeout: seconds after which every rank is killed.
        env: additions to the environment; kernels are interpreted (`TRITON_INTERPRET=1`) unless it says otherwise.
        killed: ranks that the function is to kill by SIGKILL; their result is None.
        fresh: start new interpreters, for what depends on how modules are imported.

    Raises:
        RankError: with the traceback, exit code or stderr of every rank that failed.
    """
    if callable(function_path):
        function_path = f"{function_path.__module__}:{function_path.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        payload = Path(folder, "payload")
        payload.write_bytes(pickle.dumps((function_path, args, timeout)))
        spawn = _spawn if fresh or "TRITON_INTERPRET" in (env or {}) or _has_gpu() else _fork
        processes = [spawn(Path(folder), rank, world_size, env or {}) for rank in range(world_size)]
        try:
            timed_out = _wait([p for rank, p in enumerate(processes) if rank not in killed], timeout)
            if timed_out:
                _ask_where(processes)
        finally:
            _kill(processes)
        for rank in killed:
            if processes[rank].returncode == -signal.SIGKILL and not timed_out:
                (Path(folder) / f"result{rank}").write_bytes(pickle.dumps((True, None)))
        return _collect(Path(folder), processes, function_path, timed_out=timed_out, timeout=timeout)


@functools.cache
def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def _environment(rank: int, world_size: int, env: dict[str, str]) -> dict[str, str]:
    full = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # A quarter of what users get: the pages of four ranks' memory take a second to make.
    full = {"TUNEDCOMM_WORKSPACE_MIB": "16", **full, **env}
    # Before the payload is unpickled: its arguments may be of classes that live in a test module.
    full["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    full.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    return full


def _spawn(folder: Path, rank: int, world_size: int, env: dict[str, str]) -> Any:
    full = _environment(rank, world_size, env)
    with (folder / f"stderr{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder)], env=full, stdout=log, stderr=log, start_new_session=True
        )


def _fork(folder: Path, rank: int, world_size: int, env: dict[str, str]) -> Any:
    paths = (str(Path(__file__).parent), *(path for path in sys.path if path))
    full = _environment(rank, world_size, env)
    return nursery().fork(Request(str(folder), str(folder / f"stderr{rank}"), full, paths))


def _wait(processes: Sequence[Any], timeout: float) -> bool:
    """Until all have ended, one has failed and the grace is over, or the time is up; True in the last case."""
    deadline = time.monotonic() + timeout
    shortened = False
    while any(p.poll() is None for p in processes):
        if not shortened and any(p.returncode not in (None, 0) for p in processes):
            shortened, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return not shortened
        time.sleep(0.02)
    return False


def _ask_where(processes: Sequence[Any]) -> None:
    """Have the processes write the stacks of their threads."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _collect(folder: Path, processes: Sequence[Any], name: str, *, timed_out: bool, timeout: float) -> list[Any]:
    results, failures = [], []
    for rank, process in enumerate(processes):
        outcome = folder / f"result{rank}"
        if outcome.exists():
            succeeded, value = pickle.loads(outcome.read_bytes())
            if succeeded:
                results.append(value)
                continue
            failures.append(f"rank {rank} raised:\n{value}")
            continue
        why = f"was killed after {timeout:g} s" if timed_out else f"ended with code {process.returncode}"
        log = (folder / f"stderr{rank}").read_text(errors="replace")[-6000:]
        failures.append(f"rank {rank} {why} without a result; its last output:\n{log}")
    if failures:
        raise RankError(f"{name} failed on {len(failures)} of {len(processes)} ranks\n" + "\n".join(failures))
    return results


def _linger(folder: Path, world_size: int) -> None:
    """Stay until every rank has its result: a peer may not have read the last bytes that gloo sent it."""
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and not all((folder / f"result{r}").exists() for r in range(world_size)):
        time.sleep(0.01)


def main(folder: Path) -> int:
    """Body of one rank's process."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name, args, timeout = pickle.loads((folder / "payload").read_bytes())
    outcome: tuple[bool, Any]
    try:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        module, _, function = name.partition(":")
        outcome = True, getattr(importlib.import_module(module), function)(rank, world_size, *args)
    except BaseException:  # noqa: BLE001 - the parent reports it: pytest's own outcomes derive from BaseException
        outcome = False, traceback.format_exc()
    partial = folder / f"result{rank}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(folder / f"result{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome[0]:
        _linger(folder, world_size)
    # Not sys.exit: a group whose peers died may hang in its destructor.
    os._exit(0 if outcome[0] else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
