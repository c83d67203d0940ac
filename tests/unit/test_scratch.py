"""Memory that the plans of a lane share."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tunedcomm.symm.scratch import scratch_of


class Workspace(SimpleNamespace):
    __hash__ = object.__hash__


def test_plans_of_a_lane_share_the_largest() -> None:
    workspace = Workspace(device=torch.device("cpu"))
    small = scratch_of(workspace, "eager", 1000)
    assert small.nbytes == 1 << 20
    assert scratch_of(workspace, "eager", 1 << 20) is small
    large = scratch_of(workspace, "eager", (1 << 20) + 1)
    assert large.nbytes == 1 << 21
    assert all(scratch_of(workspace, "eager", nbytes) is large for nbytes in (1, 1 << 20, 1 << 21))
    graph = scratch_of(workspace, "graph", 1)
    assert graph.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
    other = scratch_of(Workspace(device=torch.device("cpu")), "eager", 1)
    assert other.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in (small, large, graph)}
