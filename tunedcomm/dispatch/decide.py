"""Decide which candidate a group runs for a problem, and why.

`decide` is pure; what is forced or quarantined is passed to it. `tunedcomm.dispatch.plans` asks it for a group, and
binds the decided candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tunedcomm import kernels, settings
from tunedcomm.errors import ConfigError, InfeasibleError, UnknownNameError, UnsupportedInputError
from tunedcomm.kernels import source_hash_of
from tunedcomm.selection.select import Decision, Registered, Source, choose
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, admits_library, check_candidate, get_variant

# Sources of decisions on problems that were not tuned.
MISSES: frozenset[Source] = frozenset({"interpolated", "borrowed", "heuristic", "library"})
# Op to the variant and config that `force` names for it now.
forced_ops: dict[str, tuple[str, dict[str, Value] | None]] = {}


def forced_here() -> dict[str, str]:
    """Op to the candidate that `force()` names for it now, in words."""
    return {op: name if config is None else f"{name} {dict(config)}" for op, (name, config) in forced_ops.items()}


def forced_candidate(
    problem: Problem, policy: NumericsPolicy, limits: Limits, mode: str, *, agreed: Mapping[str, str] | None = None
) -> Candidate | None:
    """The candidate that `force()`, TUNEDCOMM_FORCE_<OP> or TUNEDCOMM_MODE=off names for this problem, or None.

    Args:
        problem, policy, limits: what is asked, and where.
        mode: TUNEDCOMM_MODE.
        agreed: op to the variant named by the variable on every rank of a group; by default the variable as it is now.

    Raises:
        UnknownNameError: the variable names no variant of the op.
        InfeasibleError: the forced variant cannot run the problem; or the mode is `off`, and the policy does not admit
            the library.
    """
    name, config = forced_ops.get(problem.op, (None, None))
    if name is None:
        name = settings.forced(problem.op) if agreed is None else agreed.get(problem.op)
    if name is None and mode == "off":
        check_library(problem, policy, "TUNEDCOMM_MODE=off")
        return Candidate.of(problem.op, "library", {})
    if name is None:
        return None
    try:
        variant = get_variant(problem.op, name)
    except UnknownNameError as error:  # force() has looked its name up, so it is the variable's
        raise UnknownNameError(f"{settings.FORCE_PREFIX}{problem.op.upper()}={name!r}: {error}") from None
    candidate = Candidate.of(
        problem.op, name, config if config is not None else variant.default_config(problem, limits)
    )
    if reason := check_candidate(problem, candidate, limits):
        raise InfeasibleError(f"{candidate} is forced for {problem}, but cannot run it: {reason}")
    return candidate


def decide(
    problem: Problem,
    snapshot: Snapshot,
    limits: Limits,
    *,
    policy: NumericsPolicy = "default",
    forced: Candidate | None = None,
    max_sms: int | None = None,
    quarantined: Mapping[tuple[str, str], str] = {},
    with_reasons: bool = True,
) -> Decision:
    """The candidate that a group with this snapshot runs, and why. Pure: no clock, no files, no communication.

    Args:
        problem, snapshot, limits, policy, forced, max_sms: as `choose` takes them.
        quarantined: op and variant to the reason why the library runs in its place.
        with_reasons: False leaves `why` and `passed_over` incomplete, which take longer than a call may.

    Raises:
        InfeasibleError: the policy does not admit the library in the place of a quarantined variant.
    """
    kernels.discover()
    catalog = Registered(limits, source_hash_of)
    decision = choose(
        snapshot, problem, catalog, policy=policy, forced=forced, max_sms=max_sms, with_reasons=with_reasons
    )
    reason = quarantined.get((problem.op, decision.candidate.variant))
    if reason is None:
        return decision
    if not admits_library(policy, problem.op):
        raise InfeasibleError(f"{decision.candidate}: {reason}, and numerics={policy!r} does not admit the library")
    return library_instead(decision, reason)


def library_instead(decision: Decision, reason: str) -> Decision:
    """The library in the place of a decision whose candidate does not run, for `reason`."""
    passed_over = ((str(decision.candidate), reason), *decision.passed_over)
    library = Candidate.of(decision.candidate.op, "library", {})
    why = f"the library: {decision.candidate} was chosen, but {reason}"
    return Decision(candidate=library, source="library", why=why, passed_over=passed_over)


def beside_ordered(
    decision: Decision, problem: Problem, snapshot: Snapshot, limits: Limits, *, max_sms: int | None = None
) -> Decision:
    """Add what the policy `ordered` would run, if it is another candidate and both latencies are known."""
    if decision.latency_us is None:
        return decision
    try:
        other = decide(problem, snapshot, limits, policy="ordered", max_sms=max_sms)
    except (ConfigError, InfeasibleError):
        return decision
    if other.candidate == decision.candidate or other.latency_us is None:
        return decision
    return replace(decision, ordered=other.candidate, ordered_us=other.latency_us)


def note_force_mode(decision: Decision, mode: str) -> Decision:
    """Add to the reason what forced the candidate, or that TUNEDCOMM_MODE=force would raise."""
    if decision.source == "forced":
        op = decision.candidate.op
        variable = f"{settings.FORCE_PREFIX}{op.upper()}" if settings.forced(op) else ""
        by = "tunedcomm.force()" if op in forced_ops else variable or "TUNEDCOMM_MODE=off" * (mode == "off")
        return replace(decision, why=f"{decision.why} by {by}") if by else decision
    if mode != "force" or decision.is_answered:
        return decision
    return replace(decision, why=f"{decision.why}; with TUNEDCOMM_MODE=force a call raises InfeasibleError")


def check_limit(name: str, limit: int | None, unit: str) -> None:
    """Raise UnsupportedInputError unless `limit`, the argument `name`, is a number of `unit` or None."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise UnsupportedInputError(f"{name}={limit!r} is not a number of {unit}; pass an integer from 0 on, or None")


def check_policy(policy: NumericsPolicy | None) -> None:
    """Raise UnsupportedInputError for an unknown numerics policy; None stands for the one in force."""
    if policy is not None and policy not in settings.POLICIES:
        raise UnsupportedInputError(f"numerics={policy!r} is not a policy; allowed: {', '.join(settings.POLICIES)}")


def check_library(problem: Problem, policy: NumericsPolicy, why: str) -> None:
    """Refuse to run the library where the policy does not admit it.

    Raises:
        InfeasibleError: the library would have to serve, for the reason `why`.
    """
    if not admits_library(policy, problem.op):
        raise InfeasibleError(f"numerics={policy!r} does not admit the library, which would serve {problem}: {why}")
