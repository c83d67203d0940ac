"""Ranks that count the steps of their exchanges differently meet all the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from tunedcomm.symm.cuda import GroupStore


def exchange(store: dist.Store, step: int, rank: int, value: str) -> None:
    store.set(f"CUDASymmetricMemory/{step}/{rank}", value)


def test_steps_are_numbered_by_the_group() -> None:
    shared = dist.HashStore()
    # What C++ does with a store: through the base class, not through Python's names.
    stores = [GroupStore(shared) for _ in range(2)]
    first, second = (dist.PrefixStore("", store) for store in stores)
    for step in range(3):
        exchange(first, 4 + step, 0, f"a{step}")
        exchange(second, 9 + step, 1, f"b{step}")
        first.wait([f"CUDASymmetricMemory/{4 + step}/1"], timedelta(seconds=1))
        assert first.get(f"CUDASymmetricMemory/{4 + step}/1") == f"b{step}".encode()
        assert second.get(f"CUDASymmetricMemory/{9 + step}/0") == f"a{step}".encode()
        assert second.multi_get([f"CUDASymmetricMemory/{9 + step}/{rank}" for rank in (0, 1)]) == [
            f"a{step}".encode(),
            f"b{step}".encode(),
        ]


def test_other_keys_stay() -> None:
    shared = dist.HashStore()
    store = GroupStore(shared)
    store.set("plain", "x")
    assert shared.get("plain") == b"x"
    assert store.get("plain") == b"x"
    with pytest.raises(dist.DistStoreError):
        store.wait(["absent"], timedelta(milliseconds=20))
