"""An op whose bad variants pass every check of their first launches; a sweep imports it as a plugin.

Its library is the slowest of all, so that whatever is not found out is dispatched.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from typing import Any

import torch
from planted import Bind, Launch, Tensors, add_up, after, plant, plant_op
from planted_cases import LATE_OP, NEVER, NEXT

from tunedcomm.space import Config
from tunedcomm.spec import Problem

_LEAK_BYTES = 50 << 20
_launches = itertools.count()
# Set once a process is damaged, which the library dies of at `NEXT`.
_damaged: list[bool] = []


def crash_where_asked(problem: Problem, output: torch.Tensor) -> None:
    if (_damaged and problem.numel == NEXT) or problem.numel == NEVER:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.2)


def keep(num_bytes: int, *, most: int) -> Bind:
    """Every launch allocates so much and keeps it, up to so many times."""

    def bind(problem: Problem, config: Config, workspace: Any) -> Launch:
        kept: list[torch.Tensor] = []

        def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
            if len(kept) < most:
                kept.append(torch.ones(num_bytes, dtype=torch.uint8))
            time.sleep(0.1 if most < 100 else 0.0)
            add_up(inputs, outputs)

        return launch

    return bind


def turns_wrong_late(problem: Problem, config: Config, workspace: Any) -> Launch:
    """Right for 8 launches, twice as many as the first check makes, then it gives the result of the launch before."""
    last: list[torch.Tensor] = []

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        result = outputs[0].clone()
        if next(_launches) >= 8:
            outputs[0].copy_(last[0])
        last[:] = [result]

    return launch


def writes_before_its_input(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        ctypes.memset(inputs[0].data_ptr() - 8, 7, 8)

    return launch


plant_op(LATE_OP)
for _name, _bind in {
    "library": after(crash_where_asked),
    "good": after(lambda problem, output: time.sleep(0.1)),
    "settles": keep(_LEAK_BYTES // 4, most=12),  # as a ring of buffers does
    "damages": after(lambda problem, output: _damaged.append(True)),
    "turns_wrong_late": turns_wrong_late,
    "writes_behind_its_output": after(
        lambda problem, output: ctypes.memset(output.data_ptr() + output.nbytes + 16, 7, 16)
    ),
    "writes_before_its_input": writes_before_its_input,
    "leaks": keep(_LEAK_BYTES, most=10**9),
}.items():
    plant(_name, _bind, op=LATE_OP, numerics="library" if _name == "library" else "ordered")
