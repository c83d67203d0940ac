"""The ranks of one group as processes of this host: how they start, how they join, how they end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, NoReturn

from tunedcomm.hardware import gpu_of, num_gpu_ranks

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent process ends; at once if the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def send_kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process that leads a process group, with its group, unless it has ended; does not wait."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


_POLL_S = 0.05
# Variable with the descriptor of the socket, listening at MASTER_PORT, on which rank 0 serves the ranks' store.
_STORE_FD = "GANG_STORE_FD"
# Set by the launcher of this process; the ranks are a job of their own.
_LAUNCHER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|GROUP_WORLD_SIZE|"
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING)"
)


def rank_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Environment of ranks: this process's environment without its launcher's variables, with these changes."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}
    # Ranks of one host must not meet under a name that resolves to an address that nobody answers.
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The modules that this process can import, plugins among them.
    return {**defaults, **kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **changes}


def start_ranks(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    *,
    pipes: Sequence[int] = (),
    output: IO[Any] | None = None,
) -> list[subprocess.Popen[bytes]]:
    """Start a Python process for each rank of one group, each the leader of a process group; see `join_group`.

    The ranks meet at a store whose listening socket they inherit, so that no other process can take its port.

    Args:
        commands: arguments of Python, by rank.
        environment: see `rank_environment`.
        pipes: a descriptor for each rank to inherit.
        output: takes the ranks' output and errors; by default they go to this process's standard error.
    """
    with socket.create_server(("127.0.0.1", 0)) as store:
        return [
            subprocess.Popen(
                [sys.executable, *command],
                env={**environment, **_place_of(rank, len(commands), store)},
                stdin=subprocess.DEVNULL,
                stdout=output or sys.stderr,
                stderr=output,
                start_new_session=True,
                pass_fds=(store.fileno(), *pipes[rank : rank + 1]),
            )
            for rank, command in enumerate(commands)
        ]


def _place_of(rank: int, world_size: int, store: socket.socket) -> dict[str, str]:
    """Variables that tell a rank its place in the group, and where the ranks meet."""
    size, place = str(world_size), str(rank)
    ranks = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": place, "LOCAL_RANK": place}
    host, port = store.getsockname()
    return {**ranks, "MASTER_ADDR": host, "MASTER_PORT": str(port), _STORE_FD: str(store.fileno())}


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    world_size: int,
    environment: Mapping[str, str],
    on_wait: Callable[[], None] = lambda: None,
) -> int:
    """Run `python -m module arguments` on `world_size` ranks; their output goes to standard error.

    `on_wait` is called again and again while they run. Returns 0 if every rank ended with 0, else the exit code of the
    first rank that failed; the others are then killed.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if num_gpu_ranks() < 2 else {}
    ranks = start_ranks([["-m", module, *arguments]] * world_size, rank_environment({**environment, **hidden}))
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            on_wait()
            time.sleep(_POLL_S)
        return next(filter(None, codes), 0)
    finally:
        for rank in ranks:  # all of them at once: a rank that outlives a peer reports its loss
            send_kill(rank)
        for rank in ranks:
            rank.wait()


def run_forked(body: Callable[[], int], *, world_size: int, environment: Mapping[str, str]) -> int:
    """Run `body` on forked CPU ranks, which need not import anything; else like `run_module`.

    This process may have no GPU context, process group or thread that the ranks need.
    """
    import torch

    parent = os.getpid()

    def run_rank(rank: int) -> NoReturn:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills the ranks
        os.dup2(2, 1)
        variables = {**rank_environment(environment), **_place_of(rank, world_size, store)}
        os.environ.clear()
        os.environ.update(variables)
        torch.set_num_threads(1)
        sys.exit(body())

    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as store:
        ranks = [fork.Process(target=run_rank, args=(rank,)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
    try:
        while None in (codes := [rank.exitcode for rank in ranks]) and not any(codes):
            time.sleep(_POLL_S)
        return next(filter(None, codes), 0)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()


def join_group(timeout: timedelta | None = None) -> torch.device:
    """Join the default group of the ranks that `start_ranks` or a launcher has started; returns the rank's device."""
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if (descriptor := os.environ.get(_STORE_FD)) is not None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0,
            master_listen_fd=int(descriptor) if rank == 0 else None,
            **options,
        )
        options |= {"store": store, "rank": rank, "world_size": world_size}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    device = gpu_of(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **options)
    return device
