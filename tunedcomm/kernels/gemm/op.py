"""The fused GEMMs: what the three ops compute, how their operands are laid out, and their products by the library.

    ag_gemm   every rank's rows of A, gathered, times this rank's B
    gemm_rs   the ranks' products A·B summed, each rank its rows of the sum
    gemm_ar   the ranks' products A·B summed, the whole sum on every rank, plus a bias

A problem's shape is (M, N, K) of the GEMM that one rank computes: after the gather, before the scatter. `layout` says
how B is stored, which extra inputs and outputs there are, and the result's dtype if it is not the usual one, for
example `nk+bias+float32`; `scaling` says how fp8 operands are scaled. Inputs are a, b, then bias, scale_a and scale_b
as far as the problem has them; outputs are the result and, if wanted, the gathered A. b is the matrix as it is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.reference import generator_of
from tunedcomm.spec import ITEMSIZE, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float8_e4m3fn")  # of operands that kernels multiply
SCALINGS = ("", "tensorwise", "rowwise")
OUT_DTYPES = ("bfloat16", "float16", "float32")
# ‖out − ref‖ / ‖ref‖: roundings of the result and of partial results; fp8 operands are exact in the reference.
TOLERANCE = {
    "bfloat16": 8e-3,
    "float16": 1.2e-3,
    "float32": 1e-4,
    "float64": 1e-12,
    "tensorwise": 1e-2,
    "rowwise": 1e-2,
}
SCALED_MULTIPLE = 16  # cuBLAS wants N and K of fp8 products to be multiples of this
_SCALED_ALIGNMENT = 16  # bytes; cuBLAS wants fp8 matrices and their scales to begin at multiples of this


class GemmLayout(NamedTuple):
    """A layout taken apart.

    Attributes:
        nk: B is stored [N, K], else [K, N].
        bias, gathered: a bias is added; the gathered A is returned, too.
        dtype: name of the result's dtype.
    """

    nk: bool
    bias: bool
    gathered: bool
    dtype: str


class Operands(NamedTuple):
    """A launch's inputs by name; None for what the problem does not have."""

    a: Any
    b: Any
    bias: Any
    scale_a: Any
    scale_b: Any

    def of_rows(self, problem: Problem, first: int, end: int) -> Operands:
        """The same with some rows of A only, and their scales."""
        scale_a = self.scale_a[first:end] if problem.scaling == "rowwise" else self.scale_a
        return self._replace(a=self.a[first:end], scale_a=scale_a)


def usual_dtype(dtype: str) -> str:
    """The result's dtype if none is asked for."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def gemm_layout(problem: Problem) -> GemmLayout:
    """The problem's layout, taken apart."""
    return _parse_layout(problem.layout, problem.dtype)


@functools.lru_cache(maxsize=256)
def _parse_layout(layout: str, dtype: str) -> GemmLayout:
    parts = layout.split("+")
    dtype = next((part for part in parts if part in ITEMSIZE), usual_dtype(dtype))
    return GemmLayout(parts[0] == "nk", "bias" in parts, "gathered" in parts, dtype)


def layout_name(wanted: GemmLayout, dtype: str) -> str:
    """Inverse of `gemm_layout`, for operands of `dtype`."""
    parts = ["nk" if wanted.nk else "kn"]
    parts += [name for name, is_set in (("bias", wanted.bias), ("gathered", wanted.gathered)) if is_set]
    parts += [wanted.dtype] if wanted.dtype != usual_dtype(dtype) else []
    return "+".join(parts)


def _layouts(*extras: str) -> tuple[str, ...]:
    """Every layout of an op that may have the given extra (`bias` or `gathered`), the most usual first."""
    endings = ["", *(f"+{extra}" for extra in extras)]
    dtypes = ["", *(f"+{dtype}" for dtype in (*OUT_DTYPES, "float64"))]
    return tuple(f"{store}{ending}{dtype}" for dtype in dtypes for ending in endings for store in ("nk", "kn"))


def operands_of(problem: Problem, inputs: tuple[Any, ...]) -> Operands:
    """A launch's inputs by name."""
    rest = list(inputs[2:])
    bias = rest.pop(0) if gemm_layout(problem).bias else None
    scales = rest[:2] if problem.scaling else (None, None)
    return Operands(inputs[0], inputs[1], bias, *scales)


def out_itemsize(problem: Problem) -> int:
    """Bytes of an element of the result."""
    return ITEMSIZE[gemm_layout(problem).dtype]


def shard_rows(problem: Problem) -> int:
    """Rows of one rank: of A in ag_gemm, of the result in gemm_rs.

    Raises:
        ValueError: M is not a multiple of the number of ranks.
    """
    rows, left = divmod(problem.shape[0], problem.world_size)
    if left:
        raise ValueError(f"M = {problem.shape[0]} of {problem.op} is not a multiple of {problem.world_size} ranks")
    return rows


def rows_of(problem: Problem) -> int:
    """`shard_rows`, rounded up where the ranks do not have the same number: such problems are refused later."""
    return -(-problem.shape[0] // problem.world_size)


def _values(shape: tuple[int, ...], dtype: str, generator: torch.Generator, kind: str, share: int) -> torch.Tensor:
    """Random values; of `kind` integers one in `share` is ±1 and the others are 0, so that long sums stay small."""
    import torch

    device = generator.device
    if kind == "integers":
        drawn = torch.randint(-share, share, shape, generator=generator, device=device, dtype=torch.int16)
        return ((drawn == 0).to(torch.float32) - (drawn == -1).to(torch.float32)).to(getattr(torch, dtype))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(getattr(torch, dtype))


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    (m, n, k), wanted, generator = problem.shape, gemm_layout(problem), generator_of(rank, seed, device)
    rows = shard_rows(problem) if problem.op == "ag_gemm" else m
    found = [
        _values((rows, k), problem.dtype, generator, kind, 8),
        _values((n, k) if wanted.nk else (k, n), problem.dtype, generator, kind, 16),
    ]
    if wanted.bias:  # the same on every rank
        found.append(_values((n,), wanted.dtype, generator_of(problem.world_size, seed, device), kind, 2))
    if problem.scaling:
        for shape in ((rows, 1), (1, n)) if problem.scaling == "rowwise" else ((1,), (1,)):
            scale = torch.rand(shape, generator=generator, dtype=torch.float32, device=device) + 0.5
            found.append(scale if kind == "random" else torch.exp2((4 * scale).floor() - 4))
    return tuple(found)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    (m, n, k), wanted = problem.shape, gemm_layout(problem)
    rows = shard_rows(problem) if problem.op == "gemm_rs" else m
    out = torch.empty((rows, n), dtype=getattr(torch, wanted.dtype), device=device)
    if not wanted.gathered:
        return (out,)
    return out, torch.empty((m, k), dtype=getattr(torch, problem.dtype), device=device)


def product_reference(problem: Problem, given: tuple[Any, ...], rows: slice | None = None) -> torch.Tensor:
    """A·B of one rank's inputs in float64, without the bias; only some rows of A if asked."""
    operands, wanted = operands_of(problem, given), gemm_layout(problem)
    rows = rows or slice(None)
    a, b = operands.a[rows].double(), operands.b.double()
    found: torch.Tensor = a @ (b.T if wanted.nk else b)
    if operands.scale_a is not None:
        scale_a = operands.scale_a[rows] if problem.scaling == "rowwise" else operands.scale_a
        found = found * scale_a.double() * operands.scale_b.double()
    return found


def _gathered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    of_rank = inputs[rank]
    parts = []
    for given in inputs:
        # Scales of rows come with the rows; the scale of a whole tensor is this rank's.
        scale_a = (given if problem.scaling == "rowwise" else of_rank)[-2:-1]
        scales = (*scale_a, of_rank[-1]) if problem.scaling else ()
        parts.append(product_reference(problem, (given[0], of_rank[1], *scales)))
    out = torch.cat(parts)
    return (out, torch.cat([given[0].double() for given in inputs])) if gemm_layout(problem).gathered else (out,)


def _summed_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    rows = None
    if problem.op == "gemm_rs":
        count = shard_rows(problem)
        rows = slice(rank * count, (rank + 1) * count)
    total = product_reference(problem, inputs[0], rows)
    for given in inputs[1:]:
        total += product_reference(problem, given, rows)
    bias = operands_of(problem, inputs[rank]).bias
    if bias is not None:
        total = total + bias.double()
    return (total / len(inputs) if problem.reduction == "avg" else total,)


def _message_bytes(problem: Problem) -> int:
    """Bytes that a rank sends: of A, of partial results, or of partial results and sums."""
    (m, n, k), others = problem.shape, problem.world_size - 1
    if problem.op == "gemm_ar":
        return 2 * m * n * out_itemsize(problem) * others // problem.world_size
    row = k * ITEMSIZE[problem.dtype] if problem.op == "ag_gemm" else n * out_itemsize(problem)
    return m // problem.world_size * others * row


_Shapes = list[tuple[int, ...]]


def _default_shapes(on_gpus: _Shapes, backend: str, itemsize: int) -> _Shapes:
    return on_gpus if backend == "cuda" else [(48, 32, 32)]


def _related_forms(extra: str, problem: Problem) -> tuple[list[str], tuple[str, ...]]:
    """Without bias or gathered input (`extra`), then with it, then with B stored the other way."""
    stored, *rest = problem.layout.split("+")
    dtype = [part for part in rest if part != extra]
    endings = [rest, dtype, *([[extra, *dtype]] if extra else [])]
    stores = [stored, *(store for store in ("nk", "kn") if store != stored)]
    layouts = ["+".join([store, *ending]) for store in stores for ending in endings]
    return layouts, ("rowwise", "tensorwise") if problem.scaling else ()


_fused_gemm = functools.partial(
    OpSpec,
    dtypes=DTYPES,
    rank_of_shape=3,
    make_inputs=_make_inputs,
    make_outputs=_make_outputs,
    tolerance=TOLERANCE,
    message_bytes=_message_bytes,
    busbw_factor=None,
    scalings=SCALINGS,
    time_cold=True,
    is_gemm=True,
)
_AG_SHAPES: _Shapes = [
    *((m, 2560, 8192) for m in (16, 64, 256)),
    *((512, 8192, 2048), (2048, 7168, 8192), (4096, 3584, 8192), (8192, 3584, 8192)),
    *((8192, 8192, 8192), (2048, 8192, 7168), (16384, 7168, 8192)),
]
_RS_SHAPES: _Shapes = [
    *((m, 8192, 2048) for m in (16, 64, 256)),
    *((512, 2048, 8192), (2048, 8192, 7168), (4096, 8192, 3584), (8192, 8192, 3584)),
    *((8192, 8192, 8192), (2048, 7168, 8192), (16384, 8192, 7168)),
]
_AR_SHAPES: _Shapes = [
    *((m, 8192, k) for m in (1, 16, 64, 256) for k in (2048, 7168)),
    *((m, 8192, 3584) for m in (2048, 4096, 8192)),
]

AG_GEMM = register_op(
    _fused_gemm(
        name="ag_gemm",
        summary="the ranks' rows of A, gathered, times this rank's B",
        reductions=("",),
        shape_help="M x N x K of the GEMM after the gather, e.g. 4096x3584x8192; a rank has M / world_size rows of A",
        reference=_gathered_reference,
        default_shapes=functools.partial(_default_shapes, _AG_SHAPES),
        model_shapes=lambda shard: [(shard.padded_tokens, p.n, p.k) for p in shard.column_parallel],
        related_forms=functools.partial(_related_forms, "gathered"),
        layouts=_layouts("gathered"),
        check=shard_rows,
    )
)
GEMM_RS = register_op(
    _fused_gemm(
        name="gemm_rs",
        summary="the ranks' products A x B, summed, each rank its rows of the sum",
        reductions=("sum", "avg"),
        shape_help="M x N x K of the GEMM before the scatter, e.g. 4096x8192x3584; every rank gets M / world_size rows",
        reference=_summed_reference,
        default_shapes=functools.partial(_default_shapes, _RS_SHAPES),
        model_shapes=lambda shard: [(shard.padded_tokens, p.n, p.k) for p in shard.row_parallel],
        related_forms=functools.partial(_related_forms, ""),
        layouts=_layouts(),
        check=shard_rows,
    )
)
GEMM_AR = register_op(
    _fused_gemm(
        name="gemm_ar",
        summary="the ranks' products A x B, summed, plus a bias",
        reductions=("sum",),
        shape_help="M x N x K of the GEMM that one rank computes, e.g. 64x8192x2048",
        reference=_summed_reference,
        default_shapes=functools.partial(_default_shapes, _AR_SHAPES),
        model_shapes=lambda shard: [(shard.tokens, p.n, p.k) for p in shard.row_parallel],
        related_forms=functools.partial(_related_forms, "bias"),
        layouts=_layouts("bias"),
    )
)


def product(problem: Problem, operands: Operands, out: torch.Tensor) -> torch.Tensor:
    """A·B by the library (cuBLAS on GPUs) into `out`, of the result's dtype, without the bias."""
    import torch

    a, b = operands.a, operands.b.T if gemm_layout(problem).nk else operands.b
    if not problem.scaling and problem.dtype != "float8_e4m3fn":
        if out.dtype == a.dtype:
            return torch.mm(a, b, out=out)
        if not a.is_cuda:
            return out.copy_(a.to(out.dtype) @ b.to(out.dtype))
        if out.dtype == torch.float32:
            return torch.mm(a, b, out_dtype=torch.float32, out=out)
        return out.copy_(torch.mm(a, b))
    scale_a, scale_b = operands.scale_a, operands.scale_b
    if a.is_cuda and a.shape[1] % SCALED_MULTIPLE == 0 and b.shape[1] % SCALED_MULTIPLE == 0 and b.numel():
        return _scaled_product(a, b, scale_a, scale_b, out)
    return out.copy_((a.float() @ b.float()) * scale_a * scale_b)


def _scaled_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """A·B of fp8 operands into `out` by cuBLAS."""
    import torch

    if b.stride(0) != 1:  # cuBLAS multiplies fp8 by columns only
        b = b.T.contiguous().T
    a, b, scale_a, scale_b = (
        tensor.clone() if tensor.data_ptr() % _SCALED_ALIGNMENT else tensor for tensor in (a, b, scale_a, scale_b)
    )
    if out.dtype != torch.bfloat16 and (scale_a.numel() > 1 or scale_b.numel() > 1):
        # Scales of rows come with bf16 results only.
        one = torch.ones(1, dtype=torch.float32, device=a.device)
        return out.copy_(torch._scaled_mm(a, b, one, one, out_dtype=torch.float32) * scale_a * scale_b)
    if out.data_ptr() % _SCALED_ALIGNMENT:
        return out.copy_(torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype))
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, out=out)


def ready_to_cut(problem: Problem, operands: Operands) -> Operands:
    """Operands whose B is as the library wants it, for products of many parts of A."""
    if problem.scaling and not gemm_layout(problem).nk and operands.b.is_cuda and operands.b.numel():
        return operands._replace(b=operands.b.T.contiguous().T)
    return operands


def bind_gathered(problem: Problem, gather: Callable[[int, Any, Any, int], None]) -> Launch:
    """A launch of ag_gemm that gathers everything, then multiplies.

    Args:
        problem: what is bound.
        gather: `(0 for A or 1 for the scales of its rows, gathered, shard, stream)`.
    """
    (m, _, k), gathered = problem.shape, gemm_layout(problem).gathered

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        operands = operands_of(problem, inputs)
        whole = outputs[1] if gathered else operands.a.new_empty((m, k))
        gather(0, whole, operands.a, stream)
        if problem.scaling == "rowwise":
            scales = operands.scale_a.new_empty((m, 1))
            gather(1, scales, operands.scale_a, stream)
            operands = operands._replace(scale_a=scales)
        product(problem, operands._replace(a=whole), outputs[0])

    return run


def bind_product(problem: Problem) -> Callable[[tuple[Any, ...], torch.Tensor], object]:
    """`(inputs, out)` to `product`, with everything settled that can be known before."""
    import torch

    wanted, mm = gemm_layout(problem), torch.mm
    if problem.scaling or wanted.dtype != problem.dtype:
        return lambda inputs, out: product(problem, operands_of(problem, inputs), out)
    if wanted.nk:
        return lambda inputs, out: mm(inputs[0], inputs[1].T, out=out)
    return lambda inputs, out: mm(inputs[0], inputs[1], out=out)
