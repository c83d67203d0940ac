"""Forms of all_reduce_rms_norm that make scales, return the norm besides, add an offset or take a bias of x's shape."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks
from quick import some
from variant_checks import bits_of, check_variant, inputs_of_all, launch_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.all_reduce_rms_norm.op import form_of, scales_view
from tunedcomm.ops.call import paths
from tunedcomm.spec import Problem, get_op, variants

OP = "all_reduce_rms_norm"
RANKS = Ranks(env=HOST, forget=False)
kernels.discover()
FORMS = [name for name in variants(OP) if name.endswith("_quantized")]
SHAPES = ((3, 1024), (5, 256), (1, 128), (4, 384), (7, 640))


def problem_of(shape, dtype, world_size, layout="residual", scaling="token"):
    return Problem(OP, shape, dtype, world_size, layout=layout, scaling=scaling, mode="eager")


def forms():
    """Every scaling that is not basic with some layout, and every such layout with some scaling."""
    layouts, scalings = get_op(OP).layouts, get_op(OP).scalings
    yield from ((layouts[number % len(layouts)], scaling) for number, scaling in enumerate(scalings[2:]))
    yield from ((layout, ("", "fp8", "token")[number % 3]) for number, layout in enumerate(layouts[4:]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_shapes(rank, world_size):
    """Every variant up and down on one lane that every call leaves fit."""
    communicator, ran = get_communicator(), dict.fromkeys(variants(OP), 0)
    limits, dtype = limits_of(communicator), {2: "bfloat16", 3: "float32"}[world_size]
    for seed, (layout, scaling) in some(enumerate(forms())):
        problem = problem_of(SHAPES[seed % len(SHAPES)], dtype, world_size, layout, scaling)
        for name, variant in variants(OP).items():
            if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                check_variant(communicator, problem, name, seed=seed, kind="integers" if seed % 4 == 3 else "random")
                ran[name] += 1
    assert len(FORMS) == 4
    assert {ran[name] for name in (*FORMS, "library", "host_unfused")} == {max(ran.values())}
    assert {ran[name] for name in ("lamport", "one_shot", "two_shot", "two_shot_lamport", "unfused")} == {0}


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


def test_public_call(rank, world_size):
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
            assert paths[OP if name == "lamport" else "all_reduce_rms_norm_quantized"].last[dist.group.WORLD]
    x, bias, weight = torch.randn(4, 64), torch.randn(4, 64), torch.ones(64)
    y, h = tunedcomm.all_reduce_rms_norm(x, weight, bias=bias)
    again = tunedcomm.all_reduce_rms_norm(x, weight, residual=bias)
    assert torch.equal(y, again[0])
    assert torch.equal(h, again[1])
    empty = tunedcomm.all_reduce_rms_norm(torch.ones(0, 128), torch.ones(128), quantize="group128", with_norm=True)
    assert [tuple(t.shape) for t in empty] == [(0, 128), (0, 128), (0, 1), (0, 128)]


def test_bad_input(rank, world_size):
    x, w = torch.ones(4, 64), torch.ones(64)
    for change, said in (
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
        ({"quantize": "token", "eps": -1.0}, "eps"),
        ({"bias": torch.ones(4, 63)}, "bias"),
        ({"x": x.clone().requires_grad_(), "quantize": "token"}, "not differentiable"),
        ({"weight": w.clone().requires_grad_(), "weight_offset": 1.0}, "not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_rms_norm(**{"x": x, "weight": w, **change})
    asked = (1e-6, "token", "row", False, False, 0.0, world_size, dist.group.WORLD.group_name)
    operator = torch.ops.tunedcomm.all_reduce_rms_norm_quantized
    with pytest.raises(tunedcomm.UnsupportedInputError, match="not differentiable"):
        operator(x.clone().requires_grad_(), w, None, None, None, *asked)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="call that"):
        operator(x, w, None, None, None, 1e-6, "", *asked[2:])


@pytest.mark.parametrize("world_size", [pytest.param(1, id="alone")])
def test_a_group_of_one(rank, world_size):
    x, w = torch.randn(2, 3, 256), torch.randn(256)
    plain, held = tunedcomm.all_reduce_rms_norm(x, w + 1.0, residual=x)
    y, h, scales, norm = tunedcomm.all_reduce_rms_norm(
        x, w, residual=x, quantize="group128", scales_layout="column", with_norm=True, weight_offset=1.0
    )
    torch.testing.assert_close(h, held)
    torch.testing.assert_close(norm, plain)
    back = (y.float().unflatten(-1, (2, 128)) * scales.unsqueeze(-1)).flatten(-2)
    assert (back - plain).norm() < 0.05 * plain.norm()
    assert scales.stride() == (3, 1, 8)


def test_scales_of_columns_are_padded():
    problem = problem_of((5, 384), "bfloat16", 2, scaling="group128+columns")
    scales = get_op(OP).make_outputs(problem, "cpu")[2]
    assert (scales.shape, scales.stride()) == ((5, 3), (1, 8))
    assert scales_view(problem, torch.empty(3, 8)).stride() == (1, 8)
