"""library_tuned: the library's GEMM into the result, then this library's own all_reduce of it in place.

Every element of the result is read and written by one and the same thread of the all_reduce, so it may lie where the
product lies. The bias is added by the all_reduce kernel, or by PyTorch where rows are no whole packets.

Numerics: library (the library's products; their sums are ordered, so all ranks get the same bits). Graph-safe. Lane
rules: those of the all_reduce kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch, closest, kernel_blocks
from tunedcomm.kernels.gemm.ar_reduce import (
    KERNELS,
    adds_bias,
    bind_reduce,
    refuse_reduce,
    requests_of,
    rounds_of,
    wish_of,
)
from tunedcomm.kernels.gemm.problem import bind_product, operands_of, refuse_gemm, wanted_of
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY_TUNED"]

_SPACE = Space(
    {
        "algorithm": Choice("lamport", "two_shot_lamport", "two_shot", "one_shot"),
        "num_blocks": Choice(1, 2, 8, 16, 32, 64, 128),
        "num_warps": PowerOfTwo(2, 16),
        "num_chunks": Choice(1, 4, 16),
        "launch_pdl": Choice(False, True),
    }
)


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse_gemm(problem, limits, panel_bytes=0, descriptors=False):
        return reason
    return refuse_reduce(problem, config, limits, problem.shape[0])


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    return closest(wish_of(problem, limits, problem.shape[0]), _SPACE, problem, limits, _infeasible)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    return requests_of(problem, config, problem.shape[0])


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    multiply = bind_product(problem)
    reduce = bind_reduce(problem, config, workspace, problem.shape[0])
    if not wanted_of(problem).bias:

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            out = outputs[0]
            multiply(inputs, out)
            reduce(stream, out.data_ptr(), 0)

        return run
    fused = adds_bias(problem, str(config["algorithm"]))

    def run_with_bias(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        out, bias = outputs[0], operands_of(problem, inputs).bias
        multiply(inputs, out)
        reduce(stream, out.data_ptr(), bias.data_ptr())
        if not fused:
            out.add_(bias)

    return run_with_bias


LIBRARY_TUNED = register_variant(
    Variant(
        op="gemm_ar",
        name="library_tuned",
        numerics="library",
        summary="cuBLAS, then tunedcomm's own all_reduce in place; best for few rows",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=kernel_blocks,
        num_rounds=lambda problem, config: rounds_of(problem, config, problem.shape[0]),
        kernels=KERNELS,
        compile_requests=_requests,
    )
)
