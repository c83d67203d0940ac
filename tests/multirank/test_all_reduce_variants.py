"""Every all_reduce variant on the host backend, against float64 and, for `ordered` ones, against exact bits."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from quick import some

from tunedcomm import kernels
from tunedcomm.spec import Problem, variants

kernels.discover()
# On one node: what spans several has tests of its own.
KERNELS = sorted(n for n, v in variants("all_reduce").items() if v.kernels and "ranks_per_node" not in v.space.names)
ORDERED = sorted(name for name in KERNELS if variants("all_reduce")[name].numerics == "ordered")
SIZES = (1, 7, 64, 1000, 4099)


def _limits(communicator):
    from dataclasses import replace

    return replace(communicator.limits, emulated_multicast=True)


def _launch(communicator, problem, variant, inputs, config=None):
    from tunedcomm.spec import Candidate, check_candidate, get_op, get_variant

    limits = _limits(communicator)
    config = config if config is not None else get_variant("all_reduce", variant).default(problem, limits)
    candidate = Candidate.of("all_reduce", variant, config)
    reason = check_candidate(problem, candidate, limits)
    assert reason is None, (candidate, reason)
    launch = communicator.bind(problem, candidate)
    outputs = inputs if problem.in_place else get_op("all_reduce").make_outputs(problem, "cpu")
    if not problem.in_place:
        outputs[0].fill_(float("nan"))
    launch(inputs, outputs, 0)
    communicator.check_peers()
    return outputs[0]


def _check(communicator, problem, variant, seed, kind, config=None):
    from tunedcomm.spec import get_op, get_variant

    spec = get_op("all_reduce")
    world_size = communicator.world_size
    everyone = [spec.make_inputs(problem, rank, seed, kind, "cpu") for rank in range(world_size)]
    out = _launch(communicator, problem, variant, everyone[communicator.rank], config)
    everyone = [spec.make_inputs(problem, rank, seed, kind, "cpu") for rank in range(world_size)]
    if get_variant("all_reduce", variant).numerics == "ordered":
        (expected,) = spec.ordered_reference(problem, everyone, communicator.rank)
        assert torch.equal(_bits(out), _bits(expected)), (variant, problem, kind)
    (reference,) = spec.reference(problem, everyone, communicator.rank)
    error = ((out.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()
    assert error <= spec.tolerance[problem.dtype], (variant, problem, kind, error)
    return out


def _bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def sizes_body(rank, world_size, variant, dtype):
    """Sizes up and down on one lane: every call leaves the lane fit for any other."""
    from tunedcomm.dispatch.communicator import get_communicator

    communicator = get_communicator()
    count = 0
    for seed, numel in some(enumerate((*SIZES, *reversed(SIZES)))):
        for reduction in ("sum", "avg") if seed % 2 else ("sum",):
            problem = Problem("all_reduce", (numel,), dtype, world_size, reduction=reduction, mode="eager")
            _check(communicator, problem, variant, seed, "integers" if seed % 3 == 0 else "random")
            count += 1
    return count


@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes(world_size, variant):
    dtype = {2: "bfloat16", 3: "float16", 4: "float32"}[world_size]
    (count,) = set(run_ranks(world_size, sizes_body, variant, dtype, timeout=240))
    assert count >= 4


def agreement_body(rank, world_size, dtype):
    """All ordered variants in turn on the same inputs, with awkward values; their bits."""
    from tunedcomm.dispatch.communicator import get_communicator
    from tunedcomm.spec import get_op

    communicator = get_communicator()
    results = {}
    for reduction in ("sum", "avg"):
        problem = Problem("all_reduce", (515,), dtype, world_size, reduction=reduction, mode="eager")
        for variant in ORDERED:
            x = get_op("all_reduce").make_inputs(problem, rank, 3, "random", "cpu")[0]
            tiny = torch.finfo(x.dtype).smallest_normal / 8
            x[:8] = torch.tensor([0.0, -0.0, tiny, -tiny, float("inf"), float("nan"), 1.0, -1.0]).to(x.dtype)
            x[8:10] = -0.0  # a word of negative zeros on every rank
            x[10] = tiny if rank % 2 else -tiny
            out = _launch(communicator, problem, variant, (x,))
            results[reduction, variant] = _bits(out).tolist()
    return results


@pytest.mark.parametrize(("world_size", "dtype"), [(2, "float16"), (3, "bfloat16"), (4, "bfloat16"), (3, "float32")])
def test_ordered_variants_give_the_same_bits(world_size, dtype):
    ranks = run_ranks(world_size, agreement_body, dtype, timeout=240)
    first = ranks[0]
    for reduction in ("sum", "avg"):
        expected = torch.tensor(first[reduction, ORDERED[0]])
        for results in ranks:
            for variant in ORDERED:
                assert torch.equal(torch.tensor(results[reduction, variant]), expected), (reduction, variant)
    words = torch.tensor(first["sum", ORDERED[0]])
    assert words[8] == 0, "negative zeros sum to +0.0"


def chunks_body(rank, world_size):
    """two_shot cut into more chunks than its areas hold, sizes that do not divide, twice each."""
    from tunedcomm.dispatch.communicator import get_communicator

    communicator = get_communicator()
    for numel in (16 * 128 * 8 * world_size, 13 * 128 * 8 * world_size + 1234):
        for chunks in some((1, 2, 4, 8, 16) if numel % 128 == 0 else (4, 8)):
            config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": chunks}
            problem = Problem("all_reduce", (numel,), "bfloat16", world_size, mode="eager")
            for seed in some((1, 2)):
                _check(communicator, problem, "two_shot", seed, "random", config)
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_shot_in_many_chunks(world_size):
    assert run_ranks(world_size, chunks_body, timeout=240) == [True] * world_size
