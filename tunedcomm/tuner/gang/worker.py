"""One rank of a gang: `python -m tunedcomm.tuner.gang.worker SUPERVISOR_PID SETTINGS`; SETTINGS is a file.

The kernel ties the life of every rank to the supervisor's: closed pipes or time-outs would not reach a process that
hangs in a driver call. The supervisor starts the ranks itself: importing PyTorch's elastic launcher takes seconds at
every start of a gang, and a gang on one host needs none of it.

A gang may be started before it is wanted: its ranks then import all they need and wait until the supervisor closes its
end of `GO_FD`. That is most of what a start takes, and touches no device.

Rank 0 hears the supervisor's commands and broadcasts each; every rank runs it. A rank ends with code 0 when it is told
to end, and with `EXIT_UNUSABLE` when a candidate left the ranks out of step.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tunedcomm.tuner.gang.process import die_with_parent
from tunedcomm.tuner.gang.protocol import EXIT_UNUSABLE, GO_FD, LOST, Settings

if TYPE_CHECKING:
    from tunedcomm.tuner.gang.group import Gang


def run_rank(path: Path) -> int:
    """Body of one rank."""
    faulthandler.enable()
    settings = Settings.load(path)
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
    die_with_parent(int(sys.argv[1]))
    try:
        code = run_rank(Path(sys.argv[2]))
    except Exception:  # noqa: BLE001 - printed as it would be if it were let through
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, nor an exception let through: groups whose peers are gone, or hung on the device, may never return
    # from their destructors, and gloo's abort at the interpreter's end.
    os._exit(code)
