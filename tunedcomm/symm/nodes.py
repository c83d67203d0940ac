"""Groups within and across the nodes of a group that spans several, and a workspace for each node.

Ranks of one node can address each other's memory, ranks of different nodes cannot. Where every node has the same number
of ranks, a rank belongs to two groups besides its own: the ranks of its node, and those with its place on every node.

`torch.distributed.new_group` must be called by all ranks of the default group, and its variant that need not be numbers
groups by what each rank made before, which differs. So these groups meet in a store of their own, under a name that the
ranks of the parent group agree on: making them is collective over that group and nothing else.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _register_process_group
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store, _world

from tunedcomm.errors import SettingError
from tunedcomm.symm.control import Control
from tunedcomm.symm.exchange import exchange, register_subgroup
from tunedcomm.symm.layout import LaneLayout
from tunedcomm.symm.ring import HostRing
from tunedcomm.symm.workspace import Workspace

_TIMEOUT = timedelta(minutes=10)  # of the meeting and of gloo's calls; NCCL's watchdog keeps its own


@dataclass(frozen=True, slots=True, eq=False)
class NodeGroups:
    """Memory and group of variants that work within nodes and across them.

    Attributes:
        workspace: symmetric memory of the ranks of this node, ordered as in the parent group.
        across: the ranks with this rank's place on every node.
    """

    workspace: Workspace
    across: dist.ProcessGroup


class NoWorkspace(NamedTuple):
    """Stands in for the workspace where a group as a whole has no symmetric memory."""

    group: dist.ProcessGroup
    device: torch.device
    nodes: NodeGroups | None
    control: Control
    ring: HostRing | None = None

    def check_peers(self) -> None:
        """Raise if the group has ended."""
        self.control.check()


def node_name(node_of_rank: Sequence[int]) -> str:
    """The name of this rank's node: its entry in `node_of_rank`, or the host's name.

    Args:
        node_of_rank: value of TUNEDCOMM_NODE_OF_RANK, empty where it is not set.

    Raises:
        SettingError: `node_of_rank` does not have one entry for each rank.
    """
    if node_of_rank and len(node_of_rank) != dist.get_world_size():
        raise SettingError(
            f"TUNEDCOMM_NODE_OF_RANK names the nodes of {len(node_of_rank)} ranks, but the default group has "
            f"{dist.get_world_size()}; name one for each, or unset it for what the host names say"
        )
    return str(node_of_rank[dist.get_rank()]) if node_of_rank else socket.gethostname()


def nodes_of(names: Sequence[str]) -> tuple[int, ...]:
    """Nodes by rank, numbered in the order in which their names come up first."""
    distinct = list(dict.fromkeys(names))
    return tuple(distinct.index(name) for name in names)


def shares_hosts(everyone: Sequence[tuple[str, str]]) -> bool:
    """True if nodes of different names run on one kernel.

    Args:
        everyone: each rank's (name of the node, boot of the kernel).
    """
    return len({boot for _, boot in everyone}) < len({name for name, _ in everyone})


def ranks_per_node(nodes: Sequence[int]) -> int:
    """Number of ranks on every node; 0 where they differ or there is only one node."""
    counts = {nodes.count(node) for node in nodes}
    return counts.pop() if len(counts) == 1 and len(set(nodes)) > 1 else 0


def make_subgroup(group: dist.ProcessGroup, members: Sequence[int], name: str, kind: str) -> dist.ProcessGroup:
    """A group of some ranks of `group`, which torch.distributed's functions take like any other.

    Args:
        members: ranks in `group`, the caller's among them; called by each of them.
        name: the same on each of them, and different on all other ranks.
        kind: `cuda` or `cpu`, of the tensors that it serves.
    """
    rank, ranks = members.index(dist.get_rank(group)), [dist.get_global_rank(group, member) for member in members]
    store = PrefixStore(name, _get_process_group_store(group))
    made = ProcessGroup(store, rank, len(members))
    backend_store, size = PrefixStore(kind, store), len(members)
    if kind == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.global_ranks_in_group, options.group_name = ranks, name  # type: ignore[assignment]
        kind_of_backend, backend_name = ProcessGroup.BackendType.NCCL, "nccl"
        backend: Any = dist.ProcessGroupNCCL(backend_store, rank, size, options)
    else:
        kind_of_backend, backend_name = ProcessGroup.BackendType.GLOO, "gloo"
        backend = dist.ProcessGroupGloo(backend_store, rank, size, timeout=_TIMEOUT)
    made._set_default_backend(kind_of_backend)
    made._register_backend(torch.device(kind), kind_of_backend, backend)
    backend._set_sequence_number_for_group()
    made._set_group_name(name)  # type: ignore[arg-type]
    # Where torch keeps its groups; destroy_process_group() ends all that are there.
    _world.pg_map[made] = (backend_name, store)
    _world.pg_names[made] = name  # type: ignore[assignment]
    _world.pg_to_tag[made] = ""
    _world.pg_backend_config[made] = f"{kind}:{backend_name}"
    _world.pg_group_ranks[made] = {member: place for place, member in enumerate(ranks)}
    _register_process_group(name, made)  # type: ignore[arg-type]
    return made


def make_node_groups(
    group: dist.ProcessGroup, nodes: Sequence[int], device: torch.device, layout: LaneLayout, *, timeout_ns: int
) -> NodeGroups:
    """Groups and workspace of the caller's node; collective over `group`.

    Args:
        nodes: the node of every rank, each with the same number of ranks.

    Raises:
        WorkspaceError: no symmetric memory on this node; other nodes may have it.
    """
    rank = dist.get_rank(group)
    name = f"tunedcomm-{exchange(group, uuid.uuid4().hex)[0]}"
    by_node = [[r for r, of in enumerate(nodes) if of == node] for node in range(max(nodes) + 1)]
    members = by_node[nodes[rank]]
    place = members.index(rank)
    across = [ranks[place] for ranks in by_node]
    within = make_subgroup(group, members, f"{name}-node{nodes[rank]}", device.type)
    register_subgroup(within, group, members, f"node{nodes[rank]}")
    between = make_subgroup(group, across, f"{name}-place{place}", device.type)
    # NCCL connects at a group's first call, which must not be one that is captured.
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=between)
    control = Control.share(within, device, timeout_ns=timeout_ns, names=members)
    workspace = Workspace(within, device, layout, control)
    workspace.lanes["eager"]  # now, when ranks of other nodes hear whether there is room
    return NodeGroups(workspace, between)
