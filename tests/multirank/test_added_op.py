"""An op that a test adds, of the most demanding kind: its problems tell the kind of memory, its launches take scalars.

Nothing of the package is edited for it: everything that is asked of an op is asked of its `OpSpec` and its adapter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks
from spec_samples import toy_op, toy_variant

from tunedcomm.bench.contenders import contenders_of
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.ops.adapter import OpAdapter, Tensors
from tunedcomm.ops.call import CallPath
from tunedcomm.ops.torch_ops import Operator
from tunedcomm.spec import Problem, get_op, register_op, register_variant

NUMEL = 40
NAME = "dummy_broadcast"


class _Broadcast(OpAdapter):
    op = NAME
    options = ("int src",)
    reduces = False
    depends_on_memory = True

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        assert 0 <= options[0] < world_size

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        return Problem(self.op, (inputs[0].numel(),), "float32", world_size, reduction="", mode="eager")

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        return (inputs[0], *outputs), (int(inputs[1]),)

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        return (options[0],)


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> Tensors:
    return torch.full(problem.shape, rank + 1.0, device=device), torch.ones(1, dtype=torch.int64)


def _make_outputs(problem: Problem, device: Any) -> Tensors:
    return (torch.empty(problem.shape, device=device),)


def _bind(problem: Problem, config: Any, workspace: Any) -> Any:
    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        outputs[0].copy_(inputs[0])
        dist.broadcast(outputs[0], int(inputs[1]), group=workspace.group)

    return run


def _set_up(rank: int) -> None:
    register_op(toy_op(NAME, reductions=(), make_inputs=_make_inputs, make_outputs=_make_outputs))
    register_variant(toy_variant(NAME, "library", bind=_bind))
    path: CallPath[torch.Tensor] = CallPath(_Broadcast())
    Operator(path).define()


RANKS = Ranks(setup=_set_up)


def broadcast(x: torch.Tensor, src: int) -> Any:
    from tunedcomm.ops.call import paths

    return paths[NAME].call((x, None), (src,), None, "default", None)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_repeated_calls_keep_their_scalars(rank: int, how: str) -> None:
    x = torch.full((NUMEL,), rank + 1.0)
    call: Any = broadcast if how == "eager" else torch.compile(broadcast, backend="aot_eager", fullgraph=True)
    for src in (1, 0, 1):
        for _ in range(4):
            assert torch.equal(call(x, src), torch.full((NUMEL,), src + 1.0))
    assert torch.equal(x, torch.full((NUMEL,), rank + 1.0))


def test_bench_makes_the_public_call(rank: int) -> None:
    problem = Problem(NAME, (NUMEL,), "float32", RANKS.world_size, reduction="", mode="eager")
    inputs = get_op(NAME).make_inputs(problem, rank, 0, "random", torch.device("cpu"))
    (tuned,) = contenders_of(get_communicator(), problem, inputs, ["tuned"]).present[1:]
    for _ in range(4):
        tuned.launch(tuned.turns[0])
        assert torch.equal(tuned.results[0], torch.full((NUMEL,), 2.0))
    assert get_communicator().fast_calls, "the call was repeated"
