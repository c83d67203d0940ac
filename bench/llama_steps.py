"""The workloads of `bench/llama_tp.py`: what a step is, what it gives, and how far that is from what is expected."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from llama_model import Plan
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["TOLERANCES", "Step", "Workload", "difference", "workloads"]

# Largest ‖out − ref‖ / ‖ref‖ that another order of summation may cost, through all layers and back.
TOLERANCES = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step is.

    Attributes:
        name: in the rows.
        plan: which tensor parallelism.
        batch, tokens: of the input.
        context: tokens that the caches hold, the new one included; 0: no caches.
        train: forward and backward, else forward alone.
        graph: steps are captured in CUDA graphs, where there are any.
        steps, rounds: steps in a turn, turns of each configuration.
    """

    name: str
    plan: Plan
    batch: int
    tokens: int
    context: int = 0
    train: bool = False
    graph: bool = True
    steps: int = 1
    rounds: int = 3


def workloads(arguments: Namespace) -> list[Workload]:
    """Those asked for, in the order in which they run."""
    tiny = arguments.tiny
    tokens, context = (16, 12) if tiny else (arguments.tokens, arguments.context)
    steps, rounds = (1, 2) if tiny else (3, arguments.rounds or 20)
    found = [Workload("prefill", "sequence", 1, tokens, steps=steps, rounds=rounds)]
    for batch in (1, 8) if tiny else (1, 8, 64):
        steps, rounds = (1, 2) if tiny else (20, arguments.rounds or 30)
        found.append(Workload(f"decode_{batch}", "plain", batch, 1, context, steps=steps, rounds=rounds))
    steps, rounds = (1, 2) if tiny else (2, max(3, (arguments.rounds or 20) // 2))
    found.append(Workload("train", "sequence", 1, tokens, train=True, graph=False, steps=steps, rounds=rounds))
    wanted = arguments.workload
    return [each for each in found if not wanted or each.name in wanted or each.name.partition("_")[0] in wanted]


class Step:
    """One step of a model; what it gave is kept for `results`."""

    def __init__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor, *, train: bool
    ) -> None:
        self._forward, self._model, self._train = forward, model, train
        self.x = x.requires_grad_(train)
        self.output: torch.Tensor | None = None

    def __call__(self) -> None:
        if not self._train:
            with torch.no_grad():
                self.output = self._forward(self.x)
            return
        self._model.zero_grad(set_to_none=True)
        self.x.grad = None
        y = self._forward(self.x)
        y.float().square().mean().backward()
        self.output = y.detach()

    def results(self) -> list[torch.Tensor]:
        """Copies of the output and of all gradients, this rank's parts."""
        found = [self.output]
        if self._train:
            found += [self.x.grad, *(parameter.grad for parameter in self._model.parameters())]
        return [_copied(each) for each in found]


def _copied(x: torch.Tensor | None) -> torch.Tensor:
    if x is None:
        raise RuntimeError("a step gave no output, or an input or weight has no gradient")
    return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """Largest relative error of a tensor, infinite where there are NaN; and whether all bits agree."""
    worst, same = 0.0, len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        worst = max(worst, error if math.isfinite(error) else math.inf)
        same = same and torch.equal(one, other)
    return worst, same
