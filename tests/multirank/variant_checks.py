"""Launches of one variant on the host backend, judged against the op's references; for ops of any form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from cases import bits_of

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.spec import Candidate, Limits, Problem, check_candidate, get_op, get_variant


def limits_of(communicator: Communicator) -> Limits:
    """The communicator's limits, with emulated multicast allowed and a core for every thread of a host."""
    limits = communicator.limits
    return replace(limits, emulated_multicast=True, host_cores=limits.host_cores and 64)


def inputs_of_all(problem: Problem, seed: int, kind: str) -> list[tuple[torch.Tensor, ...]]:
    """Every rank's inputs."""
    make = get_op(problem.op).make_inputs
    return [make(problem, rank, seed, kind, "cpu") for rank in range(problem.world_size)]


def launch_variant(
    communicator: Communicator,
    problem: Problem,
    variant: str,
    inputs: tuple[torch.Tensor, ...],
    config: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Bind and launch once, by default with the variant's own config; outputs start as NaN (or the least integer)."""
    limits = limits_of(communicator)
    chosen = get_variant(problem.op, variant).default(problem, limits) if config is None else config
    candidate = Candidate.of(problem.op, variant, chosen)
    reason = check_candidate(problem, candidate, limits)
    assert reason is None, (candidate, reason)
    launch = communicator.bind(problem, candidate)
    outputs: tuple[torch.Tensor, ...] = inputs
    if not problem.in_place:
        outputs = get_op(problem.op).make_outputs(problem, "cpu")
        for output in outputs:
            output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)
    launch(inputs, outputs, 0)
    communicator.check_peers()
    return outputs


def error_of(got: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − ref‖ / ‖ref‖ of what is finite in the reference; infinite if NaN or ±inf of it are not the same."""
    got, reference = got.double(), reference.double()
    finite = reference.isfinite()
    if not torch.allclose(got[~finite], reference[~finite], rtol=0, atol=0, equal_nan=True):
        return math.inf
    due = reference[finite]
    return float((got[finite] - due).norm() / due.norm().clamp_min(1e-30))


def check_variant(
    communicator: Communicator,
    problem: Problem,
    variant: str,
    *,
    seed: int = 0,
    kind: str = "random",
    config: Mapping[str, Any] | None = None,
    everyone: Sequence[tuple[torch.Tensor, ...]] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Launch and judge: exact bits of `ordered` variants, else the op's tolerance; inputs must be left as they were.

    Args:
        everyone: every rank's inputs, instead of what the op makes from `seed` and `kind`.
    """
    spec, rank = get_op(problem.op), communicator.rank
    given = inputs_of_all(problem, seed, kind) if everyone is None else list(everyone)
    mine = tuple(tensor.clone() for tensor in given[rank])
    outputs = launch_variant(communicator, problem, variant, mine, config)
    if not problem.in_place:
        assert all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(mine, given[rank], strict=True)), "input changed"
    if get_variant(problem.op, variant).numerics == "ordered" and spec.ordered_reference is not None:
        for got, expected in zip(outputs, spec.ordered_reference(problem, given, rank), strict=True):
            assert torch.equal(bits_of(got), bits_of(expected)), (variant, problem, kind)
    for got, reference in zip(outputs, spec.reference(problem, given, rank), strict=True):
        error = error_of(got, reference)
        assert error <= spec.tolerance_of(problem), (variant, problem, error)
    return outputs
