"""dcp_combine: partial attention outputs of all ranks, exchanged by heads and merged by their LSEs.

Under decode context parallelism every rank has a part of the keys and values of all heads. It computes x [T, H, D] and
lse [T, H] (fp32) from its part; rank r of n is left the result of heads r · H/n to (r + 1) · H/n − 1. `merge` has the
arithmetic. Inputs are x and lse, outputs out [T, H/n, D] and lse [T, H/n]. The canonical shape is (T, H, D), the layout
is the base of the LSEs, `e` or `2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.common.feasibility import Launch, packets_a_block, refuse_kernels
from tunedcomm.kernels.common.in_order import InOrderVariant
from tunedcomm.kernels.common.launch import Argument
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.reference import SUM_DTYPES, draw, generator_of
from tunedcomm.kernels.common.variant import KernelVariant, LibraryVariant, Workspace
from tunedcomm.kernels.dcp_combine.merge import merged, merged_fast
from tunedcomm.metrics import shard_factor
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

BASES = ("e", "2")
_WARP = 32


def rows_of_rank(problem: Problem) -> tuple[int, int, int]:
    """(T, H/n, D), the shape of a rank's result."""
    tokens, heads, head_dim = problem.shape
    return tokens, heads // problem.world_size, head_dim


def of_rank(values: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The heads that rank `rank` is left, of [T, H, …]."""
    part: torch.Tensor = values.unflatten(1, (world_size, -1))[:, rank]
    return part


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`random`: one LSE of eight is NaN or infinite on some ranks, with NaN in x. `integers`: all weigh the same."""
    import torch

    shape, rows = problem.shape, problem.shape[:2]
    generator = generator_of(rank, seed, device)
    x = draw(shape, problem.dtype, generator, kind)
    shared = generator_of(-1, seed, device)
    lse = torch.randint(-8, 9, rows, generator=shared, dtype=torch.int32, device=device).float()
    if kind != "random":
        return x, lse
    counted = torch.randint(0, problem.world_size, rows, generator=shared, dtype=torch.int32, device=device)
    lse = lse + 3 * torch.randn(rows, generator=generator, dtype=torch.float32, device=device)
    drawn = torch.rand(rows, generator=generator, dtype=torch.float32, device=device)
    left_out = (drawn < 0.125) & (counted != rank)
    bad = torch.where(drawn < 0.04, float("nan"), torch.where(drawn < 0.08, float("inf"), float("-inf")))
    return x.masked_fill_(left_out.unsqueeze(-1), float("nan")), torch.where(left_out, bad, lse)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    shape = rows_of_rank(problem)
    out = torch.empty(shape, dtype=getattr(torch, problem.dtype), device=device)
    return out, torch.empty(shape[:2], dtype=torch.float32, device=device)


def _stacked(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' outputs and LSEs of the heads of `rank`."""
    import torch

    n, shape = problem.world_size, problem.shape
    parts = torch.stack([of_rank(x.view(shape), rank, n) for x, _ in inputs])
    return parts, torch.stack([of_rank(lse.view(shape[:2]), rank, n) for _, lse in inputs])


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    return merged_fast(*_stacked(problem, inputs, rank), problem.layout, torch.float64)


def _exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    return merged(*_stacked(problem, inputs, rank), problem.layout)


def _mask(problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """Zeros in what a rank without a finite LSE passes."""
    if not inputs:
        return inputs, outputs
    x, lse = inputs
    left_out = ~lse.isfinite()
    return (x.masked_fill(left_out.unsqueeze(-1), 0), lse.masked_fill(left_out, 0)), outputs


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    if backend != "cuda":
        return [(1, 24, 64), (16, 24, 128), (64, 24, 512)]
    return [*((1 << power, 32, 128) for power in range(0, 9, 2)), *((1 << power, 32, 512) for power in range(0, 9, 2))]


def _model_shapes(shard: Any) -> list[tuple[int, ...]]:
    """All heads of all tokens; latent attention merges in the latent space."""
    model = shard.model
    return [(shard.tokens, model.num_heads, model.head_dim if model.latent is None else model.latent.kv_lora_rank)]


def check(problem: Problem) -> None:
    """Refuse heads that the ranks cannot share equally.

    Raises:
        UnsupportedInputError: says what to pass.
    """
    heads, head_dim = problem.shape[1:]
    if heads < 1 or heads % problem.world_size or head_dim < 1:
        raise UnsupportedInputError(
            f"dcp_combine of {heads} heads of {head_dim} elements on {problem.world_size} ranks; the number of heads "
            f"must be a multiple of {problem.world_size}, and a head needs an element"
        )


register_op(
    OpSpec(
        name="dcp_combine",
        summary="every rank gets its heads of all ranks' partial attention, merged by LSE",
        reductions=(),
        dtypes=SUM_DTYPES,
        shape_help="tokens x heads of all ranks x head size, e.g. 64x32x128",
        rank_of_shape=3,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of a sum in fp32 that is rounded once.
        tolerance={"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-6},
        message_bytes=lambda problem: problem.nbytes // problem.world_size,
        busbw_factor=shard_factor,
        default_shapes=_default_shapes,
        ordered_reference=_exact,
        layouts=BASES,
        related_forms=lambda problem: (BASES, ()),
        check=check,
        mask_unspecified=_mask,
        is_per_rank=True,
        model_shapes=_model_shapes,
    )
)


def exchange_by_library(problem: Problem, inputs: tuple[Any, ...], group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [n, T, H/n, D] and LSEs [n, T, H/n] of this rank's heads from every rank."""
    import torch
    import torch.distributed as dist

    exchange: Any = dist.all_to_all_single

    def exchanged(values: Any, shape: tuple[int, ...]) -> torch.Tensor:
        sent = values.view(shape).unflatten(1, (problem.world_size, -1)).transpose(0, 1).contiguous()
        got = torch.empty_like(sent)
        exchange(got.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=group)
        return got

    return exchanged(inputs[0], problem.shape), exchanged(inputs[1], problem.shape[:2])


def write_results(found: tuple[torch.Tensor, ...], outputs: tuple[Any, ...]) -> None:
    """Copy (out, lse) to the outputs of a launch, of whatever shape those are."""
    for output, values in zip(outputs, found, strict=True):
        output.view(values.shape).copy_(values)


class Library(LibraryVariant, registered=True):
    """Two exchanges, then PyTorch's exponential and sum. Graph-safe on NCCL."""

    op = "dcp_combine"
    summary = "all_to_all_single of NCCL (gloo on CPUs), and PyTorch operators that merge"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            parts, lses = exchange_by_library(problem, inputs, workspace.group)
            write_results(merged_fast(parts, lses, problem.layout, torch.float32), outputs)

        return run


class InOrder(InOrderVariant, registered=True):
    op = "dcp_combine"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            write_results(merged(*exchange_by_library(problem, inputs, workspace.group), problem.layout), outputs)

        return run


class CombineVariant(KernelVariant):
    """A variant whose kernel takes `(x, lse, out, lse_out, total, …)`; its threads share a rank's result.

    An LSE goes with each group of packets that are one row's and one warp's: with as many as divide a row and a warp.
    """

    op = "dcp_combine"
    packet_bytes = PACKET_BYTES + 4  # with an LSE, which at most is one a packet

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        if reason := refuse_kernels(problem, limits, SUM_DTYPES, ("",)):
            return reason
        head_dim = problem.shape[2]
        if head_dim * ITEMSIZE[problem.dtype] % PACKET_BYTES:
            return f"heads of {head_dim} {problem.dtype} are not whole packets of {PACKET_BYTES} bytes"
        return None

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        row = problem.shape[2] * ITEMSIZE[problem.dtype] // PACKET_BYTES
        return {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": problem.dtype,
            "BASE": problem.layout,
            "HEADS": rows_of_rank(problem)[1],
            "ROW": row,
            "GROUP": min(row & -row, _WARP),
            "BLOCK": packets_a_block(config),
        }

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        return (None, None, None, None, self.work_packets(problem))

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in (*inputs, *outputs))

    def work_packets(self, problem: Problem) -> int:
        return packets_of(problem.nbytes // problem.world_size)
