"""all_to_all_v on the host backend: uneven counts, none at all, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, spy_on_launches
from quick import some
from variant_checks import check_variant

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import DTYPES, Problem

RANKS = Ranks()


def asked(numel: int, dtype: str, world_size: int, layout: str = "") -> Problem:
    return Problem("all_to_all_v", (numel,), dtype, world_size, reduction="", layout=layout, mode="eager")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_variants(rank: int, world_size: int) -> None:
    """Sizes up and down, dtypes and configs in turn, with all_to_all between: bits."""
    communicator = get_communicator()
    count = 0
    for numel in some((1, 3, 64, 333, 2050, 333, 64, 3, 1), 2):
        for variant in ("push", "library"):
            dtype = DTYPES[count % len(DTYPES)]
            kind = "integers" if count % 3 == 0 else "random"
            check_variant(communicator, asked(numel, dtype, world_size), variant, seed=count, kind=kind)
            count += 1
        even = Problem("all_to_all", (numel,), "bfloat16", world_size, reduction="", mode="eager")
        check_variant(communicator, even, ("lamport", "push", "pull")[count % 3])
    check_variant(communicator, asked(800, "bfloat16", world_size, "rows2"), "push")
    for chunks in (2, 8):
        config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": chunks}
        for _ in range(2):
            check_variant(communicator, asked(9 * 128 * 8 + 24, "bfloat16", world_size), "push", config=config)


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
        assert {launch.problem for launch in launched} == {asked(20, "float32", 2)}
        tunedcomm.all_to_all_v(torch.ones(3, 4), [2, 1] if rank == 0 else [1, 2], [2, 1] if rank == 0 else [1, 2])
        assert launched[-1].variant == "library", "without a bound"
        tunedcomm.check_agreement()


def test_results_go_where_asked(rank: int) -> None:
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


def test_nothing_at_all(rank: int) -> None:
    none = [0, 0]
    assert tunedcomm.all_to_all_v(torch.empty(0, 3), none, none).shape == (0, 3)
    assert tunedcomm.all_to_all_v(torch.empty(0, 3), none, none, max_count=0).shape == (0, 3)
    assert tunedcomm.all_to_all_v(
        torch.empty(3, 0), [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1]
    ).shape == (3, 0)
    alone = [dist.new_group([member]) for member in range(2)][rank]
    x = rows_of(rank, 4, 2)
    assert torch.equal(tunedcomm.all_to_all_v(x, [4], [4], group=alone), x)


def test_bad_inputs(rank: int) -> None:
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
    assert torch.equal(tunedcomm.all_to_all_v(x, good, good, max_count=2), x), "the refusals left the group as it was"
