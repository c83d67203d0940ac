"""host_unfused: CPU tensors; shares are copied into their order, exchanged in shared memory, and copied where they go.

Numerics: ordered (bits are moved).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_to_all.host import HostOneShot
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.kernels.ulysses.op import GATHER, SCATTER, shapes_of, share_bytes, shares_of
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Problem


class ScatterHost(HostComposed, registered=True):
    op = SCATTER
    summary = "CPU tensors: an exchange in shared memory between two copies"
    algorithms = {"one_shot": HostOneShot.variant}  # noqa: RUF012 - never changed

    def collective_problem(self, problem: Problem) -> Problem:
        return replace(problem, shape=(share_bytes(problem) // ITEMSIZE[problem.dtype],), input_kind="plain")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        exchange, (shape, result) = self.collectives(problem, config)[0].bind(workspace), shapes_of(problem)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            sent = shares_of(inputs[0], shape, problem).contiguous()
            got = torch.empty_like(sent)
            exchange((sent,), (got,), stream)
            shares_of(outputs[0], result, problem).copy_(got)

        return run


class GatherHost(ScatterHost, registered=True):
    op = GATHER
