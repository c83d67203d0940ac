"""Kernels are interpreted where there is no GPU, also for programs that begin with an integration."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from quick import some

TELL = "from tunedcomm.kernels.common import sync; print(bool(sync.INTERPRET), os.environ.get('TRITON_INTERPRET'))"


def told(*lines: str, **changes: str) -> tuple[str, str]:
    """What a process without GPUs says at its end, and on stderr."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env.update(CUDA_VISIBLE_DEVICES="", **changes)
    code = "\n".join(["import os", *lines, TELL])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("name", some(["all_reduce", "fusion_pass", "intercept", "operators"], 4))
def test_whatever_is_touched_first(name: str) -> None:
    lines = ("from tunedcomm.integrations import operators",) if name == "operators" else (f"tunedcomm.{name}",)
    said, warned = told("import tunedcomm", "import torch", *lines)
    assert said == "True 1"
    assert "imported before" not in warned


def test_triton_before_tunedcomm_is_warned_of() -> None:
    said, warned = told("import triton", "import tunedcomm.kernels")
    assert said == "False None"
    assert "set TRITON_INTERPRET=1, or import tunedcomm.kernels before Triton" in warned
    assert told("import tunedcomm.kernels", "import triton")[0] == "True 1"


def test_what_the_user_set_stays() -> None:
    assert told("import tunedcomm.kernels", TRITON_INTERPRET="0")[0] == "False 0"


def test_import_alone_sets_nothing() -> None:
    done, _ = told("import sys, tunedcomm", "print('TRITON_INTERPRET' in os.environ, 'triton' in sys.modules)")
    assert done.splitlines()[0] == "False False"
