"""Start one gang: `python -m tunedcomm.tuner.launch SUPERVISOR_PID SETTINGS`, the path of a gang's settings.

Ties every process's life to the one above it, by order of the kernel: the launcher dies with the supervisor, the ranks
with the launcher. Closed pipes or time-outs would not reach a process that hangs in a driver call.

Not PyTorch's elastic launcher: importing that takes seconds at every start of a gang, before the ranks import the same
again, and of what it does a gang on one host needs nothing but this. The ranks meet at a store whose socket is opened
here and inherited by rank 0, so that its port cannot be taken by anybody else meanwhile.

A gang may be started before it is wanted: its ranks then import all they need and wait until `GO_FD` is closed on the
supervisor's side. That is most of what a start takes, and touches no device.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tunedcomm.tuner.death import write_exits
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.processes import die_with_parent

__all__ = ["GO_FD", "STORE_FD", "STORE_PORT", "main"]

STORE_FD, STORE_PORT, GO_FD = "GANG_STORE_FD", "GANG_STORE_PORT", "GANG_GO_FD"
_POLL_S = 0.05
# Ranks that die within so long of the first one are asked for their exit code: it may be the first that was the echo.
_GRACE_S = 0.5


def _spawn(settings: str, rank: int, world_size: int, store: socket.socket) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), STORE_PORT: str(store.getsockname()[1])}
    environment.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    inherited = [int(os.environ[GO_FD])]
    if rank == 0:
        inherited.append(store.fileno())
        environment[STORE_FD] = str(store.fileno())
    command = [sys.executable, "-m", "tunedcomm.tuner.gang.worker", settings, str(os.getpid())]
    return subprocess.Popen(command, env=environment, pass_fds=inherited)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> list[tuple[int, int]]:
    """Until all ranks have ended, or one has failed; ranks with their exit codes, first dead first."""
    exits: list[tuple[int, int]] = []
    failed_at: float | None = None
    while len(exits) < len(ranks):
        seen = {rank for rank, _ in exits}
        for rank, process in enumerate(ranks):
            if rank not in seen and (code := process.poll()) is not None:
                exits.append((rank, code))
                if code and failed_at is None:
                    failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            break
        time.sleep(_POLL_S)
    return exits


def main(supervisor: int, settings: str) -> int:
    """Run the gang until it has ended; the exit code of the first rank that failed, 0 if none did."""
    die_with_parent(supervisor)
    world_size = Settings.load(Path(settings)).world_size
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as store:
        store.bind(("127.0.0.1", 0))
        store.listen(128)
        ranks = [_spawn(settings, rank, world_size, store) for rank in range(world_size)]
    exits = _wait(ranks)
    write_exits(Path(settings).parent, exits)
    for process in ranks:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    return next((abs(code) for _, code in exits if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
