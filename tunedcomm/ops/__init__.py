"""The public functions. Importing this package defines their operators, `torch.ops.tunedcomm.*`.

`call.paths` holds the path of every op: `planned` binds what a call would run, `adapter.problem` names it.
`run_problem` makes the public call for a problem, and `explain` says what a call or a problem would run.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import Any, overload

import torch

from tunedcomm.dispatch import plans
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.ops import torch_ops as torch_ops
from tunedcomm.ops.adapter import Tensors
from tunedcomm.ops.arguments import check_input
from tunedcomm.ops.call import CallPath, paths
from tunedcomm.selection.select import Decision
from tunedcomm.spec import NumericsPolicy, Problem, get_op


@functools.cache
def path_of(problem: Problem) -> CallPath[Any] | None:
    """The path of the public calls that ask for `problem`; None where a package's op has no public function."""
    return next((p for p in paths.values() if p.adapter.op == problem.op and p.adapter.asks_for(problem)), None)


def run_problem(problem: Problem, inputs: Tensors, outputs: Tensors) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    path = path_of(problem)
    assert path is not None, problem
    path.run_problem(problem, inputs, outputs)


@overload
def explain(
    communicator: Communicator, problem: Problem, *, policy: NumericsPolicy | None = None, max_sms: int | None = None
) -> Decision: ...


@overload
def explain(
    communicator: str,
    problem: torch.Tensor | Sequence[torch.Tensor],
    *,
    policy: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> Decision: ...


def explain(
    communicator: Communicator | str,
    problem: Problem | torch.Tensor | Sequence[torch.Tensor],
    *,
    policy: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> Decision:
    """The decision for a problem, with every reason; binds and launches nothing. Print it to read it.

    `explain("all_reduce", x)` explains the call `all_reduce(x)` on the default group, out of CUDA graphs. Other options
    are fields of a problem: `explain(get_communicator(), Problem("all_reduce", (x.numel(),), "float32", 4, "max"))`
    explains `all_reduce(x, op="max")` of 4 ranks in a graph, and `mode="eager"` the call out of graphs.

    Args:
        communicator: what `get_communicator(group)` gives, or the name of an op.
        problem: a problem that a call on the communicator may ask: its world size, a reduction of the op if that has
            any. After an op's name the input in plain memory, or a tuple of the inputs; its options are the defaults.
        policy, max_sms: as in calls.

    Raises:
        UnsupportedInputError: an unknown numerics policy, or a problem that no call on this communicator asks.
        InfeasibleError: a forced candidate cannot run, or the policy admits nothing that is known.
    """
    if isinstance(communicator, str) and isinstance(problem, (torch.Tensor, Sequence)):
        inputs = (problem,) if isinstance(problem, torch.Tensor) else tuple(problem)
        communicator, problem = _asked(communicator, inputs)
    if isinstance(communicator, str) or not isinstance(problem, Problem):
        raise UnsupportedInputError(
            "explain takes an op's name and its input, or a communicator and a Problem, not "
            f"{type(communicator).__name__} and {type(problem).__name__}; {_EXAMPLE}"
        )
    return plans.explain(communicator, problem, policy=policy, max_sms=max_sms)


_EXAMPLE = (
    'pass e.g. explain("all_reduce", x), or for other options explain(tunedcomm.get_communicator(), '
    'tunedcomm.Problem("all_reduce", (4096,), "bfloat16", 4, reduction="max", mode="eager"))'
)


def _asked(op: str, inputs: Tensors) -> tuple[Communicator, Problem]:
    """The problem of a call with these inputs and with defaults, on the communicator of the default group."""
    path = next((path for path in paths.values() if path.adapter.op == get_op(op).name), None)
    public: Any = getattr(sys.modules[type(path.adapter).__module__], op, None) if path else None
    defaults = {} if public is None else inspect.signature(public).parameters
    names = [] if path is None else [option.split()[-1] for option in path.adapter.options]
    options = tuple([defaults[name].default if name in defaults else inspect.Parameter.empty for name in names])
    if path is None or inspect.Parameter.empty in options:
        raise UnsupportedInputError(f"calls of {op} need more than tensors; {_EXAMPLE}")
    inputs += (None,) * (len(path.adapter.inputs) - len(inputs))
    for name, tensor in zip(path.adapter.inputs[:1], inputs, strict=False):
        check_input(op, tensor, name)
    communicator = path.communicator(inputs[0], None)
    path.adapter.check(inputs, options, communicator.world_size)
    return communicator, path.adapter.problem(inputs, options, communicator.world_size)
