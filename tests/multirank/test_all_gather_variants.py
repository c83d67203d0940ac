"""Every all_gather variant on the host backend: exact bits, whatever the payload holds, at any size."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases import report, run_cases
from harness import run_ranks
from quick import QUICK, sample, some
from variant_checks import check_variant, launch_variant, limits_of

from tunedcomm import kernels
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.kernels.common.packets import ESCAPE
from tunedcomm.kernels.common.sync import SENTINEL
from tunedcomm.spec import DTYPES, Problem, get_variant, variants

kernels.discover()
KERNELS = sorted(name for name, variant in variants("all_gather").items() if variant.kernels)
SIZES = (1, 7, 1000, 4099)


def gather(numel: int, dtype: str, world_size: int) -> Problem:
    return Problem("all_gather", (numel,), dtype, world_size, reduction="", mode="eager")


def sizes(variant: str, world_size: int, rank: int) -> None:
    """Sizes up and down on one lane: every call leaves the lane fit for any other."""
    del rank
    communicator = get_communicator()
    dtypes = {2: ("bfloat16",), 3: ("uint8", "float16", "float64"), 4: ("float32", "int8", "int64")}[world_size]
    for seed, numel in some(enumerate((*SIZES, *reversed(SIZES))), 4):
        problem = gather(numel, dtypes[seed % len(dtypes)], world_size)
        check_variant(communicator, problem, variant, seed=seed, kind="random" if seed % 3 else "integers")


def every_dtype(world_size: int, rank: int) -> None:
    """Every dtype through every variant, the library included."""
    del rank
    communicator = get_communicator()
    for seed, dtype in some(enumerate(DTYPES)):
        for name in ("library", *KERNELS) if seed % 3 == 0 else ("library", KERNELS[seed % len(KERNELS)]):
            check_variant(communicator, gather(75 + seed, dtype, world_size), name, seed=seed, kind="integers")


PAYLOADS = ("sentinels", "escapes", "both", "one word", "any bits")


def payload(kind: str, num_words: int, seed: int, rank: int) -> torch.Tensor:
    """Words of a payload that tries the packets' disguise, as float32."""
    generator = torch.Generator().manual_seed(seed * 101 + rank)
    words = torch.randint(-(2**31), 2**31, (num_words,), generator=generator, dtype=torch.int64).to(torch.int32)
    coin = torch.randint(0, 2, (num_words,), generator=generator).bool()
    if kind == "sentinels":
        words[:] = SENTINEL.value
    elif kind == "escapes":
        words[:] = ESCAPE.value
    elif kind == "both":
        words = torch.where(coin, SENTINEL.value, ESCAPE.value).to(torch.int32)
    elif kind == "one word":
        words[seed % num_words] = SENTINEL.value if coin[0] else ESCAPE.value
    return words.view(torch.float32)


def arena_is_clean(communicator: Communicator) -> bool:
    workspace = communicator.workspace
    assert workspace is not None
    layout = workspace.layout
    arena = workspace.buffers["eager"].local[layout.arena : layout.one_shot].view(torch.int32)
    return bool((arena == SENTINEL.value).all())


def clean_arena(world_size: int, rank: int) -> None:
    """Nothing but sentinels is left in the arena once all ranks have ended a call, masks included."""
    communicator = get_communicator()
    for seed, kind in enumerate(PAYLOADS):
        words = payload(kind, 301, seed, rank)
        launch_variant(communicator, gather(301, "float32", world_size), "lamport", (words,))
        dist.barrier()
        assert arena_is_clean(communicator), kind
        dist.barrier()


def many_chunks(world_size: int, rank: int) -> None:
    """Messages cut into more chunks than the gather areas hold, sizes that do not divide, twice each."""
    del rank
    communicator, count = get_communicator(), 0
    for numel, blocks in some(((16 * 128 * 4, 1), (13 * 128 * 4 + 123, 2), (33 * 128 * 4 + 1, 1)), 2):
        for chunks in sample((1, 2, 4, 8, 16, 32), quick=3):
            config = {"num_blocks": blocks, "num_warps": 4, "items": 1, "num_chunks": chunks}
            problem, name = gather(numel, "float32", world_size), "multimem" if count % 3 == 2 else "push"
            if get_variant("all_gather", name).infeasible(problem, config, limits_of(communicator)) is None:
                for seed in (1, 2):
                    check_variant(communicator, problem, name, seed=seed, config=config)
                count += 1
    assert count > (1 if QUICK else 5)


CASES = {f"sizes, {variant}": functools.partial(sizes, variant) for variant in KERNELS}
CASES["many_chunks"] = many_chunks
MORE = (every_dtype, clean_arena)
TWO = {case.__name__: case for case in MORE}


def body(rank: int, world_size: int) -> dict[str, str]:
    cases = {**CASES, **(TWO if world_size == 2 else {})}
    return run_cases({name: functools.partial(case, world_size) for name, case in cases.items()}, rank)


@pytest.fixture(scope="module")
def outcomes() -> Callable[[int], list[dict[str, str]]]:
    return functools.cache(lambda world_size: run_ranks(world_size, body, timeout=400))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_variants(outcomes: Callable[[int], list[dict[str, str]]], world_size: int, name: str) -> None:
    report(outcomes(world_size), name)


@pytest.mark.parametrize("name", TWO)
def test_on_two_ranks(outcomes: Callable[[int], list[dict[str, str]]], name: str) -> None:
    report(outcomes(2), name)
