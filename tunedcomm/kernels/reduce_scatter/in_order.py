"""in_order: sums in rank order by PyTorch operators; see `common.in_order`."""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.in_order import InOrderVariant, scatter_in_order
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem


class InOrder(InOrderVariant, registered=True):
    op = "reduce_scatter"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x = inputs[0].view(problem.world_size, -1)
            scatter_in_order(x, outputs[0].view(-1), problem.reduction, workspace.group)

        return run
