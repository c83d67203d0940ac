"""Norms and biases of sums: exact bits of ordered variants on every rank, in every form, and the public calls."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, bits_of
from quick import some
from variant_checks import check_variant, inputs_of_all, launch_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.all_reduce_rms_norm.op import form_of, scales_view
from tunedcomm.ops.call import paths
from tunedcomm.spec import Problem, get_op, get_variant, variants

OP, BIAS = "all_reduce_rms_norm", "all_reduce_bias"
RANKS = Ranks(env=HOST, forget=False, timeout=500)
kernels.discover()
BASIC = [name for name in variants(OP) if not name.endswith("_quantized")]
KERNELS = sorted(name for name in BASIC if variants(OP)[name].kernels)
LAYOUTS = get_op(OP).layouts[:4]
SHAPES = ((1, 128), (5, 128), (3, 1000), (7, 256), (1, 2048), (4, 24))


def problem_of(shape, dtype, world_size, layout="residual", scaling="", op=OP):
    return Problem(op, shape, dtype, world_size, layout=layout, scaling=scaling, mode="eager")


@pytest.mark.parametrize("op", [OP, BIAS])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shapes(rank, world_size, op):
    """Every variant at shapes up and down, with all extras, on one lane that every call leaves fit."""
    communicator, ran, dtype = get_communicator(), [], {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    limits = limits_of(communicator)
    for seed, shape in some(enumerate((*SHAPES, *reversed(SHAPES))), 5):
        kind, more = "integers" if seed % 3 == 0 else "random", (LAYOUTS[seed % 4], "fp8" if seed % 5 == 4 else "")
        problem = problem_of(shape, dtype, world_size, *(more if op == OP else ("", "")), op)
        for name, variant in variants(op).items():
            if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                check_variant(communicator, problem, name, seed=seed, kind=kind)
                ran.append(name)
    # in_order stands in for the library, some need more ranks or a GPU
    assert set(ran) >= {name for name, variant in variants(op).items() if variant.kernels and "_quant" not in name}


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float16"), (3, "bfloat16"), (4, "float32")])
def test_ordered_variants_and_ranks_give_the_same_bits(rank, world_size, dtype):
    """In several configs, on the same inputs."""
    communicator = get_communicator()
    ordered = [n for n in KERNELS if variants(OP)[n].numerics == "ordered"]
    shuffle, ran = random.Random(7), 0
    for number, (shape, layout) in enumerate((((3, 512), "residual"), ((2, 2048), "bias+residual"), ((5, 640), ""))):
        problem, found = problem_of(shape, dtype, world_size, layout), set()
        for name in ordered:
            variant, limits = get_variant(OP, name), limits_of(communicator)
            feasible = [c for c in variant.space.enumerate() if variant.infeasible(problem, c, limits) is None]
            for config in shuffle.sample(feasible, min(1 + (number == 0), len(feasible))):
                outputs = check_variant(communicator, problem, name, seed=number, config=config)
                found.add(tuple(t.view(torch.uint8).numpy().tobytes() for t in outputs))
                ran += 1
        everyones = [None] * world_size
        dist.all_gather_object(everyones, found)
        assert len(set.union(*everyones)) == 1, number
    assert ran >= 14


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_lag(rank, world_size):
    """two_shot with every lag, over more and fewer chunks than its areas hold; the same bits as the exact ones."""
    communicator, ran = get_communicator(), 0
    variant, limits = get_variant(OP, "two_shot"), limits_of(communicator)
    for seed, tokens in enumerate((5, 6, 9, 17)):
        problem = problem_of((tokens, 128), "bfloat16", world_size)
        for lag in (1, 2, 3):
            for rows in (1, 2):
                config = {"num_blocks": 1, "num_warps": 1, "rows": rows, "lag": lag}
                if variant.infeasible(problem, config, limits) is None:
                    check_variant(communicator, problem, "two_shot", seed=seed, config=config)
                    ran += 1
    assert ran == 17


def inputs_for(rank, world_size, shape, dtype="bfloat16", layout="bias+residual", scaling=""):
    """(this rank's inputs by name, exact results)."""
    flat = (torch.Size(shape[:-1]).numel(), shape[-1])
    problem = problem_of(flat, dtype, world_size, layout, scaling)
    everyone = inputs_of_all(problem, 4, "random")
    y, h = get_op(OP).ordered_reference(problem, everyone, rank)
    names = ["x", "weight", *(name for name in ("bias", "residual") if name in layout), *(["scale"] if scaling else [])]
    given = dict(zip(names, everyone[rank], strict=True))
    for name in {"x", "residual"} & set(given):
        given[name] = given[name].reshape(shape)
    if scaling:
        given["out_dtype"] = torch.float8_e4m3fn
    return given, y.reshape(shape), h.reshape(shape)


def same(results, y, h):
    return torch.equal(bits_of(results[0]), bits_of(y)) and torch.equal(bits_of(results[1]), bits_of(h))


@pytest.mark.slow
def test_public_call(rank, world_size):
    """Outputs new and given, the residual in place, strides, alignment and extras; the second call is fast."""
    for layout, scaling in (("bias+residual", ""), ("residual", "fp8"), ("", "")):
        given, y, h = inputs_for(rank, world_size, (2, 3, 64), layout=layout, scaling=scaling)
        for name in KERNELS if layout == "residual" else ["lamport"]:
            with tunedcomm.force(OP, name):
                for _ in range(2):
                    for _ in range(2):
                        assert same(tunedcomm.all_reduce_rms_norm(**given), y, h), name
                    assert paths[OP].last_fast_calls, "made by the second call"
                    out, held = torch.full_like(y, 0.0), torch.full_like(h, float("nan"))
                    got = tunedcomm.all_reduce_rms_norm(**given, out=out, residual_out=held)
                    assert got[0] is out
                    assert got[1] is held
                    assert same(got, y, h), name
                    if "residual" in layout:
                        held = given["residual"].clone()
                        asked = {**given, "residual": held, "residual_out": held}
                        assert same(tunedcomm.all_reduce_rms_norm(**asked), y, h), name
                        assert torch.equal(bits_of(held), bits_of(h))
                if name != "lamport":
                    continue  # all kernels are given copies of what follows
                wide = torch.zeros(2, 3, 128, dtype=h.dtype)
                strided = {
                    **given,
                    "x": wide[..., ::2].copy_(given["x"]),
                    "residual_out": torch.zeros_like(wide)[..., 1::2],
                }
                assert same(tunedcomm.all_reduce_rms_norm(**strided), y, h), name
                weight = torch.zeros(65, dtype=h.dtype)[1:].copy_(given["weight"])
                assert same(tunedcomm.all_reduce_rms_norm(**{**given, "weight": weight}), y, h), name
                if "residual" in layout:  # a residual in place that kernels cannot take as it lies
                    held = torch.zeros_like(wide)[..., ::2].copy_(given["residual"])
                    asked = {**given, "residual": held, "residual_out": held}
                    assert same(tunedcomm.all_reduce_rms_norm(**asked), y, h), name
    given, y, h = inputs_for(rank, world_size, (3, 7), dtype="float32")
    got = tunedcomm.all_reduce_rms_norm(**given)  # no whole packets: the library
    torch.testing.assert_close(got[0], y)
    torch.testing.assert_close(got[1], h)
    row = tunedcomm.all_reduce_rms_norm(torch.ones(64), torch.ones(64), eps=0.0)
    torch.testing.assert_close(row[0], torch.ones(64))
    big = tunedcomm.all_reduce_rms_norm(torch.ones(64), torch.ones(64), eps=1e9)
    assert big[0].max() < 1e-3, "another eps is another result"


def test_a_residual_that_is_the_input_has_a_fast_call(rank):
    """One tensor in two places has a fast call of its own, which refuses two tensors, and the other way round."""
    weight, x = torch.ones(64), torch.randn(4, 64)
    with tunedcomm.force(OP, "lamport"):
        for _ in range(2):
            y, h = tunedcomm.all_reduce_rms_norm(x, weight, residual=x)
        fast = paths[OP].last_fast_calls.get(dist.group.WORLD)
        assert fast is not None
        rest = (None, None, None, 1e-6, None, None, None)
        assert fast(x, weight, None, x.clone(), *rest) is None
        assert same(fast(x, weight, None, x, *rest), y, h)
        for _ in range(2):
            assert same(tunedcomm.all_reduce_rms_norm(x, weight, residual=x.clone()), y, h)
        assert paths[OP].last_fast_calls[dist.group.WORLD](x, weight, None, x, *rest) is None


def test_bad_input(rank, world_size):
    """Errors that name the argument; and that nothing hangs after them."""
    x, w = torch.ones(4, 64), torch.ones(64)
    whole = torch.ones(9, 64)
    for change, said in (
        ({"x": "x"}, "torch.Tensor"),
        ({"x": torch.tensor(1.0)}, "no dimensions"),
        ({"x": x.int()}, "does not take torch.int32"),
        ({"weight": None}, "weight"),
        ({"weight": torch.ones(63)}, "weight"),
        ({"weight": w.double()}, "weight"),
        ({"bias": torch.ones(4, 63)}, "bias"),
        ({"residual": torch.ones(64)}, "residual"),
        ({"residual": x.half()}, "residual"),
        ({"eps": -1.0}, "eps"),
        ({"eps": "small"}, "eps"),
        ({"out_dtype": torch.float8_e4m3fn}, "belong together"),
        ({"scale": torch.ones(1)}, "belong together"),
        ({"out_dtype": torch.float16, "scale": torch.ones(1)}, "out_dtype"),
        ({"out_dtype": torch.float8_e4m3fn, "scale": torch.ones(2)}, "scale"),
        ({"out": torch.ones(4, 65)}, "out has shape"),
        ({"out": x}, "out overlaps x"),
        ({"residual": whole[:4], "out": whole[:4]}, "out overlaps residual"),
        ({"residual": whole[:4], "residual_out": whole[1:5]}, "residual_out overlaps residual without being residual"),
        ({"out": whole[:4], "residual_out": whole[3:7]}, "residual_out overlaps out"),
        ({"quantize": "row"}, "quantize='row'"),
        ({"quantize": "tensor"}, "belong together"),
        ({"quantize": "token", "scale": torch.ones(1)}, "belong together"),
        ({"quantize": "group128"}, "multiple of 128"),
        ({"quantize": "token", "pow2_scales": True}, "group128"),
        ({"quantize": "token", "scales_layout": "column"}, "group128"),
        ({"quantize": "token", "scales_layout": "c"}, "scales_layout"),
        ({"quantize": "token", "out_dtype": torch.float16}, "out_dtype"),
        ({"with_norm": True}, "with_norm"),
        ({"weight_offset": float("nan")}, "weight_offset"),
        ({"quantize": "token", "bias": torch.ones(3, 64)}, "bias"),
        ({"x": x.clone().requires_grad_(), "quantize": "token"}, "not differentiable"),
        ({"weight": w.clone().requires_grad_(), "weight_offset": 1.0}, "not differentiable"),
        ({"numerics": "exact"}, "numerics"),
        ({"max_sms": -1}, "max_sms"),
        ({"x": x.clone().requires_grad_(), "out": torch.ones(4, 64)}, "into a given tensor is not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_rms_norm(**{"x": x, "weight": w, **change})
    given, y, h = inputs_for(rank, world_size, (3, 64), dtype="float32")
    torch.testing.assert_close(tunedcomm.all_reduce_rms_norm(**given, numerics="any", max_sms=8), (y, h))


# Forms that make scales, return the norm besides, add an offset or take a bias of x's shape.
FORMS = [name for name in variants(OP) if name.endswith("_quantized")]
QUANTISED_SHAPES = ((3, 1024), (5, 256), (1, 128), (4, 384), (7, 640))


def forms():
    """Every scaling that is not basic with some layout, and every such layout with some scaling."""
    layouts, scalings = get_op(OP).layouts, get_op(OP).scalings
    yield from ((layouts[number % len(layouts)], scaling) for number, scaling in enumerate(scalings[2:]))
    yield from ((layout, ("", "fp8", "token")[number % 3]) for number, layout in enumerate(layouts[4:]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_shapes_of_quantised_forms(rank, world_size):
    """Every variant up and down on one lane that every call leaves fit."""
    communicator, ran = get_communicator(), dict.fromkeys(variants(OP), 0)
    limits, dtype = limits_of(communicator), {2: "bfloat16", 3: "float32"}[world_size]
    for seed, (layout, scaling) in some(enumerate(forms())):
        problem = problem_of(QUANTISED_SHAPES[seed % len(QUANTISED_SHAPES)], dtype, world_size, layout, scaling)
        for name, variant in variants(OP).items():
            if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                check_variant(communicator, problem, name, seed=seed, kind="integers" if seed % 4 == 3 else "random")
                ran[name] += 1
    assert len(FORMS) == 3
    assert {ran[name] for name in (*FORMS, "library", "host_unfused")} == {max(ran.values())}
    assert {ran[name] for name in ("lamport", "one_shot", "two_shot", "two_shot_lamport")} == {0}


def test_they_quantise_the_ordered_norm(rank, world_size):
    """The scales and numbers are those of the ordered norm, which is that of the basic form; the same on every rank."""
    communicator, found = get_communicator(), []
    for number, scaling in enumerate(("token+norm", "group128+columns+norm", "group128+pow2+norm")):
        problem = problem_of((3, 512), "bfloat16", world_size, scaling=scaling)
        (mine, *_), inputs = [inputs_of_all(problem, number, "random")[rank]], inputs_of_all(problem, number, "random")
        plain = problem_of((3, 512), "bfloat16", world_size, scaling="")
        y, h = launch_variant(communicator, plain, "lamport", inputs[rank])
        for name in FORMS:
            out, held, scales, norm = launch_variant(communicator, problem, name, mine)
            assert torch.equal(norm, y)
            assert torch.equal(held, h)
            groups = y.float().unflatten(-1, (scales.shape[-1], -1))
            due = groups.abs().amax(-1) / 448
            if "pow2" in scaling:
                due = torch.exp2(torch.ceil(torch.log2(due)))
            assert torch.equal(scales, due)
            scaled = groups * (1 / scales).unsqueeze(-1)
            assert torch.equal(bits_of(out), bits_of(scaled.flatten(-2).to(torch.float8_e4m3fn)))
            found.append([bits_of(out).tolist(), bits_of(scales).tolist()])
    theirs = [None] * world_size
    dist.all_gather_object(theirs, found)
    assert all(other == found for other in theirs)


def test_zeros_infinities_and_nan(rank, world_size):
    """Rows of zeros, infinities and NaN: the same meaning from every variant, and neighbours are left alone."""
    communicator = get_communicator()
    for dtype, scaling in (
        ("bfloat16", "token+norm"),
        ("float32", "group128+norm"),
        ("bfloat16", "group128+pow2+norm"),
    ):
        problem = problem_of((5, 256), dtype, world_size, layout="", scaling=scaling)
        everyone = inputs_of_all(problem, 2, "random")
        for x, weight in everyone:
            x[0], x[1, 3], x[2, 200] = 0.0, float("inf"), float("nan")
            x[3, :128] = 0.0
            weight.fill_(1.0)
        for name in [*FORMS, "host_unfused", "library"]:
            out, _, scales, norm = launch_variant(communicator, problem, name, everyone[rank])
            width = 256 // scales.shape[-1]
            least = torch.tensor(1e-10) / 448
            least = torch.exp2(torch.ceil(torch.log2(least))) if "pow2" in scaling else least
            back = out.float() * scales.repeat_interleave(width, -1)
            assert (out[0].float() == 0).all(), name
            assert (scales[0] == least).all(), name
            # An infinite sum of squares leaves 0 of all but the infinity, which becomes NaN, as one NaN makes the row.
            assert back[1, 3].isnan(), name
            assert norm[2].isnan().all(), name
            assert back[2].isnan().all(), name
            assert scales[2].isnan().all(), name
            if "group128" in scaling:
                assert (back[3, :128] == 0).all(), name
                assert scales[3, 0] == least, name
            for row in (back[4], back[3, 128:]):
                assert row.isfinite().all(), name
            torch.testing.assert_close(back[4], norm[4].float(), rtol=0.07, atol=0.01)
    # Of a norm that overflows, which a large weight makes: the scale is infinite and every number NaN.
    problem = problem_of((2, 128), "float16", world_size, layout="", scaling="group128+pow2+norm")
    everyone = inputs_of_all(problem, 3, "integers")
    for _, weight in everyone:
        weight.fill_(60000.0)
    for name in [*FORMS, "host_unfused"]:
        out, _, scales, norm = launch_variant(communicator, problem, name, everyone[rank])
        assert norm.isinf().any(), name
        assert scales.isinf().all(), name
        assert (out.float() * scales).isnan().all(), name


CALLS = {
    "token": {"quantize": "token"},
    "token+norm": {"quantize": "token", "with_norm": True},
    "group128+columns+pow2+norm": {
        "quantize": "group128",
        "scales_layout": "column",
        "pow2_scales": True,
        "with_norm": True,
    },
    "fp8+norm": {"quantize": "tensor", "with_norm": True},
    "fp8": {"quantize": "tensor"},
    "": {},
}


def test_public_call_that_quantises(rank, world_size):
    """What the public call returns, with new and given results; the second call is fast."""
    shape, flat = (2, 3, 256), (6, 256)
    layouts = ("residual+offset", "full_bias+residual", "full_bias+residual+offset", "bias+residual")
    for number, (scaling, asked) in enumerate(CALLS.items()):
        layout = layouts[number % len(layouts)] if scaling != "fp8" else "residual"
        problem = problem_of(flat, "bfloat16", world_size, layout, scaling)
        everyone = inputs_of_all(problem, number, "random")
        expected = get_op(OP).ordered_reference(problem, everyone, rank)
        parts = [*("bias" for part in layout.split("+") if "bias" in part), "residual"]
        names = ["x", "weight", *parts, *(["scale"] if scaling.startswith("fp8") else [])]
        given = dict(zip(names, everyone[rank], strict=True))
        given = {n: t.reshape(shape) if t.shape == flat else t for n, t in given.items()}
        given |= {**asked, **({"weight_offset": 1.0} if "offset" in layout else {})}
        name = "lamport" if form_of(problem).is_basic else "lamport_quantized"
        with tunedcomm.force(OP, name):
            for _ in range(3):
                held = given["residual"].clone()
                for got in (
                    tunedcomm.all_reduce_rms_norm(**given),
                    tunedcomm.all_reduce_rms_norm(**{**given, "residual": held, "residual_out": held}),
                ):
                    due = [t for t in (*expected[:2], *expected[2:]) if t.numel()]
                    assert len(got) == len(due), scaling
                    for one, wanted in zip(got, due, strict=True):
                        assert torch.equal(bits_of(one), bits_of(wanted.reshape(one.shape))), (scaling, layout)
                assert torch.equal(bits_of(held), bits_of(expected[1].reshape(shape)))
                if "columns" in scaling:
                    assert got[2].stride() == (3, 1, 8), "six rows, padded to 16 bytes"
            assert paths[OP if name == "lamport" else "all_reduce_rms_norm_quantized"].last_fast_calls[dist.group.WORLD]
    x, bias, weight = torch.randn(4, 64), torch.randn(4, 64), torch.ones(64)
    y, h = tunedcomm.all_reduce_rms_norm(x, weight, bias=bias)
    again = tunedcomm.all_reduce_rms_norm(x, weight, residual=bias)
    assert torch.equal(y, again[0])
    assert torch.equal(h, again[1])


def test_operators_refuse_gradients_and_other_forms(rank, world_size):
    x, w = torch.ones(4, 64), torch.ones(64)
    asked = (1e-6, "token", "row", False, False, 0.0, world_size, dist.group.WORLD.group_name)
    operator = torch.ops.tunedcomm.all_reduce_rms_norm_quantized
    with pytest.raises(tunedcomm.UnsupportedInputError, match="not differentiable"):
        operator(x.clone().requires_grad_(), w, None, None, None, *asked)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="call that"):
        operator(x, w, None, None, None, 1e-6, "", *asked[2:])


def test_scales_of_columns_are_padded():
    problem = problem_of((5, 384), "bfloat16", 2, scaling="group128+columns")
    scales = get_op(OP).make_outputs(problem, "cpu")[2]
    assert (scales.shape, scales.stride()) == ((5, 3), (1, 8))
    assert scales_view(problem, torch.empty(3, 8)).stride() == (1, 8)


# all_reduce_bias on the host backend: exact bits of ordered variants, and the public call


FORCED = sorted(variants(BIAS).keys() - {"in_order"})  # which cannot be forced


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 40), (5, 7)])
def test_public_call_with_a_bias(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    problem = problem_of((torch.Size(shape[:-1]).numel(), shape[-1]), "float32", world_size, "", op=BIAS)
    everyone = inputs_of_all(problem, 1, "random")
    (expected,) = get_op(BIAS).ordered_reference(problem, everyone, rank)  # type: ignore[misc]
    expected = expected.reshape(shape)
    x, bias = everyone[rank][0].reshape(shape), everyone[rank][1]
    for name in FORCED if shape[-1] % 8 == 0 else ["library"]:
        with tunedcomm.force(BIAS, name):
            for _ in range(3):
                held, out = x.clone(), torch.full_like(x, float("nan"))
                assert tunedcomm.all_reduce_bias(x, bias, out=out) is out
                assert tunedcomm.all_reduce_bias(held, bias, out=held) is held
                strided = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]
                tunedcomm.all_reduce_bias(x, bias, out=strided)
                for got in (tunedcomm.all_reduce_bias(x, bias), out, held, strided):
                    if name == "library":
                        torch.testing.assert_close(got, expected)
                    else:
                        assert torch.equal(bits_of(got), bits_of(expected)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_of_the_whole_shape(rank: int, dtype: torch.dtype) -> None:
    """The bits of adding it to the ordered sum, and its gradient."""
    x, bias = (torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(7)).to(dtype) for _ in range(2))
    for name in FORCED:
        with tunedcomm.force(BIAS, name):
            for _ in range(2):
                got = tunedcomm.all_reduce_bias(x, bias)
                due = (tunedcomm.all_reduce(x, numerics="ordered").float() + bias.float()).to(dtype)
                torch.testing.assert_close(got, due, rtol=0, atol=0 if name != "library" else 0.05)
                held = x.clone()
                assert torch.equal(tunedcomm.all_reduce_bias(held, bias, out=held), got)
    x, bias = (t.clone().requires_grad_() for t in (x, bias))
    tunedcomm.all_reduce_bias(x, bias).square().sum().backward()
    assert torch.equal(bias.grad, 2 * tunedcomm.all_reduce_bias(x, bias).detach())


def test_bad_biases(rank: int) -> None:
    x, bias, whole = torch.ones(4, 8), torch.ones(8), torch.ones(5, 8)
    for given, added, out, said in (
        (x, torch.ones(7), None, "bias"),
        (x, torch.ones(4, 2), None, "bias"),
        (x, bias.double(), None, "bias"),
        (x, None, None, "bias is None"),
        (torch.tensor(1.0), bias, None, "no dimensions"),
        (x.to(torch.complex64), bias, None, "complex"),
        ("x", bias, None, "torch.Tensor"),
        (x, bias, bias.expand(4, 8), "expanded"),
        (whole[:4], bias, whole[1:], "overlaps x"),
        (x, bias, torch.ones(4, 9), "shape"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_bias(given, added, out=out)
