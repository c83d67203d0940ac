"""all_to_all and all_to_all_v: every variant bit for bit, lanes shared with other ops, and the public calls."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, bits_of, spy_on_launches
from quick import some
from variant_checks import check_variant, launch_variant, limits_of

import tunedcomm
from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import DTYPES, Candidate, Problem, check_candidate, variants

RANKS = Ranks()


kernels.discover()
KERNELS = sorted(name for name, variant in variants("all_to_all").items() if variant.kernels)
SIZES = (1, 3, 64, 333, 2050)


def asked(numel: int, dtype: str, world_size: int) -> Problem:
    return Problem("all_to_all", (numel,), dtype, world_size, reduction="", mode="eager")


def all_bits(problem: Problem, rank: int) -> tuple[torch.Tensor]:
    """What one rank sends: the sentinel, the escape and words next to them among NaN, infinities and subnormals."""
    awkward = [-0x80000000, -0x7FFFFFFF, -0x7FFFFFFE, 0, -1, 0x7FC00001, -0x7F7FFFFB, 0x7F800000, 1, -0x7FFF8000]
    dtype = getattr(torch, problem.dtype)
    size = problem.nbytes * problem.world_size
    words = torch.tensor(awkward, dtype=torch.int64).to(torch.int32).repeat(-(-size // 40) + 1)
    words = words[rank % 3 :].contiguous()
    words[5::23] = torch.arange(len(words[5::23]), dtype=torch.int32) - rank
    return (words.view(torch.uint8)[:size].clone().view(dtype),)


def expected_bits(sent: list[tuple[torch.Tensor]], rank: int, world_size: int) -> torch.Tensor:
    return torch.cat([bits_of(x).view(world_size, -1)[rank] for (x,) in sent])


def check_bits(communicator: tunedcomm.Communicator, problem: Problem, variant: str) -> None:
    sent = [all_bits(problem, rank) for rank in range(problem.world_size)]
    (out,) = launch_variant(communicator, problem, variant, sent[communicator.rank])
    assert torch.equal(bits_of(out), expected_bits(sent, communicator.rank, problem.world_size)), (variant, problem)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes(rank: int, world_size: int) -> None:
    """Sizes up and down on one lane, dtypes in turn: every call leaves the lane fit for any other."""
    communicator = get_communicator()
    count = 0
    for variant in (*KERNELS, "library"):
        for numel in some((*SIZES, *reversed(SIZES)), 4):
            problem = asked(numel, DTYPES[count % len(DTYPES)], world_size)
            check_variant(communicator, problem, variant, seed=count, kind="integers" if count % 3 == 0 else "random")
            check_bits(communicator, problem, variant)
            count += 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_copy_engines(rank: int, world_size: int) -> None:
    """The copy engines' ring, shorter and longer than its places, with flag kernels of others between."""
    communicator, checked = get_communicator(), 0
    for numel in (1, 333, 4099, 9000):
        for streams, chunks in ((1, 1), (world_size - 1, 4), (1, 8), (1, 32)):
            config = {"direction": "push", "num_streams": streams, "num_chunks": chunks}
            problem = asked(numel, "float32", world_size)
            if check_candidate(problem, Candidate.of("all_to_all", "copy_engine", config), limits_of(communicator)):
                continue
            for seed in (1, 2):
                check_variant(communicator, problem, "copy_engine", seed=seed, config=config)
                check_variant(communicator, asked(seed, "int8", world_size), "push" if seed == 1 else "pull")
            checked += 1
    assert checked == 13


def sent_by(rank: int, world_size: int, rows: int = 3, columns: int = 5) -> torch.Tensor:
    numel = world_size * rows * columns
    return (torch.arange(numel, dtype=torch.float32) + 1000 * rank).view(world_size * rows, columns)


def received(rank: int, world_size: int, rows: int = 3, columns: int = 5) -> torch.Tensor:
    everyone = [sent_by(r, world_size, rows, columns) for r in range(world_size)]
    return torch.cat([x[rank * rows : (rank + 1) * rows] for x in everyone])


def test_results_go_where_asked(rank: int) -> None:
    x, wanted = sent_by(rank, 2), received(rank, 2)
    for out in (torch.empty(6, 5), torch.zeros(6, 10)[:, ::2], torch.zeros(5, 6).t(), torch.zeros(61)[1:31].view(6, 5)):
        for name in ("lamport", "push", "library"):
            with tunedcomm.force("all_to_all", name):
                out.fill_(7.0)
                assert tunedcomm.all_to_all(x, out=out) is out
                assert torch.equal(out, wanted)
                assert torch.equal(x, sent_by(rank, 2)), "the input is left alone"


def test_symmetric_inputs(rank: int) -> None:
    for rows in (1, 40, 700):
        x = tunedcomm.symmetric_empty((2 * rows + 8) * 4, dtype=torch.float32).view(-1, 4)[4 : 4 + 2 * rows]
        x.copy_(sent_by(rank, 2, rows, 4))
        for name in ("copy_engine", "pull", "lamport", "push", "library"):
            with tunedcomm.force("all_to_all", name):
                assert torch.equal(tunedcomm.all_to_all(x), received(rank, 2, rows, 4)), name
        assert torch.equal(x, sent_by(rank, 2, rows, 4))


def test_bad_inputs(rank: int) -> None:
    x = sent_by(rank, 2)
    for given, options, said in (
        (x.t(), {}, "chunk for each of the 2 ranks; 5 .* Pad it"),
        (torch.tensor(1.0), {}, "without any cannot be cut"),
        (torch.ones(2, dtype=torch.complex64), {}, "view_as_real"),
        ([1, 2], {}, "got list"),
        (torch.eye(2).to_sparse(), {}, "dense tensor"),
        (x, {"out": x}, "out overlaps x"),
        (x, {"out": torch.empty(3, 5)}, "out has shape"),
        (x, {"max_sms": -1}, "max_sms=-1"),
        (x.clone().requires_grad_(), {"out": torch.empty_like(x)}, "not differentiable"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_to_all(given, **options)
    with pytest.raises(tunedcomm.UnknownNameError, match="'push'"):
        with tunedcomm.force("all_to_all", "pusch"):
            pass
    assert torch.equal(tunedcomm.all_to_all(x), received(rank, 2)), "the refusals left the group as it was"


# all_to_all_v on the host backend: uneven counts, none at all, and what is refused


def asked_v(numel: int, dtype: str, world_size: int, layout: str = "") -> Problem:
    return Problem("all_to_all_v", (numel,), dtype, world_size, reduction="", layout=layout, mode="eager")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sizes_of_uneven_calls(rank: int, world_size: int) -> None:
    """Sizes up and down, dtypes and configs in turn, with all_to_all between: bits."""
    communicator = get_communicator()
    count = 0
    for numel in some((1, 3, 64, 333, 2050, 333, 64, 3, 1), 2):
        for variant in ("push", "library"):
            dtype = DTYPES[count % len(DTYPES)]
            kind = "integers" if count % 3 == 0 else "random"
            check_variant(communicator, asked_v(numel, dtype, world_size), variant, seed=count, kind=kind)
            count += 1
        even = Problem("all_to_all", (numel,), "bfloat16", world_size, reduction="", mode="eager")
        check_variant(communicator, even, ("lamport", "push", "pull")[count % 3])
    check_variant(communicator, asked_v(800, "bfloat16", world_size, "rows2"), "push")
    for chunks in (2, 8):
        config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": chunks}
        for _ in range(2):
            check_variant(communicator, asked_v(9 * 128 * 8 + 24, "bfloat16", world_size), "push", config=config)


def table(seed: int, world_size: int, most: int) -> list[list[int]]:
    """Rows that rank i sends rank j."""
    numbers = random.Random(seed)
    return [
        [numbers.choice((0, 0, 1, most, numbers.randint(0, most))) for _ in range(world_size)]
        for _ in range(world_size)
    ]


def rows_of(rank: int, count: int, columns: int) -> torch.Tensor:
    return torch.arange(count * columns, dtype=torch.float32).view(count, columns) + 10000 * rank


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_counts(rank: int, world_size: int) -> None:
    """Random counts in turn, none of them known beforehand, with and without a bound."""
    moved = 0
    for step in some(range(8)):
        most, columns = (40, 4) if step % 2 else (9, 3)
        sends = table(step, world_size, most)
        if step == 3:
            sends = [[0] * world_size for _ in range(world_size)]
        everyone = [rows_of(r, sum(sends[r]), columns) for r in range(world_size)]
        wanted = torch.cat([everyone[r].split(sends[r])[rank] for r in range(world_size)])
        recv = [sends[r][rank] for r in range(world_size)]
        for bound, variant in ((most, "push"), (most, "library"), (None, "push")):
            with tunedcomm.force("all_to_all_v", variant):
                out = tunedcomm.all_to_all_v(everyone[rank], sends[rank], recv, max_count=bound)
            assert torch.equal(out, wanted), (step, bound, variant)
            moved += len(out)
    assert moved > 0


def test_plans_depend_on_the_bound_alone(rank: int) -> None:
    launched: list[Launched] = []
    spy_on_launches(launched, "all_to_all_v")
    communicator = get_communicator()
    with tunedcomm.force("all_to_all_v", "push"):
        for counts in ([1, 2], [0, 2], [5, 0]):
            send = [counts[0], counts[1]]
            recv = [send[0], counts[0]] if rank == 0 else [counts[1], send[1]]
            tunedcomm.all_to_all_v(rows_of(rank, sum(send), 4), send, recv, max_count=5)
        plans = len(communicator.plans)
        assert plans == 1
        assert {launch.problem for launch in launched} == {asked_v(20, "float32", 2)}
        tunedcomm.all_to_all_v(torch.ones(3, 4), [2, 1] if rank == 0 else [1, 2], [2, 1] if rank == 0 else [1, 2])
        assert launched[-1].variant == "library", "without a bound"
        tunedcomm.check_agreement()


def test_uneven_results_go_where_asked(rank: int) -> None:
    send, recv = ([1, 3], [1, 2]) if rank == 0 else ([2, 0], [3, 0])
    everyone = [rows_of(0, 4, 5), rows_of(1, 2, 5)]
    wanted = torch.cat([everyone[0].split([1, 3])[rank], everyone[1].split([2, 0])[rank]])
    strided = torch.zeros(3, 10)[:, ::2]
    wide = torch.stack([everyone[rank], everyone[rank]], dim=2)[:, :, 1]
    for name in ("push", "library"):
        with tunedcomm.force("all_to_all_v", name):
            assert tunedcomm.all_to_all_v(everyone[rank], send, recv, max_count=3, out=strided) is strided
            assert torch.equal(strided, wanted)
            assert torch.equal(tunedcomm.all_to_all_v(wide, torch.tensor(send), tuple(recv), max_count=4), wanted)
            negative = torch._neg_view(everyone[rank])
            assert torch.equal(tunedcomm.all_to_all_v(negative, send, recv, max_count=3), -wanted)


def test_bad_counts(rank: int) -> None:
    x, good = torch.ones(3, 2), ([1, 2] if rank == 0 else [2, 1])
    other = [good[0], 5] if rank == 0 else [5, good[1]]
    for given, send, recv, options, said in (
        (x, [1, 2, 3], good, {}, r"send_counts=\[1, 2, 3\] is not a number of rows"),
        (x, good, [-1, 4], {}, r"recv_counts=\[-1, 4\] is not"),
        (x, 3, good, {}, "send_counts=3 is not"),
        (x, [1, 1], good, {}, "names 2 rows"),
        (x, good, [3, 3], {}, "expects 3 of itself"),
        (x, good, good, {"max_count": 1}, "exceeds max_count=1"),
        (x, good, good, {"max_count": -1}, "max_count=-1"),
        (x.to(torch.complex64), good, good, {}, "complex64"),
        (x, good, other, {"out": torch.ones(3, 2)}, "out has shape"),
        (x, good, good, {"out": x}, "out overlaps x"),
    ):
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said):
            tunedcomm.all_to_all_v(given, send, recv, **options)
        dist.barrier()
        tunedcomm.release_communicator()  # counts are a rank's own, so that their refusal ends the group
    assert torch.equal(tunedcomm.all_to_all_v(x, good, good, max_count=2), x)
