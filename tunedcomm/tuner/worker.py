"""One rank of a gang: `python -m tunedcomm.tuner.worker JOB LAUNCHER_PID`, started by the elastic launcher.

Rank 0 walks the schedule and broadcasts each command; every rank runs it. The process ends with code 0 when the
schedule is over and with `EXIT_UNUSABLE` when a candidate left the ranks out of step.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunedcomm.tuner.job import EXIT_UNUSABLE, Job
from tunedcomm.tuner.processes import die_with_parent

__all__ = ["main"]


def _load_kernels(job: Job) -> None:
    from tunedcomm import kernels

    kernels.discover()
    for plugin in job.settings.plugins:
        importlib.import_module(plugin)


def _make_schedule(job: Job, gang: Any) -> Any:
    from tunedcomm import kernels
    from tunedcomm.spec import get_variant
    from tunedcomm.tuner.knowledge import Knowledge
    from tunedcomm.tuner.schedule import Schedule

    def source_hash(op: str, variant: str) -> str:
        return kernels.source_hash(get_variant(op, variant))

    communicator = gang.communicator
    knowledge = Knowledge(job, communicator.environment, communicator.limits, source_hash)
    return Schedule(
        job,
        knowledge,
        communicator.limits,
        source_hash=source_hash,
        environment=communicator.environment.digest,
        report=gang.report,
    )


def _work(job: Job, gang: Any) -> str:
    """Run commands until the end; returns why it ended, the same on every rank."""
    from tunedcomm.tuner.schedule import Command
    from tunedcomm.tuner.trial import TrialRunner

    runner = TrialRunner(gang, job.settings)
    commands = _make_schedule(job, gang).commands() if gang.rank == 0 else None
    command: Command = gang.broadcast(next(commands) if commands is not None else None)
    while command.kind == "trial":
        outcome = runner.run(command)
        # The schedule reports the outcome before it yields again, so that it is stored even if the gang now ends.
        following = commands.send(outcome) if commands is not None else None
        if outcome.status in ("hung", "crashed"):
            return "unusable"
        command = gang.broadcast(following)
    return command.reason


def main(path: str, launcher: int) -> int:
    """Body of one rank, a child of the process `launcher`."""
    die_with_parent(launcher)
    faulthandler.enable()
    folder = Path(path).parent
    job = Job.load(Path(path))
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()), encoding="ascii")
    _load_kernels(job)
    from tunedcomm.tuner.gang import assemble

    gang = assemble(job.settings, folder)
    communicator = gang.communicator
    gang.report("ready", {"environment": communicator.environment.to_dict(), "limits": asdict(communicator.limits)})
    reason = _work(job, gang)
    gang.report("end", {"reason": reason})
    return EXIT_UNUSABLE if reason == "unusable" else 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1], int(sys.argv[2]))
    except Exception:  # noqa: BLE001 - printed as it would be if it were let through
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, nor an exception let through: groups whose peers are gone, or hung on the device, may never return
    # from their destructors, and gloo's abort at the interpreter's end.
    os._exit(code)
