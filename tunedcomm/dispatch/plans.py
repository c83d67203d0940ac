"""Turn a problem into a launch: decide, bind, and keep the plan.

What a call costs after that is one look-up and the kernel's C launcher. `explain` shows decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tunedcomm.dispatch import first_use, misses
from tunedcomm.dispatch.communicator import Communicator, PlanKey, on_release
from tunedcomm.dispatch.decide import (
    beside_ordered,
    check_limit,
    check_policy,
    decide,
    forced_candidate,
    library_instead,
    note_force_mode,
)
from tunedcomm.errors import InfeasibleError, UnsupportedInputError
from tunedcomm.kernels.common.launch import SHARE_OF_EAGER
from tunedcomm.metrics import format_bytes
from tunedcomm.selection.select import Decision, Source
from tunedcomm.spec import (
    Candidate,
    NumericsPolicy,
    Problem,
    admits_library,
    format_shape,
    get_op,
    why_no_kernel,
)

logger = logging.getLogger("tunedcomm")
on_release.append(misses.flush)


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem bound to a candidate and ready to launch.

    Attributes:
        candidate: what runs.
        source: the rule that chose it.
        launch: `(inputs, outputs, raw stream handle)`.
        wants_aligned: True for kernels, which take tensors at 16-byte boundaries only.
        policy: under which it was decided.
        decide_again: makes the decision with every reason, which takes longer than a call may.
        kinds: kinds of calls that have fast calls of this plan.
    """

    problem: Problem
    candidate: Candidate
    source: Source
    launch: Callable[[tuple[Any, ...], tuple[Any, ...], int], None]
    wants_aligned: bool
    policy: NumericsPolicy
    decide_again: Callable[[], Decision]
    kinds: set[Hashable] = field(default_factory=set, compare=False)


def _decision_maker(
    communicator: Communicator, problem: Problem, policy: NumericsPolicy, max_sms: int | None
) -> partial[Decision]:
    """`decide` with its arguments, for a group as it is now; it does not hold the group.

    Raises:
        InfeasibleError: TUNEDCOMM_MODE=off, and the policy does not admit the library.
    """
    check_policy(policy)
    check_limit("max_sms", max_sms, "SMs")
    limits, agreed = communicator.limits, communicator.settings
    forced = forced_candidate(problem, policy, limits, agreed.mode, agreed=agreed.forced)
    return partial(
        decide, problem, communicator.snapshot, limits, policy=policy, forced=forced, max_sms=max_sms,
        quarantined=dict(communicator.quarantined),
    )  # fmt: skip


def plan_for(communicator: Communicator, problem: Problem, policy: NumericsPolicy, max_sms: int | None = None) -> Plan:
    """Decide and bind, on every rank alike.

    Raises:
        InfeasibleError: TUNEDCOMM_MODE=force and no database has an answer, or a forced candidate cannot run.
    """
    while True:
        asked = _decision_maker(communicator, problem, policy, max_sms)
        decision = asked(with_reasons=False)
        if not (decision.needs_check and first_use.is_due(communicator, problem, decision.candidate)):
            break
        first_use.check(communicator, problem, decision.candidate)
    decide_again: Callable[[], Decision] = asked
    if communicator.settings.mode == "force" and not decision.is_answered:
        raise InfeasibleError(
            f"TUNEDCOMM_MODE=force, but no database has an answer for {problem}; "
            f"{_way_to_tune(problem, communicator, policy)}"
        )
    counter = misses.note_problem(communicator, problem, decision.source, policy)
    try:
        launch = communicator.bind(problem, decision.candidate, for_calls=True, counter=counter, policy=policy)
    except InfeasibleError as error:
        # It does not fit on the GPU. The library serves, or what takes no more of the GPU than eager calls may.
        few = int(SHARE_OF_EAGER * communicator.limits.num_sms)
        admitted = admits_library(policy, problem.op)
        if decision.source == "forced" or not (admitted or 0 < few < (max_sms or few + 1)):
            raise
        logger.warning("%s goes to %s: %s", problem, "the library" if admitted else "a smaller grid", error)
        if not admitted:
            return plan_for(communicator, problem, policy, few)
        decision = library_instead(decide_again(), str(error))
        decide_again = partial(replace, decision)
        launch = communicator.bind(problem, decision.candidate, for_calls=True, counter=counter)
    candidate = decision.candidate
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s: %s (%s)", problem, candidate, decide_again().why)
    return Plan(problem, candidate, decision.source, launch, candidate.variant != "library", policy, decide_again)


def _way_to_tune(problem: Problem, communicator: Communicator, policy: NumericsPolicy) -> str:
    """The command that tunes a problem, or why none does, for errors."""
    spec, limits = get_op(problem.op), communicator.limits
    why = f"{spec.name} is not tuned in {problem.dtype}" if problem.dtype not in spec.dtypes else None
    if why := why or why_no_kernel(problem, limits, policy):
        return f"it cannot be tuned ({why}): unset TUNEDCOMM_MODE, or name a variant with tunedcomm.force()"
    words = f"--op {spec.name} --shape {format_shape(problem.shape)} --world-size {problem.world_size}"
    words += f" --dtype {problem.dtype} --mode {problem.mode}"
    usual = {"reduction": spec.reductions, "layout": spec.layouts, "scaling": spec.scalings_of(problem.dtype)}
    for name, allowed in {**usual, "input_kind": ("plain",)}.items():
        if (value := getattr(problem, name)) != (allowed or ("",))[0]:
            words += f" --{name.replace('_', '-')} {value or 'none'}"
    words += " --in-place yes" * problem.in_place + " --backend host" * (limits.backend == "host")
    return f"tune it with `tunedcomm tune {words}`"


def library_plan(communicator: Communicator, problem: Problem) -> Plan:
    """The library, for calls of which too little is known to choose a kernel, or nothing may be compiled or loaded."""
    library = Candidate.of(problem.op, "library", {})
    decide_again = partial(decide, problem, communicator.snapshot, communicator.limits, policy="any", forced=library)
    launch = communicator.bind(problem, library, for_calls=True)
    return Plan(problem, library, "forced", launch, False, "any", decide_again)


def explain(
    communicator: Communicator,
    problem: Problem,
    *,
    policy: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> Decision:
    """The decision for `problem`; see `tunedcomm.explain`."""
    reductions = get_op(problem.op).reductions or ("",)
    if reductions == ("",) and problem.reduction == "sum":  # what a Problem has where none is given
        problem = replace(problem, reduction="")
    if problem.reduction not in reductions:
        raise UnsupportedInputError(
            f"{problem.op} has no reduction {problem.reduction!r}, only {', '.join(map(repr, reductions))}"
        )
    if problem.world_size != communicator.world_size:
        raise UnsupportedInputError(
            f"the problem is one of {problem.world_size} ranks, the communicator has {communicator.world_size}"
        )
    check_policy(policy)
    policy = communicator.policy(policy)
    # A plan that is bound says what runs, also where the chosen candidate could not be bound.
    bound = communicator.plans.get(PlanKey(replace(problem, mode="eager"), policy, max_sms, problem.mode == "graph"))
    decision = (_decision_maker(communicator, problem, policy, max_sms) if bound is None else bound.decide_again)()
    decision = beside_ordered(decision, problem, communicator.snapshot, communicator.limits, max_sms=max_sms)
    decision = replace(
        decision, problem=problem, asked_for=communicator.snapshot.environment, memory=_memory_of(communicator)
    )
    return note_force_mode(decision, communicator.settings.mode)


def _memory_of(communicator: Communicator) -> str | None:
    """Say how much device memory the group holds, and for what."""
    if communicator.workspace is None:
        return None
    held = {name: nbytes for name, nbytes in communicator.workspace.held().items() if nbytes}
    if not held and communicator.device.type == "cpu":
        return None
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items()) or "nothing yet"
    return f"the group holds {format_bytes(sum(held.values()))}: {parts}; it takes more as calls need it"
