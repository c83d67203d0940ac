"""all_gather_v and reduce_scatter_v: bits of every variant, counts that change, refusals, gradients, compiled code."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import HOST, Ranks, bits_of, same_bits, spy_on_launches
from quick import some
from variant_checks import inputs_of_all, launch_variant

import tunedcomm
from tunedcomm import kernels
from tunedcomm.bench.contenders import contenders_of
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import Problem, get_op, get_variant

kernels.discover()
RANKS = Ranks(env=HOST, forget=False, timeout=400)
OPS = ("all_gather_v", "reduce_scatter_v")
VARIANTS = ("library", "host_one_shot", "lamport", "push")


def asked(op: str, shape: tuple[int, ...], dtype: str, world_size: int, layout: str) -> Problem:
    reduction = "" if op == "all_gather_v" else "sum"
    return Problem(op, shape, dtype, world_size, reduction=reduction, layout=layout, mode="eager")


def rows_of(rank: int, count: int, width: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums are exact, and words that packets have to disguise."""
    found = torch.arange(count * width).view(count, width).add(100 * rank).remainder(61).to(dtype)
    if found.numel() > 3 and dtype == torch.float32:
        found.view(-1).view(torch.int32)[1::7] = SENTINEL.value
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_variant(rank: int, world_size: int) -> None:
    """Sizes up and down on one lane, every layout, odd rows: exact bits, disguised words included."""
    communicator = get_communicator()
    shapes = ((7, 33), (20, 64), (1, 4), (3, 1))
    cases = [(op, layout) for op in OPS for layout in get_op(op).layouts]
    every = itertools.product(some(shapes, 2), cases, VARIANTS)
    for seed, (shape, (op, layout), variant) in enumerate(every):
        dtypes = ("float32", "bfloat16", "float16") if op == "reduce_scatter_v" else ("float32", "uint8", "int64")
        problem, spec = asked(op, shape, dtypes[seed % 3], world_size, layout), get_op(op)
        kind = "integers" if seed % 2 else "random"
        everyone = inputs_of_all(problem, seed, kind)
        mine = tuple(tensor.clone() for tensor in everyone[rank])
        outputs = launch_variant(communicator, problem, variant, mine)
        outputs = spec.mask_unspecified(problem, (), outputs)[1]
        assert all(map(same_bits, mine, everyone[rank])), "input changed"
        exact = get_variant(op, variant).numerics == "ordered" or kind == "integers"
        due = spec.ordered_reference(problem, everyone, rank)  # type: ignore[misc]
        for got, wanted in zip(outputs, due, strict=True):
            close = torch.allclose(got.double(), wanted.double(), rtol=2e-2, atol=1)
            assert same_bits(got, wanted) or (close and not exact)


def expected(op: str, counts: list[int], rank: int) -> torch.Tensor:
    if op == "all_gather_v":
        return torch.cat([rows_of(peer, count) for peer, count in enumerate(counts)])
    total = sum(rows_of(peer, sum(counts)) for peer in range(len(counts)))
    return total.split(counts)[rank] + 0.0  # type: ignore[union-attr]


def given(op: str, counts: list[int], rank: int, room: int) -> torch.Tensor:
    x = rows_of(rank, counts[rank] if op == "all_gather_v" else sum(counts))
    return torch.cat([x, torch.full((room - len(x), 5), float("nan"))]) if room else x


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_public_calls(rank: int, world_size: int, variant: str) -> None:
    """Counts that change from call to call, none on some ranks or on all; fast calls read them anew."""
    every = [[3, 0, 6, 1], [0, 0, 0, 0], [6, 6, 6, 6], [0, 5, 0, 2]]
    counts_on_device = torch.zeros(world_size, dtype=torch.int32)
    rooms = {"all_gather_v": 6, "reduce_scatter_v": 6 * world_size}
    held = {op: torch.zeros(room, 5) for op, room in rooms.items()}
    for op, full in itertools.product(OPS, every):
        counts = full[:world_size]
        function: Any = getattr(tunedcomm, op)
        with tunedcomm.force(op, variant):
            due = expected(op, counts, rank)
            for _ in range(3):
                assert same_bits(function(given(op, counts, rank, 0), counts, max_count=6) + 0.0, due + 0.0)
            out = torch.zeros(len(due), 10)[:, ::2]
            assert function(given(op, counts, rank, 0), tuple(counts), max_count=6, out=out) is out
            assert torch.equal(out, due)
            counts_on_device.copy_(torch.tensor(counts))
            held[op].copy_(given(op, counts, rank, rooms[op]))
            for _ in range(3):
                found = function(held[op], counts_on_device, max_count=6)
                assert torch.equal(found[: len(due)], due)
                assert len(found) == (6 * world_size if op == "all_gather_v" else 6)
                assert op == "all_gather_v" or not found[len(due) :].any()
            if op == "all_gather_v":
                padded, told = tunedcomm.all_gather_v(given(op, counts, rank, 0), max_count=6)
                assert told.tolist() == counts
                assert torch.equal(torch.cat([padded[r, :count] for r, count in enumerate(counts)]), due)


def test_one_kernel_whatever_the_counts(rank: int, world_size: int) -> None:
    launched: list[Any] = []
    spy_on_launches(launched, "all_gather_v")
    tunedcomm.release_communicators()
    for counts in ([4, 0], [1, 3], [0, 4]):
        tunedcomm.all_gather_v(rows_of(rank, counts[rank]), counts, max_count=4)
    assert len({(each.variant, each.problem) for each in launched}) == 1


@pytest.mark.parametrize("variant", ["library", "host_one_shot", "lamport", "push"])
def test_counts_beyond_the_bound(rank: int, world_size: int, variant: str) -> None:
    """Clamped, so that nothing is written or read out of bounds, and an error on every rank; the group goes on."""
    for op in OPS:
        function: Any = getattr(tunedcomm, op)
        x = torch.ones(3 if op == "all_gather_v" else 3 * world_size, 5)
        for wrong in ([4, 1], [2, -1]):
            with tunedcomm.force(op, variant), pytest.raises(tunedcomm.UnsupportedInputError, match="max_count=3"):
                function(x, torch.tensor(wrong, dtype=torch.int32), max_count=3)
            with tunedcomm.force(op, variant):
                function(x, torch.tensor([3, 0], dtype=torch.int32), max_count=3)


def test_refusals(rank: int, world_size: int) -> None:
    x, good = torch.ones(2, 3), [2, 2]
    for op, (tensor, counts, bound), said in (
        ("all_gather_v", (x, [2], 4), "2 ranks"),
        ("all_gather_v", (x, [2, 5], 4), "max_count=4"),
        ("all_gather_v", (x, [2, 2.0], 4), "integers"),
        ("all_gather_v", (x, good, -1), "max_count"),
        ("all_gather_v", (x, torch.tensor(good), 2), "int32"),
        ("all_gather_v", (x.to(torch.complex64), good, 2), "view_as_real"),
        ("all_gather_v", (x, torch.tensor(good, dtype=torch.int32), 4), "4 rows"),
        ("reduce_scatter_v", (x, good, 2), "4 rows"),
        ("reduce_scatter_v", (x, None, 2), "counts"),
        ("reduce_scatter_v", (x > 0, good, 2), "does not take"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            getattr(tunedcomm, op)(tensor, counts, max_count=bound)
    assert torch.equal(tunedcomm.all_gather_v(x, good, max_count=2), torch.ones(4, 3))  # type: ignore[arg-type]
    assert tunedcomm.reduce_scatter_v(torch.ones(0, 3), [0, 0], max_count=0).shape == (0, 3)


def test_gradients_are_each_others(rank: int, world_size: int) -> None:
    counts = [3, 1]
    on_device = torch.tensor(counts, dtype=torch.int32)
    seeds = torch.arange(4.0).view(4, 1) + 1
    x = torch.ones(counts[rank], 2, requires_grad=True)
    (tunedcomm.all_gather_v(x, counts, max_count=4) * seeds).sum().backward()  # type: ignore[operator]
    mine = 2 * seeds.split(counts)[rank].expand(-1, 2)
    assert x.grad is not None
    assert torch.equal(x.grad, mine)
    x = torch.ones(counts[rank], 2, requires_grad=True)
    padded, _ = tunedcomm.all_gather_v(x, max_count=4)
    padded.narrow(1, 0, 1).sum().backward()
    assert torch.equal(x.grad, torch.where(torch.arange(counts[rank]).view(-1, 1) < 1, 2.0, 0.0).expand(-1, 2))  # type: ignore[arg-type]
    x = torch.ones(4, 2, requires_grad=True)
    (tunedcomm.all_gather_v(x, on_device, max_count=4)[:4] * seeds).sum().backward()  # type: ignore[index]
    assert torch.equal(x.grad[: counts[rank]], mine)  # type: ignore[index]
    assert not x.grad[counts[rank] :].any()  # type: ignore[index]
    for given_counts, rows in ((counts, 4), (on_device, 8)):
        x = torch.ones(rows, 2, requires_grad=True)
        y = tunedcomm.reduce_scatter_v(x, given_counts, max_count=4)
        (y[: counts[rank]] * seeds.split(counts)[rank]).sum().backward()
        assert torch.equal(x.grad[:4], seeds.expand(-1, 2))  # type: ignore[index]
        assert not x.grad[4:].any()  # type: ignore[index]


def test_compiled(rank: int, world_size: int) -> None:
    counts = [3, 1]

    def program(x: torch.Tensor, on_device: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y: Any = tunedcomm.all_gather_v(x * 2, counts, max_count=4)
        z: Any = tunedcomm.all_gather_v(x.new_ones(4, 2), on_device, max_count=4)
        return tunedcomm.reduce_scatter_v(y, counts, max_count=4), z

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        y, z = compiled(torch.ones(counts[rank], 2), torch.tensor(counts, dtype=torch.int32))
        assert torch.equal(y, torch.full((counts[rank], 2), 4.0))
        assert torch.equal(z[:4], torch.ones(4, 2))


def test_bench_and_explain_know_them(rank: int, world_size: int) -> None:
    for op in OPS:
        for layout in get_op(op).layouts:
            problem = asked(op, (4, 32), "bfloat16", world_size, layout)
            inputs: tuple[Any, ...] = get_op(op).make_inputs(problem, rank, 1, "random", torch.device("cpu"))
            (tuned,) = contenders_of(get_communicator(), problem, inputs, ["tuned"]).present[1:]
            for _ in range(3):
                tuned.launch(tuned.turns[0])
            everyone = inputs_of_all(problem, 1, "random")
            due = get_op(op).ordered_reference(problem, everyone, rank)  # type: ignore[misc]
            found = get_op(op).mask_unspecified(problem, (), tuned.results)[1]
            assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(found, due, strict=True))


@pytest.mark.parametrize("variant", ["library", "host_unfused", "lamport"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_lists(rank: int, world_size: int, variant: str) -> None:
    """Several tensors of different dtypes, odd sizes, strides and given results, in one call."""
    with tunedcomm.force("all_gather_list", variant):
        for width in (5, 64, 1, 5):
            whole = [rows_of(r, 3, width) for r in range(world_size)]
            kinds = (torch.float32, torch.float16, torch.uint8, torch.int64)
            every = [[x.to(kind) for kind in kinds] + [x[:, 0], x[:0]] for x in whole]
            due = [torch.cat(parts) for parts in zip(*every, strict=True)]
            for _ in range(3):
                found = tunedcomm.all_gather(every[rank])
                assert all(map(same_bits, found, due))
            outs = [torch.zeros(*each.shape, 2, dtype=each.dtype)[..., 0] for each in due]
            assert all(a is b for a, b in zip(tunedcomm.all_gather(every[rank], out=outs), outs, strict=True))
            assert all(map(same_bits, outs, due))
            wide = tunedcomm.all_gather([every[rank][0], every[rank][3]], dim=1)
            assert torch.equal(wide[1], torch.cat([each[3] for each in every], 1))
    with pytest.raises(tunedcomm.UnsupportedInputError, match="an out for each"):
        tunedcomm.all_gather([whole[0]], out=[])
    for problem in (
        Problem("all_gather_list", (n,), "uint8", world_size, "", layout=a) for n in (48, 700) for a in "412"
    ):
        everyone = inputs_of_all(problem, 3, "integers")
        outputs = launch_variant(get_communicator(), problem, variant, everyone[rank])
        assert all(map(same_bits, outputs, get_op(problem.op).ordered_reference(problem, everyone, rank)))  # type: ignore[misc]
