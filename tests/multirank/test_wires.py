"""Quantised wires: bits of every variant, special values, errors, calls, gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, bits_of, settings
from quick import sample, some
from variant_checks import inputs_of_all, launch_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.fp8 import WIRES, sent
from tunedcomm.integrations.engines.group import EngineGroup
from tunedcomm.spec import Problem, get_op, get_variant, variants

kernels.discover()
RANKS = Ranks(forget=False, env={"TUNEDCOMM_WORKSPACE_MIB": "1", "TUNEDCOMM_MISS_LOG": "0"}, timeout=500)
OPS = ("all_reduce", "reduce_scatter", "all_gather")
NAMES = {
    "all_reduce": ("host_quantized", "lamport_quantized", "one_shot_quantized", "two_shot_quantized"),
    "reduce_scatter": ("host_quantized", "lamport_quantized", "one_shot_quantized"),
    "all_gather": ("host_quantized", "one_shot_quantized"),
}
SIZES = (1, 127, 128, 1000, 4099)
DTYPES = ("bfloat16", "float16", "float32")
MOST = {"fp8_group128": 0.04, "int8_group128": 0.01}


def problem_of(op: str, numel: int, dtype: str, world_size: int, wire: str, reduction: str = "sum") -> Problem:
    reduction = "" if op == "all_gather" else reduction
    return Problem(op, (numel,), dtype, world_size, reduction, scaling=wire, mode="eager")


def check_bits(problem: Problem, name: str, everyone: list[tuple[torch.Tensor, ...]], config: object = None) -> None:
    """Launch; the same values as the reference of the variant, bit for bit but for NaN."""
    communicator = get_communicator()
    (x,) = everyone[communicator.rank]
    (out,) = launch_variant(communicator, problem, name, (x.clone(),), config)  # type: ignore[arg-type]
    refer = get_op(problem.op).quantized_references
    assert refer is not None
    due = refer(problem, everyone, communicator.rank)[1 if name == "two_shot_quantized" else 0][0]
    assert torch.equal(out.isnan(), due.isnan())
    assert torch.equal(bits_of(out.nan_to_num(0.5)), bits_of(due.nan_to_num(0.5))), (problem, name)


def test_names(rank: int) -> None:
    """Of a problem with a wire nothing runs but these and the library."""
    limits = limits_of(get_communicator())
    for op in OPS:
        problem = problem_of(op, 4096, "bfloat16", 2, WIRES[0])
        found = {
            n for n, v in variants(op).items() if v.infeasible(problem, v.default(problem, limits), limits) is None
        }
        assert found == {"library", *NAMES[op]}, found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits(rank: int, world_size: int, op: str) -> None:
    """Sizes up and down, every dtype and wire in turns, sums and means."""
    for name in NAMES[op]:
        for seed, numel in sample(enumerate((*SIZES, *reversed(SIZES))), quick=4):
            wire, dtype = WIRES[(seed + world_size) % 2], DTYPES[(seed + world_size) % 3]
            problem = problem_of(op, numel, dtype, world_size, wire, "avg" if seed % 4 == 3 else "sum")
            check_bits(problem, name, inputs_of_all(problem, seed, "random"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_chunks(rank: int, world_size: int, op: str) -> None:
    """More chunks than areas hold, sizes that do not divide, twice each."""
    for numel in some((8 * 128 * 16 * world_size, 7 * 128 * 16 * world_size + 1234), 1):
        for name, chunks in itertools.product(NAMES[op], (4, 8)):
            config = {"num_blocks": 1, "num_warps": 4, "num_chunks": chunks}
            if name == "host_quantized":
                config = {"chunk_kib": 16 * chunks, "spins": 1, "threads": 1}
            elif name == "lamport_quantized":
                config = {"num_blocks": 2, "num_warps": 4, "items": max(chunks // 2, 1), "launch_pdl": False}
            problem = problem_of(op, numel, "bfloat16", world_size, WIRES[chunks % 2])
            if get_variant(op, name).infeasible(problem, config, limits_of(get_communicator())) is None:
                for seed in (1, 2):
                    check_bits(problem, name, inputs_of_all(problem, seed, "random"), config)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wire", WIRES)
def test_special_values(rank: int, world_size: int, op: str, wire: str) -> None:
    """A group with a NaN or an infinity is all NaN; zeros stay zeros; tiny, huge and constant groups."""
    for name, dtype in itertools.product(NAMES[op], ("bfloat16", "float32")):
        problem = problem_of(op, 128 * 12 + 5, dtype, world_size, wire)
        everyone = inputs_of_all(problem, 3, "random")
        for r, (x,) in enumerate(everyone):
            groups = x[: len(x) // 128 * 128].view(-1, 128)
            groups[0] = 0.0
            groups[1] = -0.0
            groups[2] *= 1e-39
            groups[3] *= 1e30
            groups[4] = 3.25
            if r == 0:
                groups[5, 17], groups[6, 0], groups[7, 127] = float("nan"), float("inf"), float("-inf")
            groups[8, 1:] = 0.0
            groups[8, 1] = -1e-6
            groups[9], groups[9, 64] = 0.0, 4.0
            groups[9, 3:32:4] = -1e-9  # as e4m3 −0.0: words that are the Lamport sentinel
            groups[10] = 0.0
            if dtype == "float32":  # NaN whose low byte is 0x80, which interpreted kernels keep as its int8
                groups[10].view(torch.int32)[3::4] = 0x7FC00080
        check_bits(problem, name, everyone)
        if op == "all_reduce":
            (out,) = launch_variant(get_communicator(), problem, name, (everyone[rank][0].clone(),))
            groups = out[: len(out) // 128 * 128].view(-1, 128)
            assert bool((bits_of(groups[:2]) == 0).all())
            assert bool(groups[5:8].isnan().all())
            assert bool(groups[:5].isfinite().all() and groups[8:10].isfinite().all() and groups[11:].isfinite().all())
            torch.testing.assert_close(groups[4], torch.full_like(groups[4], 3.25 * world_size), rtol=1e-2, atol=0)


def test_errors(rank: int, world_size: int) -> None:
    """On normal inputs, whatever the variant; a NaN of e4m3 is no value."""
    for name, wire in itertools.product(NAMES["all_reduce"], WIRES):
        problem = problem_of("all_reduce", 40_000, "float32", world_size, wire)
        everyone = inputs_of_all(problem, 7, "random")
        (out,) = launch_variant(get_communicator(), problem, name, everyone[rank])
        due = get_op("all_reduce").reference(problem, everyone, rank)[0]
        assert (out.double() - due).norm() / due.norm() < MOST[wire]
    values = torch.linspace(-448, 448, 128)
    assert sent(values, WIRES[0]).abs().max() == 448


def values(rank: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(world_size: int, wire: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The sum that one-shot variants give."""
    parts = [sent(values(r, *shape, dtype=dtype).flatten(), wire) for r in range(world_size)]
    found = torch.zeros(parts[0].shape)
    for part in parts:
        found += part
    return found.view(shape).to(dtype)


def test_public_calls(rank: int, world_size: int) -> None:
    """Repeated, in place, strided, into a given tensor, under every policy, by the operator."""
    for wire, dtype in itertools.product(WIRES, (torch.bfloat16, torch.float32)):
        x, due = values(rank, 6, 91, dtype=dtype), total(world_size, wire, 6, 91, dtype=dtype)
        for _ in range(3):
            assert torch.equal(tunedcomm.all_reduce(x, wire=wire), due)
            out = torch.empty(91, 6, dtype=dtype).t()
            assert tunedcomm.all_reduce(x, wire=wire, out=out) is out
            assert torch.equal(out, due)
            mine = x.clone()
            assert torch.equal(tunedcomm.all_reduce_(mine, wire=wire), due)
            assert torch.equal(mine, due)
            exact = tunedcomm.all_reduce(x, numerics="ordered")
            assert torch.equal(tunedcomm.all_reduce(x, wire=wire, numerics="ordered"), exact)
            with tunedcomm.numerics("ordered"):
                assert torch.equal(tunedcomm.all_reduce(x, wire=wire), exact)
        group = dist.group.WORLD
        assert group is not None
        found = torch.ops.tunedcomm.all_reduce_wire(x, "sum", wire, world_size, group.group_name)
        assert torch.equal(found, due)
        with tunedcomm.force("all_reduce", "library"):
            torch.testing.assert_close(tunedcomm.all_reduce(x, wire=wire), exact, rtol=2e-2, atol=2e-2)


def test_gathers_and_scatters(rank: int, world_size: int) -> None:
    """Chunks of any alignment, along other dimensions, by the operators."""
    for wire, dtype in itertools.product(WIRES, (torch.float16, torch.float32)):
        x = values(rank, 2 * world_size, 61, dtype=dtype)
        every = [values(r, 2 * world_size, 61, dtype=dtype) for r in range(world_size)]
        chunks = [each.chunk(world_size)[rank].flatten() for each in every]
        scattered = torch.stack([sent(chunk, wire) for chunk in chunks]).sum(0).to(dtype).view(2, 61)
        whole = torch.cat([sent(each.flatten(), wire).to(dtype).view(each.shape) for each in every])
        for _ in range(2):
            found = tunedcomm.reduce_scatter(x, wire=wire)
            assert torch.equal(found, scattered) or world_size > 2
            assert torch.equal(tunedcomm.all_gather(x, wire=wire), whole)
            along = tunedcomm.all_gather(x, dim=1, wire=wire)
            assert torch.equal(along, torch.cat(whole.chunk(world_size), 1))
            moved = tunedcomm.reduce_scatter(x.t(), dim=1, wire=wire)
            assert torch.equal(moved.t(), found)
        with tunedcomm.numerics("ordered"):
            assert torch.equal(tunedcomm.all_gather(x, wire=wire), torch.cat(every))
        needs = x.detach().clone().requires_grad_()
        tunedcomm.all_gather(needs, wire=wire).sum().backward()
        assert torch.equal(needs.grad, torch.full_like(x, world_size))
        needs.grad = None
        tunedcomm.reduce_scatter(needs, op="avg", wire=wire).sum().backward()
        assert torch.equal(needs.grad, torch.full_like(x, 1 / world_size))


def test_serving(rank: int, world_size: int) -> None:
    """By argument and by TUNEDCOMM_WIRE, from its size on, and never under `ordered`."""
    x, large = values(rank, 64, 91), values(rank, 6000, 91)  # 1.04 MiB
    adapter = tunedcomm.ServingAllReduce(wire=WIRES[1])
    out = torch.empty_like(x)
    assert adapter.should_use(x)
    assert adapter.all_reduce(x, out) is out
    assert torch.equal(out, total(world_size, WIRES[1], 64, 91))
    with settings({"TUNEDCOMM_WIRE": f"{WIRES[0]}:1MiB"}):
        adapter = tunedcomm.ServingAllReduce()
        assert torch.equal(adapter.all_reduce(x), tunedcomm.all_reduce(x))
        assert torch.equal(adapter.all_reduce(large), total(world_size, WIRES[0], 6000, 91))
        found = EngineGroup("vllm", dist.group.WORLD, x.device, ordered=False)
        for _ in range(50):
            if (served := found.serve("all_reduce", "all_reduce", [large], ("sum",))) is not None:
                break
        assert served is not None
        assert torch.equal(served[0], total(world_size, WIRES[0], 6000, 91))
        adapter = tunedcomm.ServingAllReduce(numerics="ordered")
        assert torch.equal(adapter.all_reduce(large), tunedcomm.all_reduce(large, numerics="ordered"))
    with pytest.raises(tunedcomm.UnsupportedInputError, match="fp4"):
        tunedcomm.ServingAllReduce(wire="fp4")


def test_gradients(rank: int, world_size: int) -> None:
    """They are not quantised."""
    x = values(rank, 4, 8, dtype=torch.float32).requires_grad_()
    grad = values(rank + 10, 4, 8, dtype=torch.float32)
    every = sum(values(r + 10, 4, 8, dtype=torch.float32) for r in range(world_size))
    tunedcomm.all_reduce(x, wire=WIRES[0]).backward(grad)
    torch.testing.assert_close(x.grad, every)


def test_bad_input(rank: int) -> None:
    x = values(rank, 6, 4)
    for options, told in (
        ({"wire": "fp4"}, "fp4"),
        ({"wire": WIRES[0], "op": "max"}, "max"),
        ({"wire": WIRES[0], "out_dtype": torch.float32}, "out_dtype"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=told):
            tunedcomm.all_reduce(x, **options)
    with pytest.raises(tunedcomm.UnsupportedInputError, match="int32"):
        tunedcomm.all_reduce(x.int(), wire=WIRES[0])
