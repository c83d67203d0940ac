"""library_tuned: the library's GEMM (cuBLAS on GPUs), then one of this library's own ordered reduce_scatter kernels.

The product goes into a tensor that the plan holds; `algorithm` names the reduce_scatter variant. Best at decode sizes,
where a GEMM is too short to hide anything under.

Numerics: library (the products; the sums are ordered). Graph-safe. Lane rules: those of the reduce_scatter kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch, closest
from tunedcomm.kernels.gemm.problem import DTYPES, operands_of, out_itemsize, product, wanted_of
from tunedcomm.kernels.gemm.rs_common import rows_of
from tunedcomm.kernels.reduce_scatter.lamport import LAMPORT, lamport_kernel
from tunedcomm.kernels.reduce_scatter.one_shot import ONE_SHOT, one_shot_kernel
from tunedcomm.kernels.reduce_scatter.push import PUSH, push_kernel
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["LIBRARY_TUNED"]

_BY_NAME = {"lamport": LAMPORT, "one_shot": ONE_SHOT, "push": PUSH}
_LAMPORT_BYTES = 1 << 20  # of a rank's result: above it push is tried first
_SPLIT_BLOCKS = 32  # from so many on, half of push's blocks push and the others sum
_SPACE = Space(
    {
        "algorithm": Choice(*_BY_NAME),
        "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
        "num_warps": Choice(2, 4, 8, 16),
        "num_chunks": Choice(1, 4, 16, 64),
        "launch_pdl": Choice(False, True),
    }
)


def _scattering(problem: Problem, config: Config) -> tuple[Variant, Problem, dict[str, Value]]:
    """The reduce_scatter that is asked for: variant, problem, config."""
    name, shape = str(config["algorithm"]), (rows_of(problem) * problem.shape[1],)
    shared = {"num_blocks": config["num_blocks"], "num_warps": config["num_warps"]}
    plain = replace(problem, op="reduce_scatter", shape=shape, dtype=wanted_of(problem).dtype, input_kind="plain")
    asked = replace(plain, layout="", scaling="")
    if name == "lamport":
        return LAMPORT, asked, {**shared, "launch_pdl": config["launch_pdl"]}
    if name == "one_shot":
        return ONE_SHOT, asked, {**shared, "items": 1}
    split = int(config["num_chunks"]) > 1 and int(config["num_blocks"]) >= _SPLIT_BLOCKS
    return PUSH, asked, {**shared, "items": 1, "num_chunks": config["num_chunks"], "split": split}


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    if problem.dtype not in DTYPES:
        return f"kernels are tuned for {', '.join(DTYPES)}; {problem.dtype} goes to the library"
    if problem.shape[0] % problem.world_size:
        return f"{problem.shape[0]} rows are not the same number for each of {problem.world_size} ranks"
    if problem.shape[2] == 0:
        return "there is nothing to do"
    if config["algorithm"] != "lamport" and config["launch_pdl"]:
        return f"{config['algorithm']} is not launched early: only launch_pdl=False"
    if config["algorithm"] != "push" and int(config["num_chunks"]) > 1:
        return f"{config['algorithm']} has no chunks: only num_chunks=1"
    variant, asked, inner = _scattering(problem, config)
    return variant.infeasible(asked, inner, limits)


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    _, asked, _ = _scattering(problem, {"algorithm": "one_shot", "num_blocks": 1, "num_warps": 4})
    best = "lamport" if asked.nbytes <= _LAMPORT_BYTES or limits.backend == "host" else "push"
    usual = _BY_NAME[best].default(asked, limits)
    wish: dict[str, Any] = {"algorithm": best, "num_chunks": 1, "launch_pdl": False}
    wish |= {name: usual[name] for name in _SPACE.names if name in usual}
    return closest(wish, _SPACE, problem, limits, _infeasible)


def _rounds(problem: Problem, config: Config) -> int:
    variant, asked, inner = _scattering(problem, config)
    return variant.num_rounds(asked, inner)


def _requests(problem: Problem, config: Config) -> Iterable[Any]:
    variant, asked, inner = _scattering(problem, config)
    return variant.compile_requests(asked, inner)


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch

    variant, asked, inner = _scattering(problem, config)
    scatter = variant.bind(asked, inner, workspace.reporting_as(problem))
    rows, columns = problem.shape[:2]
    nbytes = rows * columns * out_itemsize(problem)
    room = workspace.scratch(problem.mode, nbytes)[:nbytes]
    partial = room.view(getattr(torch, wanted_of(problem).dtype)).view(rows, columns)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        product(problem, operands_of(problem, inputs), partial)
        scatter((partial,), outputs, stream)

    return run


LIBRARY_TUNED = register_variant(
    Variant(
        op="gemm_rs",
        name="library_tuned",
        numerics="library",
        summary="cuBLAS, then tunedcomm's own ordered reduce_scatter; best at decode sizes",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        num_rounds=_rounds,
        kernels=(lamport_kernel, one_shot_kernel, push_kernel),
        compile_requests=_requests,
    )
)
