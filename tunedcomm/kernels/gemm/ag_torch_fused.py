"""torch_fused: PyTorch's `symm_mem.fused_all_gather_matmul`, or its scaled form.

The operators return memory of their own, so the result is copied; what measures PyTorch itself leaves that out.
`native` asks for the form with a persistent GEMM that waits for progress signals, which the operator otherwise chooses
by a rule of its own.

Numerics: library. Graph-safe. A lost peer leaves it spinning, so it only runs when it is forced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.gemm.problem import Operands, operands_of, usual_dtype, wanted_of
from tunedcomm.space import Choice, Config, Space, Value
from tunedcomm.spec import Limits, Problem, Variant, register_variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = ["TORCH_FUSED"]

_NATIVE_ROWS = 128  # of its only tile: a shard is whole tiles
_SPACE = Space({"native": Choice(False, True)})


def _infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
    wanted = wanted_of(problem)
    if limits.backend != "cuda" or not limits.symmetric:
        return "PyTorch's symmetric-memory operators need GPUs that address each other's memory"
    if problem.numel == 0 or problem.shape[0] % problem.world_size:
        return f"PyTorch's operators want as many rows on each of {problem.world_size} ranks, not {problem.shape[0]}"
    if problem.dtype.startswith("float8") != bool(problem.scaling):
        return "PyTorch's operators scale fp8 operands and no others"
    if not problem.scaling and wanted.dtype != usual_dtype(problem.dtype):
        return f"PyTorch's operator returns {problem.dtype}, not {wanted.dtype}"
    if problem.scaling and (problem.shape[1] % 16 or problem.shape[2] % 16):
        return f"PyTorch multiplies fp8 matrices by whole 16 rows and columns, not {problem.shape[1:]}"
    if not config["native"]:
        return None
    if problem.dtype != "bfloat16":
        return f"PyTorch's native operator multiplies bfloat16, not {problem.dtype}"
    rows, columns, depth = problem.shape[0] // problem.world_size, *problem.shape[1:]
    if rows % _NATIVE_ROWS or columns % 8 or depth % 8:
        return (
            f"PyTorch's native operator wants shards of whole {_NATIVE_ROWS} rows, and N and K whole 8, not "
            f"{rows}x{columns}x{depth}"
        )
    return _lack_of_native()


def _lack_of_native() -> str | None:
    """Why this PyTorch has no native operator, or None."""
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    if hasattr(symm_mem, "_fused_all_gather_matmul_native") and hasattr(torch.ops.symm_mem, "_async_input_mm"):
        return None
    return f"PyTorch {torch.__version__} has no native form of the operator"


def _default(problem: Problem, limits: Limits) -> dict[str, Value]:
    del problem, limits
    return {"native": False}


def _scaled(problem: Problem, operands: Operands, name: str, out: Any) -> tuple[Any, Any]:
    """(gathered A, result) of the scaled operator, which multiplies by columns only."""
    import torch

    b = operands.b.T if wanted_of(problem).nk else operands.b.T.contiguous().T
    gathered, results = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        operands.a, [b], operands.scale_a, [operands.scale_b], 0, name, [None], [None], [out.dtype], [False]
    )
    return gathered, results[0]


def _bind(problem: Problem, config: Config, workspace: Workspace) -> Launch:
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    name, wanted = workspace.group.group_name, wanted_of(problem)

    def compute(operands: Operands, out: Any) -> tuple[Any, Any]:
        if problem.scaling:
            return _scaled(problem, operands, name, out)
        b = operands.b.T if wanted.nk else operands.b
        if config["native"]:
            found: tuple[Any, Any] = symm_mem._fused_all_gather_matmul_native(operands.a, b, name)
            return found
        gathered, results = torch.ops.symm_mem.fused_all_gather_matmul(
            operands.a, [b], 0, name, return_A=wanted.gathered
        )
        return gathered, results[0]

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        del stream
        gathered, result = compute(operands_of(problem, inputs), outputs[0])
        outputs[0].copy_(result)
        if wanted.gathered:
            outputs[1].copy_(gathered)

    return run


TORCH_FUSED = register_variant(
    Variant(
        op="ag_gemm",
        name="torch_fused",
        numerics="library",
        summary="PyTorch's fused_all_gather_matmul",
        space=_SPACE,
        infeasible=_infeasible,
        default=_default,
        bind=_bind,
        num_blocks=lambda problem, config: -1,
        bounded=False,
    )
)
