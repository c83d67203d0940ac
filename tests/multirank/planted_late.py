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
from planted import Launch, Tensors, add_up, plant, plant_op
from planted_cases import LATE_BAD, LATE_OP, NEVER, NEXT

from tunedcomm.space import Config
from tunedcomm.spec import Problem

_LEAK_BYTES = 50 << 20
_launches = itertools.count()
# Set once a process is damaged, which the library dies of at `NEXT`.
_damaged: list[bool] = []


def library(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        if (_damaged and problem.numel == NEXT) or problem.numel == NEVER:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.2)
        add_up(inputs, outputs)

    return launch


def good(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        time.sleep(0.1)
        add_up(inputs, outputs)

    return launch


def damages(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        _damaged[:] = [True]

    return launch


def settles(problem: Problem, config: Config, workspace: Any) -> Launch:
    """Keeps what its first launches allocate, as a ring of buffers does."""
    kept: list[torch.Tensor] = []

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        time.sleep(0.1)
        if len(kept) < 12:
            kept.append(torch.ones(_LEAK_BYTES // 4, dtype=torch.uint8))
        add_up(inputs, outputs)

    return launch


def leaks(problem: Problem, config: Config, workspace: Any) -> Launch:
    kept: list[torch.Tensor] = []

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        kept.append(torch.ones(_LEAK_BYTES, dtype=torch.uint8))
        add_up(inputs, outputs)

    return launch


def turns_wrong_late(problem: Problem, config: Config, workspace: Any) -> Launch:
    """Right for 60 launches of a process, then it gives what the launch before should have given."""
    last: list[torch.Tensor] = []

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        result = outputs[0].clone()
        if next(_launches) >= 60:
            outputs[0].copy_(last[0])
        last[:] = [result]

    return launch


def writes_behind_its_output(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        ctypes.memset(outputs[0].data_ptr() + outputs[0].nbytes + 16, 7, 16)

    return launch


def writes_before_its_input(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        ctypes.memset(inputs[0].data_ptr() - 8, 7, 8)

    return launch


plant_op(LATE_OP)
plant("library", library, op=LATE_OP, numerics="library")
for _name in ("good", "settles", "damages", *LATE_BAD):
    plant(_name, globals()[_name], op=LATE_OP)
