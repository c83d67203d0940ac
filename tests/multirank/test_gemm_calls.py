"""Public functions of the fused GEMMs: any operands that they take, against float64, refusals, and their launches."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST, Ranks, replaced
from gemm_samples import DTYPES, FP8, HOW, drawn, near, scale, stored, sums
from quick import some

import tunedcomm
from tunedcomm import kernels
from tunedcomm.kernels.all_gather import progress
from tunedcomm.kernels.common import copies
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.gemm import ar, chunked
from tunedcomm.kernels.gemm.op import operands_of
from tunedcomm.ops import gemm, run_problem
from tunedcomm.ops.call import paths
from tunedcomm.space import Space
from tunedcomm.spec import Problem, get_op, get_variant, register_variant

kernels.discover()
RANKS = Ranks(env=HOST, forget=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reducing_calls(rank: int, world_size: int) -> None:
    """gemm_rs and gemm_ar: dtypes, strides of b and a, batch dimensions, results given and new."""
    for number, (how, dtype) in some(enumerate((h, d) for h in HOW for d in DTYPES)):
        k, n = 24 + 8 * (number % 2), 40
        batch = ((2 * world_size, 3), (4 * world_size,), (world_size, 1, 2))[number % 3]
        a, b = drawn(rank, *batch, k, dtype=dtype), stored(drawn(rank, k, n, dtype=dtype), how)
        if number % 4 == 1:
            a = torch.zeros(*batch, 2 * k, dtype=dtype)[..., ::2].copy_(a)
        elif number % 4 == 2:
            a = a.transpose(0, -1).contiguous().transpose(0, -1)
        total = sums(world_size, batch, k, n, dtype)
        rows = total.chunk(world_size)[rank]
        shape = (batch[0] // world_size, *batch[1:], n)
        near(tunedcomm.gemm_rs(a, b), rows, shape, dtype)
        near(tunedcomm.gemm_rs(a, b, op="avg", max_sms=8), rows / world_size, shape, dtype)
        near(tunedcomm.gemm_ar(a, b, numerics="any"), total, (*batch, n), dtype)
        bias = drawn(99, n, dtype=dtype)
        near(tunedcomm.gemm_ar(a, b, bias=bias), total + bias.double(), (*batch, n), dtype)
        held, whole = torch.full(shape, math.nan, dtype=dtype), torch.full((*batch, 2 * n), math.nan, dtype=dtype)
        assert tunedcomm.gemm_rs(a, b, out=held) is held
        near(held, rows, shape, dtype)
        out = whole[..., 1::2]
        assert tunedcomm.gemm_ar(a, b, bias=bias, out=out) is out
        near(out, total + bias.double(), (*batch, n), dtype)
        assert whole[..., ::2].isnan().all(), "nothing beside the view is written"
        if dtype.itemsize == 2:
            near(tunedcomm.gemm_rs(a, b, out_dtype=torch.float32), rows, shape, torch.float32, str(dtype)[6:])
            found = tunedcomm.gemm_ar(a, b, bias=bias.float(), out_dtype=torch.float32)
            near(found, total + bias.double(), (*batch, n), torch.float32, str(dtype)[6:])
    vector = drawn(rank, 16)
    total = sums(world_size, (), 16, 8, torch.float32)
    near(tunedcomm.gemm_ar(vector, drawn(rank, 16, 8)), total, (8,), torch.float32)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathering_calls(rank: int, world_size: int) -> None:
    """ag_gemm: dtypes, strides, batch dimensions, results given and new, what was gathered."""
    for number, (how, dtype) in some(enumerate((h, d) for h in HOW for d in DTYPES)):
        k, n = 24 + 8 * (number % 2), 40
        batch = ((2, 3), (5,), (1, 1, 2))[number % 3]
        a, b = drawn(rank, *batch, k, dtype=dtype), stored(drawn(rank, k, n, dtype=dtype), how)
        if number % 4 == 1:
            a = torch.zeros(*batch, 2 * k, dtype=dtype)[..., ::2].copy_(a)
        everyone = torch.cat([drawn(r, *batch, k, dtype=dtype) for r in range(world_size)])
        wanted = everyone.double().reshape(-1, k) @ b.double()
        shape = (*everyone.shape[:-1], n)
        near(tunedcomm.ag_gemm(a, b), wanted, shape, dtype)
        out = torch.full((*shape[:-1], 2 * n), math.nan, dtype=dtype)[..., ::2]
        found, gathered = tunedcomm.ag_gemm(a, b, return_gathered=True, out=out)
        assert found is out
        near(found, wanted, shape, dtype)
        assert torch.equal(gathered, everyone)
        if dtype.itemsize == 2:
            near(tunedcomm.ag_gemm(a, b, out_dtype=torch.float32), wanted, shape, torch.float32, str(dtype)[6:])


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp8(rank: int, world_size: int) -> None:
    """Scales for the tensor and for rows, in fp8, of all three ops, with batch dimensions; every dtype of results."""
    rows, k, n = 2 * world_size, 48, 32
    for how in some(("nk", "kn", "part of nk"), 2):
        for rowwise in (False, True):
            operands = []
            for r in range(world_size):
                a, b = drawn(r, rows, 3, k, dtype=FP8), drawn(r, k, n, dtype=FP8)
                scales = (scale(r, rows, 3, 1), scale(r, 1, n)) if rowwise else (scale(7, 1), scale(r, 1))
                operands.append((a, b, *scales))
            exact = [(a.double() * sa).reshape(-1, k) @ (b.double() * sb) for a, b, sa, sb in operands]
            a, b, scale_a, scale_b = operands[rank]
            b = stored(b, how)
            for dtype in (None, torch.float16, torch.float32):
                got = dtype or torch.bfloat16
                asked = {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": dtype}
                total = sum(exact)
                near(tunedcomm.gemm_ar(a, b, **asked), total, (rows, 3, n), got, "rowwise")
                bias = drawn(99, n, dtype=got)
                near(tunedcomm.gemm_ar(a, b, bias=bias, **asked), total + bias.double(), (rows, 3, n), got, "rowwise")
                mine = total.chunk(world_size)[rank]
                near(tunedcomm.gemm_rs(a, b, **asked), mine, (rows // world_size, 3, n), got, "rowwise")
                whole = torch.cat([x.double() * (s if rowwise else scale_a) for x, _, s, _ in operands])
                wanted = whole.reshape(-1, k) @ (b.double() * scale_b)
                near(tunedcomm.ag_gemm(a, b, **asked), wanted, (rows * world_size, 3, n), got, "rowwise")


# Bad operands of the fused GEMMs give a named error that says what to do on every rank, and the group works on


M, N, K = 6, 16, 24


def refuse(changes: dict[str, Any], said: str, *names: str) -> None:
    """Every one of the named ops (all by default) refuses a call with these arguments, and says so."""
    for name in names or ("ag_gemm", "gemm_rs", "gemm_ar"):
        given = {"a": torch.ones(M, K), "b": torch.ones(K, N), **changes}
        a, b = given.pop("a"), given.pop("b")
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said) as caught:
            getattr(tunedcomm, name)(a, b, **given)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("world_size", [2, 3])
def test_shapes_that_do_not_fit(rank: int, world_size: int) -> None:
    refuse({"b": torch.ones(K + 1, N)}, f"K = {K} columns and b has {K + 1} rows")
    refuse({"b": torch.ones(N, K)}, r"they must be equal; pass b\.t\(\)")
    refuse({"b": torch.ones(2, K, N)}, "it must be a matrix")
    refuse({"b": torch.ones(K)}, "it must be a matrix")
    refuse({"b": torch.tensor(1.0)}, "it must be a matrix")
    refuse({"a": torch.tensor(1.0)}, "must have at least")
    refuse({"a": torch.ones(K)}, "at least 2 dimensions", "ag_gemm", "gemm_rs")
    refuse({"b": None}, r"wants b \[K, N\], got None")


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_that_ranks_cannot_share(rank: int, world_size: int) -> None:
    for shape in ((world_size + 1, K), (1, K), (1, world_size, K), (world_size - 1, 4, K)):
        refuse({"a": torch.ones(shape)}, f"multiple of {world_size} .*: pad a", "gemm_rs")


@pytest.mark.parametrize("world_size", [2, 3])
def test_scales_that_do_not_fit(rank: int, world_size: int) -> None:
    one = torch.ones(1)
    eight = {"a": torch.ones(M, K).to(FP8), "b": torch.ones(K, N).to(FP8)}
    refuse(eight, "wants scale_a and scale_b; pass both")
    refuse({**eight, "scale_a": one}, "wants scale_a and scale_b; pass both")
    refuse({**eight, "scale_b": one}, "wants scale_a and scale_b; pass both")
    refuse({"scale_a": one, "scale_b": one}, "are for")
    refuse({"scale_b": one}, "are for")
    for scale_a, scale_b in (
        (torch.ones(M), torch.ones(N)),
        (torch.ones(M, 1), one),
        (one, torch.ones(1, N)),
        (torch.ones(1, M), torch.ones(N, 1)),
        (torch.ones(M, 1), torch.ones(1, N + 1)),
        (torch.ones(0), torch.ones(0)),
    ):
        said = r"one element each, or \(6, 1\) and \(1, 16\)"
        refuse({**eight, "scale_a": scale_a, "scale_b": scale_b}, said)
    refuse({**eight, "scale_a": one.double(), "scale_b": one}, "got torch.float64")
    refuse({**eight, "scale_a": one, "scale_b": 1.0}, "scale_b of .* got float")
    refuse({**eight, "scale_a": one, "scale_b": one, "out_dtype": FP8}, "out_dtype=torch.float8_e4m3fn")


@pytest.mark.parametrize("world_size", [2, 3])
def test_biases_that_do_not_fit(rank: int, world_size: int) -> None:
    for wrong in (torch.ones(N + 1), torch.ones(1, N), torch.ones(N).bfloat16()):
        refuse({"bias": wrong}, "bias of gemm_ar has shape", "gemm_ar")
    brain = {"a": torch.ones(M, K).bfloat16(), "b": torch.ones(K, N).bfloat16()}
    refuse({**brain, "bias": torch.ones(N)}, r"and torch\.bfloat16", "gemm_ar")
    refuse({"bias": 1.0}, "bias of gemm_ar wants a torch.Tensor", "gemm_ar")


@pytest.mark.parametrize("world_size", [2, 3])
def test_lists_of_b_that_do_not_fit(rank: int, world_size: int) -> None:
    b, one = torch.ones(K, N), torch.ones(1)
    eight = {"a": torch.ones(M, K).to(FP8), "b": [b.to(FP8)] * 2, "scale_a": one}
    out = torch.ones(M * world_size, N)
    for changes, said in (
        ({"b": []}, "b of ag_gemm is an empty list"),
        ({"b": ()}, "is an empty list"),
        ({"b": [b, b.bfloat16()]}, r"b\[1\] of ag_gemm is of torch\.bfloat16"),
        ({"b": [b.bfloat16(), b.bfloat16()]}, r"a of torch\.float32 with b of torch\.bfloat16"),
        ({"b": [b, b.to("meta")]}, r"b\[1\] of ag_gemm is on meta, a on cpu"),
        ({"b": [b, b[1:]]}, r"K = 24 columns and b has 23 rows"),
        ({"b": [b, "b"]}, r"b\[1\] of ag_gemm wants a torch\.Tensor, got str"),
        ({"b": [b, None]}, r"wants b \[K, N\], got None"),
        ({"a": "a", "b": [b]}, "a of ag_gemm wants a torch.Tensor"),
        ({"b": [b, b], "out": out}, "out of ag_gemm has type Tensor"),
        ({"b": [b, b], "out": [out]}, "out of ag_gemm has 1 elements"),
        ({"b": [b, b], "out": [out, out]}, r"out\[1\] overlaps out\[0\]"),
        ({"b": [b, b], "out": [None, out[1:]]}, r"out\[1\] has shape"),
        ({"b": [b, b], "scale_b": [one, one]}, "are for torch.float8_e4m3fn"),
        ({**eight}, "wants scale_a and scale_b"),
        ({**eight, "scale_b": one}, "scale_b of ag_gemm has type Tensor"),
        ({**eight, "scale_b": [one]}, "scale_b of ag_gemm has 1 elements"),
        ({**eight, "scale_b": [one, None]}, "wants scale_a and scale_b"),
        ({"b": [b, b], "max_sms": -1}, "max_sms"),
        ({"b": [b, b], "numerics": "exact"}, "numerics"),
    ):
        refuse(changes, said, "ag_gemm")
    mixed = {"a": torch.ones(1, K).to(FP8), "b": [b.to(FP8)] * 2, "scale_a": torch.ones(1, 1)}
    refuse({**mixed, "scale_b": [torch.ones(1, N), one]}, "must be of one kind for all b", "ag_gemm")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_group_works_after_all_that(rank: int, world_size: int) -> None:
    total = float(K * sum(range(1, world_size + 1)))
    a, b = torch.full((M, K), rank + 1.0), torch.ones(K, N)
    assert torch.equal(tunedcomm.gemm_ar(a, b), torch.full((M, N), total))
    assert torch.equal(tunedcomm.gemm_rs(a, b), torch.full((M // world_size, N), total))
    assert torch.equal(tunedcomm.ag_gemm(a, b)[:M], torch.full((M, N), float(K)))


# Fused GEMMs as benchmarks ask for them, and their launches by address


def test_run_problem(rank: int, world_size: int) -> None:
    """`run_problem` asks for the very problem, whatever its layout and scaling."""
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        spec = get_op(op)
        asked = [(layout, "") for layout in spec.layouts if layout.endswith(("k", "n", "bias", "gathered", "float32"))]
        plain = [layout for layout in spec.layouts[:4] if "float" not in layout]
        asked += [(layout, scaling) for layout in plain for scaling in ("tensorwise", "rowwise")]
        asked += [("nk+float16", "rowwise"), ("kn+float32", "tensorwise")]
        for number, (layout, scaling) in enumerate(asked):
            dtype, reduction = "float8_e4m3fn" if scaling else "float16", spec.reductions[-1]
            more = {"layout": layout, "scaling": scaling, "mode": "eager"}
            problem = Problem(op, (2 * world_size, 16, 32), dtype, world_size, reduction, **more)
            everyone = [spec.make_inputs(problem, r, number, "random", "cpu") for r in range(world_size)]
            outputs = spec.make_outputs(problem, "cpu")
            run_problem(problem, everyone[rank], outputs)
            for output, wanted in zip(outputs, spec.reference(problem, everyone, rank), strict=True):
                assert output.shape == wanted.shape
                error = (output.double() - wanted).norm() / wanted.norm()
                assert error <= spec.tolerance[scaling or dtype], (problem, error)
            plans = tunedcomm.get_communicator().plans
            assert any(key[0] == problem for key in plans if isinstance(key[0], Problem)), problem


def test_launches_by_address(rank: int, world_size: int) -> None:
    """Launches by address: the second call of a kind is fast, and every address comes where it belongs."""
    seen: list[tuple[int, ...]] = []

    def plant(op: str) -> None:
        def bind(problem: Problem, config: Any, workspace: Any) -> AddressLaunch:
            def arrange(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
                a, b, bias, *scales = operands_of(problem, inputs)
                tensors = (a, b, *([bias] if op == "gemm_ar" else []), *scales, *outputs)
                found = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
                return (*found, 0) if op == "ag_gemm" and len(outputs) == 1 else found

            return AddressLaunch(lambda stream, *addresses: seen.append(addresses), arrange)

        anything: dict[str, Any] = {"infeasible": lambda *_: None, "default": lambda *_: {}, "space": Space()}
        model = get_variant(op, "library_tuned")
        register_variant(replace(model, name="planted", numerics="ordered", bind=bind, **anything))

    half = {"dtype": torch.bfloat16}
    a, weight, bias = torch.ones(6, 2, 32, **half), torch.ones(16, 32, **half), torch.ones(16, **half)
    out, part = torch.ones(6, 2, 16, **half), torch.ones(6 // world_size, 2, 16, **half)
    whole, gathered = torch.ones(6 * world_size, 2, 16, **half), torch.ones(6 * world_size, 2, 32, **half)
    at = torch.Tensor.data_ptr
    for op, options, wanted in (
        ("gemm_ar", {"bias": bias, "out": out}, (at(a), at(weight), at(bias), 0, 0, at(out))),
        ("gemm_ar", {"out": out}, (at(a), at(weight), 0, 0, 0, at(out))),
        ("gemm_rs", {"out": part}, (at(a), at(weight), 0, 0, at(part))),
        ("ag_gemm", {"out": whole}, (at(a), at(weight), 0, 0, at(whole), 0)),
    ):
        plant(op)
        with tunedcomm.force(op, "planted"):
            for turn in range(4):
                seen.clear()
                fast = paths[op].last_fast_calls.get(dist.group.WORLD)
                assert (fast is not None) == (turn > 1), (op, turn)  # made by the second call
                getattr(tunedcomm, op)(a, weight.t(), **options)
                assert seen == [wanted], (op, turn)
            seen.clear()
            other = torch.ones(8, 32, **half)  # another width of the same a has a fast call of its own
            for _ in range(2):
                getattr(tunedcomm, op)(a, other.t())
                getattr(tunedcomm, op)(a, weight.t(), **options)
            assert [addresses[1] for addresses in seen] == [at(other), at(weight)] * 2
    with tunedcomm.force("ag_gemm", "planted"):
        for _ in range(2):
            seen.clear()
            tensors = (a, weight.t(), None, None, whole, gathered)
            results = gemm.ag_gemm_gathered(tensors, None, dist.group.WORLD, "default", None)
            assert seen == [(at(a), at(weight), 0, 0, at(whole), at(gathered))]
            assert results[0] is whole
            assert results[1] is gathered
        moved = torch.ones(6, 32, 2, **half).transpose(1, 2)  # a copy stands for what no kernel takes as it lies
        for _ in range(2):
            seen.clear()
            tunedcomm.ag_gemm(moved, weight.t(), out=whole)
            assert seen[0][0] != at(moved)


def test_nobody_writes_what_a_slow_peer_still_reads(rank: int, world_size: int) -> None:
    """The last rank is slow to read, while the others are at the next call already, of another op."""
    a, b = torch.ones(32, 32, dtype=torch.float16), torch.eye(32, dtype=torch.float16)
    real, seconds = ar.load_packets, 0.0

    class Slow:
        def __call__(self, *args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return real(*args, **options)

    slow = replaced(ar, "load_packets", Slow())
    with slow, tunedcomm.force("gemm_ar", "one_shot"), tunedcomm.force("ag_gemm", "library_tuned"):
        tunedcomm.gemm_ar(a, b)
        tunedcomm.ag_gemm(a[:16], b)
        dist.barrier()
        seconds = 0.5 if rank == world_size - 1 else 0.0
        summed = tunedcomm.gemm_ar(a * 5, b)
        gathered = tunedcomm.ag_gemm(a[:16] * 7, b)
    assert torch.equal(summed, torch.full_like(summed, 5 * world_size))
    assert torch.equal(gathered, torch.full_like(gathered, 7))


def test_a_gather_under_way_shares_no_event_with_calls_in_between() -> None:
    assert min(copies.EVENTS_OF_PROGRESS) >= copies.NUM_EVENTS
    assert {progress._BEGUN, progress._SENT} == set(copies.EVENTS_OF_PROGRESS)
    assert chunked._DONE + copies.NUM_STREAMS < copies.NUM_EVENTS
