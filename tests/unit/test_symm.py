"""Memory that the plans of a lane share, and the store in which ranks meet whatever they have counted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.symm.control import Control
from tunedcomm.symm.cuda import GroupStore
from tunedcomm.symm.layout import LaneLayout
from tunedcomm.symm.workspace import Workspace


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    """A workspace of one rank."""
    kernels.discover()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, device = dist.group.WORLD, torch.device("cpu")
        control = Control.share(group, device, timeout_ns=1)
        yield Workspace(group, device, LaneLayout.for_messages(1 << 16), control)
    finally:
        dist.destroy_process_group()


def test_plans_of_a_lane_share_the_largest(workspace: Workspace) -> None:
    small = workspace.scratch("eager", 1000)
    assert small.nbytes == 1 << 20
    assert workspace.scratch("eager", 1 << 20) is small
    large = workspace.scratch("eager", (1 << 20) + 1)
    assert large.nbytes == 1 << 21
    assert all(workspace.scratch("eager", nbytes) is large for nbytes in (1, 1 << 20, 1 << 21))
    assert workspace.scratch("graph", 1).untyped_storage().data_ptr() != large.untyped_storage().data_ptr()


def test_panels_grow_by_allocations_of_their_own(workspace: Workspace) -> None:
    small = workspace.panels("eager", 1)
    assert workspace.panels("eager", 1 << 20) is small
    large = workspace.panels("eager", small.buffer.nbytes)
    assert large.buffer.nbytes > small.buffer.nbytes
    assert large.local != small.local
    assert workspace.panels("graph", 1) is not large


def test_steps_are_numbered_by_the_group() -> None:
    """Ranks that count the steps of their exchanges differently meet all the same."""
    shared = dist.HashStore()
    # What C++ does with a store: through the base class, not through Python's names.
    stores = [GroupStore(shared) for _ in range(2)]
    first, second = (dist.PrefixStore("", store) for store in stores)
    for step in range(3):
        one, other = (f"CUDASymmetricMemory/{begin + step}" for begin in (4, 9))
        first.set(f"{one}/0", f"a{step}")
        second.set(f"{other}/1", f"b{step}")
        first.wait([f"{one}/1"], timedelta(seconds=1))
        assert first.get(f"{one}/1") == f"b{step}".encode()
        assert second.get(f"{other}/0") == f"a{step}".encode()
        both = second.multi_get([f"{other}/{rank}" for rank in (0, 1)])
        assert both == [f"a{step}".encode(), f"b{step}".encode()]


def test_other_keys_stay() -> None:
    shared = dist.HashStore()
    store = GroupStore(shared)
    store.set("plain", "x")
    assert shared.get("plain") == store.get("plain") == b"x"
    with pytest.raises(dist.DistStoreError):
        store.wait(["absent"], timedelta(milliseconds=20))
