"""Every all_reduce_rms_norm variant on the host backend: exact bits of ordered ones, on every rank."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks
from quick import QUICK, some
from variant_checks import bits_of, check_variant, inputs_of_all, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.ops.call import paths
from tunedcomm.spec import Problem, get_op, get_variant, variants

OP = "all_reduce_rms_norm"
RANKS = Ranks(env=HOST, forget=False)
kernels.discover()
BASIC = [name for name in variants(OP) if not name.endswith("_quantized")]
KERNELS = sorted(name for name in BASIC if variants(OP)[name].kernels)
LAYOUTS = get_op(OP).layouts[:4]
SHAPES = ((1, 128), (5, 128), (3, 1000), (7, 256), (1, 2048), (4, 24))


def problem_of(shape, dtype, world_size, layout="residual", scaling=""):
    return Problem(OP, shape, dtype, world_size, layout=layout, scaling=scaling, mode="eager")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shapes(rank, world_size):
    """Every variant at shapes up and down on one lane, with all extras, on one lane that every call leaves fit."""
    communicator, ran, dtype = get_communicator(), 0, {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    limits = limits_of(communicator)
    for seed, shape in some(enumerate((*SHAPES, *reversed(SHAPES)))):
        kind = "integers" if seed % 3 == 0 else "random"
        problem = problem_of(shape, dtype, world_size, LAYOUTS[seed % 4], "fp8" if seed % 5 == 4 else "")
        for name, variant in variants(OP).items():
            if variant.infeasible(problem, variant.default(problem, limits), limits) is None:
                check_variant(communicator, problem, name, seed=seed, kind=kind)
                ran += 1
    assert ran >= (3 if QUICK else 10) * len(BASIC)


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_among_all_reduce_calls(rank, world_size):
    """The variants among those of all_reduce on one lane, in random order."""
    communicator, shuffle = get_communicator(), random.Random(3)
    plain = [n for n, v in variants("all_reduce").items() if v.kernels and v.numerics == "ordered"]
    for seed in some(range(16)):
        if shuffle.random() < 0.5:
            numel = shuffle.choice((1, 333, 4099))
            problem = Problem("all_reduce", (numel,), "bfloat16", world_size, mode="eager")
            check_variant(communicator, problem, shuffle.choice(plain), seed=seed)
        else:
            shape = shuffle.choice(((1, 256), (4, 128), (9, 512)))
            problem = problem_of(shape, "bfloat16", world_size, shuffle.choice(LAYOUTS))
            limits = limits_of(communicator)
            found = {n: get_variant(OP, n) for n in KERNELS}
            fit = [n for n, v in found.items() if v.infeasible(problem, v.default(problem, limits), limits) is None]
            check_variant(communicator, problem, shuffle.choice(fit), seed=seed)


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
                    assert same(tunedcomm.all_reduce_rms_norm(**given), y, h), name
                    assert paths[OP].last, "made by the first call"
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
                        held.copy_(given["residual"])
                        tensors = tuple(asked.get(n) for n in ("x", "weight", "bias", "residual", "scale", "out"))
                        fast = paths[OP].last[dist.group.WORLD]
                        option = (1e-6, given.get("out_dtype"))
                        assert fast(*tensors, held.clone(), *option, None, None) is None, "not the residual"
                        assert same(fast(*tensors, held, *option, None, None), y, h), "the second call is fast"
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
    assert [t.shape for t in tunedcomm.all_reduce_rms_norm(torch.ones(0, 8), torch.ones(8))] == [(0, 8), (0, 8)]
    row = tunedcomm.all_reduce_rms_norm(torch.ones(64), torch.ones(64), eps=0.0)
    torch.testing.assert_close(row[0], torch.ones(64))
    big = tunedcomm.all_reduce_rms_norm(torch.ones(64), torch.ones(64), eps=1e9)
    assert big[0].max() < 1e-3, "another eps is another result"


def test_a_residual_that_is_the_input_has_a_fast_call(rank):
    """One tensor in two places has a fast call of its own, which refuses two tensors, and the other way round."""
    weight, x = torch.ones(64), torch.randn(4, 64)
    with tunedcomm.force(OP, "lamport"):
        y, h = tunedcomm.all_reduce_rms_norm(x, weight, residual=x)
        fast = paths[OP].last.get(dist.group.WORLD)
        assert fast is not None
        rest = (None, None, None, 1e-6, None, None, None)
        assert fast(x, weight, None, x.clone(), *rest) is None
        assert same(fast(x, weight, None, x, *rest), y, h)
        assert same(tunedcomm.all_reduce_rms_norm(x, weight, residual=x.clone()), y, h)
        assert paths[OP].last[dist.group.WORLD](x, weight, None, x, *rest) is None


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
        ({"numerics": "exact"}, "numerics"),
        ({"max_sms": -1}, "max_sms"),
        ({"x": x.clone().requires_grad_(), "out": torch.ones(4, 64)}, "into a given tensor is not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_reduce_rms_norm(**{"x": x, "weight": w, **change})
    given, y, h = inputs_for(rank, world_size, (3, 64), dtype="float32")
    torch.testing.assert_close(tunedcomm.all_reduce_rms_norm(**given, numerics="any", max_sms=8), (y, h))


@pytest.mark.parametrize("world_size", [pytest.param(1, id="alone")])
def test_a_group_of_one(rank, world_size):
    x, w = torch.randn(4, 64), torch.randn(64)
    y, h = tunedcomm.all_reduce_rms_norm(x, w, residual=x, bias=w)
    torch.testing.assert_close(h, x + x + w)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(h, (64,), w, 1e-6))
    held = x.clone()
    tunedcomm.all_reduce_rms_norm(x, w, residual=held, bias=w, residual_out=held)
    assert torch.equal(held, h)


@pytest.mark.parametrize("world_size", [pytest.param(3, id="three")])
def test_subgroups(rank, world_size):
    """Overlapping groups of two, used in turn."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for _ in range(3):
        for first, group in enumerate(groups):
            if rank in (first, first + 1):
                given, y, h = inputs_for(rank - first, 2, (3, 64))
                with tunedcomm.force(OP, "two_shot_lamport"):
                    assert same(tunedcomm.all_reduce_rms_norm(**given, group=group), y, h)
