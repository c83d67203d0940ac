"""host_unfused: products of CPU tensors by PyTorch, before or after a collective over the ring in shared memory.

Numerics: library (how the library adds over the depth is its own choice; the collectives' sums are ordered).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_gather.host import HostOneShot as GatherOneShot
from tunedcomm.kernels.all_reduce.host import HostUnfused
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.variant import Collective, Workspace
from tunedcomm.kernels.gemm.op import bind_product, operands_of, product, rows_of, wanted_of
from tunedcomm.kernels.reduce_scatter.host import HostOneShot as ScatterOneShot
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem


class _ByRows(HostComposed):
    """A GEMM of whose rows every rank has as many."""

    numerics = "library"

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.shape[0] % problem.world_size:
            return f"{problem.shape[0]} rows are not as many on each of {problem.world_size} ranks"
        return None


class HostGather(_ByRows, registered=True):
    op = "ag_gemm"
    summary = "CPU tensors: all_gather in shared memory, then PyTorch's product"
    algorithms = {"one_shot": GatherOneShot.variant}  # noqa: RUF012 - never changed

    def asked(self, problem: Problem) -> Problem:
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
        import torch

        (m, _, k), wanted, dtype = problem.shape, wanted_of(problem), getattr(torch, problem.dtype)
        gathers = [gather.bind(workspace) for gather in self.collectives(problem, config)]

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            operands = operands_of(problem, inputs)
            whole = outputs[1] if wanted.gathered else torch.empty((m, k), dtype=dtype, device="cpu")
            gathers[0]((operands.a,), (whole,), stream)
            if problem.scaling == "rowwise":
                scales = torch.empty((m, 1), device="cpu")
                gathers[1]((operands.scale_a,), (scales,), stream)
                operands = operands._replace(scale_a=scales)
            product(problem, operands._replace(a=whole), outputs[0])

        return run


class HostScatter(_ByRows, registered=True):
    op = "gemm_rs"
    summary = "CPU tensors: PyTorch's product, then reduce_scatter in shared memory"
    algorithms = {"one_shot": ScatterOneShot.variant}  # noqa: RUF012 - never changed

    def asked(self, problem: Problem) -> Problem:
        shape, dtype = (rows_of(problem) * problem.shape[1],), wanted_of(problem).dtype
        return replace(problem, shape=shape, dtype=dtype, layout="", scaling="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        scatter, multiply = self.collectives(problem, config)[0].bind(workspace), bind_product(problem)
        shape, dtype = problem.shape[:2], getattr(torch, wanted_of(problem).dtype)

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

    def asked(self, problem: Problem) -> Problem:
        shape, dtype = (problem.shape[0] * problem.shape[1],), wanted_of(problem).dtype
        return replace(problem, shape=shape, dtype=dtype, layout="", scaling="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce, multiply = self.collectives(problem, config)[0].bind(workspace), bind_product(problem)
        with_bias = wanted_of(problem).bias

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            multiply(inputs, outputs[0])
            reduce(outputs, outputs, stream)
            if with_bias:
                outputs[0].add_(inputs[2])

        return run
