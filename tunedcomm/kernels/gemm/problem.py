"""What the fused GEMMs share on the host: layouts, inputs, references, the product by the library, feasibility.

A problem's shape is (M, N, K), of the GEMM that one rank computes: after the gather, before the scatter. `layout` says
how B is stored, what is given and wanted besides, and the result's dtype where it is not the usual one, e.g.
`nk+bias+float32`; `scaling` how fp8 operands are scaled. Inputs are a, b, then bias, scale_a and scale_b as far as the
problem has them; outputs are the result and, if it is wanted, the gathered A. b is the matrix as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tunedcomm.kernels.common.reference import generator_of
from tunedcomm.spec import ITEMSIZE, Limits, Problem

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "SCALINGS",
    "TOLERANCE",
    "Operands",
    "Wanted",
    "bind_product",
    "layouts",
    "make_inputs",
    "operands_of",
    "out_itemsize",
    "product",
    "product_reference",
    "ready_to_cut",
    "refuse_gemm",
    "wanted_of",
]

DTYPES = ("bfloat16", "float16", "float8_e4m3fn")  # of operands that kernels multiply
SCALINGS = ("", "tensorwise", "rowwise")
_OUT_DTYPES = ("bfloat16", "float16", "float32")
# ‖out − ref‖ / ‖ref‖: roundings of the result and of partial results; fp8 operands are exact in the reference.
TOLERANCE = {
    "bfloat16": 8e-3,
    "float16": 1.2e-3,
    "float32": 1e-4,
    "float64": 1e-12,
    "tensorwise": 1e-2,
    "rowwise": 1e-2,
}
_SCALED_MULTIPLE = 16  # cuBLAS takes fp8 matrices of so many columns and so deep
_SCALED_ALIGNMENT = 16  # bytes; cuBLAS refuses fp8 matrices and scales that begin elsewhere
_DESCRIPTOR_BYTES = 16  # bases and rows of matrices behind tensor descriptors are multiples of this


class Wanted(NamedTuple):
    """A layout taken apart.

    Attributes:
        nk: B is stored [N, K], else [K, N].
        bias, gathered: a bias is added; the gathered A is wanted, too.
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


def usual_dtype(dtype: str) -> str:
    """The result's dtype if none is asked for."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def wanted_of(problem: Problem) -> Wanted:
    """What the problem's layout says."""
    parts = problem.layout.split("+")
    dtype = next((part for part in parts if part in ITEMSIZE), usual_dtype(problem.dtype))
    return Wanted(parts[0] == "nk", "bias" in parts, "gathered" in parts, dtype)


def layout_of(wanted: Wanted, dtype: str) -> str:
    """Inverse of `wanted_of`, for operands of `dtype`."""
    parts = ["nk" if wanted.nk else "kn"]
    parts += [name for name, there in (("bias", wanted.bias), ("gathered", wanted.gathered)) if there]
    parts += [wanted.dtype] if wanted.dtype != usual_dtype(dtype) else []
    return "+".join(parts)


def layouts(*extras: str) -> tuple[str, ...]:
    """Every layout of an op that may have the given extra (`bias` or `gathered`), the most usual first."""
    endings = [*("" for _ in [0]), *(f"+{extra}" for extra in extras)]
    dtypes = ["", *(f"+{dtype}" for dtype in (*_OUT_DTYPES, "float64"))]
    return tuple(f"{store}{ending}{dtype}" for dtype in dtypes for ending in endings for store in ("nk", "kn"))


def operands_of(problem: Problem, inputs: tuple[Any, ...]) -> Operands:
    """A launch's inputs by name."""
    rest = list(inputs[2:])
    bias = rest.pop(0) if wanted_of(problem).bias else None
    scales = rest[:2] if problem.scaling else (None, None)
    return Operands(inputs[0], inputs[1], bias, *scales)


def out_itemsize(problem: Problem) -> int:
    """Bytes of an element of the result."""
    return ITEMSIZE[wanted_of(problem).dtype]


def _values(shape: tuple[int, ...], dtype: str, generator: torch.Generator, kind: str, share: int) -> torch.Tensor:
    """Of `kind` integers, one in `share` is 1 or −1 and the others 0, so that long sums stay small."""
    import torch

    device = generator.device
    if kind == "integers":
        drawn = torch.randint(-share, share, shape, generator=generator, device=device, dtype=torch.int16)
        return ((drawn == 0).to(torch.float32) - (drawn == -1).to(torch.float32)).to(getattr(torch, dtype))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(getattr(torch, dtype))


def make_inputs(
    problem: Problem, rank: int, seed: int, kind: str, device: Any, *, rows: int, shared_bias: bool = True
) -> tuple[torch.Tensor, ...]:
    """One rank's operands.

    Args:
        rows: of A on one rank.
        shared_bias: the bias is the same on every rank.
    """
    import torch

    (_, n, k), wanted, generator = problem.shape, wanted_of(problem), generator_of(rank, seed, device)
    found = [
        _values((rows, k), problem.dtype, generator, kind, 8),
        _values((n, k) if wanted.nk else (k, n), problem.dtype, generator, kind, 16),
    ]
    if wanted.bias:
        shared = generator_of(problem.world_size, seed, device)
        found.append(_values((n,), wanted.dtype, shared if shared_bias else generator, kind, 2))
    if problem.scaling:
        for shape in ((rows, 1), (1, n)) if problem.scaling == "rowwise" else ((1,), (1,)):
            scale = torch.rand(shape, generator=generator, device=device) + 0.5
            found.append(scale if kind == "random" else torch.exp2((4 * scale).floor() - 4))
    return tuple(found)


def product_reference(problem: Problem, given: tuple[Any, ...], rows: slice | None = None) -> torch.Tensor:
    """A·B of one rank's inputs in float64, without the bias; only some rows of A if asked."""
    operands, wanted = operands_of(problem, given), wanted_of(problem)
    rows = rows or slice(None)
    a, b = operands.a[rows].double(), operands.b.double()
    found: torch.Tensor = a @ (b.T if wanted.nk else b)
    if operands.scale_a is not None:
        scale_a = operands.scale_a[rows] if problem.scaling == "rowwise" else operands.scale_a
        found = found * scale_a.double() * operands.scale_b.double()
    return found


def product(problem: Problem, operands: Operands, out: torch.Tensor, a: torch.Tensor | None = None) -> torch.Tensor:
    """A·B by the library (cuBLAS on GPUs) into `out`, without the bias.

    Args:
        operands: of a launch; `a` stands for its A if given, with as many rows as `scale_a` has.
        out: of the result's dtype.
    """
    import torch

    a, b = operands.a if a is None else a, operands.b.T if wanted_of(problem).nk else operands.b
    if not problem.scaling and problem.dtype != "float8_e4m3fn":
        if out.dtype == a.dtype:
            return torch.mm(a, b, out=out)
        return out.copy_(a.to(out.dtype) @ b.to(out.dtype)) if not a.is_cuda else _mm_into(a, b, out)
    scale_a, scale_b = operands.scale_a, operands.scale_b
    if a.is_cuda and a.shape[1] % _SCALED_MULTIPLE == 0 and b.shape[1] % _SCALED_MULTIPLE == 0 and b.numel():
        return _scaled_product(a, b, scale_a, scale_b, out)
    return out.copy_((a.float() @ b.float()) * scale_a * scale_b)


def ready_to_cut(problem: Problem, operands: Operands) -> Operands:
    """Operands whose B is as the library wants it, for products of many parts of A."""
    if problem.scaling and not wanted_of(problem).nk and operands.b.is_cuda and operands.b.numel():
        return operands._replace(b=operands.b.T.contiguous().T)
    return operands


def _scaled_product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """A·B of fp8 operands into `out` by cuBLAS."""
    import torch

    if b.stride(0) != 1:  # the library multiplies by columns only
        b = b.T.contiguous().T
    a, b, scale_a, scale_b = (_aligned(tensor) for tensor in (a, b, scale_a, scale_b))
    if out.dtype != torch.bfloat16 and (scale_a.numel() > 1 or scale_b.numel() > 1):
        # Scales of rows come with bf16 results only.
        one = torch.ones(1, device=a.device)
        return out.copy_(torch._scaled_mm(a, b, one, one, out_dtype=torch.float32) * scale_a * scale_b)
    if out.data_ptr() % _SCALED_ALIGNMENT:
        return out.copy_(torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype))
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, out=out)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """It, or a copy that begins where cuBLAS wants what belongs to fp8 products to begin."""
    return tensor.clone() if tensor.data_ptr() % _SCALED_ALIGNMENT else tensor


def _mm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A·B rounded to a dtype that is not the operands'."""
    import torch

    if out.dtype == torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(a, b))


def refuse_gemm(problem: Problem, limits: Limits, *, panel_bytes: int, descriptors: bool = True) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might.

    Args:
        problem, limits: what is asked, and where.
        panel_bytes: data that a call keeps in its panels.
        descriptors: operands are read through tensor descriptors.
    """
    m, n, k = problem.shape
    wanted, size = wanted_of(problem), ITEMSIZE[problem.dtype]
    if not limits.symmetric:
        return "the ranks cannot address each other's memory"
    if problem.dtype not in DTYPES:
        return f"kernels multiply {', '.join(DTYPES)}; {problem.dtype} goes to the library"
    if wanted.dtype not in _OUT_DTYPES:
        return f"kernels write {', '.join(_OUT_DTYPES)}; {wanted.dtype} goes to the library"
    if problem.reduction != "sum" and problem.op != "ag_gemm":
        return f"kernels sum; {problem.reduction} goes to the library"
    if m == 0 or n == 0 or k == 0:
        return "there is nothing to do"
    if panel_bytes > limits.panel_bytes:
        return (
            f"{panel_bytes} bytes of matrices; panels hold {limits.panel_bytes} at most, 16 times "
            "TUNEDCOMM_WORKSPACE_MIB"
        )
    if descriptors and k * size % _DESCRIPTOR_BYTES:
        return f"rows of {k} {problem.dtype} are no multiples of {_DESCRIPTOR_BYTES} bytes, as tensor descriptors want"
    if descriptors and not wanted.nk and n * size % _DESCRIPTOR_BYTES:
        return f"rows of {n} {problem.dtype} are no multiples of {_DESCRIPTOR_BYTES} bytes, as tensor descriptors want"
    return None


def bind_product(problem: Problem) -> Callable[[tuple[Any, ...], torch.Tensor], object]:
    """`product` of a launch's inputs into a result, with all that can be known before settled before."""
    import torch

    wanted, mm = wanted_of(problem), torch.mm
    if problem.scaling or wanted.dtype != problem.dtype:
        return lambda inputs, out: product(problem, operands_of(problem, inputs), out)
    if wanted.nk:
        return lambda inputs, out: mm(inputs[0], inputs[1].T, out=out)
    return lambda inputs, out: mm(inputs[0], inputs[1], out=out)
