"""in_order: sums in rank order and norms row by row, by PyTorch operators; see `common.in_order`.

The norm of fp64 follows the rule of `rows` in fp64.
"""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.all_reduce_rms_norm.op import given_of, norm_rows
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.in_order import InOrderVariant, reduce_in_order
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem

_ELEMENTS = 1 << 22  # of the rows that are normalised together


class InOrder(InOrderVariant, registered=True):
    op = "all_reduce_rms_norm"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            given = given_of(problem, inputs)
            s = torch.empty(problem.shape, dtype=given.x.dtype, device=given.x.device)
            reduce_in_order(given.x.view(-1), s.view(-1), "sum", workspace.group)
            norm_rows(problem, given, s, outputs, max(_ELEMENTS // problem.shape[1], 1))

        return run
