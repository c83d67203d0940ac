"""`db compile`: binaries of winners are compiled without a GPU, and a manifest tells where they do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import real_trial, record, refused, run

from tunedcomm import kernels
from tunedcomm.kernels.common import binaries
from tunedcomm.spec import Problem

PROBLEM = Problem("all_reduce", (1 << 22,), "bfloat16", 4)
CONFIG = {"num_blocks": 132, "num_warps": 16, "items": 1, "num_chunks": 1}
# In a process that interprets nothing. The grid of 132 fills more than half of the GPU with 127 registers a thread.
LATER = f"""
from dataclasses import replace
from triton.backends.compiler import GPUTarget
from tunedcomm.kernels.common.launch import fewer_registers, is_compiled
from tunedcomm import kernels, spec
kernels.discover()
variant = spec.get_variant("all_reduce", "two_shot")
(request,) = variant.compile_requests(spec.{PROBLEM!r}, {CONFIG})
eager = replace(request, max_registers=fewer_registers(132, 512, 132, 0.5))
for one in (request, eager, replace(request, num_warps=4)):
    print(is_compiled(one, GPUTarget("cuda", 90, 32)))
"""


def test_a_later_start_finds_the_binaries_of_both_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    winner = real_trial("two_shot", 4.0, problem=PROBLEM, config=CONFIG)
    path = record(tmp_path / "cluster.db", real_trial("library", 14.0, problem=PROBLEM), winner)
    none = run("db", "compile", "--cluster", path, "--target", "sm_80")
    assert none.code == 1, "no winners of such a GPU"
    assert "sm_90" in none.out
    assert "TRITON_CACHE_DIR" not in none.out
    assert binaries.targets() == []
    made = run("db", "compile", "--cluster", path, "--target", "sm_90", "--json")
    assert made.code == 0, made
    assert "compiling for sm_90" in made.err
    assert [(one["num_winners"], one["errors"]) for one in made.json["targets"]] == [(2, [])]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", LATER], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]

    sources = kernels.source_hashes()
    assert binaries.misfit(90, sources) is None
    assert "sm_100" in (binaries.misfit(100, sources) or "")
    assert "all_reduce.two_shot" in (binaries.misfit(90, {**sources, "all_reduce.two_shot": "other"}) or "")
    (tmp_path / "cache").rename(tmp_path / "moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    assert "path" in (binaries.misfit(90, sources) or "")
    (tmp_path / "moved" / "tunedcomm.json").write_text('{"90": 1}')
    assert binaries.misfit(90, sources), "no cache stops a call"
    assert "--target" in refused("db", "compile", "--cluster", path, "--target", "hopper")
