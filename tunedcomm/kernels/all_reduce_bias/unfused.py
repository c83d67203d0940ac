"""unfused: all_reduce by this library's own ordered kernels, then one kernel that adds the bias to the sums in place.

Numerics: ordered. Graph-safe. Lane rules: those of the all_reduce kernel; the second one does not touch the lane.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tunedcomm.kernels.all_reduce_bias._common import arrange, refuse, with_bias
from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.common.lane import block_range
from tunedcomm.kernels.common.launch import CompileRequest, ManyLaunch, bind_kernel
from tunedcomm.kernels.common.packets import packets_of
from tunedcomm.kernels.common.protocols import refuse_launch_pdl
from tunedcomm.kernels.common.sync import INTERPRET, load_packets, store_packets
from tunedcomm.kernels.common.unfused import (
    AXES,
    KERNELS,
    bind_sum,
    refuse_sum,
    sum_asked,
    sum_default,
    sum_rounds,
)
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["UNFUSED", "bias_rows_kernel"]

_MAX_ADD_BLOCKS = 264


@triton.jit
def bias_rows_kernel(
    out, bias, total, row, DTYPE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The bias on sums that lie where the result goes; no peers."""
    if PDL and not INTERPRET:
        gdc_wait()
    lanes, first, step = block_range(BLOCK)
    for start in tl.range(first, total, step):
        packet = start + lanes
        here = packet < total
        s = load_packets(out + packet * 16, here)
        s0, s1, s2, s3 = with_bias(s, bias, packet, row, here, DTYPE)
        store_packets(out + packet * 16, s0, s1, s2, s3, here)


_SPACE = Space({**AXES, "add_warps": PowerOfTwo(1, 16), "launch_pdl": Choice(False, True)})


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if reason := refuse(problem, limits) or refuse_launch_pdl(config, limits):
        return reason
    return refuse_sum(problem, config, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    wish = {**sum_default(problem, limits), "add_warps": 8, "launch_pdl": limits.launch_pdl}
    return closest(wish, _SPACE, problem, limits, _infeasible)  # type: ignore[arg-type]


def _add_blocks(problem: Problem, config: Config) -> int:
    return max(1, min(-(-packets_of(problem.nbytes) // (32 * int(config["add_warps"]))), _MAX_ADD_BLOCKS))


def _add_request(problem: Problem, config: Config) -> CompileRequest:
    warps, pdl = int(config["add_warps"]), bool(config["launch_pdl"])
    constants: dict[str, Value] = {"DTYPE": problem.dtype, "BLOCK": 32 * warps, "PDL": pdl}
    return CompileRequest.of(bias_rows_kernel, constants, num_warps=warps, launch_pdl=pdl)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    variant, asked, inner = sum_asked(problem, config)
    return (*variant.compile_requests(asked, inner), _add_request(problem, config))


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    reduce, total = bind_sum(problem, config, workspace), packets_of(problem.nbytes)
    kernel = bind_kernel(_add_request(problem, config), _add_blocks(problem, config), workspace.device)
    add = kernel.fix((None, None, total, total // problem.shape[0]))

    def by_address(stream: int, x: int, bias: int, out: int) -> None:
        reduce(stream, x, out)
        add(stream, out, bias)

    return ManyLaunch(by_address, arrange)


UNFUSED = register_variant(
    Variant(
        op="all_reduce_bias",
        name="unfused",
        numerics="ordered",
        summary="an ordered all_reduce kernel, then one kernel that adds the bias",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: max(int(config["num_blocks"]), _add_blocks(problem, config)),
        num_rounds=sum_rounds,
        kernels=(*KERNELS, bias_rows_kernel),
        compile_requests=_requests,
    )
)
