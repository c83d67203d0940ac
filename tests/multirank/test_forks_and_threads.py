"""Forked children of a rank are none of its group; threads of a rank may launch interpreted kernels at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases import Case, report, run_cases
from harness import run_ranks

import tunedcomm
from tunedcomm.kernels.common.launch import bind_kernel
from tunedcomm.kernels.common.nan import NAN_BITS, NUM_CELLS, count_nan_request

NUM_THREADS, NUM_LAUNCHES = 3, 60


def in_a_child(call: Callable[[], object]) -> str:
    """The name of the error that the call raises in a forked child, or "" if it raises none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = ""
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def a_forked_child_is_no_rank(rank: int) -> None:
    """Not of a group that was called before, nor of one that was not, nor through a fast call or an operator."""
    other, x = dist.new_group([0, 1]), torch.ones(64)
    for _ in range(3):
        assert torch.equal(tunedcomm.all_reduce(x), torch.full((64,), 2.0))
    with tunedcomm.intercept():
        dist.all_reduce(torch.ones(64))
        calls: list[Callable[[], object]] = [
            lambda: tunedcomm.all_reduce(x),
            lambda: tunedcomm.all_gather(x),
            lambda: tunedcomm.all_reduce(x, group=other),
            lambda: tunedcomm.all_reduce(torch.ones(64, requires_grad=True)),
            tunedcomm.get_communicator,
            tunedcomm.check_agreement,
        ]
        for call in calls:
            assert in_a_child(call) == "GroupError"
    for group in (None, other):
        assert torch.equal(tunedcomm.all_reduce(x, group=group), torch.full((64,), 2.0)), "the parent goes on"


def threads_that_launch(rank: int) -> None:
    """Kernels that wait for nobody, so that their order does not matter."""
    bind = bind_kernel(count_nan_request(4), NUM_CELLS, torch.device("cpu")).fix((None,) * 5)
    failures: list[BaseException] = []

    def launch(count: int) -> None:
        x = torch.ones(700 * count)
        x[:count] = float("nan")
        try:
            for _ in range(NUM_LAUNCHES):
                cells = torch.zeros(NUM_CELLS, dtype=torch.int64)
                bind(0, x.data_ptr(), x.numel(), *NAN_BITS["float32"], cells.data_ptr())
                assert int(cells.sum()) == count
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=launch, args=(number + 1,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


CASES: dict[str, Case] = {case.__name__: case for case in (threads_that_launch, a_forked_child_is_no_rank)}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_cases(CASES, rank)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(2, body, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_forks_and_threads(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)
