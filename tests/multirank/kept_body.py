"""A rank whose process imports nothing but what a first call needs."""

from __future__ import annotations

import sys

import torch

import tunedcomm


def first_call(rank: int, world_size: int) -> tuple[bool, str, str]:
    """Whether SQLAlchemy was imported, the snapshot's digest, and the source of the decision."""
    out = tunedcomm.all_reduce(torch.full((4096,), rank + 1.0))
    assert bool((out == world_size * (world_size + 1) / 2).all())
    is_loaded = "sqlalchemy" in sys.modules
    communicator = tunedcomm.get_communicator()
    (source,) = {plan.source for plan in communicator.plans.values()}
    return is_loaded, communicator.snapshot.digest, source
