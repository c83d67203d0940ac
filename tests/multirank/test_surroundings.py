"""Calls inside of what else PyTorch has: tracing, transforms, tensors of other kinds, another default device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, report, run_cases
from harness import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tunedcomm
from tunedcomm import kernels
from tunedcomm.spec import register_variant, variants


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def no_plain_tensors(rank: int) -> None:
    """What has no operator cannot be traced; such tensors have no memory at their address."""
    out = tunedcomm.symmetric_empty((8, 8), dtype=torch.float32)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: tunedcomm.all_to_all_v(x, [2, 2], [2, 2], max_count=2),
        lambda x: tunedcomm.all_gather_with_progress(x, out=out),
    ]
    mesh = init_device_mesh("cpu", (2,))
    for call in calls:
        with refused("takes plain tensors, not DTensor; .* pass .to_local"):
            call(DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)]))
        with refused("cannot be traced and takes plain tensors, not FakeTensor"), FakeTensorMode():
            call(torch.ones(4, 8))
        with refused("torch.func transforms"):
            torch.vmap(call)(torch.ones(2, 4, 8))


def a_variant_that_raises_when_asked(rank: int) -> None:
    """Whether a miss is worth tuning is asked on one rank alone; nobody wanted this variant to run."""
    tunedcomm.release_communicators()
    kernels.discover()

    def asked(*arguments: Any) -> Any:
        raise KeyError("num_pieces")

    held = list(variants("all_gather").values())
    for each in held:
        if not each.is_library:
            register_variant(dataclasses.replace(each, infeasible=asked, default=asked))
    try:
        for size in (64, 1000):
            found = tunedcomm.all_gather(torch.full((size,), rank + 1.0))
            assert torch.equal(found, torch.arange(1.0, 3.0).repeat_interleave(size))
        communicator = tunedcomm.get_communicator()
        told = tunedcomm.explain(communicator, tunedcomm.Problem("all_gather", (64,), "float32", 2, mode="eager"))
        assert (told.candidate.variant, told.source) == ("library", "library")
        named = pytest.raises(tunedcomm.ConfigError, match=r"all_gather.push: its default\(\) raised KeyError")
        with tunedcomm.force("all_gather", "push"), named:
            tunedcomm.all_gather(torch.ones(64))
    finally:
        for each in held:
            register_variant(each)
        tunedcomm.release_communicators()


CASES: dict[str, Case] = {
    "no plain tensors": no_plain_tensors,
    "a variant that raises when it is asked": a_variant_that_raises_when_asked,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, body)


@pytest.mark.parametrize("name", CASES)
def test_surroundings(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
