"""host_unfused: products of CPU tensors by PyTorch, before or after a collective over the ring in shared memory.

Numerics: library (how the library adds over the depth is its own choice; the collectives' sums are ordered).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_gather.op import HostOneShot as GatherOneShot
from tunedcomm.kernels.all_reduce.host import HostUnfused
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.variant import Collective, Workspace
from tunedcomm.kernels.gemm.op import bind_gathered, bind_product, gemm_layout, rows_of
from tunedcomm.kernels.reduce_scatter.op import HostOneShot as ScatterOneShot
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem


class _ByRows(HostComposed):
    """A GEMM whose rows are shared out evenly among the ranks."""

    numerics = "library"

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.shape[0] % problem.world_size:
            return f"{problem.shape[0]} rows are not as many on each of {problem.world_size} ranks"
        return None


class HostGather(_ByRows, registered=True):
    op = "ag_gemm"
    summary = "CPU tensors: all_gather in shared memory, then PyTorch's product"
    algorithms = {"one_shot": GatherOneShot.variant}  # noqa: RUF012 - never changed

    def collective_problem(self, problem: Problem) -> Problem:
        shape = (rows_of(problem) * problem.shape[2],)
        return replace(problem, shape=shape, reduction="", layout="", scaling="")

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        """The gathers of A and, if its rows have scales, of those."""
        gathers = super().collectives(problem, config)
        if problem.scaling != "rowwise":
            return gathers
        scales = replace(gathers[0].problem, shape=(rows_of(problem),), dtype="float32")
        return (*gathers, Collective.of(GatherOneShot.variant, scales, {**config, "chunk_kib": 16, "threads": 1}))

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        gathers = [gather.bind(workspace) for gather in self.collectives(problem, config)]
        return bind_gathered(problem, lambda index, whole, shard, stream: gathers[index]((shard,), (whole,), stream))


class HostScatter(_ByRows, registered=True):
    op = "gemm_rs"
    summary = "CPU tensors: PyTorch's product, then reduce_scatter in shared memory"
    algorithms = {"one_shot": ScatterOneShot.variant}  # noqa: RUF012 - never changed

    def collective_problem(self, problem: Problem) -> Problem:
        shape, dtype = (rows_of(problem) * problem.shape[1],), gemm_layout(problem).dtype
        return replace(problem, shape=shape, dtype=dtype, layout="", scaling="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        scatter, multiply = self.collectives(problem, config)[0].bind(workspace), bind_product(problem)
        shape, dtype = problem.shape[:2], getattr(torch, gemm_layout(problem).dtype)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            partial = torch.empty(shape, dtype=dtype, device="cpu")
            multiply(inputs, partial)
            scatter((partial,), outputs, stream)

        return run


class HostReduce(HostUnfused, registered=True):
    """The product goes into the result and is reduced in place."""

    op = "gemm_ar"
    numerics = "library"
    summary = "CPU tensors: PyTorch's product, then all_reduce in shared memory"

    def collective_problem(self, problem: Problem) -> Problem:
        shape, dtype = (problem.shape[0] * problem.shape[1],), gemm_layout(problem).dtype
        return replace(problem, shape=shape, dtype=dtype, layout="", scaling="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce, multiply = self.collectives(problem, config)[0].bind(workspace), bind_product(problem)
        with_bias = gemm_layout(problem).bias

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            multiply(inputs, outputs[0])
            reduce(outputs, outputs, stream)
            if with_bias:
                outputs[0].add_(inputs[2])

        return run
