"""One rank of a gang: `python -m tunedcomm.tuner.gang.worker SUPERVISOR_PID FD PROTOCOL`; FD is its pipe.

The kernel ties the life of every rank to the supervisor's: closed pipes or time-outs would not reach a process that
hangs in a driver call. The supervisor starts the ranks itself: importing PyTorch's elastic launcher takes seconds at
every start of a gang, and a gang on one host needs none of it.

A gang may be started before it is wanted: its ranks then import all they need and wait to be told to go. That is most
of what a start takes, and touches no device.

Every rank hears the same commands and runs each, until it is killed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection

from tunedcomm.errors import TuningError
from tunedcomm.tuner.gang.process import die_with_parent
from tunedcomm.tuner.gang.protocol import PROTOCOL, Settings


def run_rank(line: Connection) -> None:
    """Body of one rank, whose messages `protocol` describes."""
    settings: Settings = line.recv()
    # All that can be done before the device is the gang's own.
    import torch  # noqa: F401 - before the kernels, which ask it whether there are GPUs

    from tunedcomm import kernels
    from tunedcomm.tuner.gang.group import assemble
    from tunedcomm.tuner.measure.trial import TrialRunner

    kernels.discover()
    for plugin in settings.plugins:
        importlib.import_module(plugin)

    line.recv()
    gang = assemble(settings, line)
    gang.report("ready", (gang.communicator.environment, gang.communicator.limits))
    runner = TrialRunner(gang, settings)
    while True:
        gang.report("result", runner.run(line.recv()))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    channel = Connection(int(sys.argv[2]))
    try:
        if sys.argv[3] != PROTOCOL:
            raise TuningError(
                f"this process is of tunedcomm {PROTOCOL} and the one that started it of {sys.argv[3]}: tunedcomm was "
                "replaced while it ran. Start the command again"
            )
        run_rank(channel)
    except Exception as error:  # noqa: BLE001 - whatever it is, the supervisor hears of it
        traceback.print_exc()
        channel.send(("failure", (time.monotonic(), f"{type(error).__name__}: {error}"[:500])))
    # Not sys.exit, nor an exception let through: groups whose peers are gone, or hung on the device, may never return
    # from their destructors, and gloo's abort at the interpreter's end.
    os._exit(1)
