"""host_unfused: an all_reduce of CPU tensors over the ring in shared memory, then PyTorch on a few rows each.

As many rows are taken together as stay in the cache with their intermediate results, too few for PyTorch's threads.

Numerics: ordered.
"""

from __future__ import annotations

from typing import Any

from tunedcomm.kernels.all_reduce.host import HostUnfused
from tunedcomm.kernels.all_reduce_rms_norm.op import given_of, norm_rows
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.reference import SUM_DTYPES
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem

_ELEMENTS = 32767  # of the rows that are normalised together


class HostRmsNorm(HostUnfused, registered=True):
    op = "all_reduce_rms_norm"
    summary = "CPU tensors: all_reduce in shared memory, then PyTorch operators row by row"

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.dtype not in SUM_DTYPES:
            return f"sums of squares are made in fp32, which is too narrow for {problem.dtype}"
        return None

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        reduce, (tokens, hidden) = self.collectives(problem, config)[0].bind(workspace), problem.shape
        max_rows = max(_ELEMENTS // hidden, 1)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            given, h = given_of(problem, inputs), outputs[1].view(tokens, hidden)
            shared = given.residual is not None and given.residual.data_ptr() == h.data_ptr()
            s = torch.empty_like(h) if shared else h
            reduce((given.x,), (s,), stream)
            norm_rows(problem, given, s, outputs, max_rows)

        return run
