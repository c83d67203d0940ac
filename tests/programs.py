"""Programs that tests start: this Python, with the folders of the tests and other variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def python(
    *arguments: object,
    paths: Sequence[Path] = (),
    cwd: Path | None = None,
    timeout: float = 600.0,
    code: int = 0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run it; `paths` come before those of the tests, and it must end with `code`."""
    search = os.pathsep.join(map(str, (*paths, ROOT, *filter(None, sys.path))))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": search, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stderr[-4000:]
    return done
