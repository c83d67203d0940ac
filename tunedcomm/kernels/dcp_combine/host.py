"""host_unfused: CPU tensors; heads and LSEs go through shared memory as one message a rank, then PyTorch merges.

Numerics: ordered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_to_all.host import HostOneShot
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import LINE, HostComposed
from tunedcomm.kernels.common.reference import SUM_DTYPES
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.kernels.dcp_combine.merge import merged
from tunedcomm.kernels.dcp_combine.op import rows_of_rank, write_results
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Limits, Problem

_LSE_BYTES = 4


def _payload_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes that a rank sends another one: of LSEs and of outputs."""
    tokens, heads, head_dim = rows_of_rank(problem)
    return tokens * heads * _LSE_BYTES, tokens * heads * head_dim * ITEMSIZE[problem.dtype]


class HostCombine(HostComposed, registered=True):
    op = "dcp_combine"
    summary = "CPU tensors: an exchange in shared memory, then PyTorch operators"
    algorithms = {"one_shot": HostOneShot.variant}  # noqa: RUF012 - never changed

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return None if problem.dtype in SUM_DTYPES else f"it merges {', '.join(SUM_DTYPES)}, not {problem.dtype}"

    def collective_problem(self, problem: Problem) -> Problem:
        """Bytes for each rank, as many as keep all parts aligned."""
        return replace(problem, shape=(-(-sum(_payload_bytes(problem)) // LINE) * LINE,), dtype="uint8", layout="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        (collective,) = self.collectives(problem, config)
        exchange, n, size = collective.bind(workspace), problem.world_size, collective.problem.numel
        rows, dtype = rows_of_rank(problem), getattr(torch, problem.dtype)
        lse_bytes, out_bytes = _payload_bytes(problem)
        sent, got = (torch.zeros(n, size, dtype=torch.uint8, device="cpu") for _ in range(2))

        def parts(memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            lses, outs = memory[:, :lse_bytes], memory[:, lse_bytes : lse_bytes + out_bytes]
            return outs.view(dtype).view(n, *rows), lses.view(torch.float32).view(n, *rows[:2])

        to_send, come = parts(sent), parts(got)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            for values, shape, target in zip(inputs, (problem.shape, problem.shape[:2]), to_send, strict=True):
                target.copy_(values.view(shape).unflatten(1, (n, -1)).transpose(0, 1))
            exchange((sent,), (got,), stream)
            write_results(merged(*come, problem.layout), outputs)

        return run
