"""Batch invariance under numerics="ordered": any slice of a batch alone has the bits that it has inside the whole."""

from __future__ import annotations

import functools

import pytest
from cases import report, run_each
from harness import run_ranks
from quick import FULL, QUICK
from slices import OPS, Draws, compare

from tunedcomm.dispatch.communicator import get_communicator

WORLD_SIZE = 2
BATCHES = 200 if FULL else 2 if QUICK else 4


def slices_of(op: str, rank: int) -> None:
    draws = Draws(get_communicator(), op)
    ran = compare(draws, BATCHES, 4)
    assert len(ran) > 1, "one variant says nothing of another"
    if FULL:
        assert set(ran) == {candidate.variant for candidate in draws.candidates}, ran


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_each({op: functools.partial(slices_of, op) for op in OPS}, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, body, timeout=3000 if FULL else 240)


@pytest.mark.timeout(3600 if FULL else 300)
@pytest.mark.parametrize("op", OPS)
def test_slices(outcomes: list[dict[str, str]], op: str) -> None:
    report(outcomes, op)
