"""The public functions. Importing this package defines their operators, `torch.ops.tunedcomm.*`.

`call.paths` holds the path of every op: `planned` binds what a call would run, `adapter.problem` names it.
`run_problem` makes the public call for a problem.
"""

from __future__ import annotations

import functools
from typing import Any

from tunedcomm.ops import torch_ops as torch_ops
from tunedcomm.ops.adapter import Tensors
from tunedcomm.ops.call import CallPath, paths
from tunedcomm.spec import Problem


@functools.cache
def path_of(problem: Problem) -> CallPath[Any] | None:
    """The path of the public calls that ask for `problem`; None where a package's op has no public function."""
    return next((p for p in paths.values() if p.adapter.op == problem.op and p.adapter.asks_for(problem)), None)


def run_problem(problem: Problem, inputs: Tensors, outputs: Tensors) -> None:
    """The public call that asks for `problem` on the default group, for benchmarks."""
    path = path_of(problem)
    assert path is not None, problem
    path.run_problem(problem, inputs, outputs)
