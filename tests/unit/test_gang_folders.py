"""What gangs of a killed supervisor left is cleared away by the next one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tunedcomm.tuner.gang.process import _FOLDER, remove_stale_folders


def test_only_folders_of_dead_supervisors_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    elsewhere = f"tunedcomm-gang-00000000-{dead.pid}-a"  # of a host that shares the directory
    names = [f"{_FOLDER}{dead.pid}-a", f"{_FOLDER}{os.getpid()}-b", f"{_FOLDER}x", elsewhere, "another"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "output.txt").write_text("text")
    remove_stale_folders()
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
