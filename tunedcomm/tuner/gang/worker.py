"""One rank of a gang: `python -m tunedcomm.tuner.gang.worker SUPERVISOR_PID FD PROTOCOL`; FD is its pipe.

The kernel kills a rank when its supervisor ends: a closed pipe or a time-out would not reach a process that hangs in a
driver call. The supervisor starts the ranks itself: importing PyTorch's elastic launcher takes seconds, and a gang on
one host does not need it.

A gang may start before it is needed: its ranks import their modules, which takes most of a start and touches no device,
and wait for `GO`. Every rank receives the same commands and runs each of them, until it is killed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from multiprocessing.connection import Connection

from tunedcomm.errors import TuningError
from tunedcomm.tuner.gang.protocol import PROTOCOL, Settings
from tunedcomm.tuner.gang.ranks import die_with_parent


def run_rank(line: Connection) -> None:
    """Body of one rank; `protocol` describes the messages."""
    settings: Settings = line.recv()
    # Import everything before the gang may take its device.
    import torch  # noqa: F401 - before the kernels, which ask it whether there are GPUs

    from tunedcomm.tuner.gang.group import assemble
    from tunedcomm.tuner.measure.trial import TrialRunner
    from tunedcomm.tuner.search.spec import load_variants

    load_variants(settings.plugins)
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
    except Exception as error:  # noqa: BLE001 - the supervisor gets every error
        traceback.print_exc()
        channel.send(("failure", (time.monotonic(), f"{type(error).__name__}: {error}"[:500])))
    # Neither sys.exit nor an exception: destructors of groups whose peers are gone or hang may never return, and gloo
    # aborts at the interpreter's end.
    os._exit(1)
