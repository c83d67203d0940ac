"""A gang's processes: one launcher, and one process for each rank.

    python -m tunedcomm.tuner.gang.worker gang SUPERVISOR_PID SETTINGS     the launcher; SETTINGS is a file
    python -m tunedcomm.tuner.gang.worker rank LAUNCHER_PID SETTINGS       one rank

The kernel ties every process's life to the one above it: the launcher dies with the supervisor, the ranks with the
launcher. Closed pipes or time-outs would not reach a process that hangs in a driver call.

The launcher is not PyTorch's elastic one: importing that takes seconds at every start of a gang, before the ranks
import the same again, and a gang on one host needs none of the rest. The ranks meet at a store whose socket the
launcher opens and rank 0 inherits, so that no other process can take its port meanwhile.

A gang may be started before it is wanted: its ranks then import all they need and wait until the supervisor closes its
end of `GO_FD`. That is most of what a start takes, and touches no device.

Rank 0 hears the supervisor's commands and broadcasts each; every rank runs it. A rank ends with code 0 when it is told
to end, and with `EXIT_UNUSABLE` when a candidate left the ranks out of step.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tunedcomm.tuner.gang.process import die_with_parent, write_exits
from tunedcomm.tuner.gang.protocol import EXIT_UNUSABLE, GO_FD, LINE_FD, LOST, STORE_FD, STORE_PORT, Settings

if TYPE_CHECKING:
    from tunedcomm.tuner.gang.group import Gang

_POLL_S = 0.05
# Ranks that die within so long of the first one are asked for their exit code: it may be the first that was the echo.
_GRACE_S = 0.5


# The launcher


def launch(settings: Path) -> int:
    """Run the gang until it has ended; the exit code of the first rank that failed, 0 if none did."""
    world_size = Settings.load(settings).world_size
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as store:
        store.bind(("127.0.0.1", 0))
        store.listen(128)
        ranks = [_spawn(settings, rank, world_size, store) for rank in range(world_size)]
    os.close(int(os.environ[LINE_FD]))  # rank 0 alone has it: the supervisor sees when that is gone
    exits = _wait(ranks)
    write_exits(settings.parent, exits)
    for process in ranks:
        process.kill()
    return next((abs(code) for _, code in exits if code), 0)


def _spawn(settings: Path, rank: int, world_size: int, store: socket.socket) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), STORE_PORT: str(store.getsockname()[1])}
    environment.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    inherited = [int(os.environ[GO_FD])]
    if rank == 0:
        inherited += [store.fileno(), int(os.environ[LINE_FD])]
        environment[STORE_FD] = str(store.fileno())
    command = [sys.executable, "-m", "tunedcomm.tuner.gang.worker", "rank", str(os.getpid()), str(settings)]
    return subprocess.Popen(command, env=environment, pass_fds=inherited)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> list[tuple[int, int]]:
    """Wait until all ranks have ended, or one has failed; ranks with their exit codes, first dead first."""
    exits: dict[int, int] = {}
    failed_at: float | None = None
    while len(exits) < len(ranks):
        for rank, process in enumerate(ranks):
            if rank not in exits and (code := process.poll()) is not None:
                exits[rank] = code
                if code and failed_at is None:
                    failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            break
        time.sleep(_POLL_S)
    return list(exits.items())


# A rank


def run_rank(path: Path) -> int:
    """Body of one rank."""
    faulthandler.enable()
    settings = Settings.load(path)
    (path.parent / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()), encoding="ascii")
    _load_kernels(settings)
    # Whatever can be done before the device is the gang's own.
    import tunedcomm.tuner.measure.trial  # noqa: F401
    from tunedcomm.tuner.gang.group import assemble

    _wait_until_wanted()
    gang = assemble(settings, path.parent)
    communicator = gang.communicator
    gang.report("ready", (communicator.environment, communicator.limits))
    reason = _work(settings, gang)
    gang.report("end", reason)
    return EXIT_UNUSABLE if reason == "unusable" else 0


def _load_kernels(settings: Settings) -> None:
    import torch  # noqa: F401 - before the kernels, which ask it whether there are GPUs

    from tunedcomm import kernels

    kernels.discover()
    for plugin in settings.plugins:
        importlib.import_module(plugin)


def _wait_until_wanted() -> None:
    """Return once the supervisor has closed its end, or is gone (which ends this process by other means)."""
    descriptor = int(os.environ[GO_FD])
    while os.read(descriptor, 1):
        pass
    os.close(descriptor)


def _work(settings: Settings, gang: Gang) -> str:
    """Run commands until the end; returns why it ended, the same on every rank."""
    from tunedcomm.tuner.measure.trial import TrialRunner

    runner = TrialRunner(gang, settings)
    while True:
        command = gang.broadcast(gang.receive())
        assert command is not None
        if command.kind == "end":
            return command.reason
        if command.kind == "wait":
            continue
        result = runner.run(command)
        gang.report("result", result)
        if result.status in LOST:
            return "unusable"


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    try:
        code = {"gang": launch, "rank": run_rank}[sys.argv[1]](Path(sys.argv[3]))
    except Exception:  # noqa: BLE001 - printed as it would be if it were let through
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, nor an exception let through: groups whose peers are gone, or hung on the device, may never return
    # from their destructors, and gloo's abort at the interpreter's end.
    os._exit(code)
