"""library: NCCL on GPUs, gloo on CPUs; torch_one_shot and torch_two_shot: PyTorch's symmetric-memory operators.

library takes whatever the backend takes. Numerics: library. Graph-safe on NCCL.

PyTorch's operators sum in fp32 in an order of their own (numerics: library). Graph-safe. A lost peer leaves them
spinning, so they only run when they are forced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.common.variant import LibraryVariant
from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tunedcomm.symm.workspace import Workspace


def library_reduction(reduction: str, group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    """A function that reduces a tensor in place over `group`, on the current stream."""
    import torch.distributed as dist

    ops = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    all_reduce, op = dist.all_reduce, ops[reduction]

    def reduce(out: torch.Tensor) -> None:
        all_reduce(out, op, group=group)

    def average(out: torch.Tensor) -> None:
        if out.is_cuda:
            all_reduce(out, dist.ReduceOp.AVG, group=group)
            return
        all_reduce(out, op, group=group)
        out.div_(dist.get_world_size(group))  # gloo has no average

    return average if reduction == "avg" else reduce


class Library(LibraryVariant):
    op = "all_reduce"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce = library_reduction(problem.reduction, workspace.group)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            del stream
            out = outputs[0]
            if out is not inputs[0]:
                out.copy_(inputs[0])
            reduce(out)

        return run


def staging_of(problem: Problem, workspace: Workspace) -> torch.Tensor:
    """The lane's staging, made known to PyTorch under the group's own name; collective."""
    import torch
    import torch.distributed._symmetric_memory as symm_mem

    staging = workspace.staging(problem.mode, getattr(torch, problem.dtype), problem.numel)
    symm_mem.rendezvous(workspace.buffers[problem.mode].local, workspace.group)
    return staging


def refuse_torch(problem: Problem, limits: Limits, *, granularity: int) -> str | None:
    """Return why PyTorch's operators cannot run `problem`, or None; `granularity` divides the message in bytes."""
    if limits.backend != "cuda" or not limits.symmetric:
        return "PyTorch's symmetric-memory operators need GPUs that address each other's memory"
    if problem.dtype not in ("bfloat16", "float32"):
        return f"PyTorch's operators sum bfloat16 and float32, not {problem.dtype}"
    if problem.reduction != "sum":
        return f"PyTorch's operators do sum, not {problem.reduction}"
    if problem.world_size not in (2, 4, 8):
        return f"PyTorch's operators serve 2, 4 or 8 ranks, not {problem.world_size}"
    if problem.numel == 0 or problem.nbytes % granularity:
        return f"PyTorch's operators want a multiple of {granularity} bytes, not {problem.nbytes}"
    if problem.input_kind == "plain" and problem.nbytes + PACKET_BYTES > limits.staging_bytes:
        return f"{problem.nbytes} bytes exceed the staging of {limits.staging_bytes} bytes (TUNEDCOMM_WORKSPACE_MIB)"
    return None


class _TorchVariant(LibraryVariant):
    op = "all_reduce"
    bounded = False


class TorchOneShot(_TorchVariant):
    name = "torch_one_shot"
    summary = "PyTorch's symmetric-memory one-shot"

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.nbytes > 8 * limits.one_shot_bytes:
            return f"one-shots are out of the question at {problem.nbytes} bytes"
        return refuse_torch(problem, limits, granularity=16)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        name = workspace.group.group_name
        if problem.input_kind == "symmetric" and not problem.in_place:

            def run_symmetric(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
                del stream
                torch.ops.symm_mem.one_shot_all_reduce_out(inputs[0], "sum", name, outputs[0])

            return run_symmetric
        staging = staging_of(problem, workspace)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            del stream
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(
                staging, inputs[0].view(-1), "sum", name, outputs[0].view(-1)
            )

        return run


class TorchTwoShot(_TorchVariant):
    name = "torch_two_shot"
    summary = "PyTorch's symmetric-memory two-shot"

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return refuse_torch(problem, limits, granularity=16 * problem.world_size)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        name = workspace.group.group_name
        if problem.input_kind == "symmetric" and problem.in_place:

            def run_in_place(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
                del outputs, stream
                torch.ops.symm_mem.two_shot_all_reduce_(inputs[0], "sum", name)

            return run_in_place
        staging = staging_of(problem, workspace)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            del stream
            staging.copy_(inputs[0].view(-1))
            torch.ops.symm_mem.two_shot_all_reduce_(staging, "sum", name)
            outputs[0].view(-1).copy_(staging)

        return run


LIBRARY = Library().register()
TORCH_ONE_SHOT = TorchOneShot().register()
TORCH_TWO_SHOT = TorchTwoShot().register()
