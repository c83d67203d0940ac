"""One rank of a gang: `python -m tunedcomm.tuner.gang.worker SETTINGS LAUNCHER_PID`, started by `tuner.launch`.

Rank 0 hears the supervisor's commands and broadcasts each; every rank runs it. The process ends with code 0 when it is
told to end, and with `EXIT_UNUSABLE` when a candidate left the ranks out of step.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tunedcomm.tuner.commands import LOST
from tunedcomm.tuner.job import EXIT_UNUSABLE, Settings
from tunedcomm.tuner.launch import GO_FD
from tunedcomm.tuner.processes import die_with_parent

if TYPE_CHECKING:
    from tunedcomm.tuner.gang.group import Gang

__all__ = ["main"]


def _load_kernels(settings: Settings) -> None:
    import torch  # noqa: F401 - before the kernels, which ask it whether there are GPUs

    from tunedcomm import kernels

    kernels.discover()
    for plugin in settings.plugins:
        importlib.import_module(plugin)


def _wait_until_wanted() -> None:
    """Returns once the supervisor has closed its end, or is gone (which ends this process by other means)."""
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
        outcome = runner.run(command)
        gang.report("result", {"outcome": outcome.to_dict()})
        if outcome.status in LOST:
            return "unusable"


def main(path: Path, launcher: int) -> int:
    """Body of one rank, a child of the process `launcher`."""
    die_with_parent(launcher)
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
    gang.report("ready", {"environment": communicator.environment.to_dict(), "limits": asdict(communicator.limits)})
    reason = _work(settings, gang)
    gang.report("end", {"reason": reason})
    return EXIT_UNUSABLE if reason == "unusable" else 0


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]), int(sys.argv[2]))
    except Exception:  # noqa: BLE001 - printed as it would be if it were let through
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, nor an exception let through: groups whose peers are gone, or hung on the device, may never return
    # from their destructors, and gloo's abort at the interpreter's end.
    os._exit(code)
