"""Every all_gather variant on the host backend: exact bits, whatever the payload holds, at any size."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from cases import report, run_cases
from harness import run_ranks
from quick import QUICK, sample, some
from variant_checks import bits_of, check_variant, inputs_of_all, launch_variant, limits_of

import tunedcomm
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


def payloads(world_size: int, rank: int) -> None:
    """Payloads of all kinds and sizes in random order on one lane, each rank with a kind of its own."""
    communicator = get_communicator()
    shuffle = random.Random(7)
    for seed in sample(range(40)):
        numel = shuffle.choice((1, 2, 3, 4, 5, 17, 64, 257, 900))
        kinds = [shuffle.choice(PAYLOADS) for _ in range(world_size)]
        name = "lamport" if seed % 4 else shuffle.choice(KERNELS)
        everyone = [payload(kind, numel, seed, r) for r, kind in enumerate(kinds)]
        (out,) = launch_variant(communicator, gather(numel, "float32", world_size), name, (everyone[rank],))
        assert torch.equal(bits_of(out), torch.cat([bits_of(x) for x in everyone])), (seed, name, kinds, numel)


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


@contextlib.contextmanager
def slowed() -> Iterator[None]:
    """Inside the block this process gets on at a fraction of its pace: another thread wants the interpreter too."""
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(2000))

    threads = [threading.Thread(target=spin) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def a_slow_rank(world_size: int, rank: int) -> None:
    """Nobody runs ahead of a rank that is slower, which may be any."""
    communicator = get_communicator()
    config = {"num_blocks": 1, "num_warps": 4, "items": 1, "num_chunks": 16}
    for slow, name in enumerate(("push", "multimem")):
        for seed in some((1, 2)):
            with slowed() if rank == slow else contextlib.nullcontext():
                problem = gather(16 * 128 * 4, "float32", world_size)
                check_variant(communicator, problem, name, seed=seed, config=config)


def larger_than_the_workspace(world_size: int, rank: int) -> None:
    """Push goes round in the areas; pull changes to the scatter area and then refuses."""
    del rank
    communicator = get_communicator()
    limits, pull = limits_of(communicator), get_variant("all_gather", "pull")
    one_shot, staging = limits.one_shot_bytes, limits.staging_bytes
    assert one_shot < staging <= 2 << 20
    for nbytes in some((one_shot + 16, staging - 5, 2 * staging + 1)):
        problem = gather(nbytes, "uint8", world_size)
        check_variant(communicator, problem, "push")
        if nbytes <= staging:
            check_variant(communicator, problem, "pull")
        else:
            assert "exceed the staging" in str(pull.infeasible(problem, pull.default(problem, limits), limits))


def mixed_with_all_reduce(world_size: int, rank: int) -> None:
    """Variants of two ops and sizes in random order on one lane, the same on every rank."""
    del rank
    communicator, shuffle = get_communicator(), random.Random(world_size)
    reducers = sorted(n for n, v in variants("all_reduce").items() if v.kernels and v.numerics == "ordered")
    for seed in sample(range(45), quick=6):
        numel = shuffle.choice((1, 6, 130, 1000, 3001))
        if seed % 3 == 2:
            problem = Problem("all_reduce", (numel,), "float32", world_size, mode="eager")
            check_variant(communicator, problem, shuffle.choice(reducers), seed=seed)
        else:
            problem = gather(numel, shuffle.choice(("bfloat16", "float32", "uint8")), world_size)
            kind = shuffle.choice(("random", "integers"))
            check_variant(communicator, problem, shuffle.choice(KERNELS), seed=seed, kind=kind)


def configs(world_size: int, rank: int) -> None:
    """Points all over the spaces that the host may run."""
    del rank
    communicator, count = get_communicator(), 0
    limits, shuffle = limits_of(communicator), random.Random(3)
    for name in KERNELS:
        variant = get_variant("all_gather", name)
        for numel in some((3, 1111, 20_000)):
            problem = gather(numel, "bfloat16", world_size)
            feasible = [c for c in variant.space.enumerate() if variant.infeasible(problem, c, limits) is None]
            for config in shuffle.sample(feasible, min(3, len(feasible))):
                check_variant(communicator, problem, name, seed=count, config=config)
                count += 1
    assert count > (1 if QUICK else 3) * len(KERNELS)


def symmetric_input(world_size: int, rank: int) -> None:
    """Peers read it where it lies, so it may be overwritten as soon as the call has ended."""
    for numel in (5, 999, 40_000):
        problem = gather(numel, "float32", world_size)
        x = tunedcomm.symmetric_empty(numel + 4, dtype=torch.float32)[4:]
        for seed in (1, 2):
            everyone = inputs_of_all(problem, seed, "integers")
            x.copy_(everyone[rank][0])
            with tunedcomm.force("all_gather", "pull"):
                out = tunedcomm.all_gather(x)
            x.fill_(-1.0)
            assert torch.equal(bits_of(out), torch.cat([bits_of(values) for (values,) in everyone])), (numel, seed)


CASES = {f"sizes, {variant}": functools.partial(sizes, variant) for variant in KERNELS}
CASES |= {case.__name__: case for case in (payloads, mixed_with_all_reduce, many_chunks)}
MORE = (every_dtype, clean_arena, a_slow_rank, larger_than_the_workspace, configs, symmetric_input)
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


def eight_body(rank: int, world_size: int) -> bool:
    """The largest group that kernels serve."""
    communicator = get_communicator()
    for name in KERNELS:
        check_variant(communicator, gather(333, "bfloat16", world_size), name, seed=1, kind="integers")
    return True


@pytest.mark.slow
def test_eight_ranks() -> None:
    assert run_ranks(8, eight_body, timeout=240) == [True] * 8
