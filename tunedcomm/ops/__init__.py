"""The public functions. Importing this package defines their operators, `torch.ops.tunedcomm.*`.

`call.paths` holds the path of every op: `planned` binds what a call would run, `form.problem` names it. `run_problem`
makes the public call for a problem.
"""

from __future__ import annotations

import torch

from tunedcomm.kernels.all_to_all.op import row_numel
from tunedcomm.kernels.gemm.op import operands_of, wanted_of
from tunedcomm.ops import collectives, experts, gemm
from tunedcomm.ops import torch_ops as torch_ops
from tunedcomm.ops.call import world
from tunedcomm.spec import Problem


def run_problem(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    x, out, reduction = inputs[0], outputs[0], problem.reduction
    match problem.op:
        case "all_reduce":
            collectives.all_reduce(x, op=reduction, out=out)
        case "all_gather":
            collectives.all_gather(x, out=out)
        case "reduce_scatter":
            collectives.reduce_scatter(x, op=reduction, out=out)
        case "all_to_all":
            collectives.all_to_all(x, out=out)
        case "all_to_all_v":
            row = row_numel(problem)
            send, recv = ([count // row for count in counts.tolist()] for counts in inputs[1:])
            max_count = problem.numel // row
            collectives.all_to_all_v(x.view(-1, row), send, recv, max_count=max_count, out=out.view(-1, row))
        case "all_reduce_bias":
            collectives.all_reduce_bias(x, inputs[1], out=out)
        case "all_reduce_rms_norm":
            collectives.run_rms_norm(problem, inputs, outputs)
        case "ep_dispatch":
            experts.run_dispatch(problem, inputs, outputs)
        case "ep_combine":
            experts.run_combine(problem, inputs, out)
        case _:
            _run_gemm(problem, inputs, outputs)


def _run_gemm(problem: Problem, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    a, b, bias, scale_a, scale_b = operands_of(problem, inputs)
    b, out, dtype = b.t() if wanted_of(problem).nk else b, outputs[0], outputs[0].dtype
    if problem.op == "gemm_rs":
        gemm.gemm_rs(a, b, op=problem.reduction, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, out=out)
    elif problem.op == "gemm_ar":
        gemm.gemm_ar(a, b, bias=bias, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, out=out)
    elif len(outputs) == 1:
        gemm.ag_gemm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, out=out)
    else:
        gemm.ag_gemm_gathered((a, b, scale_a, scale_b, *outputs), dtype, world._default_pg, "default", None)
