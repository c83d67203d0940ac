"""`push` and `two_phase` of ep_dispatch in the sorted layouts: weights that travel beside the places of tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import run_ranks
from test_experts import asked, by_rank, through_experts
from variant_checks import bits_of, inputs_of_all, limits_of

import tunedcomm
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.moe.op import dispatched, token_shapes
from tunedcomm.kernels.moe.push import _Further
from tunedcomm.spec import Candidate, Problem, check_candidate

VARIANTS = ("push", "two_phase")
SMALL = {"num_blocks": 2, "num_warps": 1, "split": 1, "items": 1}
IN_PARTS = {"num_blocks": 4, "num_warps": 1, "split": 2, "items": 2}
WIDE = {"num_blocks": 4, "num_warps": 1, "split": 1, "items": 1}  # more blocks than tokens of a piece
# Tokens, top-k and config: more pieces than the ring holds, a last piece that is not full, one piece alone.
GRIDS: tuple[tuple[int, int, Any], ...] = (
    (11, 3, {**SMALL, "chunk_tokens": 2}), (9, 2, {**IN_PARTS, "chunk_tokens": 4}), (5, 8, {**WIDE, "chunk_tokens": 8}),
    (13, 1, {**IN_PARTS, "chunk_tokens": 2}),
)  # fmt: skip


def weights_of_all(problem: Problem) -> torch.Tensor:
    """Weights of every rank, of which no two are the same but for zeros: the first of each rank are −0.0."""
    tokens, _, topk, _ = problem.shape
    made = torch.arange(1, problem.world_size * tokens * topk + 1, dtype=torch.float32).view(-1, tokens, topk) / 8
    made[:, 0, 0] = -0.0
    return made


def launched(
    communicator: Communicator, problem: Problem, variant: str, config: Any, given: tuple[Any, ...], capacity: int
) -> list[torch.Tensor]:
    """Outputs of a launch; those of tokens begin as zeros, all others as what they cannot be."""
    candidate = Candidate.of("ep_dispatch", variant, config)
    assert check_candidate(problem, candidate, limits_of(communicator)) is None
    launch = communicator.bind(problem, candidate)
    outputs = [torch.zeros(size, dtype=t) for size, t in token_shapes(problem, capacity, weighted=len(given) > 2)]
    for output in outputs[2:]:
        output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)
    launch(given, tuple(outputs), 0)
    return outputs


def bits_body(rank: int, world_size: int) -> None:
    """All outputs, with weights and without in turn; also quantised, skewed, and where ids are −1."""
    communicator = get_communicator()
    forms = itertools.cycle((("padded", ""), ("contiguous", "group128"), ("padded", "token"), ("contiguous", "")))
    for seed, ((tokens, topk, config), variant) in enumerate(itertools.product(GRIDS, VARIANTS)):
        layout, scaling = next(forms)
        problem = asked("ep_dispatch", (tokens, 1024, topk, 4 * world_size), world_size, layout=layout, scaling=scaling)
        everyone = inputs_of_all(problem, seed, ("integers", "random")[seed % 3 == 2])
        weights = weights_of_all(problem)
        given = [(*inputs, own) for inputs, own in zip(everyone, weights, strict=True)]
        capacity = world_size * tokens * topk + 128 * 4
        due, _ = dispatched(given, rank, problem, capacity, 128)
        for turn in range(3):
            with_weights = turn != 1
            inputs = given[rank] if with_weights else given[rank][:2]
            outputs = launched(communicator, problem, variant, config, inputs, capacity)
            assert len(outputs[5]) == (world_size if with_weights else 0)
            for number, (got, wanted) in enumerate(zip(outputs, due, strict=True)):
                assert not got.numel() or torch.equal(bits_of(got), bits_of(wanted)), (str(problem), variant, number)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_weights_travel_with_places(world_size: int) -> None:
    run_ranks(world_size, bits_body, timeout=240)


def overflow_body(rank: int, world_size: int) -> None:
    """Weights come also where tokens have no room, and of calls without memory or a kernel for them."""
    communicator = get_communicator()
    for variant, layout in itertools.product(VARIANTS, ("padded", "contiguous")):
        problem = asked("ep_dispatch", (6, 256, 2, 2 * world_size), world_size, layout=layout, dtype="float32")
        weights = weights_of_all(problem)
        ids = torch.tensor([[0, -1]] * 6)
        given = torch.ones(6, 256), ids, weights[rank]
        with pytest.raises(tunedcomm.CapacityError, match="expert 0"):
            launched(communicator, problem, variant, {**SMALL, "chunk_tokens": 2}, given, 6 * world_size - 1)
        for config in ({**SMALL, "chunk_tokens": 2}, {**IN_PARTS, "chunk_tokens": 8}):
            outputs = launched(communicator, problem, variant, config, given, 6 * world_size)
            assert torch.equal(bits_of(outputs[5]), bits_of(weights + 0.0)), variant


def without_kernel_body(rank: int, world_size: int) -> None:
    """Where there is no kernel that takes weights, they are gathered."""
    _Further.launch = lambda self: None  # type: ignore[method-assign]
    overflow_body(rank, world_size)


@pytest.mark.parametrize("body", [overflow_body, without_kernel_body])
def test_weights_come_where_tokens_have_no_room(body: Any) -> None:
    run_ranks(2, body, timeout=120)


def public_body(rank: int, world_size: int) -> None:
    """Round trips with sums by rank exchange nothing beside the two kernels."""
    communicator, experts = get_communicator(), 4 * world_size
    generator = torch.Generator().manual_seed(2)
    for (tokens, topk), case, variant in itertools.product(((1, 2), (7, 3)), ("mixed", "one", "none"), VARIANTS):
        everyone, weights = [], []
        for _ in range(world_size):
            ids = torch.randint(-1, experts, (tokens, topk), generator=generator)
            ids = {"mixed": ids, "one": torch.full_like(ids, experts - 1), "none": torch.full_like(ids, -1)}[case]
            everyone.append((torch.randint(-8, 8, (tokens, 32), generator=generator).float(), ids))
            weights.append(torch.rand(tokens, topk, generator=generator))
        for layout in ("padded", "contiguous"):
            with tunedcomm.force("ep_dispatch", variant), torch.no_grad():
                sent = tunedcomm.ep_dispatch(
                    *everyone[rank], num_experts=experts, layout=layout, topk_weights=weights[rank],
                    capacity=2 * world_size * tokens * topk + 4 * 128,
                )  # fmt: skip
                assert {key.problem.op for key in communicator.plans} == {"ep_dispatch"}, "no plan of another op"
            y = tunedcomm.ep_combine(through_experts(sent, rank), sent, reduce="rank")
            assert torch.equal(y, by_rank(everyone, weights, rank)), (variant, case, layout)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_by_rank_need_no_exchange_of_weights(world_size: int) -> None:
    run_ranks(world_size, public_body, timeout=120)
