"""all_to_all_v on the host backend: uneven counts, none at all, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from cases import Case, Launched, report, run_cases, spy_on_launches
from harness import run_ranks
from variant_checks import check_variant

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.spec import DTYPES, Problem


def asked(numel: int, dtype: str, world_size: int, layout: str = "") -> Problem:
    return Problem("all_to_all_v", (numel,), dtype, world_size, reduction="", layout=layout, mode="eager")


def variants_body(rank: int, world_size: int) -> int:
    """Sizes up and down, dtypes and configs in turn, with all_to_all between: bits."""
    communicator = get_communicator()
    count = 0
    for numel in (1, 3, 64, 333, 2050, 333, 64, 3, 1):
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
    return count


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_variants(world_size: int) -> None:
    assert run_ranks(world_size, variants_body, timeout=240) == [18] * world_size


def table(seed: int, world_size: int, most: int) -> list[list[int]]:
    """Rows that rank i sends rank j."""
    numbers = random.Random(seed)
    return [
        [numbers.choice((0, 0, 1, most, numbers.randint(0, most))) for _ in range(world_size)]
        for _ in range(world_size)
    ]


def rows_of(rank: int, count: int, columns: int) -> torch.Tensor:
    return torch.arange(count * columns, dtype=torch.float32).view(count, columns) + 10000 * rank


def counts_body(rank: int, world_size: int, rounds: int) -> int:
    """Random counts in turn, none of them known beforehand, with and without a bound."""
    moved = 0
    for step in range(rounds):
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
    return moved


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_counts(world_size: int) -> None:
    assert min(run_ranks(world_size, counts_body, 8, timeout=240)) > 0


def plans_depend_on_the_bound_alone(rank: int) -> None:
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


def results_go_where_asked(rank: int) -> None:
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


def nothing_at_all(rank: int) -> None:
    none = [0, 0]
    assert tunedcomm.all_to_all_v(torch.empty(0, 3), none, none).shape == (0, 3)
    assert tunedcomm.all_to_all_v(torch.empty(0, 3), none, none, max_count=0).shape == (0, 3)
    assert tunedcomm.all_to_all_v(
        torch.empty(3, 0), [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1]
    ).shape == (3, 0)
    alone = [dist.new_group([member]) for member in range(2)][rank]
    x = rows_of(rank, 4, 2)
    assert torch.equal(tunedcomm.all_to_all_v(x, [4], [4], group=alone), x)


def bad_inputs(rank: int) -> None:
    def refused(text: str) -> object:
        return pytest.raises(tunedcomm.UnsupportedInputError, match=text)

    x, good = torch.ones(3, 2), ([1, 2] if rank == 0 else [2, 1])
    with refused(r"send_counts=\[1, 2, 3\] is not a number of rows from 0 on for each of the 2 ranks"):
        tunedcomm.all_to_all_v(x, [1, 2, 3], good)
    with refused(r"recv_counts=\[-1, 4\] is not a number"):
        tunedcomm.all_to_all_v(x, good, [-1, 4])
    with refused("send_counts=3 is not a number"):
        tunedcomm.all_to_all_v(x, 3, good)  # type: ignore[arg-type]
    with refused(r"send_counts=\[1, 1\] names 2 rows, but x has shape \(3, 2\)"):
        tunedcomm.all_to_all_v(x, [1, 1], good)
    with refused("sends itself . rows and expects 3 of itself"):
        tunedcomm.all_to_all_v(x, good, [3, 3])
    with refused(r"exceeds max_count=1; pass the same larger max_count"):
        tunedcomm.all_to_all_v(x, good, good, max_count=1)
    with refused("max_count=-1 is no number of rows"):
        tunedcomm.all_to_all_v(x, good, good, max_count=-1)
    with refused("does not take torch.complex64"):
        tunedcomm.all_to_all_v(x.to(torch.complex64), good, good)
    with refused(r"out has shape \(3, 2\)"):
        tunedcomm.all_to_all_v(x[:3], good, [good[0], 5] if rank == 0 else [5, good[1]], out=torch.ones(3, 2))
    with refused("out overlaps x"):
        tunedcomm.all_to_all_v(x, good, good, out=x)
    assert torch.equal(tunedcomm.all_to_all_v(x, good, good, max_count=2), x), "the refusals left the group as it was"


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        results_go_where_asked, nothing_at_all, bad_inputs, plans_depend_on_the_bound_alone,
    )
}  # fmt: skip


def public_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, public_body, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_public_call(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
