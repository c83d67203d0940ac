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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import tunedcomm
import tunedcomm.ops
from tunedcomm.ops import call as call_module
from tunedcomm.ops import gemm

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


def calls_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "tunedcomm" in str(node.target)]


def aot(rank: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(every_form, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments(rank)), every_form(*arguments(rank)))


def dynamic(rank: int) -> None:
    """One graph for all sizes, none of them written into it."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(every_form, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 6, 10):
        torch.testing.assert_close(compiled(*arguments(rank, rows)), every_form(*arguments(rank, rows)))
    assert len(graphs) == 1


def fx(rank: int) -> None:
    for tracing in ("real", "fake", "symbolic"):
        traced = make_fx(every_form, tracing_mode=tracing)(*arguments(rank))
        assert calls_of(traced.graph) == [
            "tunedcomm.ag_gemm.default",
            "tunedcomm.ag_gemm_gathered.default",
            "tunedcomm.ag_gemm_list.default",
            "tunedcomm.ag_gemm_list.default",
            "tunedcomm.gemm_ar.default",
            "tunedcomm.gemm_rs.default",
            "tunedcomm.gemm_rs.out",
            "tunedcomm.gemm_ar.out",
        ]
        torch.testing.assert_close(traced(*arguments(rank)), every_form(*arguments(rank)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(K, N), torch.nn.Linear(N, K, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = tunedcomm.ag_gemm(x, [self.up.weight.t(), self.up.weight.t()])
        return tunedcomm.gemm_rs(q * k, self.down.weight.t()) + tunedcomm.gemm_ar(x, self.up.weight.t()).sum()


def exported(strict: bool, rank: int) -> None:
    torch.manual_seed(3)
    model = Model().requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (drawn(rank, 4, K),), dynamic_shapes=({0: rows},), strict=strict)
    wanted = {"tunedcomm.ag_gemm_list.default", "tunedcomm.gemm_rs.default", "tunedcomm.gemm_ar.default"}
    assert wanted == set(calls_of(program.graph))
    for each in (program, program.run_decompositions()):
        for rows_now in (4, 7):
            x = drawn(rank, rows_now, K)
            torch.testing.assert_close(each.module()(x), model(x))


def fake(rank: int) -> None:
    """Public functions of fake tensors give fake results, and send nothing."""
    with FakeTensorMode() as mode:
        x, w = torch.empty(4, 16, 32), torch.empty(8, 32)
        assert tunedcomm.ag_gemm(x, w.t()).shape == (8, 16, 8)
        assert tunedcomm.gemm_rs(x.half(), w.half().t(), out_dtype=torch.float32).dtype == torch.float32
        with pytest.raises(tunedcomm.UnsupportedInputError, match=r"pass b\.t"):
            tunedcomm.gemm_ar(x, w)
        with pytest.raises(tunedcomm.UnsupportedInputError, match="is an empty list"):
            tunedcomm.ag_gemm(x, [])
        with pytest.raises(tunedcomm.UnsupportedInputError, match=r"out\[1\] has shape"):
            tunedcomm.ag_gemm(x, [w.t()] * 2, out=[None, x])
    if rank == 0:  # alone
        tunedcomm.gemm_ar(mode.from_tensor(drawn(rank, 3, 8)), mode.from_tensor(drawn(rank, 8, 8)))


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


def eager_goes_past(rank: int) -> None:
    """Plain eager calls do not pay for PyTorch's dispatcher."""
    called: list[str] = []
    kept = call_module.call_operator
    noting = lambda op, *rest: called.append(op) or kept(op, *rest)  # noqa: E731
    call_module.call_operator = gemm.call_operator = noting
    try:
        every_form(*arguments(rank))
        assert not called
        x, w = arguments(rank)
        tunedcomm.ag_gemm(x, [w.t().requires_grad_(), w.t()])
        assert called == ["ag_gemm_list"], "else the test above shows nothing"
    finally:
        call_module.call_operator = gemm.call_operator = kept


TRACED_CASES: dict[str, Case] = {
    "aot_eager": aot,
    "dynamic shapes": dynamic,
    "make_fx": fx,
    "export": functools.partial(exported, False),
    "export strict": functools.partial(exported, True),
    "fake tensors": fake,
    "refused in compiled code": compiled_refusals,
    "eager calls": eager_goes_past,
}
TRACED_CASES = some_of(TRACED_CASES, 3)


def traced_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(TRACED_CASES, rank)


@pytest.fixture(scope="module")
def traced_outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, traced_body, timeout=240)


@pytest.mark.parametrize("name", TRACED_CASES)
def test_traced(traced_outcomes: list[dict[str, str]], name: str) -> None:
    report(traced_outcomes, name)


def inductor_body(rank: int, world_size: int) -> bool:
    """Weights reach the operators in the layout that the caller stores them in."""
    seen: list[bool] = []
    form = call_module.paths["gemm_ar"].form
    kept = form.operands
    form.operands = lambda inputs, options: seen.append(inputs[1].is_contiguous()) or kept(inputs, options)  # type: ignore[func-returns-value]
    compiled = torch.compile(every_form, fullgraph=True)
    for _ in range(2):
        got, wanted = compiled(*arguments(rank)), every_form(*arguments(rank))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    assert seen
    assert all(seen), "w of gemm_ar is [K, N]"
    x, w = arguments(rank)
    seen.clear()
    compiled = torch.compile(lambda x, w: tunedcomm.gemm_ar(x.sin(), w.t()) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x, w), tunedcomm.gemm_ar(x.sin(), w.t()) + 1)
    assert seen == [False, False]
    return True


@pytest.mark.slow
def test_inductor(tmp_path_factory: pytest.TempPathFactory) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # they take longer than what is compiled here
    assert run_ranks(WORLD_SIZE, inductor_body, timeout=240, env=env) == [True] * WORLD_SIZE
