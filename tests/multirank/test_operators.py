"""The operators `torch.ops.tunedcomm.*`: PyTorch's own checks of them, and what traces and compiles to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, Ranks, replaced
from fusion_samples import inductor
from gemm_samples import FP8, scale
from gemm_samples import drawn as drawn_gemm
from quick import some_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import tunedcomm
from tunedcomm.ops import call as call_module

WORLD_SIZE = 2
M, K, N = 4, 16, 8
OPS = torch.ops.tunedcomm


RANKS = Ranks(prepare=inductor, timeout=480)


def draw(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def settings() -> tuple[int, str]:
    return WORLD_SIZE, dist.group.WORLD.group_name


# Operator to (tensors, options, outputs): whether tensors need gradients is the check's to vary.
CHECKED: dict[str, tuple[list[tuple[int, ...]], tuple[Any, ...], dict[str, tuple[int, ...]]]] = {
    "all_reduce": ([(4, 6)], ("sum",), {"out": (4, 6)}),
    "all_gather": ([(4, 6)], (1,), {"out": (4, 12)}),
    "reduce_scatter": ([(4, 6)], ("avg", 1), {"out": (4, 3)}),
    "all_to_all": ([(4, 6)], (), {"out": (4, 6)}),
    "all_reduce_bias": ([(4, 6), (6,)], (), {"out": (4, 6)}),
    "all_reduce_rms_norm": ([(4, 6), (6,), (6,), (4, 6)], (None, 1e-6, None), {"out": (4, 6), "residual_out": (4, 6)}),
}
QUANTISED = ([(4, 128), (128,), (4, 128), (4, 128)], (None, 1e-6, "group128", "column", True, True, 1.0))


def quantised(rank: int) -> None:
    shapes, options = QUANTISED
    opcheck(
        OPS.all_reduce_rms_norm_quantized.default, (*(draw(rank, *shape) for shape in shapes), *options, *settings())
    )


def functional(name: str, rank: int) -> None:
    shapes, options, _ = CHECKED[name]
    for needed in (False, True):
        tensors = [draw(rank, *shape).requires_grad_(needed) for shape in shapes]
        opcheck(getattr(OPS, name).default, (*tensors, *options, *settings()))


def into(name: str, rank: int) -> None:
    shapes, options, outputs = CHECKED[name]
    tensors = [draw(rank, *shape) for shape in shapes]
    given = {output: torch.empty(shape) for output, shape in outputs.items()}
    opcheck(getattr(OPS, name).out, (*tensors, *options, *settings()), given)


def in_place(name: str, rank: int) -> None:
    shapes, options, _ = CHECKED[name]
    opcheck(getattr(OPS, f"{name}_").default, (*(draw(rank, *shape) for shape in shapes), *options, *settings()))


IDS = torch.tensor([[0, 3], [2, -1], [1, 2]])


def dispatching(rank: int) -> None:
    for needed in (False, True):
        x = draw(rank, 3, 4).requires_grad_(needed)
        opcheck(OPS.ep_dispatch.default, (x, IDS, 4, None, "contiguous", "", 8, True, *settings()))


def combining(rank: int) -> None:
    rows = OPS.ep_dispatch.default(draw(rank, 3, 4), IDS, 4, None, "padded", "", 8, True, *settings())[4]
    for needed in (False, True):
        results, weights = draw(rank, 2, 6, 4).requires_grad_(needed), draw(9, 3, 2).requires_grad_(needed)
        opcheck(OPS.ep_combine.default, (results, weights, IDS, rows, 4, *settings()))


def operands(rank: int, nk: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a, and b in one of its two layouts."""
    a = drawn_gemm(rank, M, K, dtype=dtype)
    return a, drawn_gemm(rank, N, K, dtype=dtype).t() if nk else drawn_gemm(rank, K, N, dtype=dtype)


def gemm_calls(rank: int, nk: bool, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Operator to arguments."""
    a, b = operands(rank, nk, dtype)
    half, single = dtype == torch.bfloat16, torch.float32
    scales = (scale(9, 1), scale(rank, 1)) if dtype == FP8 else (None, None)
    wide = single if half or dtype == FP8 else None
    bias, several = drawn_gemm(5, N, dtype=wide or dtype), [scales[1]] * 2 if dtype == FP8 else []
    return {
        "ag_gemm": (a, b, *scales, wide, *settings()),
        "ag_gemm_gathered": (a, b, *scales, None, *settings()),
        "ag_gemm_list": (a, [b, b.clone()], scales[0], several, None, *settings(), "any", None),
        "gemm_rs": (a, b, *scales, wide, "sum", *settings()),
        "gemm_ar": (a, b, bias, *scales, wide, *settings(), "default", 8),
    }


def needing(value: Any, needed: bool) -> Any:
    if isinstance(value, list):
        return [needing(each, needed) for each in value]
    return value.detach().requires_grad_(needed) if isinstance(value, torch.Tensor) else value


def gemm(name: str, dtype: torch.dtype, rank: int) -> None:
    # The others compare inputs before and after, which PyTorch cannot do with fp8 on CPUs.
    checks = ("test_autograd_registration", "test_faketensor")
    for nk in (False, True):
        for needed in (False, True) if dtype == torch.float32 else (False,):
            given = tuple(needing(each, needed) for each in gemm_calls(rank, nk, dtype)[name])
            if dtype == FP8:
                opcheck(getattr(OPS, name).default, given, test_utils=checks)
            else:
                opcheck(getattr(OPS, name).default, given)


def gemm_into(name: str, rank: int) -> None:
    arguments = gemm_calls(rank, True, torch.float32)[name]
    made = getattr(OPS, name)(*arguments)
    results = made if isinstance(made, tuple) else (made,)
    given = {output: torch.zeros_like(result) for output, result in zip(("out", "gathered"), results, strict=False)}
    opcheck(getattr(OPS, name).out, arguments, given)
    getattr(OPS, name).out(*arguments, **given)
    torch.testing.assert_close(tuple(given.values()), results)


GEMMS = ("ag_gemm", "ag_gemm_gathered", "ag_gemm_list", "gemm_rs", "gemm_ar")
CHECKS: dict[str, Case] = {
    "ep_dispatch": dispatching,
    "ep_combine": combining,
    **{name: functools.partial(functional, name) for name in CHECKED},
    **{f"{name}.out": functools.partial(into, name) for name in CHECKED},
    "all_reduce_rms_norm_quantized": quantised,
    **{f"{name}_": functools.partial(in_place, name) for name in ("all_reduce", "all_reduce_bias")},
}
GEMM_CHECKS: dict[str, Case] = {
    **{name: functools.partial(gemm, name, torch.float32) for name in GEMMS},
    **{f"{name} bf16": functools.partial(gemm, name, torch.bfloat16) for name in GEMMS},
    **{f"{name} fp8": functools.partial(gemm, name, FP8) for name in GEMMS},
    **{f"{name}.out": functools.partial(gemm_into, name) for name in GEMMS if name != "ag_gemm_list"},
}


@pytest.mark.parametrize("name", [*some_of(CHECKS), *some_of(GEMM_CHECKS, 5)])
def test_opcheck(rank: int, name: str) -> None:
    {**CHECKS, **GEMM_CHECKS}[name](rank)


def every_op(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each public function, new results, given ones and in place; shapes are `x`'s where it can be."""
    y = tunedcomm.all_gather(tunedcomm.all_reduce(x.sin(), op="max"), dim=1)
    y = tunedcomm.reduce_scatter(y.cos(), op="avg", dim=1, group=dist.group.WORLD)
    y = tunedcomm.all_reduce_bias(tunedcomm.all_to_all(y), bias, max_sms=8)
    normed, summed = tunedcomm.all_reduce_rms_norm(y, weight, residual=x, numerics="any")
    total = normed + summed
    tunedcomm.all_reduce_(total, op="avg")
    part = torch.zeros_like(total)
    tunedcomm.all_reduce(total, out=part)
    tunedcomm.all_reduce_bias(part, bias, out=part)
    tunedcomm.all_to_all(part, out=normed)
    tunedcomm.all_reduce_rms_norm(part, weight, residual=summed, residual_out=summed)
    return total, part, normed, summed


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


def arguments(rank: int, rows: int = 4) -> tuple[torch.Tensor, ...]:
    return draw(rank, rows, 6), draw(8, 6), draw(9, 6)


def calls_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "tunedcomm" in str(node.target)]


@pytest.mark.parametrize("name", ["every_op", "every_form"])
def test_aot_eager(rank: int, name: str) -> None:
    function: Callable[..., Any] = globals()[name]
    inputs = arguments(rank) if name == "every_op" else (drawn_gemm(rank, M, K), drawn_gemm(rank + 20, N, K))
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.slow
def test_dynamic_shapes(rank: int) -> None:
    """One graph for all sizes, none of them written into it."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(every_op, backend=backend, fullgraph=True, dynamic=True)
    for rows in (4, 6, 10):
        torch.testing.assert_close(compiled(*arguments(rank, rows)), every_op(*arguments(rank, rows)))
    assert len(graphs) == 1
    with pytest.raises(Exception, match="cannot be cut"):
        compiled(*arguments(rank, 5))


def test_make_fx(rank: int) -> None:
    for tracing in ("real", "fake", "symbolic"):
        traced = make_fx(every_op, tracing_mode=tracing)(*arguments(rank))
        found = calls_of(traced.graph)
        assert found[:3] == [f"tunedcomm.{op}.default" for op in ("all_reduce", "all_gather", "reduce_scatter")]
        assert "tunedcomm.all_reduce_.default" in found
        assert found[-1] == "tunedcomm.all_reduce_rms_norm.out"
        torch.testing.assert_close(traced(*arguments(rank)), every_op(*arguments(rank)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = tunedcomm.all_gather(self.linear(x))
        total = tunedcomm.all_reduce_(gathered * 2)
        return tunedcomm.reduce_scatter(total)


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.slow), True])
def test_export(rank: int, strict: bool) -> None:
    torch.manual_seed(3)
    model = Model().requires_grad_(False)  # for all_reduce_ is in place
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (draw(rank, 4, 6),), dynamic_shapes=({0: rows},), strict=strict)
    assert {"tunedcomm.all_gather.default", "tunedcomm.reduce_scatter.default"} <= set(calls_of(program.graph))
    lowered = program.run_decompositions()
    for rows_now in (4, 7):
        x = draw(rank, rows_now, 6)
        for each in (program, lowered):
            torch.testing.assert_close(each.module()(x), model(x))


@pytest.mark.slow
def test_fake_tensors(rank: int) -> None:
    """Public functions of fake tensors give fake results, and send nothing."""
    with FakeTensorMode() as mode:
        x = torch.empty(4, 6)
        assert tunedcomm.all_gather(x, dim=1).shape == (4, 12)
        assert tunedcomm.reduce_scatter(x).shape == (2, 6)
        assert [t.dtype for t in tunedcomm.all_reduce_rms_norm(x.half(), torch.empty(6).half())] == [torch.half] * 2
        with pytest.raises(tunedcomm.UnsupportedInputError, match="5 of a tensor of shape"):
            tunedcomm.all_to_all(torch.empty(5))
    assert type(tunedcomm.all_reduce(mode.from_tensor(draw(rank, 3)))) is type(x), "outside the mode, too"
    if rank == 0:  # alone
        tunedcomm.all_reduce(mode.from_tensor(draw(rank, 3)))


def test_refused_while_compiled(rank: int) -> None:
    """What cannot be served is refused while it is compiled, by the same words."""
    w = draw(3, N, 5)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "op='mean' is no reduction": lambda x: tunedcomm.all_reduce(x, op="mean"),
        "must be a multiple of 2": tunedcomm.reduce_scatter,
        "multiple of 2 .*pad a": lambda x: tunedcomm.gemm_rs(x, w.t()),
        "it must match x": lambda x: tunedcomm.all_reduce(x, out=x.new_empty(4)),
        "numerics": lambda x: tunedcomm.all_reduce(x, numerics="exact"),  # type: ignore[arg-type]
        "op='max' is no reduction": lambda x: tunedcomm.gemm_rs(x, w.t(), op="max"),
        "they must be equal": lambda x: tunedcomm.gemm_ar(x, w),
        "out_dtype=torch.float16": lambda x: tunedcomm.ag_gemm(x, w.t(), out_dtype=torch.float16),
        "b is a list of 2": lambda x: tunedcomm.ag_gemm(x, [w.t()] * 2, out=[x]),
    }
    for text, call in calls.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(call, backend="aot_eager", fullgraph=True)(draw(rank, 5, 5))
        with pytest.raises(tunedcomm.UnsupportedInputError, match=text):
            call(draw(rank, 5, 5))


def test_eager_calls_go_past_the_operators(rank: int) -> None:
    """Plain eager calls do not pay for PyTorch's dispatcher."""
    called: list[str] = []
    kept = call_module.call_operator

    def spy(op: str, *rest: Any) -> Any:
        called.append(op)
        return kept(op, *rest)

    with replaced(call_module, "call_operator", spy):
        with torch.no_grad():
            every_op(*arguments(rank))
        every_op(*arguments(rank))
        assert not called
        tunedcomm.all_reduce(draw(rank, 3).requires_grad_())
        assert called == ["all_reduce"], "else the test above shows nothing"


def some_ops(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One kernel of Inductor's, for its compiler is slow, between ops with results of all kinds."""
    y = tunedcomm.reduce_scatter(tunedcomm.all_gather(x, dim=1), dim=1)
    normed, summed = tunedcomm.all_reduce_rms_norm(y, weight, residual=x)
    total = normed * summed
    tunedcomm.all_reduce_(total)
    tunedcomm.all_to_all(total, out=normed)
    return total, normed, summed


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor(rank: int, mode: str | None) -> None:
    torch._dynamo.reset()
    x, _, weight = arguments(rank)
    compiled = torch.compile(some_ops, mode=mode, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, weight), some_ops(x, weight))
