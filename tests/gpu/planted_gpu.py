"""Bad variants of all_reduce for real GPUs, among the good ones; a sweep imports it as a plugin.

Each is bad at one shape only, so that it costs one gang at most.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from planted_gpu_cases import BAD, SHAPE
from spec_samples import toy_variant

from tunedcomm.space import Config
from tunedcomm.spec import Limits, Problem, get_variant, register_variant

Launch = Callable[[tuple[Any, ...], tuple[Any, ...], int], None]


def lamport(problem: Problem, workspace: Any) -> Launch:
    limits = Limits("cuda", 132, False, 512, 1 << 26, 1 << 22, 1 << 25, launch_pdl=True)
    variant = get_variant("all_reduce", "lamport")
    return variant.bind(problem, variant.default(problem, limits), workspace)


def compiles_for_ever(launch: Launch, problem: Problem) -> Launch:
    time.sleep(600)
    return launch


def launch_missing_on_one_rank(launch: Launch, problem: Problem) -> Launch:
    return lambda inputs, outputs, stream: None if dist.get_rank() == 1 else launch(inputs, outputs, stream)


def before(act: Callable[[], object]) -> Callable[[Launch, Problem], Launch]:
    """Good but for what rank 1 does before each launch."""

    def spoil(launch: Launch, problem: Problem) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            if dist.get_rank() == 1:
                act()
            launch(inputs, outputs, stream)

        return run

    return spoil


def after(change: Callable[[Problem, torch.Tensor], object]) -> Callable[[Launch, Problem], Launch]:
    """Good but for what `change` does to the output."""

    def spoil(launch: Launch, problem: Problem) -> Launch:
        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            launch(inputs, outputs, stream)
            change(problem, outputs[0])

        return run

    return spoil


def fail() -> None:
    raise ValueError("planted launch error")


def spoil_the_tail(problem: Problem, output: torch.Tensor) -> None:
    if problem.numel % 8:
        output[problem.numel // 8 * 8 :] = float("nan")


def add_one_to_the_last(problem: Problem, output: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        output.view(-1)[-1:] += 1.0


def write_behind(problem: Problem, output: torch.Tensor) -> None:
    output.as_strided((8,), (1,), output.storage_offset() + problem.numel).fill_(7.0)


device_spins_on_one_rank = before(lambda: torch.cuda._sleep(1 << 41))  # minutes: only the end of the process ends it
host_sleeps_on_one_rank = before(lambda: time.sleep(600))
raises_on_one_rank = before(fail)
segfaults_on_one_rank = before(lambda: os.kill(os.getpid(), signal.SIGSEGV))
nan_on_odd_sizes = after(spoil_the_tail)
sticky_cuda_error = after(lambda problem, output: torch._assert_async(torch.zeros(1, device=output.device)))
wrong_by_one_element = after(add_one_to_the_last)
writes_behind_its_output = after(write_behind)


def stale_in_graphs(launch: Launch, problem: Problem) -> Launch:
    """In a graph it gives what the launch before it should have given: right while all inputs are the same."""
    kept: list[torch.Tensor] = []

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        launch(inputs, outputs, stream)
        if not torch.cuda.is_current_stream_capturing():
            kept[:] = [outputs[0].clone()]
            return
        result = outputs[0].clone()
        outputs[0].copy_(kept[0])
        kept[0].copy_(result)

    return run


def wrong_second_launch(launch: Launch, problem: Problem) -> Launch:
    kept: list[torch.Tensor] = []

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        launch(inputs, outputs, stream)
        kept.append(outputs[0].clone())
        outputs[0].copy_(kept[0])

    return run


def turns_wrong_late(launch: Launch, problem: Problem) -> Launch:
    """Right for 60 launches, replayed ones too, then it gives what the launch before should have given."""
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    kept = torch.zeros(problem.numel, dtype=getattr(torch, problem.dtype), device="cuda")

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        launch(inputs, outputs, stream)
        result = outputs[0].clone()
        count.add_(1)
        outputs[0].copy_(torch.where(count > 60, kept, result))
        kept.copy_(result)

    return run


def leaks(launch: Launch, problem: Problem) -> Launch:
    kept: list[torch.Tensor] = []

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        launch(inputs, outputs, stream)
        if not torch.cuda.is_current_stream_capturing():
            kept.append(torch.ones(50 << 20, dtype=torch.uint8, device="cuda"))

    return run


def plant(name: str, spoil: Callable[[Launch, Problem], Launch]) -> None:
    def infeasible(problem: Problem, config: Config, limits: Limits) -> str | None:
        near = abs(problem.numel - SHAPE[0]) < 64  # the odd shapes next to it are part of its check
        return None if near else f"planted for {SHAPE[0]} elements"

    def bind(problem: Problem, config: Config, workspace: Any) -> Launch:
        return spoil(lamport(problem, workspace), problem)

    register_variant(toy_variant("all_reduce", name, infeasible=infeasible, bind=bind))


for _name in BAD:
    plant(_name, globals()[_name])
