"""unfused: all_reduce by this library's own ordered kernels, then one kernel that adds and normalises row by row.

The sum is put where residual_out goes, or where y goes if residual_out is the residual itself; y in fp8 has no room for
it, so such plans hold a tensor of their own. The second kernel reads every packet by the thread that then writes there.

Numerics: ordered. Graph-safe. Lane rules: those of the all_reduce kernel; the second one does not touch the lane.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tunedcomm.kernels.all_reduce.unfused import (
    AXES,
    KERNELS,
    bind_sum,
    refuse_sum,
    sum_asked,
    sum_default,
    sum_rounds,
)
from tunedcomm.kernels.all_reduce_rms_norm._common import (
    NUM_VARYING,
    many_launch,
    refuse,
    row_packets,
    rows_constants,
)
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.launch import CompileRequest, bind_kernel
from tunedcomm.kernels.common.rows import finish_row, row_block, row_extras
from tunedcomm.kernels.common.sync import INTERPRET, load_packets
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["UNFUSED", "rms_norm_rows_kernel"]

_MAX_NORM_BLOCKS = 264


@triton.jit
def rms_norm_rows_kernel(
    s, weight, bias, residual, scale, out, residual_out, eps, tokens, row,
    DTYPE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Bias, residual and norm of rows that hold sums; no peers."""
    if PDL and not INTERPRET:
        gdc_wait()
    at = tl.arange(0, BLOCK).to(tl.int64)
    here = at < row
    weights = load_packets(weight + at * 16, here)
    for r in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        packet = at + r * row
        words = load_packets(s + packet * 16, here)
        b, extra = row_extras(bias, residual, at, packet, here, BIAS, RESIDUAL)
        finish_row(
            words, b, extra, weights, out, residual_out, scale, eps, row, packet, here,
            DTYPE, BIAS, RESIDUAL, FP8, BLOCK,
        )  # fmt: skip


_SPACE = Space({**AXES, "norm_warps": PowerOfTwo(1, 16), "launch_pdl": Choice(False, True)})


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    of_norm = {"num_warps": config["norm_warps"], "launch_pdl": config["launch_pdl"]}
    return refuse(problem, limits, of_norm) or refuse_sum(problem, config, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    warps = max(1, min(row_block(row_packets(problem)) // 32, 16))
    wish = {**sum_default(problem, limits), "norm_warps": warps, "launch_pdl": limits.launch_pdl}
    return closest(wish, _SPACE, problem, limits, _infeasible)  # type: ignore[arg-type]


def _norm_blocks(problem: Problem) -> int:
    return max(1, min(problem.shape[0], _MAX_NORM_BLOCKS))


def _norm_request(problem: Problem, config: Config) -> CompileRequest:
    pdl = bool(config["launch_pdl"])
    constants = {**rows_constants(problem), "PDL": pdl}
    return CompileRequest.of(rms_norm_rows_kernel, constants, num_warps=int(config["norm_warps"]), launch_pdl=pdl)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    variant, asked, inner = sum_asked(problem, config)
    return (*variant.compile_requests(asked, inner), _norm_request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    reduce = bind_sum(problem, config, workspace)
    kernel = bind_kernel(_norm_request(problem, config), _norm_blocks(problem), workspace.device)
    norm = kernel.fix((*(None,) * NUM_VARYING, problem.shape[0], row_packets(problem)))
    room = _room(problem, workspace)

    def by_address(stream: int, x: int, *rest: int) -> None:
        residual, out, residual_out = rest[2], rest[4], rest[5]
        s = residual_out if residual_out != residual else out
        if room is not None:
            s = room.data_ptr()
        reduce(stream, x, s)
        norm(stream, s, *rest)

    return many_launch(problem, by_address)


def _room(problem: Problem, workspace: Workspace) -> Any:
    """A tensor for the sum, where neither output can be relied on to have room for it."""
    if not (problem.scaling and "residual" in problem.layout):
        return None
    return workspace.scratch(problem.mode, problem.nbytes)


UNFUSED = register_variant(
    Variant(
        op="all_reduce_rms_norm",
        name="unfused",
        numerics="ordered",
        summary="an ordered all_reduce kernel, then one kernel that adds and normalises",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: max(int(config["num_blocks"]), _norm_blocks(problem)),
        num_rounds=sum_rounds,
        kernels=(*KERNELS, rms_norm_rows_kernel),
        compile_requests=_requests,
    )
)
