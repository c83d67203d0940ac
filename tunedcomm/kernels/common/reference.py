"""Inputs that every rank can make again, sums to compare with and sizes to sweep, for the specs of several ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.fp8 import FP8_WIRE, INT8_WIRE, WIRES, sent
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.metrics import all_reduce_factor, shard_factor
from tunedcomm.spec import DTYPES, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

SUM_DTYPES = ("bfloat16", "float16", "float32")  # that kernels sum
WIDE = "float32"  # layout of reductions whose results are fp32 sums of 16-bit floats, never rounded between
_KIB, _MIB = 1 << 10, 1 << 20
# ‖out − ref‖ / ‖ref‖ of random values that were quantised twice.
WIRE_TOLERANCE = {FP8_WIRE: 5e-2, INT8_WIRE: 1.5e-2}


def generator_of(rank: int, seed: int, device: Any) -> torch.Generator:
    """Random numbers of one rank, the same wherever they are drawn on that kind of device."""
    import torch

    return torch.Generator(device=device).manual_seed((seed * 1_000_003 + rank * 7919 + 17) % 2**62)


def draw(shape: tuple[int, ...], dtype_name: str, generator: torch.Generator, kind: str) -> torch.Tensor:
    """Values of an op that sums, on the generator's device; `kind` as in `OpSpec.make_inputs`."""
    import torch

    dtype, device = getattr(torch, dtype_name), generator.device
    if kind == "integers":
        # Sums of up to 8 of these are exact in 8 bits of mantissa, and so is their mean for powers of two.
        return torch.randint(-8, 9, shape, generator=generator, device=device, dtype=torch.int32).to(dtype)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def reduced(parts: Sequence[torch.Tensor], reduction: str, dtype: torch.dtype) -> torch.Tensor:
    """All ranks' `parts` reduced in rank order in `dtype`, sums from +0.0.

    The divisor of a mean is a tensor on purpose: PyTorch divides by numbers by multiplying with their reciprocals on
    GPUs.
    """
    import torch

    if reduction in ("max", "min"):
        pick = torch.maximum if reduction == "max" else torch.minimum
        total = parts[0].to(dtype)
        for part in parts[1:]:
            total = pick(total, part.to(dtype))
        return total
    total = torch.zeros_like(parts[0], dtype=dtype)
    for part in parts:
        total += part.to(dtype)
    return total / torch.full_like(total, len(parts)) if reduction == "avg" else total


def outputs_like(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    """The one output of an op that returns the problem's shape and dtype, or the dtype that the layout `WIDE` names."""
    import torch

    dtype = WIDE if problem.layout == WIDE else problem.dtype
    return (torch.empty(problem.shape, dtype=getattr(torch, dtype), device=device),)


def outputs_of_ranks(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    """The one output of an op that returns the problem's number of elements from every rank."""
    import torch

    numel = problem.numel * problem.world_size
    return (torch.empty(numel, dtype=getattr(torch, problem.dtype), device=device),)


def ordered_sum(parts: Sequence[torch.Tensor], reduction: str, *, wide: bool = False) -> torch.Tensor:
    """The bits that `ordered` kernels give: fp32 in rank order, rounded once, or never if `wide`."""
    import torch

    # A mean that rounds to −0.0 is written as +0.0.
    return reduced(parts, reduction, torch.float32).to(torch.float32 if wide else parts[0].dtype) + 0.0


def with_extras(s: torch.Tensor, *extras: torch.Tensor | None) -> torch.Tensor:
    """A rounded sum plus a bias and a residual, from left to right in fp32 (fp64 for fp64), rounded once more."""
    import torch

    total = s.to(torch.promote_types(s.dtype, torch.float32))
    for extra in extras:
        if extra is not None:
            total = total + extra
    return total.to(s.dtype)


def weighted_sum(parts: Sequence[torch.Tensor], weights: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Σ weights[:, k] · parts[k] over valid k, in order, from +0.0 in fp32 (or fp64), rounded once."""
    import torch

    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = torch.zeros_like(parts[0], dtype=wide)
    for k, part in enumerate(parts):
        more = total + weights[:, k, None].to(wide) * part.to(wide)
        total = torch.where(valid[:, k, None], more, total)
    return total.to(parts[0].dtype)


def powers_of_two(
    backend: str, itemsize: int, *, largest_mib: int, host_largest: int = 4 * _MIB
) -> list[tuple[int, ...]]:
    """Sizes from 1 KiB on, in elements.

    By 2 up to `largest_mib` on GPUs; up to `host_largest` bytes on the host, by 8 and from 4 MiB on by 4.
    """
    size, largest = _KIB, largest_mib * _MIB if backend == "cuda" else host_largest
    sizes: list[tuple[int, ...]] = []
    while size <= largest:
        sizes.append((size // itemsize,))
        size *= 2 if backend == "cuda" else 8 if size < 4 * _MIB else 4
    return sizes


def hidden_states(shard: Any) -> list[tuple[int, ...]]:
    """`OpSpec.model_shapes` of the hidden states of all tokens, as one row of elements."""
    return [(shard.tokens * shard.model.hidden_size,)]


def rank_hidden_states(shard: Any) -> list[tuple[int, ...]]:
    """`OpSpec.model_shapes` of the hidden states of one rank's share of the tokens, as one row of elements."""
    return [(shard.tokens_per_rank * shard.model.hidden_size,)]


def hidden_rows(shard: Any) -> list[tuple[int, ...]]:
    """`OpSpec.model_shapes` of the hidden states of all tokens, one row a token."""
    return [(shard.tokens, shard.model.hidden_size)]


def row_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    """Matrices of 1 to 4096 rows on GPUs, and a few small ones on the host."""
    if backend != "cuda":
        return [(1, 256), (3, 256), (16, 1024)]
    return [(1 << power, 8192) for power in range(13)]


def register_reduction(
    name: str, summary: str, *, shape_help: str, largest_mib: int, scatters: bool, host_largest: int = 4 * _MIB
) -> OpSpec:
    """Register an op that reduces all ranks' tensors element by element.

    Args:
        name, summary, shape_help: as in `OpSpec`.
        largest_mib: the largest message that is swept on GPUs.
        scatters: the result is the rank's chunk of the sum and not the whole.
        host_largest: bytes of the largest message that is swept on the host.
    """

    def make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor]:
        numel = problem.numel * (problem.world_size if scatters else 1)
        return (draw((numel,), problem.dtype, generator_of(rank, seed, device), kind),)

    def parts(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> list[torch.Tensor]:
        first = rank * problem.numel if scatters else 0
        return [values[first : first + problem.numel] for (values,) in inputs]

    def reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
        import torch

        return (reduced(parts(problem, inputs, rank), problem.reduction, torch.float64),)

    def exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
        return (ordered_sum(parts(problem, inputs, rank), problem.reduction, wide=problem.layout == WIDE),)

    def quantized(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> list[tuple[torch.Tensor]]:
        import torch

        dtype = inputs[0][0].dtype
        arrived = [sent(part, problem.scaling) for part in parts(problem, inputs, rank)]
        total = reduced(arrived, problem.reduction, torch.float32)
        totals = [total] if scatters else [total, sent(total, problem.scaling)]
        return [(total.to(dtype),) for total in totals]

    def check(problem: Problem) -> None:
        check_wire(problem)
        linear = problem.reduction in ("sum", "avg") and not problem.in_place
        if problem.layout == WIDE and not (linear and problem.dtype in ("bfloat16", "float16")):
            raise ValueError(f"{problem}: fp32 results are sums and means of bfloat16 and float16, not in place")
        if problem.layout and problem.scaling:
            raise ValueError(f"{problem}: sums of what travelled quantised are rounded to the payload's dtype")

    return register_op(
        OpSpec(
            name=name,
            summary=summary,
            reductions=("sum", "avg", "max", "min"),
            dtypes=SUM_DTYPES,
            shape_help=shape_help,
            rank_of_shape=1,
            make_inputs=make_inputs,
            make_outputs=outputs_like,
            reference=reference,
            # ‖out − ref‖ / ‖ref‖ of a sum of up to 8 ranks: a few roundings in the payload's dtype.
            tolerance={"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6, "float64": 1e-14, **WIRE_TOLERANCE},
            message_bytes=lambda problem: problem.nbytes,
            busbw_factor=shard_factor if scatters else all_reduce_factor,
            default_shapes=functools.partial(powers_of_two, largest_mib=largest_mib, host_largest=host_largest),
            ordered_reference=exact,
            quantized_references=quantized,
            in_place=not scatters,
            layouts=("", WIDE),
            scalings=("", *WIRES),
            check=check,
            is_per_rank=scatters,
            model_shapes=rank_hidden_states if scatters else hidden_states,
        )
    )


def check_wire(problem: Problem) -> None:
    """Refuse a wire for what is not made of floats, or not linear.

    Raises:
        ValueError: says so.
    """
    if problem.scaling and (problem.dtype not in SUM_DTYPES or problem.reduction not in ("", "sum", "avg")):
        raise ValueError(f"{problem}: sums, means and copies of {', '.join(SUM_DTYPES)} travel quantised")


def draw_any(problem: Problem, numel: int, rank: int, seed: int, kind: str, device: Any) -> torch.Tensor:
    """Values of an op that moves them; `integers` come with a few words that the packet protocol has to disguise."""
    import torch

    dtype, generator = getattr(torch, problem.dtype), generator_of(rank, seed, device)
    if kind == "random" and dtype.is_floating_point:
        return torch.randn(numel, generator=generator, device=device, dtype=torch.float32).to(dtype)
    most = 17 if dtype.is_floating_point else 128
    values = torch.randint(0, most, (numel,), generator=generator, device=device, dtype=torch.int32).to(dtype)
    words = values.view(torch.uint8)[: values.nbytes // 4 * 4].view(torch.int32)
    if kind == "integers" and len(words):
        shape = (len(words) // 32 + 2,)
        places = torch.randint(0, len(words), shape, generator=generator, dtype=torch.int64, device=device)
        words[places[0::2]] = SENTINEL.value
        words[places[1::2]] = ESCAPE.value
    return values


def register_move(
    name: str,
    summary: str,
    *,
    shape_help: str,
    make_inputs: Callable[[Problem, int, int, str, Any], tuple[torch.Tensor, ...]],
    received: Callable[[Problem, Sequence[tuple[Any, ...]], int], torch.Tensor],
    largest_mib: int,
    make_outputs: Callable[[Problem, Any], tuple[torch.Tensor, ...]] = outputs_of_ranks,
    model_shapes: Callable[[Any], list[tuple[int, ...]]] | None = None,
    is_per_rank: bool = True,
    mask_unspecified: Callable[[Problem, Any, Any], Any] = lambda problem, inputs, outputs: (inputs, outputs),
    scalings: tuple[str, ...] = ("",),
) -> OpSpec:
    """Register an op that moves values of any dtype and computes nothing.

    Args:
        name, summary, shape_help, make_inputs, make_outputs, model_shapes, is_per_rank, mask_unspecified, scalings: as
            in `OpSpec`; scalings name wires.
        received: `(problem, inputs of every rank, rank)` to the rank's result.
        largest_mib: the largest message that is swept on GPUs.
    """

    def exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
        return (received(problem, inputs, rank),)

    def reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
        return (received(problem, inputs, rank).double(),)

    def quantized(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> list[tuple[torch.Tensor]]:
        arrived = [(sent(values, problem.scaling).to(values.dtype),) for (values,) in inputs]
        return [(received(problem, arrived, rank),)]

    return register_op(
        OpSpec(
            name=name,
            summary=summary,
            reductions=(),
            dtypes=DTYPES,
            shape_help=shape_help,
            rank_of_shape=1,
            make_inputs=make_inputs,
            make_outputs=make_outputs,
            reference=reference,
            tolerance=dict.fromkeys(DTYPES, 0.0) | {wire: WIRE_TOLERANCE[wire] for wire in scalings if wire},
            message_bytes=lambda problem: problem.nbytes,
            busbw_factor=shard_factor if is_per_rank else lambda world_size: 1.0,
            default_shapes=functools.partial(powers_of_two, largest_mib=largest_mib),
            ordered_reference=exact,
            quantized_references=quantized,
            scalings=scalings,
            check=check_wire,
            is_per_rank=is_per_rank,
            mask_unspecified=mask_unspecified,
            model_shapes=model_shapes,
        )
    )


def fill_sentinel(tensors: Sequence[torch.Tensor]) -> None:
    """Fill outputs with a value that no right result holds: NaN, or the least whole number."""
    import torch

    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
