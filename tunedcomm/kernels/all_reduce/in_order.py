"""in_order: sums in rank order by PyTorch operators, with a bias or without; see `common.in_order`."""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.in_order import InOrderVariant, reduce_in_order
from tunedcomm.kernels.common.reference import with_extras
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem


class InOrder(InOrderVariant, registered=True):
    op = "all_reduce"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            reduce_in_order(inputs[0].view(-1), outputs[0].view(-1), problem.reduction, workspace.group)

        return run


class BiasInOrder(InOrderVariant, registered=True):
    op = "all_reduce_bias"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, bias, out = inputs[0].view(-1), inputs[1].view(-1), outputs[0].view(problem.shape)
            reduce_in_order(x, out.view(-1), "sum", workspace.group)
            out.copy_(with_extras(out, bias))

        return run
