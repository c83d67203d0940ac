"""Memory that the plans of a lane share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.symm.layout import LaneLayout
from tunedcomm.symm.workspace import Workspace


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    """A workspace of one rank."""
    kernels.discover()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, device = dist.group.WORLD, torch.device("cpu")
        assert group is not None
        yield Workspace(group, device, LaneLayout.for_messages(1 << 16), timeout_ns=1)
    finally:
        dist.destroy_process_group()


def test_plans_of_a_lane_share_the_largest(workspace: Workspace) -> None:
    small = workspace.scratch("eager", 1000)
    assert small.nbytes == 1 << 20
    assert workspace.scratch("eager", 1 << 20) is small
    large = workspace.scratch("eager", (1 << 20) + 1)
    assert large.nbytes == 1 << 21
    assert all(workspace.scratch("eager", nbytes) is large for nbytes in (1, 1 << 20, 1 << 21))
    graph = workspace.scratch("graph", 1)
    assert graph.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()


def test_panels_grow_by_allocations_of_their_own(workspace: Workspace) -> None:
    small = workspace.panels("eager", 1)
    assert workspace.panels("eager", 1 << 20) is small
    large = workspace.panels("eager", small.buffer.nbytes)
    assert large.buffer.nbytes > small.buffer.nbytes
    assert large.local != small.local
    assert workspace.panels("graph", 1) is not large
