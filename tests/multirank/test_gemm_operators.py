"""The fused GEMMs as operators `torch.ops.tunedcomm.*`: PyTorch's own checks, and what traces and compiles to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, report, run_cases
from gemm_samples import FP8, drawn, scale
from harness import run_ranks
from quick import some_of
from torch.library import opcheck

import tunedcomm
import tunedcomm.ops

WORLD_SIZE = 2
M, K, N = 4, 16, 8
OPS = torch.ops.tunedcomm


def settings() -> tuple[int, str]:
    return WORLD_SIZE, dist.group.WORLD.group_name


def operands(rank: int, nk: bool, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """a, and b in one of its two layouts."""
    a = drawn(rank, M, K, dtype=dtype)
    return a, drawn(rank, N, K, dtype=dtype).t() if nk else drawn(rank, K, N, dtype=dtype)


def calls(rank: int, nk: bool, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Operator to arguments."""
    a, b = operands(rank, nk, dtype)
    half, single = dtype == torch.bfloat16, torch.float32
    scales = (scale(9, 1), scale(rank, 1)) if dtype == FP8 else (None, None)
    wide = single if half or dtype == FP8 else None
    bias = drawn(5, N, dtype=wide or dtype)
    return {
        "ag_gemm": (a, b, *scales, wide, *settings()),
        "ag_gemm_gathered": (a, b, *scales, None, *settings()),
        "ag_gemm_list": (
            a,
            [b, b.clone()],
            scales[0],
            [scales[1]] * 2 if dtype == FP8 else [],
            None,
            *settings(),
            "any",
            None,
        ),
        "gemm_rs": (a, b, *scales, wide, "sum", *settings()),
        "gemm_ar": (a, b, bias, *scales, wide, *settings(), "default", 8),
    }


def needing(value: Any, needed: bool) -> Any:
    if isinstance(value, list):
        return [needing(each, needed) for each in value]
    return value.detach().requires_grad_(needed) if isinstance(value, torch.Tensor) else value


def functional(name: str, dtype: torch.dtype, rank: int) -> None:
    # The others compare inputs before and after, which PyTorch cannot do with fp8 on CPUs.
    checks = ("test_autograd_registration", "test_faketensor")
    for nk in (False, True):
        for needed in (False, True) if dtype == torch.float32 else (False,):
            given = tuple(needing(each, needed) for each in calls(rank, nk, dtype)[name])
            if dtype == FP8:
                opcheck(getattr(OPS, name).default, given, test_utils=checks)
            else:
                opcheck(getattr(OPS, name).default, given)


def into(name: str, rank: int) -> None:
    arguments = calls(rank, True, torch.float32)[name]
    made = getattr(OPS, name)(*arguments)
    results = made if isinstance(made, tuple) else (made,)
    given = {output: torch.zeros_like(result) for output, result in zip(("out", "gathered"), results, strict=False)}
    opcheck(getattr(OPS, name).out, arguments, given)
    getattr(OPS, name).out(*arguments, **given)
    torch.testing.assert_close(tuple(given.values()), results)


NAMES = ("ag_gemm", "ag_gemm_gathered", "ag_gemm_list", "gemm_rs", "gemm_ar")
OPCHECK_CASES: dict[str, Case] = {
    **{name: functools.partial(functional, name, torch.float32) for name in NAMES},
    **{f"{name} bf16": functools.partial(functional, name, torch.bfloat16) for name in NAMES},
    **{f"{name} fp8": functools.partial(functional, name, FP8) for name in NAMES},
    **{f"{name}.out": functools.partial(into, name) for name in NAMES if name != "ag_gemm_list"},
}
OPCHECK_CASES = some_of(OPCHECK_CASES, 5)


def opcheck_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(OPCHECK_CASES, rank)


@pytest.fixture(scope="module")
def opcheck_outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, opcheck_body, timeout=240)


@pytest.mark.parametrize("name", OPCHECK_CASES)
def test_opcheck(opcheck_outcomes: list[dict[str, str]], name: str) -> None:
    report(opcheck_outcomes, name)


def every_form(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each public function: new results, given ones, one b, several; `x` is [rows, K], `w` [N, K]."""
    y = tunedcomm.ag_gemm(x.sin(), w.t())
    z, gathered = tunedcomm.ag_gemm(x, w.t().contiguous(), return_gathered=True, group=dist.group.WORLD)
    p, q = tunedcomm.ag_gemm(x, [w.t(), w[:3].t()], numerics="any")
    (r,), again = tunedcomm.ag_gemm(x, (w.t(),), return_gathered=True, out=[torch.zeros_like(p)])
    summed = tunedcomm.gemm_ar(y + z + p + r, w, max_sms=8)
    total = tunedcomm.gemm_rs(summed, w.t(), op="avg")
    part = torch.zeros_like(total)
    tunedcomm.gemm_rs(summed + gathered - again, w.t(), out=part)
    tunedcomm.gemm_ar(total, w, bias=w[0], out=summed[: total.shape[0]])
    return total, part, summed, q


def arguments(rank: int, rows: int = M) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(rank, rows, K), drawn(rank + 20, N, K)


def aot(rank: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(every_form, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments(rank)), every_form(*arguments(rank)))


def compiled_refusals(rank: int) -> None:
    """What cannot be served is refused while it is compiled, by the same words."""
    x, w = arguments(rank)
    refused: dict[str, Callable[..., Any]] = {
        "op='max' is no reduction": lambda x, w: tunedcomm.gemm_rs(x, w.t(), op="max"),
        r"they must be equal; pass b\.t\(\)": tunedcomm.gemm_ar,
        "must be a multiple of 2": lambda x, w: tunedcomm.gemm_rs(x[1:], w.t()),
        "out_dtype=torch.float16": lambda x, w: tunedcomm.ag_gemm(x, w.t(), out_dtype=torch.float16),
        "b is a list of 2, so it must be a list as long": lambda x, w: tunedcomm.ag_gemm(x, [w.t()] * 2, out=[x]),
    }
    for text, call in refused.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(call, backend="aot_eager", fullgraph=True)(x, w)
        with pytest.raises(tunedcomm.UnsupportedInputError, match=text):
            call(x, w)


TRACED_CASES: dict[str, Case] = {"aot_eager": aot, "refused in compiled code": compiled_refusals}


def traced_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(TRACED_CASES, rank)


@pytest.fixture(scope="module")
def traced_outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, traced_body, timeout=240)


@pytest.mark.parametrize("name", TRACED_CASES)
def test_traced(traced_outcomes: list[dict[str, str]], name: str) -> None:
    report(traced_outcomes, name)
