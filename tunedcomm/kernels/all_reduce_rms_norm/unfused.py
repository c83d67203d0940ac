"""unfused: all_reduce by this library's own ordered kernels, then one kernel that adds and normalises row by row.

The sum is put where residual_out goes, or where y goes if residual_out is the residual itself; y in fp8 has no room for
it, so such plans use scratch. The second kernel reads every packet by the thread that then writes there.

Numerics: ordered. Graph-safe. Lane rules: those of the all_reduce kernel; the second one does not touch the lane.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tunedcomm.kernels.all_reduce.unfused import SUM_KERNELS, UnfusedVariant, sum_space
from tunedcomm.kernels.all_reduce_rms_norm.op import BASIC_ROWS, RowKernels, refuse_row_warps, row_warps
from tunedcomm.kernels.all_reduce_rms_norm.rows import finish_row, row_extras
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.sync import INTERPRET, load_packets
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem

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


class Unfused(UnfusedVariant, registered=True):
    op = "all_reduce_rms_norm"
    summary = "an ordered all_reduce kernel, then one kernel that adds and normalises"
    kernels = (*SUM_KERNELS, rms_norm_rows_kernel)
    second_warps = "norm_warps"
    space = sum_space(second_warps)
    rows: RowKernels = BASIC_ROWS

    def refuse_second(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return self.rows.refuse(problem) or refuse_row_warps(problem, limits, int(config["norm_warps"]))

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        return {**super().wish(problem, limits), "norm_warps": row_warps(problem)}

    def second_blocks(self, problem: Problem, config: Config) -> int:
        return max(1, min(problem.shape[0], _MAX_NORM_BLOCKS))

    def second_constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return self.rows.constants(problem)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce, kernel = self.bind_both(problem, config, workspace)
        norm = kernel.fix(self.rows.leading(problem))
        # y in fp8 has no room for the sum, and residual_out may be the residual.
        cramped = problem.scaling and "residual" in problem.layout
        room = workspace.scratch(problem.mode, problem.nbytes) if cramped else None

        def by_address(stream: int, x: int, *rest: int) -> None:
            residual, out, residual_out = rest[2], rest[4], rest[5]
            s = residual_out if residual_out != residual else out
            if room is not None:
                s = room.data_ptr()
            reduce(stream, x, s)
            norm(stream, s, *rest)

        return AddressLaunch(by_address, functools.partial(self.rows.arrange, problem))
