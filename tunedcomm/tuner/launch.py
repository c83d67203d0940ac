"""Start one gang: `python -m tunedcomm.tuner.launch SUPERVISOR_PID SETTINGS`, the path of a gang's settings.

A thin layer over PyTorch's elastic launcher that ties every process's life to the one above it: the launcher dies with
the supervisor, the ranks with the launcher, by order of the kernel. Closed pipes or time-outs would not reach a process
that hangs in a driver call.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.processes import die_with_parent

__all__ = ["main"]


def main(supervisor: int, settings: str) -> None:
    """Run the launcher in this process until the gang has ended."""
    die_with_parent(supervisor)
    from torch.distributed.run import main as run

    with tempfile.TemporaryDirectory(prefix="tunedcomm-launch-") as logs:
        run(
            [
                "--standalone",
                "--local-addr=127.0.0.1",
                f"--nproc-per-node={Settings.load(Path(settings)).world_size}",
                "--max-restarts=0",
                f"--log-dir={logs}",
                "--module",
                "tunedcomm.tuner.worker",
                settings,
                str(os.getpid()),
            ]
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
