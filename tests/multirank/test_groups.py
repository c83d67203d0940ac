"""Groups of four ranks: other ones than the default, overlapping ones, and two nodes that share no memory."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from cases import (
    PEER_TIMEOUT_S,
    Launched,
    Ranks,
    bits_of,
    inputs_of,
    logged,
    replaced,
    same_bits,
    settings,
    spy_on_launches,
)
from quick import some
from variant_checks import check_variant, inputs_of_all

import tunedcomm
from tunedcomm.db.targets import _warned
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.spec import Candidate as Chosen
from tunedcomm.spec import Problem, check_candidate, get_variant
from tunedcomm.symm.nodes import nodes_of, ranks_per_node

KERNELS = ("lamport", "one_shot", "two_shot", "two_shot_lamport")
launched: list[Launched] = []
RANKS = Ranks(4, setup=lambda rank: spy_on_launches(launched))


@pytest.mark.slow
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
    assert len(set(lanes)) == len(mine)


@pytest.mark.slow
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


# all_reduce over several nodes, which are groups of ranks on this host that are told to share no memory


def nodes(text: str, **more: str) -> object:
    return settings({"TUNEDCOMM_NODE_OF_RANK": text, **more})


def on_all_alike(out: torch.Tensor) -> None:
    theirs: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(theirs, bits_of(out).tolist())
    assert all(bits == theirs[0] for bits in theirs)


def test_sizes_and_dtypes(rank: int) -> None:
    for text in some(("0,0,1,1", "7,3,7,3"), 2):
        with nodes(text):
            communicator = get_communicator()
            assert communicator.limits.ranks_per_node == 2
            assert communicator.environment.nodes == 2
            assert not communicator.limits.symmetric
            for step, numel in some(enumerate((1, 7, 64, 1000, 4099, 1000, 64, 7, 1)), 4):
                dtype = ("bfloat16", "float16", "float32")[step % 3]
                for reduction in ("sum", "avg"):
                    problem = Problem("all_reduce", (numel,), dtype, 4, reduction=reduction, mode="eager")
                    kind = "integers" if step % 2 else "random"
                    (out,) = check_variant(communicator, problem, "hierarchical", seed=step, kind=kind)
                    on_all_alike(out)
                    if kind == "integers":
                        spec_inputs = inputs_of_all(problem, step, kind)
                        total = sum(x.double() for (x,) in spec_inputs) / (4 if reduction == "avg" else 1)
                        assert torch.equal(out.double(), total), "whole numbers are exact"


def test_in_pieces(rank: int) -> None:
    """Larger than the staging, in place and not."""
    with nodes("0,0,1,1"):
        communicator = get_communicator()
        for numel in some((300_001, 300_000), 2):
            for in_place in (False, True):
                problem = Problem("all_reduce", (numel,), "float32", 4, mode="eager", in_place=in_place)
                assert problem.nbytes > communicator.layout.staging_bytes
                (out,) = check_variant(communicator, problem, "hierarchical", seed=numel, kind="integers")
                total = sum(x.double() for (x,) in inputs_of_all(problem, numel, "integers"))
                assert torch.equal(out.double(), total)


def test_the_public_call(rank: int) -> None:
    x = torch.full((3, 50), rank + 1.0)
    with nodes("0,0,1,1"):
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((3, 50), 10.0)), "not tuned: the library"
        with tunedcomm.force("all_reduce", "hierarchical"):
            for _ in range(3):
                assert torch.equal(tunedcomm.all_reduce(x), torch.full((3, 50), 10.0))
                assert torch.equal(tunedcomm.all_reduce(x.t(), op="avg"), torch.full((50, 3), 2.5))
                held = x.clone()
                assert tunedcomm.all_reduce_(held) is held
                assert torch.equal(held, torch.full((3, 50), 10.0))
            with pytest.raises(tunedcomm.InfeasibleError, match="max goes to the library"):
                tunedcomm.all_reduce(x, op="max")
        with tunedcomm.force("all_reduce", "lamport"):
            with pytest.raises(tunedcomm.InfeasibleError, match="cannot address each other's memory"):
                tunedcomm.all_reduce(x)
        with pytest.raises(tunedcomm.WorkspaceError):
            tunedcomm.symmetric_empty(8)


def test_nodes_that_differ(rank: int) -> None:
    assert nodes_of(["b", "a", "b"]) == (0, 1, 0)
    assert [ranks_per_node(n) for n in ((0, 0), (0, 1), (0, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 2, 1))] == [0, 1, 0, 2, 2]
    for text in ("0,0,0,1", "0,1,2,3"):
        with nodes(text):
            assert get_communicator().limits.ranks_per_node == 0
            assert torch.equal(tunedcomm.all_reduce(torch.ones(5)), torch.full((5,), 4.0))
    problem = Problem("all_reduce", (64,), "float32", 4, mode="eager")
    with nodes("0,0,1,1"):
        limits = get_communicator().limits
        config = {**get_variant("all_reduce", "hierarchical").default(problem, limits), "ranks_per_node": 4}
        reason = check_candidate(problem, Chosen.of("all_reduce", "hierarchical", config), limits)
        assert reason == "nodes have 2 ranks, not 4"
    with nodes("0,1"), pytest.raises(tunedcomm.SettingError, match="nodes of 2 ranks, but the default group has 4"):
        tunedcomm.all_reduce(torch.ones(5))
    with nodes("0,0,1,x"), pytest.raises(tunedcomm.SettingError, match="TUNEDCOMM_NODE_OF_RANK='0,0,1,x'"):
        tunedcomm.all_reduce(torch.ones(5))
    with nodes(f"0,0,1,{1 + rank}"), pytest.raises(tunedcomm.AgreementError, match="node_of_rank"):
        tunedcomm.all_reduce(torch.ones(5))


def test_a_lost_peer_is_named_as_in_the_group(rank: int) -> None:
    """Last, for the group is out of step then."""
    with nodes("0,1,0,1", TUNEDCOMM_PEER_TIMEOUT_S=str(PEER_TIMEOUT_S)), tunedcomm.force("all_reduce", "hierarchical"):
        tunedcomm.all_reduce(torch.ones(5))
        if rank == 0:  # the others are its node's peer and, behind the library, the other node
            with pytest.raises(tunedcomm.PeerTimeoutError, match=r"^rank 0 waited .* missed rank 2 of"):
                tunedcomm.all_reduce(torch.ones(5))
        dist.barrier()


def test_pods_of_one_machine(rank: int) -> None:
    """Each has a host name of its own: several nodes, and one warning that names the cure."""
    _warned.clear()
    for text in ("", "0,0,0,0"):
        with replaced(socket, "gethostname", lambda: f"pod-{rank}"), logged() as warnings, nodes(text):
            assert get_communicator().environment.nodes == (1 if text else 4)
            assert torch.equal(tunedcomm.all_reduce(torch.ones(5)), torch.full((5,), 4.0))
        cures = [warning for warning in warnings if "set TUNEDCOMM_NODE_OF_RANK to one number" in warning]
        assert len(cures) == (rank == 0 and not text)
