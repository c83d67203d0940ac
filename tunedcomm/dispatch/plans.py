"""Turn a problem into a launch: decide, bind, and keep the plan.

What a call costs after that is one look-up and the kernel's C launcher. `force` and `explain` steer and show decisions;
`check_agreement` compares the decisions of all ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm import kernels
from tunedcomm.dispatch import first_use, misses
from tunedcomm.dispatch.agreement import first_difference
from tunedcomm.dispatch.communicator import Communicator, on_release
from tunedcomm.dispatch.dispatcher import (
    beside_ordered,
    check_limit,
    check_policy,
    decide,
    forced_candidate,
    forced_here,
    forced_ops,
    note_force_mode,
)
from tunedcomm.dispatch.groups import get_communicator, live_communicators
from tunedcomm.dispatch.launches import SHARE_OF_EAGER, Launch, fault_of, fresh_copies, no_intercept, norm_of
from tunedcomm.errors import AgreementError, InfeasibleError, UnsupportedInputError, WrongResultError
from tunedcomm.selection.select import Decision, Source
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, NumericsPolicy, Problem, admits, get_op, get_variant

logger = logging.getLogger("tunedcomm")
on_release(misses.flush)


@dataclass(frozen=True, slots=True)
class Plan:
    """A problem bound to a candidate and ready to launch.

    Attributes:
        candidate: what runs.
        source: the rule that chose it.
        launch: `(inputs, outputs, raw stream handle)`.
        wants_aligned: True for kernels, which take tensors at 16-byte boundaries only.
        policy: under which it was decided.
        decide: makes the decision with every reason, which takes longer than a call may.
        kinds: kinds of calls that have fast calls of this plan.
    """

    problem: Problem
    candidate: Candidate
    source: Source
    launch: Callable[[tuple[Any, ...], tuple[Any, ...], int], None]
    wants_aligned: bool
    policy: NumericsPolicy
    decide: Callable[[], Decision]
    kinds: set[Hashable] = field(default_factory=set, compare=False)

    @property
    def decision(self) -> Decision:
        """The decision, with every reason."""
        return self.decide()


def plan_for(communicator: Communicator, problem: Problem, policy: NumericsPolicy, max_sms: int | None = None) -> Plan:
    """Decide and bind, on every rank alike.

    Raises:
        InfeasibleError: TUNEDCOMM_MODE=force and no database has an answer, or a forced candidate cannot run.
    """
    decision = _checked_decision(communicator, problem, policy, max_sms)
    if communicator.settings.mode == "force" and not decision.is_answered:
        decision = _decision(communicator, problem, policy, max_sms)
        raise InfeasibleError(
            f"TUNEDCOMM_MODE=force, but no database has an answer for {problem}: {decision.why}; tune it with "
            f"`tunedcomm tune --op {problem.op} --shape {'x'.join(map(str, problem.shape))}`"
        )
    decide_again = _decider(communicator, problem, policy, max_sms)
    counter = misses.counter(communicator, problem, decision.source, policy)
    try:
        launch = communicator.bind(problem, decision.candidate, for_calls=True, counter=counter)
    except InfeasibleError as error:
        decision, decide_again = _instead(communicator, problem, policy, max_sms, decision, error)
        launch = communicator.bind(problem, decision.candidate, for_calls=True, counter=counter)
    candidate = decision.candidate
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s: %s (%s)", problem, candidate, decide_again().why)
    if communicator.settings.check[0] and problem.mode == "eager" and candidate.variant != "library":
        launch = _checked(communicator, problem, candidate, policy, launch)
    return Plan(problem, candidate, decision.source, launch, candidate.variant != "library", policy, decide_again)


def _instead(
    communicator: Communicator,
    problem: Problem,
    policy: NumericsPolicy,
    max_sms: int | None,
    decision: Decision,
    error: InfeasibleError,
) -> tuple[Decision, Callable[[], Decision]]:
    """Give way to the library where the decision turns out not to fit on the GPU.

    Where the policy does not admit that, a candidate that takes no more of the GPU than eager calls may follows.

    Returns:
        What is launched, and a function that makes this decision with every reason.

    Raises:
        InfeasibleError: neither fits, or the candidate is forced.
    """
    few = int(SHARE_OF_EAGER * communicator.limits.num_sms)
    admitted = _admits_library(policy, problem.op)
    if decision.source == "forced" or not (admitted or 0 < few < (max_sms or few + 1)):
        raise error
    logger.warning("%s goes to %s: %s", problem, "the library" if admitted else "a smaller grid", error)
    if admitted:
        instead = _library_instead(_decision(communicator, problem, policy, max_sms), str(error))
        return instead, lambda: instead
    return _checked_decision(communicator, problem, policy, few), _decider(communicator, problem, policy, few)


def _decider(
    communicator: Communicator, problem: Problem, policy: NumericsPolicy, max_sms: int | None
) -> Callable[[], Decision]:
    """A function that makes the decision of this moment again, with every reason; it holds no group."""
    forced = _forced(communicator, problem, policy)
    snapshot, limits, quarantined = communicator.snapshot, communicator.limits, communicator.quarantined
    decided = partial(decide, problem, snapshot, limits, policy=policy, forced=forced, max_sms=max_sms)
    return partial(_unless_quarantined, decided, policy, dict(quarantined)) if quarantined else decided


def _checked(
    communicator: Communicator, problem: Problem, candidate: Candidate, policy: NumericsPolicy, launch: Launch
) -> Launch:
    """`launch`, compared with the library at every N-th call (TUNEDCOMM_CHECK); ranks count alike and vote.

    Raises:
        WrongResultError: by the launch, on every rank, if a result was wrong on any and the library may not serve.
    """
    every, falls_back = communicator.settings.check
    plain = replace(problem, input_kind="plain")
    by_library = communicator.bind(plain, Candidate.of(problem.op, "library", {}), for_calls=True)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        number = communicator.count_checked((problem, policy))
        if number % every:
            launch(inputs, outputs, stream)
            return
        copies, expected = fresh_copies(inputs, outputs)
        size = norm_of(inputs[0]) if problem.reduction and inputs[0].is_floating_point() else 0.0
        launch(inputs, outputs, stream)
        by_library(copies, expected, stream)
        with no_intercept():
            faults = communicator.exchange_faults(fault_of(problem, outputs, expected, size))
        if not faults:
            return
        reason = f"call {number} of {problem} gave another result than the library ({'; '.join(faults)})"
        communicator.quarantine(candidate, f"{reason}; it is not used in this group any more (TUNEDCOMM_CHECK)")
        said = f"{candidate} is wrong: {reason}. The group runs the library in its place from here on"
        if not falls_back or not _admits_library(policy, problem.op):
            raise WrongResultError(f"{said}; graphs that were captured before still run it, so capture them anew")
        logger.warning("%s, in this call too; graphs that were captured before still run it", said)
        for output, due in zip(outputs, expected, strict=True):
            output.copy_(due)

    return run


def _library_instead(decision: Decision, reason: str) -> Decision:
    passed_over = ((str(decision.candidate), reason), *decision.passed_over)
    library = Candidate.of(decision.candidate.op, "library", {})
    why = f"the library: {decision.candidate} was chosen, but {reason}"
    return Decision(candidate=library, source="library", why=why, passed_over=passed_over)


def _admits_library(policy: NumericsPolicy, op: str) -> bool:
    """True if the policy admits the class of the op's library, which is ordered where the op moves bytes."""
    return admits(policy, get_variant(op, "library").numerics)


def check_library(problem: Problem, policy: NumericsPolicy, why: str) -> None:
    """Refuse to run the library where the policy does not admit it.

    Raises:
        InfeasibleError: the library would have to serve, for the reason `why`.
    """
    if not _admits_library(policy, problem.op):
        raise InfeasibleError(f"numerics={policy!r} does not admit the library, which would serve {problem}: {why}")


def library_plan(communicator: Communicator, problem: Problem) -> Plan:
    """The library, for calls of which too little is known to choose a kernel, or nothing may be compiled or loaded."""
    library = Candidate.of(problem.op, "library", {})
    decided = partial(decide, problem, communicator.snapshot, communicator.limits, policy="any", forced=library)
    launch = communicator.bind(problem, library, for_calls=True)
    return Plan(problem, library, "forced", launch, False, "any", decided)


def _forced(communicator: Communicator, problem: Problem, policy: NumericsPolicy) -> Candidate | None:
    """The candidate that something other than the databases decides for, if there is one."""
    forced = forced_candidate(problem, communicator.limits, agreed=communicator.settings.forced)
    if forced is None and communicator.settings.mode == "off":
        check_library(problem, policy, "TUNEDCOMM_MODE=off")
        forced = Candidate.of(problem.op, "library", {})
    return forced


def _decision(
    communicator: Communicator, problem: Problem, policy: NumericsPolicy, max_sms: int | None, *, told: bool = True
) -> Decision:
    check_policy(policy)
    check_limit("max_sms", max_sms, "SMs")
    decided = partial(
        decide, problem, communicator.snapshot, communicator.limits, policy=policy,
        forced=_forced(communicator, problem, policy), max_sms=max_sms,
    )  # fmt: skip
    quarantined = communicator.quarantined
    return _unless_quarantined(decided, policy, quarantined) if quarantined else decided(told=told)


def _unless_quarantined(
    decided: Callable[[], Decision], policy: NumericsPolicy, quarantined: Mapping[tuple[str, str], str]
) -> Decision:
    """The decision, or the library in the place of a variant that the group does not run any more."""
    decision = decided()
    op = decision.candidate.op
    reason = quarantined.get((op, decision.candidate.variant))
    if reason is None:
        return decision
    if not _admits_library(policy, op):
        raise InfeasibleError(f"{decision.candidate}: {reason}, and numerics={policy!r} does not admit the library")
    return _library_instead(decision, reason)


def _checked_decision(
    communicator: Communicator, problem: Problem, policy: NumericsPolicy, max_sms: int | None
) -> Decision:
    """The decision without reasons, once its candidate was checked here if its rows are borrowed; collective then."""
    decision = _decision(communicator, problem, policy, max_sms, told=False)
    while first_use.is_due(communicator, problem, decision):
        first_use.check(communicator, problem, decision.candidate)
        decision = _decision(communicator, problem, policy, max_sms, told=False)
    return decision


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
    decision = _decision(communicator, problem, communicator.policy(policy), max_sms)
    decision = beside_ordered(decision, problem, communicator.snapshot, communicator.limits, max_sms=max_sms)
    decision = replace(decision, problem=problem, asked_for=communicator.snapshot.environment)
    return note_force_mode(decision, communicator.settings.mode)


@contextlib.contextmanager
def force(op: str, variant: str, config: Mapping[str, Value] | None = None) -> Iterator[None]:
    """Run one variant for every problem of `op` inside the `with` block, the same on every rank.

    Args:
        op, variant: registered names.
        config: a point of the variant's space; by default the variant's own default for each problem.

    Raises:
        UnknownNameError, ConfigError: no such op or variant, or a config outside the space. A problem that the variant
            cannot run raises InfeasibleError when it is called.
    """
    kernels.discover()
    known = get_variant(get_op(op).name, variant)
    clean = None if config is None else known.space.validate(config)
    before = forced_ops.get(op)
    forced_ops[op] = (variant, clean)
    _forget_plans()
    try:
        yield
    finally:
        if before is None:
            del forced_ops[op]
        else:
            forced_ops[op] = before
        _forget_plans()


def _forget_plans() -> None:
    for communicator in live_communicators():
        communicator.forget_plans()


@dataclass(frozen=True, slots=True)
class Agreement:
    """The things that all ranks of a group have in common.

    Attributes:
        world_size: ranks of the group.
        snapshot: digest of the table that they dispatch from.
        settings: environment variables and the like, as they were when the group was made.
        forced: op to what `tunedcomm.force` names for it now.
        plans: each problem that was called so far, with its numerics policy, to the candidate that runs it.
    """

    world_size: int
    snapshot: str
    settings: Mapping[str, Any]
    forced: Mapping[str, str]
    plans: Mapping[str, str]


def check_agreement(group: dist.ProcessGroup | None = None, *, device: torch.device | None = None) -> Agreement:
    """Compare what every rank of a group dispatches from and has bound so far; collective over the group.

    Ranks agree when a group is made, so a difference is a mistake in this library or in how it is called: a call that
    one rank made and another did not, `out=x` or `tunedcomm.force` on one rank alone. Such a group may hang. Not for
    the hot path: it exchanges Python objects, and the ranks wait for each other.

    Args:
        group: process group, by default the default group; made ready if this is its first use.
        device: where its tensors live; by default the current CUDA device, or the CPU where there is none.

    Returns:
        What they agree on, the same on every rank.

    Raises:
        AgreementError: on every rank, naming the first rank that differs from rank 0 and in what.
        NotInitializedError: no default process group.
        GroupError: not a member of the group, or it has no backend for the device.
    """
    communicator = get_communicator(group, device)
    agreed, forced, snapshot = communicator.settings.fields(), forced_here(), communicator.snapshot.digest
    plans = {f"{plan.problem} numerics={plan.policy}": str(plan.candidate) for plan in communicator.plans.values()}
    kinds: dict[str, Mapping[str, Any]] = {
        "snapshot": {"digest": snapshot}, "setting": agreed, "tunedcomm.force": forced, "plan": plans
    }  # fmt: skip
    mine = {f"{kind} {name}": value for kind, values in kinds.items() for name, value in values.items()}
    if difference := first_difference(communicator.exchange(mine)):
        raise AgreementError(
            f"the ranks of the group do not agree: {difference}; make the same calls with the same options on every "
            "rank, and tunedcomm.release_communicators() on all of them to begin anew"
        )
    return Agreement(communicator.world_size, snapshot, agreed, forced, plans)
