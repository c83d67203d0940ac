"""chunked: the library's GEMM a part of the rows at a time, each part reduced while the next one is multiplied.

Products go into the result, on the caller's stream. A side stream waits for each part and reduces it in place by one of
this library's all_reduce kernels, on a few SMs. All that uses the lane is on that one side stream, in the same order on
every rank; it forks from the caller's stream after the calls before and joins it in the end. GEMMs of the library wait
for nothing, so whatever SMs a reduction still wants become free.

Numerics: library (the library's products; their sums are ordered, so all ranks get the same bits). Graph-safe. Lane
rules: those of the kernels that reduce.
Source: decomposed GEMM and collective as in PyTorch's asynchronous tensor parallelism, with collectives of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.copies import Copies, copies_of
from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.gemm.ar_parts import TILE, inputs_of_rows, parts_of
from tunedcomm.kernels.gemm.ar_reduce import KERNELS, adds_bias, bind_reduce, refuse_reduce, requests_of
from tunedcomm.kernels.gemm.problem import bind_product, operands_of, out_itemsize, refuse_gemm, wanted_of
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    import torch

    from tunedcomm.symm.workspace import Workspace

__all__ = ["CHUNKED"]

_HERE, _DONE = 0, 1  # events

_SPACE = Space(
    {
        "chunks": Choice(2, 4, 8),
        "algorithm": Choice("two_shot", "two_shot_lamport"),
        "num_blocks": Choice(1, 2, 8, 16, 32, 64),
        "num_warps": Choice(8, 16),
        "num_chunks": Choice(1, 2, 4),
    }
)


def _inner(config: Config) -> Config:
    return {**config, "launch_pdl": False}


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_gemm(problem, limits, panel_bytes=0, descriptors=False):
        return reason
    chunks, parts = int(config["chunks"]), parts_of(problem, config)
    if len(parts) != chunks:
        return f"{problem.shape[0]} rows make {len(parts)} parts, not {chunks}"
    step = parts[0][1]
    if step * problem.shape[1] * out_itemsize(problem) % PACKET_BYTES:
        return "parts would not begin with whole packets"
    if limits.backend == "cuda" and step < TILE:
        return f"{step} rows a part are less than the library's tiles have"
    for rows in {rows for _, rows in parts}:
        if reason := refuse_reduce(problem, _inner(config), limits, rows):
            return f"parts of {rows} rows: {reason}"
    return None


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish: dict[str, Any] = {"algorithm": "two_shot", "num_blocks": 16, "num_warps": 16, "num_chunks": 1}
    wish["chunks"] = min(max(problem.shape[0] // 512, 2), 8)
    if limits.backend == "host":
        wish |= {"num_blocks": 2, "chunks": 2}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    sizes = {rows for _, rows in parts_of(problem, config)}
    return tuple(dict.fromkeys(request for rows in sizes for request in requests_of(problem, _inner(config), rows)))


@dataclass(frozen=True, slots=True)
class _Job:
    """What a launch needs besides its tensors.

    Attributes:
        multiply: `(inputs, result)` to the library's product.
        parts: first row, number of rows, and `(stream, address of the rows, of the bias)` to their reduction.
        fused: the reductions add the bias.
    """

    problem: Problem
    copies: Copies
    multiply: Callable[[tuple[Any, ...], torch.Tensor], object]
    parts: tuple[tuple[int, int, Callable[[int, int, int], None]], ...]
    fused: bool

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        """See the module's text."""
        copies, out = self.copies, outputs[0]
        side, bias = copies.streams[0], operands_of(self.problem, inputs).bias
        added = bias.data_ptr() if self.fused else 0
        for row, rows, reduce in self.parts:
            part = out[row : row + rows]
            self.multiply(inputs_of_rows(self.problem, inputs, row, rows), part)
            copies.record(_HERE, stream)
            copies.wait(side, _HERE)
            reduce(side, part.data_ptr(), added)
        copies.record(_DONE, side)
        copies.wait(stream, _DONE)
        if bias is not None and not self.fused:
            out.add_(bias)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    parts = parts_of(problem, config)
    reductions = {
        rows: bind_reduce(problem, _inner(config), workspace, rows) for rows in sorted({rows for _, rows in parts})
    }
    return _Job(
        problem=problem,
        copies=copies_of(workspace, problem.mode),
        multiply=bind_product(problem),
        parts=tuple((row, rows, reductions[rows]) for row, rows in parts),
        fused=wanted_of(problem).bias and adds_bias(problem, str(config["algorithm"])),
    )


CHUNKED = register_variant(
    Variant(
        op="gemm_ar",
        name="chunked",
        numerics="library",
        summary="cuBLAS part by part; each part is reduced by kernels on few SMs beside the next one's GEMM",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        kernels=KERNELS,
        compile_requests=_requests,
    )
)
