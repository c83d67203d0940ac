"""`tunedcomm.reduce_scatter` as users call it; kernels and library, on the host backend."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import PEER_TIMEOUT_S, Case, gives_up_in_time, report, run_cases
from harness import run_ranks
from quick import some

import tunedcomm
from tunedcomm import kernels
from tunedcomm.spec import variants

kernels.discover()
KERNELS = sorted(
    name for name, variant in variants("reduce_scatter").items() if variant.kernels and variant.numerics == "ordered"
)
WORLD_SIZE = 3


def refused(text: str) -> Any:
    return pytest.raises(tunedcomm.UnsupportedInputError, match=text)


def values(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) % 23 * (rank + 1)).to(dtype)


def wanted(shape: tuple[int, ...], rank: int, dim: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    total = sum(values(shape, r, torch.float64) for r in range(WORLD_SIZE))
    assert isinstance(total, torch.Tensor)
    return total.chunk(WORLD_SIZE, dim)[rank].to(dtype)


def every_kernel(rank: int) -> None:
    """Forced by name, at even and odd sizes, new results and given ones."""
    for variant in KERNELS:
        with tunedcomm.force("reduce_scatter", variant):
            for shape in ((WORLD_SIZE * 7,), (WORLD_SIZE * 64, 5), (WORLD_SIZE, 1)):
                for _ in some(range(3)):
                    x = values(shape, rank)
                    out = tunedcomm.reduce_scatter(x)
                    assert torch.equal(out, wanted(shape, rank)), (variant, shape)
                    given = torch.full_like(out, float("nan"))
                    assert tunedcomm.reduce_scatter(x, out=given) is given
                    assert torch.equal(given, out)
                    assert torch.equal(x, values(shape, rank)), "the input is left as it is"


def dimensions(rank: int) -> None:
    shapes = (((4, 6, 5), 1), ((4, 6, 9), -1), ((1, 6, 2), 1), ((1, 1, 3), -1), ((6, 3), -2), ((2, 9), 1))
    for shape, dim in some(shapes, 2):
        for variant in ("lamport", "library"):
            with tunedcomm.force("reduce_scatter", variant):
                for _ in range(2):
                    out = tunedcomm.reduce_scatter(values(shape, rank), dim=dim)
                    assert out.is_contiguous()
                    assert torch.equal(out, wanted(shape, rank, dim)), (shape, dim)
                target = torch.zeros((*out.shape, 2))[..., 0]
                assert tunedcomm.reduce_scatter(values(shape, rank), dim=dim, out=target) is target
                assert torch.equal(target, wanted(shape, rank, dim))


def dtypes_and_reductions(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64):
        x = (torch.arange(12) % 5 + rank).to(dtype)
        base = (torch.arange(12) % 5)[4 * rank : 4 * rank + 4]
        assert torch.equal(tunedcomm.reduce_scatter(x), (3 * base + 3).to(dtype))
        assert torch.equal(tunedcomm.reduce_scatter(x, op="max"), (base + 2).to(dtype))
        assert torch.equal(tunedcomm.reduce_scatter(x, op="min"), base.to(dtype))
        if dtype.is_floating_point:
            assert torch.equal(tunedcomm.reduce_scatter(x, op="avg"), (base + 1).to(dtype))
    with refused("would round"):
        tunedcomm.reduce_scatter(torch.ones(3, dtype=torch.int32), op="avg")


def symmetric_inputs(rank: int) -> None:
    """Read in place by the peers, larger than any area too; plain where the chunks do not lie one after another."""
    for shape in ((WORLD_SIZE * 5, 3), (WORLD_SIZE * 40_000, 4)):
        x = tunedcomm.symmetric_empty(shape, dtype=torch.float32)
        with tunedcomm.force("reduce_scatter", "one_shot"):
            for _ in range(2):
                x.copy_(values(shape, rank))
                out = tunedcomm.reduce_scatter(x)
                assert torch.equal(out, wanted(shape, rank))
                x.zero_()  # at once: nobody reads it any more
    whole = tunedcomm.symmetric_empty((4, 6), dtype=torch.float32)
    whole.copy_(values((4, 6), rank))
    assert torch.equal(tunedcomm.reduce_scatter(whole, dim=1), wanted((4, 6), rank, 1))
    dist.barrier()


def bad_input(rank: int) -> None:
    good = torch.ones(6, 4)
    assert torch.equal(tunedcomm.reduce_scatter(good), torch.full((2, 4), 3.0))
    for x in (torch.ones(4, 6), torch.ones(8, 3), torch.ones(24)[:23]):
        with refused(r"splits dimension 0 of x, \d+ long, into 3 equal chunks; it must be a multiple of 3 .*pad x"):
            tunedcomm.reduce_scatter(x)
    with refused("splits dimension 1 of x, 4 long"):
        tunedcomm.reduce_scatter(good, dim=1)
    with refused("splits dimension 0 of x, 1 long"):
        tunedcomm.reduce_scatter(torch.tensor(1.0))
    for dim in (2, -3, "0", 1.0, None, True):
        with refused(r"dim=.* of reduce_scatter is no dimension of a tensor of shape \(6, 6\); allowed: -2 to 1"):
            tunedcomm.reduce_scatter(torch.ones(6, 6), dim=dim)  # type: ignore[arg-type]
    with refused("op='prod' is no reduction; allowed: sum, avg, max, min"):
        tunedcomm.reduce_scatter(good, op="prod")
    with refused("is no reduction"):
        tunedcomm.reduce_scatter(good, op=[])  # type: ignore[arg-type]
    with refused(r"out has shape \(6, 4\).*the result has: \(2, 4\)"):
        tunedcomm.reduce_scatter(good, out=torch.empty(6, 4))
    with refused("out overlaps x; give it memory of its own"):
        tunedcomm.reduce_scatter(good, out=good[:2])
    with refused("out has shape"):
        tunedcomm.reduce_scatter(good, out=good)
    with refused("wants a torch.Tensor"):
        tunedcomm.reduce_scatter([1.0])  # type: ignore[arg-type]
    with refused(r"does not take torch\.complex64"):
        tunedcomm.reduce_scatter(torch.ones(3, dtype=torch.complex64))
    with refused(r"does not take torch\.int16; allowed"):
        tunedcomm.reduce_scatter(torch.ones(3, dtype=torch.int16))
    with refused("op='min' is not differentiable"):
        tunedcomm.reduce_scatter(good.clone().requires_grad_(), op="min")
    assert torch.equal(tunedcomm.reduce_scatter(good), torch.full((2, 4), 3.0))


def lost_peers(rank: int) -> None:
    """Every variant gives up in time and says whom it missed; each in a group of its own."""
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    for variant in KERNELS:
        group = dist.new_group()
        with tunedcomm.force("reduce_scatter", variant):
            assert torch.equal(tunedcomm.reduce_scatter(torch.ones(600), group=group), torch.full((200,), 3.0))
            dist.barrier()
            if rank != 1:
                said = r"reduce_scatter \(called eagerly\) missed rank 1 of the group of 3"
                with gives_up_in_time(), pytest.raises(tunedcomm.PeerTimeoutError, match=said):
                    tunedcomm.reduce_scatter(torch.ones(600), group=group)
            dist.barrier()


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        every_kernel,
        dimensions,
        dtypes_and_reductions,
        symmetric_inputs,
        bad_input,
        lost_peers,
    )
}


def cases_body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(WORLD_SIZE, cases_body, timeout=180)


@pytest.mark.parametrize("name", CASES)
def test_public_calls(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
