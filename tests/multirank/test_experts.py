"""ep_dispatch and ep_combine on the host backend: bits of the reference for every variant, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from quick import FULL, some
from torch._subclasses.fake_tensor import FakeTensorMode
from variant_checks import bits_of, inputs_of_all, launch_variant, limits_of

import tunedcomm
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.moe.op import Overflow, place, sources_of
from tunedcomm.spec import Candidate, Problem, get_op, get_variant, variants

Tensors = tuple[torch.Tensor, ...]


def asked(op: str, shape: tuple[int, int, int, int], world_size: int, **extras: Any) -> Problem:
    layout = "padded" if op == "ep_dispatch" else ""
    given = {"dtype": "bfloat16", "layout": layout, **extras}
    return Problem(op, shape, world_size=world_size, reduction="", mode="eager", **given)


def check(communicator: Communicator, problem: Problem, variant: str, seed: int, kind: str, config: Any = None) -> None:
    """Every variant, the library too, gives the bits of the reference, a quantised one of its own; inputs stay."""
    spec, everyone = get_op(problem.op), inputs_of_all(problem, seed, kind)
    mine = tuple(tensor.clone() for tensor in everyone[communicator.rank])
    outputs = spec.mask_unspecified(problem, (), launch_variant(communicator, problem, variant, mine, config))[1]
    assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(mine, everyone[communicator.rank], strict=True))
    if get_variant(problem.op, variant).numerics == "quantized":
        assert spec.quantized_references is not None
        (expected,) = spec.quantized_references(problem, everyone, communicator.rank)
    else:
        assert spec.ordered_reference is not None
        expected = spec.ordered_reference(problem, everyone, communicator.rank)
    for number, (got, due) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(bits_of(got), bits_of(due)), (str(problem), variant, kind, number)


SHAPES = [(7, 128, 2, 12), (3, 64, 8, 60), (1, 16, 1, 12), (64, 16, 1, 24)]
LARGE = [(64, 128, 8, 12), (64, 256, 2, 60), (1000, 128, 8, 60), (1000, 64, 2, 24)]
EXTRAS = [("bfloat16", ""), ("float32", "group128"), ("float16", ""), ("bfloat16", "token")]


def bits_body(rank: int, world_size: int, shapes: list[tuple[int, int, int, int]]) -> int:
    communicator, count = get_communicator(), 0
    for seed, shape in enumerate(shapes):
        for number, (layout, kind) in enumerate((("padded", "random"), ("contiguous", "integers"))):
            dtype, scaling = EXTRAS[(seed + 2 * number + seed // 4) % 4]
            scaling = scaling if scaling != "group128" or shape[1] % 128 == 0 else "token"
            dispatch = asked("ep_dispatch", shape, world_size, layout=layout, scaling=scaling, dtype=dtype)
            for problem in (dispatch, asked("ep_combine", shape, world_size, dtype=dtype)):
                for name, variant in variants(problem.op).items():
                    config = variant.default(problem, limits_of(communicator))
                    if variant.infeasible(problem, config, limits_of(communicator)) is None:
                        check(communicator, problem, name, seed, kind)
                        count += 1
    return count


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits(world_size: int) -> None:
    shapes = SHAPES + LARGE if FULL else some(SHAPES[: 4 if world_size == 2 else 2], 2)
    counts = run_ranks(world_size, bits_body, shapes, timeout=280)
    few = [shape for shape in shapes if world_size * shape[0] * shape[2] <= 8192]  # ids that fit into registers
    assert min(counts) >= 12 * len(shapes) + 2 * len(few)


@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_places_are_found_without_waiting_for_the_device(layout: str) -> None:
    """Fake tensors raise where a value is asked for."""
    problem = asked("ep_dispatch", (6, 128, 2, 4), 2, layout=layout)
    with FakeTensorMode():
        placed = place(torch.zeros(2, 6, 2, dtype=torch.int32), 1, problem, 128, 128)
    assert placed.rows.shape == (2, 6, 2)


def grids_body(rank: int, world_size: int) -> None:
    """More pieces than the ring holds, tokens in two parts, threads that hold two packets; lanes without a token."""
    communicator = get_communicator()
    for seed in range(3):
        tokens, blocks, split, chunk = ((11, 2, 2, 2), (11, 2, 2, 8), (3, 4, 1, 4))[seed]
        for op, variant in itertools.product(("ep_dispatch", "ep_combine"), ("push", "lamport", "two_phase")):
            if variant not in variants(op):
                continue
            config = {"num_blocks": blocks, "num_warps": 1, "split": split}
            if op == "ep_dispatch":
                config["items"] = 2
            if variant != "lamport":
                config["chunk_tokens"] = chunk
            layout = {"layout": "contiguous"} if op == "ep_dispatch" else {}
            problem = asked(op, (tokens, 1024, 2, 6), world_size, **layout)
            check(communicator, problem, variant, seed, "integers", config)
    assert communicator.workspace is not None
    assert communicator.workspace.rearm("eager") == 0, "the sentinel is back wherever it was"


def test_grids() -> None:
    run_ranks(2, grids_body, timeout=240)


def traffic_body(rank: int, world_size: int) -> float:
    """Bytes that this rank wrote into its peer's gather area, over those of its tokens that go there."""
    communicator = get_communicator()
    problem = asked("ep_dispatch", (8, 7168, 8, 16), world_size)
    assert communicator.workspace is not None
    assert communicator.workspace.lanes["eager"]  # made now
    buffer = communicator.workspace.buffers["eager"]
    area = buffer.local[communicator.workspace.layout.gather :]
    area.fill_(0x5A)
    torch.distributed.barrier()
    config = {"num_blocks": 4, "num_warps": 8, "split": 1, "items": 1, "chunk_tokens": 8}
    outputs = launch_variant(communicator, problem, "push", inputs_of_all(problem, 0, "random")[rank], config)
    torch.distributed.barrier()
    here = (outputs[4] != -1).any(-1)
    own_words = 4 * (32 + 8) * 4 * world_size + here[rank].numel() * 8 * 4  # counts, tables and own places, at most
    come = int(here.sum()) - int(here[rank].sum())
    return (int((area != 0x5A).sum()) - own_words) / (come * 7168 * 2)


def test_a_token_travels_once() -> None:
    assert all(0.95 < ratio <= 1.05 for ratio in run_ranks(2, traffic_body, timeout=100))


def dense(everyone: list[Tensors], weights: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Expert e adds e + 1 and multiplies by two: what ep_combine of that must give."""
    x, ids = everyone[rank]
    total = torch.zeros_like(x, dtype=torch.float32)
    for k in range(ids.shape[1]):
        results = ((x + (ids[:, k, None] + 1)) * 2).to(x.dtype)
        more = total + weights[rank][:, k, None] * results.float()
        total = torch.where(ids[:, k, None] >= 0, more, total)
    return total.to(x.dtype)


def by_rank(everyone: list[Tensors], weights: list[torch.Tensor], rank: int) -> torch.Tensor:
    """As `dense`, but summed on the ranks of the experts first, each sum rounded."""
    x, ids = everyone[rank]
    ranks, local = range(len(everyone)), 4
    mine = [torch.where((ids >= r * local) & (ids < (r + 1) * local), ids, -1) for r in ranks]
    return sum((dense([(x, here)], [weights[rank]], 0).float() for here in mine), torch.zeros(x.shape)).to(x.dtype)


def through_experts(sent: tunedcomm.DispatchResult, rank: int) -> torch.Tensor:
    """The results of those experts, computed row by row."""
    flat = sent.tokens.reshape(-1, sent.tokens.shape[-1])
    out = torch.full_like(flat, float("nan"))
    local = len(sent.counts)
    for e, (begin, count) in enumerate(zip(sent.offsets.tolist(), sent.counts.tolist(), strict=False)):
        rows = slice(begin, begin + count)
        out[rows] = ((flat[rows] + (rank * local + e + 1)) * 2).to(flat.dtype)
    return out.view(sent.tokens.shape)


def public_body(rank: int, world_size: int) -> None:
    """Round trips through experts: all tokens to one, none at all, no tokens, dropped ones, strides, one rank."""
    experts = 4 * world_size
    generator = torch.Generator().manual_seed(1)
    for tokens, topk, case in itertools.product((0, 5), (1, 2), ("mixed", "one", "none")):
        everyone, weights = [], []
        for _ in range(world_size):
            x = torch.randint(-8, 8, (tokens, 32), generator=generator).float()
            ids = torch.randint(-1, experts, (tokens, topk), generator=generator)
            ids = {"mixed": ids, "one": torch.full_like(ids, experts - 1), "none": torch.full_like(ids, -1)}[case]
            everyone.append((x, ids))
            weights.append(torch.rand(tokens, topk, generator=generator))
        x, ids = everyone[rank]
        torch.full((8 * world_size * experts * max(tokens, 1), 32), float("nan"))  # memory that calls are given next
        for layout in ("padded", "contiguous"):
            sent = tunedcomm.ep_dispatch(
                x.t().contiguous().t(), ids.int() if topk == 1 else ids, num_experts=experts, layout=layout,
                capacity=2 * world_size * max(tokens, 1) * topk + (4 * 128 if layout == "contiguous" else 0),
            )  # fmt: skip
            sent.check()
            come = sources_of(sent.rows.flatten(0, 1), len(sent.tokens.view(-1, 32)))
            assert not sent.tokens.view(-1, 32)[come < 0].any(), "zeros, for gradients are recorded"
            assert layout == "padded" or all(offset % 128 == 0 for offset in sent.offsets.tolist())
            y = tunedcomm.ep_combine(through_experts(sent, rank), sent, weights[rank])
            assert torch.equal(y, dense(everyone, weights, rank)), (tokens, topk, case, layout)
            out = torch.empty(2, *y.shape)[1]
            given = {"out": out, "numerics": "ordered"}
            assert tunedcomm.ep_combine(through_experts(sent, rank), sent, weights[rank].double(), **given) is out
            assert torch.equal(out, y)
            summed = by_rank(everyone, weights, rank)
            come = tunedcomm.ep_combine(through_experts(sent, rank), sent, weights[rank].double(), reduce="rank")
            assert torch.equal(come, summed), (tokens, topk, case, layout)
            sent = replace(sent, weights=torch.stack(weights))
            tunedcomm.ep_combine(through_experts(sent, rank), sent, reduce="rank", out=out)
            assert torch.equal(out, summed)
    sent = tunedcomm.ep_dispatch(x, ids, num_experts=experts, topk_weights=weights[rank])
    assert sent.weights is not None
    assert torch.equal(sent.weights, torch.stack(weights))
    few = torch.zeros(3, 1).int()
    quantised = tunedcomm.ep_dispatch(torch.ones(3, 128), few, num_experts=experts, quantize="token")
    assert quantised.scales is not None
    assert quantised.tokens.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_public_calls(world_size: int) -> None:
    run_ranks(world_size, public_body, timeout=120)


def zeros_body(rank: int, world_size: int) -> None:
    """Rows without a token are zeros in a fast call, too, where gradients are recorded."""
    x, experts = torch.ones(5, 32), 2 * world_size
    ids = torch.arange(-1, 4).view(5, 1) % (experts + 1) - 1  # the second token goes nowhere
    held = world_size * int((ids[:, 0] // 2 == rank).sum())
    for layout in ("padded", "contiguous", "tokens"):
        for _ in range(4):
            sent = tunedcomm.ep_dispatch(x, ids, num_experts=experts, layout=layout)
            assert sorted(sent.tokens.reshape(-1, 32).sum(1).tolist())[-held - 1 :] == [0.0, *[32.0] * held], layout
            sent.tokens.fill_(float("nan"))
            del sent  # its memory is the next call's
    fast = get_communicator().fast_calls.values()
    assert sum(map(len, fast)) == (3 if world_size > 1 else 0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_without_a_token_are_zeros_where_gradients_are_recorded(world_size: int) -> None:
    run_ranks(world_size, zeros_body, timeout=120)


def weights_body(rank: int, world_size: int) -> None:
    """Weights travel along, by every variant and again by its fast call: of any dtype, also behind whole packets."""
    communicator, experts = get_communicator(), 4 * world_size
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64))
    for (tokens, topk), variant in itertools.product(((1, 1), (5, 3)), variants("ep_dispatch")):
        problem = asked("ep_dispatch", (tokens, 64, topk, experts), world_size, layout="contiguous", dtype="float32")
        chosen, limits = get_variant("ep_dispatch", variant), limits_of(communicator)
        if chosen.infeasible(problem, chosen.default(problem, limits), limits) is not None:
            continue
        generator, dtype = torch.Generator().manual_seed(tokens), next(dtypes)
        everyone = torch.randn(world_size, tokens, topk, generator=generator).to(dtype)
        everyone[:, 0, 0] = -0.0
        ids = torch.randint(-1, experts, (tokens, topk), generator=generator)
        with tunedcomm.force("ep_dispatch", variant), torch.no_grad():
            for turn in range(4):  # without weights in between
                given = everyone[rank] if turn != 1 else None
                sent = tunedcomm.ep_dispatch(
                    torch.ones(tokens, 64), ids, num_experts=experts, layout="contiguous", topk_weights=given
                )
                assert (sent.weights is None) == (given is None)
                if sent.weights is not None:
                    wide = torch.promote_types(dtype, torch.float32)
                    due = everyone.to(wide) + (0.0 if wide == torch.float32 else -0.0)
                    assert torch.equal(bits_of(sent.weights), bits_of(due)), (tokens, variant, turn)
    assert communicator.workspace is not None
    assert communicator.workspace.rearm("eager") == 0, "the sentinel is back wherever it was"


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_travel_along(world_size: int) -> None:
    run_ranks(world_size, weights_body, timeout=120)


def overflow_body(rank: int, world_size: int) -> None:
    """One token more than fits: every rank raises, for every variant, and the group goes on."""
    x, ids = torch.ones(6, 64), torch.zeros(6, 1).long()
    rows = 6 * world_size
    for layout, variant in itertools.product(("padded", "contiguous"), variants("ep_dispatch")):
        problem = asked("ep_dispatch", (6, 64, 1, 2 * world_size), world_size, layout=layout, dtype="float32")
        if get_variant("ep_dispatch", variant).infeasible(
            problem, get_variant("ep_dispatch", variant).default(problem, limits_of(get_communicator())),
            limits_of(get_communicator()),
        ):  # fmt: skip
            continue
        with tunedcomm.force("ep_dispatch", variant):
            with pytest.raises(tunedcomm.CapacityError, match=f"expert 0 .*{rows} tokens.*{rows - 1} rows"):
                tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size, capacity=rows - 1, layout=layout)
            with pytest.raises(tunedcomm.UnsupportedInputError, match="do not exist"):
                tunedcomm.ep_dispatch(x, ids + 2 * world_size * (rank == 1), num_experts=2 * world_size, layout=layout)
            sent = tunedcomm.ep_dispatch(x, ids, num_experts=2 * world_size, capacity=rows, layout=layout)
            assert sent.counts.tolist() == ([rows, 0] if rank == 0 else [0, 0]), variant


def lost_body(rank: int, world_size: int) -> None:
    """Where a kernel gave up waiting, that is the error, whatever it counted then."""
    communicator = get_communicator()
    assert communicator.workspace is not None
    sent = tunedcomm.ep_dispatch(torch.ones(6, 64), torch.zeros(6, 1).int(), num_experts=2 * world_size)
    overflow = Overflow.of(communicator.group, communicator.device)
    communicator.abandon = lambda *_: None  # type: ignore[method-assign]  # it would end the peer's turns, too
    for op in ("ep_dispatch", "ep_combine"):
        problem = asked(op, (6, 64, 1, 2 * world_size), world_size)
        default = get_variant(op, "push").default(problem, limits_of(communicator))
        launch = communicator.bind(problem, Candidate.of(op, "push", default))
        inputs, outputs = inputs_of_all(problem, 0, "random")[rank], get_op(op).make_outputs(problem, "cpu")
        overflow.cell[:2] = torch.tensor([(5 << 40) + 16, 128])
        for call in (sent.check, lambda: launch(inputs, outputs, 0)):  # noqa: B023 - called here
            communicator.status_view[0] = 1
            with pytest.raises(tunedcomm.PeerTimeoutError):
                call()
            communicator.status_view[0] = 0
        with pytest.raises(tunedcomm.CapacityError, match=r"expert 4 .*16 tokens.*128 rows"):
            launch(inputs, outputs, 0)


def test_overflow() -> None:
    run_ranks(2, overflow_body, timeout=120)
    run_ranks(2, lost_body, timeout=60)


def refused_body(rank: int, world_size: int) -> None:
    x, ids = torch.ones(4, 64), torch.tensor([[0, 3]] * 4)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("multiple", {"num_experts": 5}), ("num_experts", {"num_experts": -4}), ("capacity", {"capacity": -1}),
        ("layout", {"layout": "rows"}), ("quantize", {"quantize": "int8"}), ("alignment", {"alignment": 0}),
        ("128", {"quantize": "group128"}), ("shape", {"topk_ids": ids[:3]}), ("int64", {"topk_ids": ids.float()}),
        ("complex", {"x": x.to(torch.complex64)}), ("shape", {"x": x[0]}), ("Tensor", {"x": [1.0]}),
    ]  # fmt: skip
    for match, change in wrong:
        with pytest.raises(tunedcomm.UnsupportedInputError, match=match):
            tunedcomm.ep_dispatch(**{"x": x, "topk_ids": ids, "num_experts": 4, **change})
    sent = tunedcomm.ep_dispatch(x, ids, num_experts=4)
    weights = torch.ones(4, 2)
    for match, change in [
        ("topk_weights", {"topk_weights": weights[:, :1]}), ("topk_weights", {"topk_weights": weights.long()}),
        ("rows", {"sent": replace(sent, rows=sent.rows[:1])}), ("sent", {"sent": x}), ("leading", {"expert_out": x[0]}),
        ("complex", {"expert_out": sent.tokens.to(torch.complex64)}), ("reduce", {"reduce": "expert"}),
        ("topk_weights", {"reduce": "rank", "sent": replace(sent, weights=torch.ones(2, 4, 2))}),
        ("weights", {"reduce": "rank", "sent": replace(sent, weights=weights), "topk_weights": None}),
    ]:  # fmt: skip
        with pytest.raises(tunedcomm.UnsupportedInputError, match=match):
            tunedcomm.ep_combine(**{"expert_out": sent.tokens, "sent": sent, "topk_weights": weights, **change})
    dist.barrier()
    tunedcomm.release_communicator()  # what `expert_out` is, is a rank's own: its refusal ends the group
    assert torch.equal(tunedcomm.ep_combine(sent.tokens, sent, weights), 2 * x)


def test_bad_input() -> None:
    run_ranks(2, refused_body, timeout=60)


def policies_body(rank: int, world_size: int) -> None:
    x, ids, weights = torch.randn(4, 64), torch.tensor([[0, 3]] * 4), torch.ones(4, 2)
    for dtype in (torch.float64, torch.float32):
        sent = tunedcomm.ep_dispatch(x.to(dtype), ids, num_experts=4)
        for policy in ("default", "ordered", "any"):
            y = tunedcomm.ep_combine(sent.tokens, sent, weights, numerics=policy)
            assert torch.equal(y, 2 * x.to(dtype)), (dtype, policy)


def test_every_dtype_is_summed_in_order() -> None:
    run_ranks(2, policies_body, timeout=60)


def nan_body(rank: int, world_size: int) -> None:
    """NaN where nothing is read: of tokens without an expert, their weights, and rows without a token."""
    nan, x, ids, weights = float("nan"), torch.ones(3, 64), torch.tensor([[0, 3], [-1, 2], [-1, -1]]), torch.ones(3, 2)
    x[2], weights[ids < 0] = nan, nan
    for variant in ("library", "push", "lamport"):
        with tunedcomm.force("ep_dispatch", variant), tunedcomm.force("ep_combine", variant):
            sent = tunedcomm.ep_dispatch(x, ids, num_experts=4)
            results = torch.full_like(sent.tokens, nan)
            held = sources_of(sent.rows.flatten(0, 1), len(results.view(-1, 64))) >= 0
            results.view(-1, 64)[held] = 1
            y = tunedcomm.ep_combine(results, sent, weights)
            assert y[:, 0].tolist() == [2, 1, 0]
    weights[1, 1] = nan
    for found, call in (
        ("ep_combine: 1 NaN", lambda: tunedcomm.ep_combine(results, sent, weights)),
        ("ep_dispatch: 64 NaN", lambda: tunedcomm.ep_dispatch(x, ids.clamp(min=0), num_experts=4)),
    ):
        torch.distributed.barrier()  # a peer's error ends calls that are still under way
        with pytest.raises((tunedcomm.NanInputError, tunedcomm.GroupAbortedError), match=found):
            call()
        torch.distributed.barrier()
        tunedcomm.release_communicator()


def test_nan_is_found_where_it_counts() -> None:
    run_ranks(2, nan_body, timeout=60, env={"TUNEDCOMM_NAN_CHECK": "1"})


def example_body(rank: int, world_size: int) -> tuple[float, float]:
    """The example's layer trains as one rank with all experts and all tokens does."""
    from examples.moe import MoE

    torch.set_default_dtype(torch.float64)  # but weights travel in fp32
    silu, hidden, inner, experts, topk = torch.nn.functional.silu, 8, 16, 4, 2
    torch.manual_seed(0)
    layer = MoE(hidden, inner, experts, topk)
    up, down = torch.randn(experts, hidden, inner) / 4, torch.randn(experts, inner, hidden) / 4
    router = layer.router.weight.detach().clone().requires_grad_()
    mine = slice(rank * experts // world_size, (rank + 1) * experts // world_size)
    with torch.no_grad():
        layer.up.copy_(up[mine])
        layer.down.copy_(down[mine])
    x, wanted = torch.randn(world_size, 6, hidden), torch.randn(world_size, 6, hidden)
    dense = torch.optim.SGD([up.requires_grad_(), down.requires_grad_(), router], lr=0.01)
    sparse = torch.optim.SGD(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        best, ids = torch.softmax(x @ router.t(), -1).topk(topk, -1)
        best = best / best.sum(-1, keepdim=True)
        every = torch.einsum("rtei,eih->rteh", silu(torch.einsum("rth,ehi->rtei", x, up)), down)
        y = (best.unsqueeze(-1) * every.gather(2, ids.unsqueeze(-1).expand(*ids.shape, hidden))).sum(2)
        got = layer(x[rank])
        torch.testing.assert_close(got, y[rank], rtol=1e-6, atol=1e-6)
        for optimizer, loss in ((dense, (y - wanted).square().sum()), (sparse, (got - wanted[rank]).square().sum())):
            optimizer.zero_grad()
            loss.backward()
        layer.sum_router_gradients()
        losses.append(float((y - wanted).detach().square().sum()))
        dense.step()
        sparse.step()
        torch.testing.assert_close([layer.up, layer.router.weight], [up[mine], router], rtol=1e-6, atol=1e-6)
    return losses[0], losses[-1]


def test_the_example_trains_as_the_dense_layer() -> None:
    first, last = run_ranks(2, example_body, timeout=120)[0]
    assert last < first
