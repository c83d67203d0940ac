"""The operators `torch.ops.tunedcomm.*`: PyTorch's own checks of them, and what traces and compiles to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, replaced
from fusion_samples import inductor
from gemm_samples import FP8, scale
from gemm_samples import drawn as drawn_gemm
from quick import some
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


IDS = torch.tensor([[0, 3], [2, -1], [1, 2]])
MOVES = ("all_gather", "all_to_all", "broadcast", "ulysses_scatter", "ulysses_gather")
COLLECTIVES = (
    *MOVES,
    "all_gather_v",
    "reduce_scatter_v",
    "dcp_combine",
    "all_reduce",
    "reduce_scatter",
    "all_reduce_bias",
    "all_reduce_rms_norm",
)
GEMMS = ("ag_gemm", "ag_gemm_gathered", "ag_gemm_list", "gemm_rs", "gemm_ar")
RESULTS = {
    "all_gather_v": ("out", "counts_out"),
    "dcp_combine": ("out", "lse_out"),
    "all_reduce_rms_norm": ("out", "residual_out"),
    "ag_gemm_gathered": ("out", "gathered"),
}


def arguments_of(op: str, rank: int, nk: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """What the operator is called with; of GEMMs b in one of its two layouts, and the dtype of both."""
    x, row, same = draw(rank, 4, 6), draw(rank, 6), settings()
    a, b = drawn_gemm(rank, M, K, dtype=dtype), drawn_gemm(rank, K, N, dtype=dtype)
    b = drawn_gemm(rank, N, K, dtype=dtype).t() if nk else b
    scales = (scale(9, 1), scale(rank, 1)) if dtype == FP8 else (None, None)
    wide = torch.float32 if dtype in (FP8, torch.bfloat16) else None
    bias, several = drawn_gemm(5, N, dtype=wide or dtype), [scales[1]] * 2 if dtype == FP8 else []
    wider, column = draw(rank, 4, 128), draw(rank, 128)
    sorted_back = op in ("ep_combine", "ep_combine_rank")
    weights = draw(8, 3, 2) if op == "ep_dispatch" else None
    rows = (IDS, weights, None, 4, None, "padded" if sorted_back else "contiguous", "", 8, True, *same)
    sent = OPS.ep_dispatch.default(draw(rank, 3, 4), *rows)[4] if sorted_back else None
    return {
        "all_reduce": (x, "sum", *same),
        "all_gather": (x, 1, *same),
        "reduce_scatter": (x, "avg", 1, *same),
        "all_reduce_fp32": (x.bfloat16(), "avg", *same),
        "reduce_scatter_fp32": (x.bfloat16(), "avg", 1, *same),
        "all_reduce_wire": (x, "sum", "fp8_group128", *same),
        "all_gather_wire": (x, 1, "fp8_group128", *same),
        "reduce_scatter_wire": (x, "avg", 1, "int8_group128", *same),
        "all_to_all": (x, *same),
        "broadcast": (x, 1, *same),
        "all_gather_v": (x[: 3 + rank], None, [3, 4], 3 + rank, 5, *same),
        "reduce_scatter_v": (x, None, [1, 3], 1 + 2 * rank, 5, *same),
        "dcp_combine": (draw(rank, 3, 4, 8), draw(rank + 2, 3, 4), "2", *same),
        "ulysses_scatter": (draw(rank, 2, 3, 4, 8), *same),
        "ulysses_gather": (draw(rank, 2, 4, 3, 8), *same),
        "all_reduce_bias": (x, row, *same),
        "all_reduce_rms_norm": (x, row, row, x, None, 1e-6, None, *same),
        "all_reduce_rms_norm_quantized": (
            *(wider, column, wider, wider, None, 1e-6, "group128", "column", True, True, 1.0),
            *same,
        ),
        "ep_dispatch": (draw(rank, 3, 4), *rows),
        "ep_combine": (draw(rank, 2, 6, 4), draw(9, 3, 2), IDS, sent, None, 4, *same),
        "ep_combine_rank": (draw(rank, 2, 6, 4), draw(9, 2, 3, 2), IDS, sent, None, 4, "", *same),
        "ep_dispatch_tokens": (draw(rank, 3, 4), IDS, draw(9, 3, 2), None, 4, True, False, *same),
        "ep_combine_tokens": (draw(rank, 2 * 3, 4), torch.cat([IDS, IDS]).clamp(max=1).int(), IDS, None, 4, "", *same),
        "ag_gemm": (a, b, *scales, wide, *same),
        "ag_gemm_gathered": (a, b, *scales, None, *same),
        "ag_gemm_list": (a, [b, b.clone()], scales[0], several, None, *same, "any", None),
        "gemm_rs": (a, b, *scales, wide, "sum", *same),
        "gemm_ar": (a, b, bias, *scales, wide, *same, "default", 8),
    }[op]


def needing(value: Any, needed: bool) -> Any:
    if isinstance(value, list):
        return [needing(each, needed) for each in value]
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_(needed) if is_float else value


def into(op: str, rank: int) -> None:
    arguments = arguments_of(op, rank, True, torch.float32)
    made = getattr(OPS, op)(*arguments)
    results = made if isinstance(made, tuple) else (made,)
    given = dict(zip(RESULTS.get(op, ("out",)), map(torch.zeros_like, results), strict=False))
    opcheck(getattr(OPS, op).out, arguments, given)
    getattr(OPS, op).out(*arguments, **given)
    torch.testing.assert_close(tuple(given.values()), results)


CHECKS = (
    *(
        "ep_dispatch",
        "ep_combine",
        "ep_combine_rank",
        "ep_dispatch_tokens",
        "ep_combine_tokens",
        *COLLECTIVES,
        *(f"{op}.out" for op in COLLECTIVES),
    ),
    *("all_reduce_rms_norm_quantized", "all_reduce_", "all_reduce_bias_"),
    *("all_reduce_fp32", "reduce_scatter_fp32", "all_reduce_wire", "all_gather_wire", "reduce_scatter_wire"),
)
OF_GEMMS = (
    *(f"{op}{dtype}" for dtype in ("", " bf16", " fp8") for op in GEMMS),
    *(f"{op}.out" for op in GEMMS if op != "ag_gemm_list"),
)


@pytest.mark.parametrize("name", [*some(CHECKS), *some(OF_GEMMS, 5)])
def test_opcheck(rank: int, name: str) -> None:
    """An operator, with a dtype of GEMMs, into given results (`.out`) or in place (`_`)."""
    if name.endswith(".out"):
        into(name.removesuffix(".out"), rank)
        return
    op, _, kind = name.partition(" ")
    dtype = {"": torch.float32, "bf16": torch.bfloat16, "fp8": FP8}[kind]
    # The others compare inputs before and after, which PyTorch cannot do with fp8 on CPUs.
    more = {"test_utils": ("test_autograd_registration", "test_faketensor")} if dtype == FP8 else {}
    is_plain = dtype != torch.float32 or op.endswith(("_", "_quantized"))
    for nk in (False, True) if op in GEMMS else (True,):
        for needed in (False,) if is_plain else (False, True):
            given = tuple(needing(each, needed) for each in arguments_of(op.removesuffix("_"), rank, nk, dtype))
            opcheck(getattr(OPS, op).default, given, **more)


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
    tunedcomm.all_reduce_(part, op="avg", wire="int8_group128")
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


def test_a_repeated_call_is_traced(rank: int) -> None:
    """Also over real tensors, where a guard of PyTorch sees no difference."""
    x = draw(rank, 4, 6)
    for _ in range(3):
        tunedcomm.all_reduce(x)
    traced = make_fx(lambda x: tunedcomm.all_reduce(x) + 1)(x)
    assert calls_of(traced.graph) == ["tunedcomm.all_reduce.default"]
    torch.testing.assert_close(traced(x * 2), tunedcomm.all_reduce(x * 2) + 1)


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
        "op='mean' is not a reduction": lambda x: tunedcomm.all_reduce(x, op="mean"),
        "must be a multiple of 2": tunedcomm.reduce_scatter,
        "multiple of 2 .*pad a": lambda x: tunedcomm.gemm_rs(x, w.t()),
        "it must match x": lambda x: tunedcomm.all_reduce(x, out=x.new_empty(4)),
        "numerics": lambda x: tunedcomm.all_reduce(x, numerics="exact"),  # type: ignore[arg-type]
        "op='max' is not a reduction": lambda x: tunedcomm.gemm_rs(x, w.t(), op="max"),
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
