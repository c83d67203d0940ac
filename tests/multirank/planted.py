"""An op of its own with good variants and with every kind of bad one; a sweep imports it as a plugin.

Registers when it is imported, so tests name it and leave the importing to the sweep.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from planted_cases import OP, TOO_LARGE, TOO_LARGE_TO_CHECK
from spec_samples import toy_op, toy_variant

from tunedcomm.errors import PeerTimeoutError
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Problem, register_op, register_variant

Tensors = tuple[torch.Tensor, ...]
Launch = Callable[[Tensors, Tensors, int], None]
Bind = Callable[[Problem, Config, Any], Launch]


def make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> Tensors:
    too_large = problem.numel == TOO_LARGE or (problem.numel == TOO_LARGE_TO_CHECK and kind == "integers")
    if too_large and dist.get_rank() == 1:
        raise torch.OutOfMemoryError("planted: tried to allocate too much")
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    if kind == "integers":
        return (torch.randint(-8, 9, (problem.numel,), generator=generator).to(torch.float32),)
    return (torch.randn(problem.numel, generator=generator),)


def reference(problem: Problem, inputs: Sequence[Tensors], rank: int) -> Tensors:
    return (torch.stack([values.double() for (values,) in inputs]).sum(0),)


def ordered_reference(problem: Problem, inputs: Sequence[Tensors], rank: int) -> Tensors:
    total = torch.zeros_like(inputs[0][0])
    for (values,) in inputs:
        total += values
    return (total,)


def plant_op(name: str) -> None:
    register_op(
        toy_op(
            name,
            make_inputs=make_inputs,
            make_outputs=lambda problem, device: (torch.empty(problem.numel),),
            reference=reference,
            tolerance={"float32": 1e-6},
            default_shapes=lambda backend, itemsize: [(64,), (1024,)],
            ordered_reference=ordered_reference,
        )
    )


def add_up(inputs: Tensors, outputs: Tensors) -> None:
    outputs[0].copy_(inputs[0])
    dist.all_reduce(outputs[0])


def plant(name: str, bind: Bind, *, op: str = OP, space: Space | None = None, **changes: Any) -> None:
    register_variant(toy_variant(op, name, space, bind=bind, **changes))


def good(problem: Problem, config: Config, workspace: Any) -> Launch:
    delay_s = int(config.get("delay_ms", 0)) / 1e3

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        time.sleep(delay_s)
        add_up(inputs, outputs)

    return launch


def after(spoil: Callable[[Problem, torch.Tensor], object]) -> Bind:
    """Launches that are right but for what `spoil` does to the output."""

    def bind(problem: Problem, config: Config, workspace: Any) -> Launch:
        def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
            add_up(inputs, outputs)
            spoil(problem, outputs[0])

        return launch

    return bind


def before(act: Callable[[], object], *, binding: bool = False) -> Bind:
    """Good but for what rank 1 does before each launch, or before it binds."""

    def bind(problem: Problem, config: Config, workspace: Any) -> Launch:
        if binding and dist.get_rank() == 1:
            act()

        def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
            if not binding and dist.get_rank() == 1:
                act()
            add_up(inputs, outputs)

        return launch

    return bind


def planted_error(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def add_one_to_the_last(problem: Problem, output: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        output[-1] += 1.0


def wrong_second_launch(problem: Problem, config: Config, workspace: Any) -> Launch:
    kept: list[torch.Tensor] = []

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        kept.append(outputs[0].clone())
        outputs[0].copy_(kept[0])

    return launch


def nan_on_odd_sizes(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        filled = outputs[0].clone()
        add_up(inputs, outputs)
        whole = problem.numel // 4 * 4
        outputs[0][whole:] = filled[whole:]

    return launch


def to_next_float(problem: Problem, output: torch.Tensor) -> None:
    """Within any tolerance, but not what every ordered variant gives."""
    output.copy_(torch.nextafter(output, torch.full_like(output, 1e9)))


def leaves_packets(problem: Problem, config: Config, workspace: Any) -> Launch:
    """Right by itself; a later call would take for a peer's data what lies in the arena."""
    assert workspace.lanes[problem.mode]  # made now, on every rank

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        add_up(inputs, outputs)
        if dist.get_rank() == 1:
            workspace.buffers[problem.mode].local[workspace.layout.arena + 64 : workspace.layout.arena + 80].fill_(1)

    return launch


def bind_takes_for_ever(problem: Problem, config: Config, workspace: Any) -> Launch:
    time.sleep(600)
    return good(problem, config, workspace)


def peer_times_out(problem: Problem, config: Config, workspace: Any) -> Launch:
    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        raise PeerTimeoutError("planted: waited for rank 0")

    return launch


plant_op(OP)
plant("library", good, numerics="library")
# Far enough apart to be told apart on a busy machine; the fastest one is not for everybody.
plant("good", good, space=Space({"delay_ms": Choice(40, 20, 100)}))
plant("unordered", good, space=Space({"delay_ms": Choice(5)}), numerics="unordered")
no_memory = torch.OutOfMemoryError("planted: tried to allocate too much")
plant("bind_takes_too_much", before(planted_error(no_memory), binding=True))
plant("infeasible", good, infeasible=lambda problem, config, limits: "planted: not on this machine")
plant("wrong_by_one_element", after(add_one_to_the_last))
plant("wrong_second_launch", wrong_second_launch)
plant("nan_on_odd_sizes", nan_on_odd_sizes)
plant("other_bits", after(to_next_float))
plant("leaves_packets", leaves_packets)
plant("bind_fails_on_one_rank", before(planted_error(RuntimeError("planted compile error")), binding=True))
plant("bind_takes_for_ever", bind_takes_for_ever)
plant("raises_on_one_rank", before(planted_error(ValueError("planted launch error"))))
plant("segfaults", before(lambda: os.kill(os.getpid(), signal.SIGSEGV)))
plant("deadlocks", before(lambda: time.sleep(600)))
plant("peer_times_out", peer_times_out)
