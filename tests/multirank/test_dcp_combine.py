"""dcp_combine as callers use it: bits of every variant, ranks left out, refusals, gradients, compiled code."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, same_bits
from quick import some
from variant_checks import check_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.bench.contenders import contenders_of
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.integrations.serving import dcp_a2a_lse_reduce
from tunedcomm.spec import Problem, get_op, get_variant

kernels.discover()
RANKS = Ranks(env=HOST, forget=False, timeout=400)
VARIANTS = ("library", "host_unfused", "lamport", "push")
KERNELS = ("lamport", "push")


def asked(shape: tuple[int, ...], dtype: str, world_size: int, base: str = "e") -> Problem:
    return Problem("dcp_combine", shape, dtype, world_size, reduction="", layout=base, mode="eager")


def inputs_of(rank: int, world_size: int, shape: tuple[int, ...] = (5, 12, 16), dtype: str = "float32") -> Any:
    return get_op("dcp_combine").make_inputs(asked(shape, dtype, world_size), rank, 3, "random", "cpu")


def everyone(world_size: int, shape: tuple[int, ...] = (5, 12, 16), dtype: str = "float32") -> list[Any]:
    return [inputs_of(rank, world_size, shape, dtype) for rank in range(world_size)]


def due(parts: list[Any], rank: int, base: str = "e") -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's result in float64."""
    problem = asked(tuple(parts[0][0].shape), "float32", len(parts), base)
    found = get_op("dcp_combine").reference(problem, parts, rank)
    return found[0], found[1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_variant(rank: int, world_size: int) -> None:
    """Sizes up and down on one lane, rows of 1 to 72 packets, both bases: exact bits, with NaN of ranks left out."""
    communicator, seed = get_communicator(), 0
    shapes = ((1, 12, 8), (7, 24, 24), (3, 12, 128), (2, 12, 576), (33, 12, 16), (1, 12, 8))
    for shape, dtype, base in some(list(itertools.product(shapes, ("bfloat16", "float32", "float16"), ("e", "2"))), 6):
        for variant in ("library", "host_unfused", *KERNELS):
            seed += 1
            check_variant(
                communicator, asked(shape, dtype, world_size, base), variant, seed=seed,
                kind="integers" if seed % 4 == 0 else "random",
            )  # fmt: skip
    for chunks in (2, 8):
        config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": chunks}
        for seed in (1, 2):
            check_variant(communicator, asked((70, 12, 64), "bfloat16", world_size), "push", config=config, seed=seed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_that_count_nothing(rank: int, world_size: int, variant: str) -> None:
    """No rank left: zeros and −inf; one rank left: its very bits; extreme and negative-zero LSEs; two calls alike."""
    lse = torch.zeros(6, 2)
    lse[0] = (math.nan, math.inf)[rank]
    lse[1] = (-math.inf, -3.0)[rank]
    lse[2] = (-0.0, 0.0)[rank]
    lse[3] = (3e38, -3e38)[rank]
    lse[4] = (-1e38, -1e38)[rank]
    lse[5] = (1.0, 2.0)[rank]
    x = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(rank))
    x[0] = math.nan
    x[2:, 0, 0] = -0.0
    x[1] = math.nan if rank == 0 else x[1]
    other = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(1 - rank))
    with tunedcomm.force("dcp_combine", variant):
        for _ in range(3):
            out, total = tunedcomm.dcp_combine(x, lse, return_lse=True)
            assert torch.equal(out[0], torch.zeros(1, 8))
            assert torch.equal(total[:2, 0], torch.tensor([-math.inf, -3.0]))
            assert torch.equal(out[1, 0], (x if rank else other)[1, rank])
            first = (x if rank == 0 else other)[3, rank]
            torch.testing.assert_close(out[3, 0, 1:], first[1:], rtol=0, atol=0)
            weights = (1 / (1 + math.e), 1 / (1 + 1 / math.e))
            mixed = weights[rank] * x[5, rank] + weights[1 - rank] * other[5, rank]
            torch.testing.assert_close(out[5, 0, 1:], mixed[1:])
            assert total[5, 0].item() == pytest.approx(math.log(math.e + math.e**2))


def test_same_bits_from_every_ordered_variant(rank: int, world_size: int) -> None:
    for dtype, base in (("bfloat16", "e"), ("float32", "2")):
        x, lse = inputs_of(rank, world_size, (9, 12, 128), dtype)
        x[lse == lse.floor()] = -0.0
        found = []
        for variant in VARIANTS[1:]:
            with tunedcomm.force("dcp_combine", variant):
                found.append(tunedcomm.dcp_combine(x, lse, base=base, return_lse=True))  # type: ignore[arg-type]
        # It runs where nothing else can, which is never so on CPUs.
        problem = asked((9, 12, 128), dtype, world_size, base)
        outputs = get_op("dcp_combine").make_outputs(problem, "cpu")
        launch = get_variant("dcp_combine", "in_order").bind(problem, {}, SimpleNamespace(group=dist.group.WORLD))
        launch((x, lse), outputs, 0)
        found.append(outputs)
        for out, total in found[1:]:
            assert same_bits(out, found[0][0])
            assert same_bits(total, found[0][1])
        chosen = tunedcomm.dcp_combine(x, lse, base=base, numerics="ordered")  # type: ignore[arg-type]
        assert isinstance(chosen, torch.Tensor)
        assert same_bits(chosen, found[0][0])


def test_strides_outputs_and_odd_heads(rank: int, world_size: int) -> None:
    parts = everyone(world_size, (5, 12, 3))
    x, lse = parts[rank]
    expected, total = due(parts, rank)
    for variant in ("host_unfused", "library"):
        with tunedcomm.force("dcp_combine", variant):
            wide, column = torch.zeros(5, 12, 6)[..., ::2].copy_(x), torch.empty(12, 5).t().copy_(lse)
            out, lse_out = torch.zeros(5, 6, 6)[..., ::2], torch.zeros(6, 5).t()
            for _ in range(3):
                found = tunedcomm.dcp_combine(wide, column, out=out, lse_out=lse_out, return_lse=True)
                assert found[0] is out
                assert found[1] is lse_out
                torch.testing.assert_close(out.double(), expected)
                torch.testing.assert_close(lse_out.double(), total)
    with tunedcomm.force("dcp_combine", "lamport"), pytest.raises(tunedcomm.InfeasibleError, match="16 bytes"):
        tunedcomm.dcp_combine(x, lse)
    assert torch.equal(tunedcomm.dcp_combine(torch.empty(0, 4, 8), torch.empty(0, 4)), torch.empty(0, 2, 8))


def test_refusals(rank: int, world_size: int) -> None:
    x, lse = inputs_of(rank, world_size)
    for given, beside, options, said in (
        (x, lse.double(), {}, "float32"),
        (x, lse.t(), {}, "tokens, heads"),
        (x, None, {}, "None"),
        (x[0], lse, {}, "head size"),
        (x.double(), lse, {}, "float64"),
        (x[:, :3], lse[:, :3], {}, "multiple of 2"),
        (x[..., :0], lse, {}, "needs an element"),
        (x, lse, {"base": "10"}, "base='10'"),
        (x, lse, {"base": 2}, "base=2"),
        (x, lse, {"out": x}, "out has shape"),
        (x, lse, {"max_sms": -1}, "max_sms"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.dcp_combine(given, beside, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(tunedcomm.dcp_combine(x, lse).double(), due(everyone(world_size), rank)[0])  # type: ignore[union-attr]


@pytest.mark.parametrize("base", ["e", "2"])
def test_gradient(rank: int, world_size: int, base: Any) -> None:
    """As PyTorch differentiates the merge of all ranks' tensors in one process."""
    parts = [tuple(t.double().requires_grad_() for t in part) for part in everyone(world_size)]
    seeds = torch.arange(5 * 6 * 16, dtype=torch.float64).view(5, 6, 16).cos()
    loss: Any = 0.0
    for r in range(world_size):
        out, total = due([(x, lse) for x, lse in parts], r, base)
        loss = loss + (out * seeds * (r + 1)).sum() + (total * (r - 0.5)).sum()
    wanted = torch.autograd.grad(loss, parts[rank])
    x, lse = (t.detach().float().requires_grad_() for t in parts[rank])
    out, total = tunedcomm.dcp_combine(x, lse, base=base, return_lse=True)
    ((out * seeds.float() * (rank + 1)).sum() + (total * (rank - 0.5)).sum()).backward()
    for found, expected in zip((x.grad, lse.grad), wanted, strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), expected.nan_to_num(0.0), rtol=1e-4, atol=1e-5)


def test_compiled(rank: int, world_size: int) -> None:
    def program(x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        out, total = tunedcomm.dcp_combine(x, lse, base="2", return_lse=True)
        return out * 2 + total.unsqueeze(-1)

    x, lse = inputs_of(rank, world_size)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x, lse), program(x, lse))


def test_in_the_place_of_vllms(rank: int, world_size: int) -> None:
    (x, lse), group = inputs_of(rank, world_size), SimpleNamespace(device_group=dist.group.WORLD)
    for is_natural in (True, False):
        expected = tunedcomm.dcp_combine(x, lse, base="e" if is_natural else "2", return_lse=True)
        found = dcp_a2a_lse_reduce(x, lse, group, None, True, is_natural)
        assert all(map(same_bits, found, expected))
        alone = dcp_a2a_lse_reduce(x, lse, group, is_lse_base_on_e=is_natural)
        assert same_bits(alone, expected[0])  # type: ignore[arg-type]


def test_bench_and_explain_know_it(rank: int, world_size: int) -> None:
    problem = asked((4, 4, 64), "bfloat16", world_size)
    inputs: tuple[Any, ...] = get_op("dcp_combine").make_inputs(problem, rank, 1, "random", torch.device("cpu"))
    (tuned,) = contenders_of(get_communicator(), problem, inputs, ["tuned"]).present[1:]
    expected = tunedcomm.dcp_combine(*inputs, return_lse=True)
    for _ in range(3):
        tuned.launch(tuned.turns[0])
        assert all(same_bits(a, b) for a, b in zip(tuned.results, expected, strict=True))
    assert tunedcomm.explain("dcp_combine", inputs).candidate.variant == "host_unfused"


@pytest.mark.parametrize("world_size", [1])
def test_one_rank(rank: int, world_size: int) -> None:
    x, lse = torch.randn(3, 2, 8), torch.tensor([[1.0, math.nan], [2.0, -math.inf], [0.0, 3.0]])
    out, total = tunedcomm.dcp_combine(x, lse, return_lse=True)
    left_out = ~lse.isfinite()
    assert torch.equal(out, x.masked_fill(left_out.unsqueeze(-1), 0.0))
    assert torch.equal(total, lse.masked_fill(left_out, -math.inf))
