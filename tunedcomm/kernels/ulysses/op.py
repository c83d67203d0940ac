"""ulysses_scatter and ulysses_gather: all_to_all between parts of the sequence and parts of the heads.

With n ranks, S tokens, and W = heads · head size elements a token:

    ulysses_scatter   x [B, S/n, W] of its tokens → out [B, S, W/n] of its heads
    ulysses_gather    x [B, S, W/n] of its heads  → out [B, S/n, W] of its tokens

The canonical shape of both is (S, B, W), of the whole tensor. What rank i sends rank j, a *share*, is [B, S/n, W/n]:
tokens of one rank, heads of the other.

**Units.** A share lies in either tensor in pieces of equal size, a *unit* each: in [B, S/n, W] a unit is the W/n
elements of a token, in [B, S, W/n] it is the S/n · W/n elements of a batch. Between two units of one rank's share lie
those of the others. So element p of the share of rank j lies at p + (p div unit · (n − 1) + j) · unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.all_to_all.host import HostOneShot
from tunedcomm.kernels.common.feasibility import Launch, packets_a_block
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.launch import Argument
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.common.reference import draw_any
from tunedcomm.kernels.common.variant import LibraryVariant, MoveVariant, Workspace
from tunedcomm.metrics import shard_factor
from tunedcomm.space import Config, Value
from tunedcomm.spec import DTYPES, ITEMSIZE, Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

SCATTER, GATHER = "ulysses_scatter", "ulysses_gather"


def shapes_of(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a rank's input and output."""
    (tokens, batch, width), n = problem.shape, problem.world_size
    by_tokens, by_heads = (batch, tokens // n, width), (batch, tokens, width // n)
    return (by_tokens, by_heads) if problem.op == SCATTER else (by_heads, by_tokens)


def share_bytes(problem: Problem) -> int:
    """Bytes that a rank sends another one."""
    (tokens, batch, width), n = problem.shape, problem.world_size
    return batch * (tokens // n) * (width // n) * ITEMSIZE[problem.dtype]


def shares_of(values: torch.Tensor, shape: tuple[int, ...], problem: Problem) -> torch.Tensor:
    """An input or output as its shares, [n, B, S/n, W/n], a view."""
    n, (batch, tokens, width) = problem.world_size, shape
    if tokens == problem.shape[0]:  # all of them
        return values.view(batch, n, tokens // n, width).transpose(0, 1)
    return values.view(batch, tokens, n, width // n).movedim(2, 0)


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
    shape = shapes_of(problem)[0]
    return (draw_any(problem, problem.numel // problem.world_size, rank, seed, kind, device).view(shape),)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    return (torch.empty(shapes_of(problem)[1], dtype=getattr(torch, problem.dtype), device=device),)


def _exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    shape, result = shapes_of(problem)
    out = torch.empty(result, dtype=inputs[0][0].dtype, device=inputs[0][0].device)
    shares_of(out, result, problem).copy_(torch.stack([shares_of(x, shape, problem)[rank] for (x,) in inputs]))
    return (out,)


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    if backend != "cuda":
        return [(24, 1, 384), (240, 1, 1536), (960, 2, 1536)]
    return [(1 << power, 1, 4096) for power in range(8, 16)]


def _model_shapes(shard: Any) -> list[tuple[int, ...]]:
    return [(shard.padded_tokens, 1, shard.model.num_heads * shard.model.head_dim)]


def check(problem: Problem) -> None:
    """Refuse tokens and heads that the ranks cannot share equally.

    Raises:
        UnsupportedInputError: says what to pass.
    """
    tokens, _, width = problem.shape
    if tokens % problem.world_size or width % problem.world_size:
        raise UnsupportedInputError(
            f"{problem.op} of {tokens} tokens of {width} elements on {problem.world_size} ranks; both must be "
            f"multiples of {problem.world_size}: pad them"
        )


def _register(name: str, summary: str) -> None:
    register_op(
        OpSpec(
            name=name,
            summary=summary,
            reductions=(),
            dtypes=DTYPES,
            shape_help="tokens of all ranks x batch x elements of a token's heads, e.g. 8192x1x4096",
            rank_of_shape=3,
            make_inputs=_make_inputs,
            make_outputs=_make_outputs,
            reference=lambda *asked: (_exact(*asked)[0].double(),),
            tolerance=dict.fromkeys(DTYPES, 0.0),
            message_bytes=share_bytes,
            busbw_factor=shard_factor,
            default_shapes=_default_shapes,
            ordered_reference=_exact,
            check=check,
            is_per_rank=True,
            model_shapes=_model_shapes,
        )
    )


_register(SCATTER, "every rank has some tokens of all heads, and gets all tokens of its heads")
_register(GATHER, "every rank has all tokens of its heads, and gets its tokens of all heads")


class UlyssesVariant(MoveVariant):
    """A variant whose kernel takes `(x, out, total, send_unit, recv_unit, …)`, in packets; threads share a share."""

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        if reason := super().refuse(problem, limits):
            return reason
        row = problem.shape[2] // problem.world_size * ITEMSIZE[problem.dtype]
        if row % PACKET_BYTES or share_bytes(problem) == 0:
            return f"{row} bytes of a token for each rank are not whole packets of {PACKET_BYTES} bytes"
        return None

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        total = self.work_packets(problem)
        of_token = problem.shape[2] // problem.world_size * ITEMSIZE[problem.dtype] // PACKET_BYTES
        of_batch = total // max(problem.shape[1], 1)
        units = (of_token, of_batch) if problem.op == SCATTER else (of_batch, of_token)
        return (None, None, total, *units)

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {"WORLD_SIZE": problem.world_size, "BLOCK": packets_a_block(config)}

    def work_packets(self, problem: Problem) -> int:
        return share_bytes(problem) // PACKET_BYTES


class ScatterLibrary(LibraryVariant, registered=True):
    """Copies into the order of shares before and behind the exchange. Graph-safe on NCCL."""

    op = SCATTER
    numerics = "ordered"  # bits are moved
    summary = "all_to_all_single of NCCL (gloo on CPUs) between two copies"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        exchange: Any = dist.all_to_all_single
        shape, result = shapes_of(problem)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            sent = shares_of(inputs[0], shape, problem).contiguous()
            got = torch.empty_like(sent)
            exchange(got.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=workspace.group)
            shares_of(outputs[0], result, problem).copy_(got)

        return run


class GatherLibrary(ScatterLibrary, registered=True):
    op = GATHER


class ScatterHost(HostComposed, registered=True):
    """Copies into the order of shares before and behind all_to_all's host_one_shot. Numerics: ordered."""

    op = SCATTER
    summary = "CPU tensors: an exchange in shared memory between two copies"
    algorithms = {"one_shot": HostOneShot.variant}  # noqa: RUF012 - never changed

    def collective_problem(self, problem: Problem) -> Problem:
        return replace(problem, shape=(share_bytes(problem) // ITEMSIZE[problem.dtype],), input_kind="plain")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        exchange, (shape, result) = self.collectives(problem, config)[0].bind(workspace), shapes_of(problem)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            sent = shares_of(inputs[0], shape, problem).contiguous()
            got = torch.empty_like(sent)
            exchange((sent,), (got,), stream)
            shares_of(outputs[0], result, problem).copy_(got)

        return run


class GatherHost(ScatterHost, registered=True):
    op = GATHER
