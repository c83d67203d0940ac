"""Kernels are interpreted where there is no GPU, whoever imports Triton after tunedcomm."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TELL = (
    "import os; from tunedcomm.kernels import _sync; print(bool(_sync.INTERPRET), os.environ.get('TRITON_INTERPRET'))"
)
GROUP = (
    "import torch.distributed as dist; dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
)


def told(*lines: str, **changes: str) -> tuple[str, str]:
    """What a process without GPUs says at its end, and on stderr."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env.update(CUDA_VISIBLE_DEVICES="", **changes)
    code = "\n".join([*lines, TELL])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(
    "lines",
    [
        ("import tunedcomm", "import torch", GROUP, "tunedcomm.fusion_pass"),
        ("import tunedcomm", "import torch", GROUP, "tunedcomm.intercept"),
        ("import tunedcomm", "import triton", "tunedcomm.all_reduce"),
        ("import tunedcomm, torch._inductor.config", "import triton", "tunedcomm.fusion_pass"),
        ("from tunedcomm.integrations import fusion",),
        ("import torch", "from tunedcomm.integrations import fusion"),
    ],
    ids=lambda lines: lines[-1],
)
def test_triton_after_tunedcomm_is_interpreted(lines: tuple[str, ...]) -> None:
    said, warned = told(*lines)
    assert said == "True 1"
    assert "imported before" not in warned


def test_triton_before_tunedcomm_is_warned_of() -> None:
    said, warned = told("import triton", "import tunedcomm")
    assert said == "False None"
    assert "Triton was imported before tunedcomm" in warned


def test_what_the_user_set_stays() -> None:
    assert told("import tunedcomm, triton", TRITON_INTERPRET="0")[0] == "False 0"


def test_import_alone_sets_nothing() -> None:
    done, _ = told("import os, sys, tunedcomm", "print('TRITON_INTERPRET' in os.environ, 'triton' in sys.modules)")
    assert done.splitlines()[0] == "False False"
