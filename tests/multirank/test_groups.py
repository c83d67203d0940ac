"""Groups other than the default one, overlapping ones too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cases import Launched, Ranks, inputs_of, same_bits, spy_on_launches

import tunedcomm
from tunedcomm.dispatch.communicator import get_communicator

KERNELS = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
launched: list[Launched] = []
pytestmark = pytest.mark.slow
RANKS = Ranks(4, setup=lambda rank: spy_on_launches(launched))


def test_overlapping_groups(rank: int) -> None:
    """Groups that share ranks, used in turn: each has its own signals, staging and numbering of ranks."""
    members = [(0, 1), (1, 2), (2, 3), (0, 1, 2), (3, 1, 0), (0, 1, 2, 3)]
    groups = [dist.new_group(list(ranks)) for ranks in members]
    mine = [(sorted(ranks), group) for ranks, group in zip(members, groups, strict=True) if rank in ranks]
    for round_number, name in enumerate((*KERNELS, "one_shot", "lamport")):
        for ranks, group in mine if round_number % 2 else [*mine, *mine]:
            place = ranks.index(rank)
            x, expected = inputs_of(place, len(ranks), 300 + 7 * round_number, "bfloat16")
            with tunedcomm.force("all_reduce", name):
                out = tunedcomm.all_reduce(x, group=group)
            assert launched[-1].variant == name
            assert same_bits(out, expected), (ranks, name)
    made = [get_communicator(group) for _, group in mine]
    assert len({id(found) for found in made}) == len(mine)
    assert [found.rank for found in made] == [ranks.index(rank) for ranks, _ in mine]
    lanes = [lane.local for found in made for lane in found.workspace.lanes.values()]
    assert len(set(lanes)) == 2 * len(mine)


def test_groups_of_others(rank: int) -> None:
    group = dist.new_group([0, 1, 2])
    x = torch.full((10,), rank + 1.0)
    if rank == 3:
        with pytest.raises(tunedcomm.GroupError, match="rank 3 is not a member of the group"):
            tunedcomm.all_reduce(x, group=group)
    else:
        assert torch.equal(tunedcomm.all_reduce(x, group=group), torch.full((10,), 6.0))


def test_symmetric_memory_of_a_subgroup(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        x = tunedcomm.symmetric_empty(40, dtype=torch.float32, group=group)
        for name in ("one_shot", "two_shot"):
            x.fill_(rank)
            with tunedcomm.force("all_reduce", name):
                tunedcomm.all_reduce_(x, group=group)
            assert torch.equal(x, torch.full((40,), 4.0))
            dist.barrier(group)
