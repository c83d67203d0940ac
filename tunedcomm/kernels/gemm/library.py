"""Variants whose products and sums are made by libraries, or whose products are and whose collective is ours.

- library: cuBLAS and NCCL on GPUs, PyTorch and gloo on CPUs. Takes whatever they take; every problem's fall-back.
- library_tuned: the library's product, before or after one of this library's own collectives. Best where a GEMM is too
  short to hide anything under. Lane rules: the collective's kernels have them.

Numerics: library (how the library adds over the depth is its own choice; our collectives' sums are ordered).
Graph-safe, the library's collectives on NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_gather.copy_engine import CopyEngine
from tunedcomm.kernels.all_gather.one_shot import Lamport as LamportGather
from tunedcomm.kernels.all_gather.push import Push as PushGather
from tunedcomm.kernels.all_reduce.bias import BiasLamport, BiasTwoShot, BiasTwoShotLamport
from tunedcomm.kernels.all_reduce.lamport import Lamport, TwoShotLamport
from tunedcomm.kernels.all_reduce.one_shot import OneShot
from tunedcomm.kernels.all_reduce.two_shot import TwoShot
from tunedcomm.kernels.common.feasibility import Launch, kept
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.variant import (
    Collective,
    ComposedVariant,
    LibraryVariant,
    Workspace,
    all_gather_single,
    reduce_scatter_single,
)
from tunedcomm.kernels.gemm.ag import gathered_in, panel_bytes
from tunedcomm.kernels.gemm.op import (
    SCALED_MULTIPLE,
    bind_gathered,
    bind_product,
    gemm_layout,
    operands_of,
    out_itemsize,
    product,
    rows_of,
)
from tunedcomm.kernels.gemm.tiles import refuse_gemm, whole_packets
from tunedcomm.kernels.reduce_scatter.one_shot import Lamport as LamportScatter
from tunedcomm.kernels.reduce_scatter.one_shot import OneShot as OneShotScatter
from tunedcomm.kernels.reduce_scatter.push import Push as PushScatter
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem


class _Library(LibraryVariant):
    summary = "cuBLAS and NCCL on GPUs, PyTorch and gloo on CPUs"


class LibraryGather(_Library, registered=True):
    op = "ag_gemm"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        group, gather_single = workspace.group, all_gather_single()

        def gather(index: int, whole: Any, shard: Any, stream: int) -> None:
            if shard.element_size() == 1:
                whole, shard = whole.view(torch.uint8), shard.view(torch.uint8)
            gather_single(whole, shard, group=group)

        return bind_gathered(problem, gather)


class LibraryScatter(_Library, registered=True):
    op = "gemm_rs"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        group, shape, dtype = workspace.group, problem.shape[:2], getattr(torch, gemm_layout(problem).dtype)
        scatter = reduce_scatter_single()

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            out = outputs[0]
            partial = product(problem, operands_of(problem, inputs), torch.empty(shape, dtype=dtype, device=out.device))
            scatter(out, partial, dist.ReduceOp.SUM, group=group)
            if problem.reduction == "avg":
                out.div_(problem.world_size)

        return run


class LibraryReduce(_Library, registered=True):
    op = "gemm_ar"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch.distributed as dist

        group = workspace.group

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            operands, out = operands_of(problem, inputs), outputs[0]
            product(problem, operands, out)
            dist.all_reduce(out, dist.ReduceOp.SUM, group=group)
            if operands.bias is not None:
                out.add_(operands.bias)

        return run


def _refuse_axes(config: Config, *, early: tuple[str, ...], cut: tuple[str, ...]) -> str | None:
    """Return why axes do not suit the config's algorithm, or None.

    Args:
        config: a point of the space.
        early: algorithms that may be launched early.
        cut: algorithms that cut messages into chunks.
    """
    algorithm = str(config["algorithm"])
    if config.get("launch_pdl") and algorithm not in early:
        return f"{algorithm} is not launched early: only launch_pdl=False"
    if int(config["num_chunks"]) > 1 and algorithm not in cut:
        return f"{algorithm} has no chunks: only num_chunks=1"
    return None


class _LibraryTuned(ComposedVariant):
    """A product by the library, and collectives of ours."""

    name = "library_tuned"
    numerics = "library"


_GATHERS = {"lamport": LamportGather.variant, "push": PushGather.variant, "copy_engine": CopyEngine.variant}
_SMALL_GATHER = 512 * 1024  # bytes of all shards up to which Lamport packets are tried first
_SCALE_WARPS, _SCALE_ROUNDS = 16, 4


def refuse_scaled(problem: Problem, limits: Limits) -> str | None:
    """Return why cuBLAS does not multiply such fp8 matrices, or None."""
    _, n, k = problem.shape
    if problem.scaling and limits.backend == "cuda" and (n % SCALED_MULTIPLE or k % SCALED_MULTIPLE):
        return f"the library multiplies fp8 matrices by whole {SCALED_MULTIPLE} rows and columns, not {(n, k)}"
    return None


class TunedGather(_LibraryTuned, registered=True):
    """Gathers to where the caller wants it, or to the panels, which serve as memory of this rank alone.

    No peer writes there before this rank's next call that begins with an exchange of flags.
    """

    op = "ag_gemm"
    summary = "tunedcomm's own all_gather, then cuBLAS"
    kernels = tuple(kernel for variant in _GATHERS.values() for kernel in variant.kernels)
    space = Space(
        {
            "algorithm": Choice(*_GATHERS),
            "num_blocks": Choice(1, 2, 8, 16, 32, 64, 132),
            "num_warps": PowerOfTwo(4, 16),
            "num_chunks": PowerOfTwo(1, 32),
            "launch_pdl": Choice(False, True),
        }
    )

    def _gather(self, problem: Problem, numel: int, dtype: str) -> Problem:
        """A gather of `numel` elements from each rank."""
        return Problem(problem.op, (numel,), dtype, problem.world_size, reduction="", mode=problem.mode)

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        """The gathers of A and, if its rows have scales, of those."""
        shard = self._gather(problem, rows_of(problem) * problem.shape[2], problem.dtype)
        gathers = [Collective.of(_GATHERS[str(config["algorithm"])], shard, config)]
        if problem.scaling == "rowwise":
            scales = self._gather(problem, rows_of(problem), "float32")
            count = -(-packets_of(scales.nbytes) // (_SCALE_ROUNDS * 32 * _SCALE_WARPS))
            axes = {"num_blocks": count, "num_warps": _SCALE_WARPS}
            gathers.append(Collective.of(LamportGather.variant, scales, axes))
        return tuple(gathers)

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := refuse_gemm(problem, limits, panel_bytes=panel_bytes(problem), descriptors=False):
            return reason
        if reason := refuse_scaled(problem, limits) or _refuse_axes(
            config, early=("lamport",), cut=("push", "copy_engine")
        ):
            return reason
        if config["algorithm"] == "copy_engine" and (config["num_blocks"] != 1 or config["num_warps"] != 4):
            return "copy engines take no blocks: only num_blocks=1 and num_warps=4"
        return None

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Not known."""
        return 0

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        inner = self._gather(problem, rows_of(problem) * problem.shape[2], problem.dtype)
        name = "lamport" if inner.nbytes * problem.world_size <= _SMALL_GATHER else "push"
        return {"num_chunks": 1, "launch_pdl": False, **_GATHERS[name].default(inner, limits), "algorithm": name}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        gathers = [gather.bind(workspace).by_address for gather in self.collectives(problem, config)]
        room, scales = gathered_in(workspace.panels(problem.mode, panel_bytes(problem)), problem)
        gathered = gemm_layout(problem).gathered

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            operands, whole = operands_of(problem, inputs), outputs[1] if gathered else room
            gathers[0](stream, operands.a.data_ptr(), whole.data_ptr())
            if scales is not None:
                gathers[1](stream, operands.scale_a.data_ptr(), scales.data_ptr())
                operands = operands._replace(scale_a=scales)
            product(problem, operands._replace(a=whole), outputs[0])

        return run


_SCATTERS = {"lamport": LamportScatter.variant, "one_shot": OneShotScatter.variant, "push": PushScatter.variant}
_LAMPORT_SCATTER_BYTES = 1 << 20  # of a rank's result: above it push is tried first
_SPLIT_BLOCKS = 32  # from so many on, half of push's blocks push and the others sum


@kept
def _scattered(problem: Problem) -> Problem:
    """The reduce_scatter of the products."""
    shape, dtype = (rows_of(problem) * problem.shape[1],), gemm_layout(problem).dtype
    return replace(problem, shape=shape, dtype=dtype, input_kind="plain", layout="", scaling="")


class TunedScatter(_LibraryTuned, registered=True):
    """The product goes into scratch."""

    op = "gemm_rs"
    summary = "cuBLAS, then tunedcomm's own ordered reduce_scatter; best at decode sizes"
    kernels = tuple(kernel for variant in _SCATTERS.values() for kernel in variant.kernels)
    space = Space(
        {
            "algorithm": Choice(*_SCATTERS),
            "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
            "num_warps": Choice(2, 4, 8, 16),
            "num_chunks": Choice(1, 4, 16, 64),
            "launch_pdl": Choice(False, True),
        }
    )

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        split = int(config["num_chunks"]) > 1 and int(config["num_blocks"]) >= _SPLIT_BLOCKS
        return (Collective.of(_SCATTERS[str(config["algorithm"])], _scattered(problem), {**config, "split": split}),)

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        axes = _refuse_axes(config, early=("lamport",), cut=("push",))
        return refuse_gemm(problem, limits, descriptors=False) or axes

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        inner = _scattered(problem)
        best = "lamport" if inner.nbytes <= _LAMPORT_SCATTER_BYTES or limits.backend == "host" else "push"
        return {"num_chunks": 1, "launch_pdl": False, **_SCATTERS[best].default(inner, limits), "algorithm": best}

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        scatter = self.collectives(problem, config)[0].bind(workspace)
        rows, columns = problem.shape[:2]
        nbytes = rows * columns * out_itemsize(problem)
        room = workspace.scratch(problem.mode, nbytes)[:nbytes]
        partial = room.view(getattr(torch, gemm_layout(problem).dtype)).view(rows, columns)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            product(problem, operands_of(problem, inputs), partial)
            scatter((partial,), outputs, stream)

        return run


_REDUCTIONS = {kind.name: kind.variant for kind in (Lamport, TwoShotLamport, TwoShot, OneShot)}
_BIAS_REDUCTIONS = {kind.name: kind.variant for kind in (BiasLamport, BiasTwoShotLamport, BiasTwoShot)}
# The first kernel of each serves plain inputs, which results are.
REDUCE_KERNELS = tuple(variant.kernels[0] for known in (_REDUCTIONS, _BIAS_REDUCTIONS) for variant in known.values())
_LAMPORT_REDUCE_BYTES = 4 << 20


def adds_bias(problem: Problem, algorithm: str) -> bool:
    """True if the kernels of `algorithm` add the problem's bias themselves."""
    return gemm_layout(problem).bias and whole_packets(problem) and algorithm in _BIAS_REDUCTIONS


def reduction_of(problem: Problem, config: Config, rows: int) -> Collective:
    """This library's all_reduce of so many rows of the result in place, which adds the bias if it can."""
    algorithm, columns = str(config["algorithm"]), problem.shape[1]
    with_bias = adds_bias(problem, algorithm)
    inner = Problem(
        problem.op, (rows, columns) if with_bias else (rows * columns,), gemm_layout(problem).dtype,
        problem.world_size, problem.reduction, problem.input_kind, problem.in_place or not with_bias,
        mode=problem.mode,
    )  # fmt: skip
    return Collective.of((_BIAS_REDUCTIONS if with_bias else _REDUCTIONS)[algorithm], inner, config)


def _refuse_reduction_axes(config: Config) -> str | None:
    return _refuse_axes(config, early=("lamport", "two_shot_lamport"), cut=("two_shot",))


def refuse_reduction(problem: Problem, config: Config, limits: Limits, rows: int) -> str | None:
    """Return why that all_reduce cannot run, or None."""
    return _refuse_reduction_axes(config) or reduction_of(problem, config, rows).refuse(limits)


def usual_reduction(problem: Problem, rows: int, *, host: bool = False) -> dict[str, Value]:
    """The config of an all_reduce of so many rows by all SMs, for variants that search other axes."""
    small = rows * problem.shape[1] * out_itemsize(problem) <= _LAMPORT_REDUCE_BYTES
    algorithm = "two_shot_lamport" if small else "two_shot"
    return {"algorithm": algorithm, "num_chunks": 1, "num_blocks": 1 if host else 128, "num_warps": 16}


def bind_reduction(
    problem: Problem, config: Config, workspace: Workspace, rows: int
) -> Callable[[int, int, int], None]:
    """`(stream, address of the rows, address of the bias or 0)` to that all_reduce, in place."""
    reduce = reduction_of(problem, config, rows).bind(workspace).by_address
    if adds_bias(problem, str(config["algorithm"])):
        return lambda stream, address, bias: reduce(stream, address, bias, address)
    return lambda stream, address, bias: reduce(stream, address, address)


class TunedReduce(_LibraryTuned, registered=True):
    """The product goes into the result and is reduced in place: the same thread reads and writes each element.

    The bias is added by the all_reduce kernel, or by PyTorch where rows are not whole packets.
    """

    op = "gemm_ar"
    summary = "cuBLAS, then tunedcomm's own all_reduce in place; best for few rows"
    kernels = REDUCE_KERNELS
    space = Space(
        {
            "algorithm": Choice(*_REDUCTIONS),
            "num_blocks": Choice(1, 2, 8, 16, 32, 64, 128),
            "num_warps": PowerOfTwo(2, 16),
            "num_chunks": Choice(1, 4, 16),
            "launch_pdl": Choice(False, True),
        }
    )

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        return (reduction_of(problem, config, problem.shape[0]),)

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_gemm(problem, limits, descriptors=False) or _refuse_reduction_axes(config)

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        nbytes = problem.shape[0] * problem.shape[1] * out_itemsize(problem)
        small = nbytes * problem.world_size <= 1 << 20
        algorithm = "lamport" if small else "two_shot_lamport" if nbytes <= _LAMPORT_REDUCE_BYTES else "two_shot"
        preferred: dict[str, Any] = {"algorithm": algorithm, "num_chunks": 1, "launch_pdl": False}
        if limits.backend == "host":
            return {**preferred, "num_blocks": 2, "num_warps": 16}
        if algorithm == "two_shot":
            return {**preferred, "num_blocks": 128, "num_warps": 16, "num_chunks": 1 if nbytes <= 32 << 20 else 4}
        packets = nbytes // PACKET_BYTES // (1 if small else problem.world_size)
        warps = 2 if packets <= 4096 else 4 if packets <= 16384 else 8
        blocks = min(packets / (32 * warps), 128)
        return {**preferred, "num_blocks": blocks, "num_warps": warps, "launch_pdl": limits.launch_pdl}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return int(config["num_blocks"])

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        multiply, reduce = bind_product(problem), bind_reduction(problem, config, workspace, problem.shape[0])
        with_bias, fused = gemm_layout(problem).bias, adds_bias(problem, str(config["algorithm"]))

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            out = outputs[0]
            multiply(inputs, out)
            reduce(stream, out.data_ptr(), inputs[2].data_ptr() if with_bias else 0)
            if with_bias and not fused:
                out.add_(inputs[2])

        return run
