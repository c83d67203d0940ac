"""all_reduce_rms_norm: the sum over the ranks, a bias and a residual added to it, and the RMS norm of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce_rms_norm._rule import h_of, norm_of, ordered_sum, to_e4m3
from tunedcomm.metrics import busbw_factor
from tunedcomm.spec import OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

__all__ = ["ALL_REDUCE_RMS_NORM", "EPS"]

EPS = 1e-6  # what launches without an eps of their own take
LAYOUTS = ("residual", "bias+residual", "", "bias")


def _generator(problem: Problem, rank: int, seed: int, device: Any) -> torch.Generator:
    import torch

    return torch.Generator(device=device).manual_seed((seed * 1_000_003 + rank * 7919 + 29) % 2**62)


def make_values(problem: Problem, shape: tuple[int, ...], generator: torch.Generator, kind: str) -> torch.Tensor:
    """Numbers of the problem's dtype, drawn on the generator's device."""
    import torch

    dtype, device = getattr(torch, problem.dtype), generator.device
    if kind == "integers":
        return torch.randint(-8, 9, shape, generator=generator, device=device, dtype=torch.int32).to(dtype)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """(x, weight, bias and residual as the layout has them, scale); only x differs from rank to rank."""
    import torch

    shape, hidden = problem.shape, problem.shape[1:]
    x = make_values(problem, shape, _generator(problem, rank, seed, device), kind)
    shared = _generator(problem, problem.world_size, seed, device)
    found = [x, make_values(problem, hidden, shared, kind)]
    if "bias" in problem.layout:
        found.append(make_values(problem, hidden, shared, kind))
    if "residual" in problem.layout:
        found.append(make_values(problem, shape, shared, kind))
    if problem.scaling:
        found.append(torch.full((1,), 0.03, device=device))
    return tuple(found)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    dtype = getattr(torch, problem.dtype)
    y = torch.empty(problem.shape, dtype=torch.float8_e4m3fn if problem.scaling else dtype, device=device)
    return y, torch.empty(problem.shape, dtype=dtype, device=device)


def _parts(problem: Problem, given: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """(weight, bias, residual, scale) of a rank's inputs; None for what the problem does not have."""
    rest = list(given[2:])
    bias = rest.pop(0) if "bias" in problem.layout else None
    residual = rest.pop(0) if "residual" in problem.layout else None
    return given[1], bias, residual, rest.pop(0) if problem.scaling else None


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    weight, bias, residual, scale = _parts(problem, inputs[rank])
    h = torch.zeros(problem.shape, dtype=torch.float64, device=weight.device)
    for given in inputs:
        h += given[0].double()
    for extra in (bias, residual):
        if extra is not None:
            h += extra.double()
    y = h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    if scale is not None:
        y = to_e4m3((y / scale.double()).float()).double()
    return y, h


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    weight, bias, residual, scale = _parts(problem, inputs[rank])
    h = h_of(ordered_sum([given[0] for given in inputs]), bias, residual)
    return norm_of(h, weight, EPS, scale), h


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    del itemsize
    if backend != "cuda":
        return [(1, 256), (3, 256), (16, 1024)]
    tokens = [1 << power for power in range(13)]
    return [*((count, 8192) for count in tokens), *((count, h) for h in (4096, 5120) for count in (1, 16, 128, 1024))]


ALL_REDUCE_RMS_NORM = register_op(
    OpSpec(
        name="all_reduce_rms_norm",
        summary="the ranks' sum plus bias and residual, and the RMS norm of that",
        reductions=("sum",),
        dtypes=("bfloat16", "float16", "float32"),
        shape_help="tokens x hidden, e.g. 64x8192",
        rank_of_shape=2,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of three roundings in the payload's dtype, or of one in e4m3 of what is a little off.
        tolerance={"bfloat16": 1.2e-2, "float16": 1.6e-3, "float32": 2e-6, "float64": 1e-13, "fp8": 5e-2},
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=lambda world_size: busbw_factor("all_reduce", world_size),
        default_shapes=_default_shapes,
        ordered_reference=_ordered_reference,
        layouts=LAYOUTS,
        scalings=("", "fp8"),
    )
)
