"""The operators' schemas and fake forms, which need neither a process group nor a peer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tunedcomm
import tunedcomm.ops
from tunedcomm.ops.torch_ops import operators

OPS = torch.ops.tunedcomm
NOBODY = (4, "a group that is not here")
SERVED = sorted(set(operators) - {"ag_gemm_list"})
MODE = FakeTensorMode()


def fakes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    with MODE:
        return [torch.empty(shape, dtype=dtype) for shape in shapes]


def test_every_op_is_an_operator() -> None:
    collectives = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
    assert {*collectives, "all_reduce_bias", "all_reduce_rms_norm", "all_reduce_rms_norm_quantized"} <= set(SERVED)
    assert {"ag_gemm", "ag_gemm_gathered", "gemm_ar", "gemm_rs"} <= set(SERVED)
    assert all(operator.gradient for operator in operators.values())
    assert OPS.ag_gemm_list.overloads() == ["default"]
    for op in SERVED:
        assert hasattr(tunedcomm, re.sub("_(gathered|quantized|tokens|rank|fp32|wire)$", "", op))
        assert sorted(getattr(OPS, op).overloads()) == ["default", "out"]


def said(argument: Any) -> tuple[Any, ...]:
    return argument.name, str(argument.type), argument.default_value, argument.alias_info


@pytest.mark.parametrize("op", SERVED)
def test_schemas_say_what_is_written(op: str) -> None:
    functional, into = getattr(OPS, op).default._schema, getattr(OPS, op).out._schema
    assert not functional.is_mutable
    shared = into.arguments[: len(functional.arguments)]
    assert list(map(said, shared)) == list(map(said, functional.arguments))
    added = into.arguments[len(functional.arguments) :]
    assert len(added) == len(functional.returns)
    assert all(a.alias_info.is_write and a.kwarg_only for a in added)
    assert len({tuple(a.alias_info.before_set) for a in added}) == len(added)
    assert not into.returns
    group = [a.name for a in functional.arguments].index("group_size")
    assert [str(a.type) for a in functional.arguments[group : group + 2]] == ["int", "str"]


def results(op: str, tensors: list[Any], *options: Any) -> Any:
    return getattr(OPS, op)(*tensors, *options, *NOBODY)


@pytest.mark.parametrize(
    ("op", "shapes", "options", "expected"),
    [
        ("all_reduce", [(8, 12)], ("max",), [(8, 12)]),
        ("all_gather", [(8, 12)], (0,), [(32, 12)]),
        ("all_gather", [(8, 12)], (-1,), [(8, 48)]),
        ("all_gather", [()], (0,), [(4,)]),
        ("reduce_scatter", [(8, 12)], ("sum", 0), [(2, 12)]),
        ("reduce_scatter", [(8, 12)], ("avg", -1), [(8, 3)]),
        ("all_reduce_fp32", [(8, 12)], ("sum",), [(8, 12)]),
        ("reduce_scatter_fp32", [(8, 12)], ("sum", -1), [(8, 3)]),
        ("all_reduce_wire", [(8, 12)], ("sum", "int8_group128"), [(8, 12)]),
        ("all_gather_wire", [(8, 12)], (1, "int8_group128"), [(8, 48)]),
        ("reduce_scatter_wire", [(8, 12)], ("sum", 1, "int8_group128"), [(8, 3)]),
        ("all_to_all", [(8, 12)], (), [(8, 12)]),
        ("all_reduce_bias", [(8, 12), (12,)], (), [(8, 12)]),
        ("ulysses_scatter", [(2, 3, 8, 5)], (), [(2, 12, 2, 5)]),
        ("ulysses_gather", [(2, 12, 2, 5)], (), [(2, 3, 8, 5)]),
        ("all_reduce_rms_norm", [(8, 12), (12,), None, (8, 12), None], (1e-6, None), [(8, 12), (8, 12)]),
    ],
)
def test_shapes(op: str, shapes: list[Any], options: tuple[Any, ...], expected: list[tuple[int, ...]]) -> None:
    made = results(op, [fakes(shape)[0] if shape is not None else None for shape in shapes], *options)
    tensors = made if isinstance(made, (list, tuple)) else [made]
    assert [tuple(tensor.shape) for tensor in tensors] == expected
    dtype = torch.float32 if op.endswith("_fp32") else torch.bfloat16
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize(
    ("options", "dtypes", "scales", "norm"),
    [
        (("token", "row", False, False, 0.0), "e4m3 float32", (2, 3, 1), (0,)),
        (("group128", "row", True, True, 1.0), "e4m3 float32", (2, 3, 2), (2, 3, 256)),
        (("group128", "column", False, False, 0.0), "e4m3 float32", (2, 8), (0,)),
        (("", "row", False, False, 1.0), "bfloat16 float32", (0,), (0,)),
    ],
)
def test_shapes_of_quantised_norms(options: Any, dtypes: str, scales: Any, norm: Any) -> None:
    x, weight = fakes((2, 3, 256), (256,))
    made = results("all_reduce_rms_norm_quantized", [x, weight, None, x, None], 1e-6, *options)
    assert [tuple(t.shape) for t in made] == [(2, 3, 256), (2, 3, 256), scales, norm]
    assert all(name in str(made[place].dtype) for name, place in zip(dtypes.split(), (0, 2), strict=True))
    (scale,) = fakes((1,), dtype=torch.float32)
    by_scale = results("all_reduce_rms_norm", [x, weight, None, None, scale], 1e-6, torch.float8_e4m3fn)
    assert [t.dtype for t in by_scale] == [torch.float8_e4m3fn, torch.bfloat16]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("is not a reduction", lambda x: OPS.all_reduce(x, "mean", *NOBODY)),
        ("numerics", lambda x: OPS.all_reduce(x, "sum", *NOBODY, "exact")),
        ("must be a multiple of 4", lambda x: OPS.reduce_scatter(x, "sum", 1, *NOBODY)),
        ("cannot be cut", lambda x: OPS.all_to_all(x.t(), *NOBODY)),
        ("does not take torch.int16", lambda x: OPS.all_reduce(x.to(torch.int16), "sum", *NOBODY)),
        ("out has shape", lambda x: OPS.all_gather.out(x, 0, *NOBODY, out=x)),
        ("residual_out has shape", lambda x: OPS.all_reduce_rms_norm.out(
            x, x[0], None, None, None, 1e-6, None, *NOBODY, out=x * 1, residual_out=x[0]
        )),
        ("bias of all_reduce_bias has shape", lambda x: OPS.all_reduce_bias_(x, x[:, 0], *NOBODY)),
        ("b has 8 rows .* pass b.t", lambda x: OPS.gemm_rs(x, x, None, None, None, "sum", *NOBODY)),
        ("bias of gemm_ar has shape", lambda x: OPS.gemm_ar(x, x.t(), x[0], None, None, None, *NOBODY)),
        ("wants scale_a and scale_b", lambda x: OPS.ag_gemm(
            x.to(torch.float8_e4m3fn), x.t().to(torch.float8_e4m3fn), None, None, None, *NOBODY
        )),
        ("is an empty list", lambda x: OPS.ag_gemm_list(x, [], None, [], None, *NOBODY, "any", 8)),
        ("scale_b of ag_gemm has 1 elements", lambda x: OPS.ag_gemm_list(
            x, [x.t()] * 2, x, [x], None, *NOBODY, "any", None
        )),
        ("gathered has shape", lambda x: OPS.ag_gemm_gathered.out(
            x, x.t(), None, None, None, *NOBODY, out=x.new_empty(32, 8), gathered=x
        )),
        ("not differentiable", lambda x: OPS.all_reduce_(x.requires_grad_() * 1, "sum", *NOBODY)),
    ],
)  # fmt: skip
def test_fake_forms_refuse_what_the_others_would(text: str, call: Any) -> None:
    (x,) = fakes((8, 6))
    with pytest.raises(tunedcomm.UnsupportedInputError, match=text):
        call(x)
