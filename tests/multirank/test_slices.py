"""Batch invariance under numerics="ordered": any slice of a batch alone has the bits that it has inside the whole."""

from __future__ import annotations

import pytest
from cases import HOST, Ranks
from quick import FULL, QUICK
from slices import OPS, Draws, compare

from tunedcomm.dispatch.groups import get_communicator

BATCHES = 200 if FULL else 2 if QUICK else 4
RANKS = Ranks(env=HOST, timeout=3000 if FULL else 240, forget=False)


@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("op", OPS)
def test_slices(rank: int, op: str) -> None:
    draws = Draws(get_communicator(), op)
    ran = compare(draws, BATCHES, 4)
    assert len(ran) > 1, "one variant says nothing of another"
    if FULL:
        assert set(ran) == {candidate.variant for candidate in draws.candidates}, ran
