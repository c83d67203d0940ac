"""Bad variants of `all_reduce` for CPU tensors, which wait in the group's ring as the good ones do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm.kernels.all_reduce.host import HostOneShot
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Problem, get_variant, register_variant
from tunedcomm.symm.ring import Call

Tensors = tuple[torch.Tensor, ...]
Launch = Callable[[Tensors, Tensors, int], None]
GOOD: Config = {"chunk_kib": 16, "spins": 1, "threads": 1}
STATUS = {"hangs": "hung", "not_by_7": "incorrect", "raises": "crashed", "stale": "incorrect"}


def hangs(good: Launch, problem: Problem, workspace: Any) -> Launch:
    """Rank 1 waits at its third launch for what nobody sends, and the others wait for rank 1."""
    calls = itertools.count(1)

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        if next(calls) == 3 and dist.get_rank() == 1:
            workspace.ring.wait(1 << 40, Call.of(problem, spins=0))
        good(inputs, outputs, stream)

    return launch


def not_by_7(good: Launch, problem: Problem, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        good(inputs, outputs, stream)
        if problem.numel % 7:
            outputs[0][-1] += 1

    return launch


def raises(good: Launch, problem: Problem, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        if dist.get_rank() == 1:
            raise ValueError("planted launch error")
        good(inputs, outputs, stream)

    return launch


def stale(good: Launch, problem: Problem, workspace: Any) -> Launch:
    kept: list[torch.Tensor] = []

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        good(inputs, outputs, stream)
        kept.append(outputs[0].clone())
        outputs[0].copy_(kept[0])

    return launch


def plant() -> None:
    for name in STATUS:
        wrap: Callable[[Launch, Problem, Any], Launch] = globals()[name]
        register_variant(
            replace(
                get_variant("all_reduce", "host_one_shot"),
                name=name,
                space=Space({"only": Choice(1)}),
                infeasible=lambda problem, config, limits: None,
                default=lambda problem, limits: {"only": 1},
                bind=lambda problem, config, workspace, wrap=wrap: wrap(  # type: ignore[misc]
                    HostOneShot().bind(problem, GOOD, workspace), problem, workspace
                ),
            )
        )
