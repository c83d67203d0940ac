"""Which candidate runs a problem: a pure function of a snapshot and the problem.

Order of resolution: forced, pin, exact, interpolated, borrowed, heuristic, library.

- Never considered (except when forced): a candidate that the numerics policy does not admit, that `feasible` refuses,
  or whose source has changed since it was measured. A pin is bound by policy and feasibility but not by the source.
- *Exact*: the rows of that very problem, the most conclusive tier of them (`Row.tier`), compared as `score` says.
- *Interpolated*: rows of the same family at other sizes (`message_bytes`; of shapes with several extents all but the
  first must agree). Between two measured sizes at most `MAX_GAP` times apart every challenger with a trial at one of
  them takes part, and at times one of the size after them, as `interpolate` says. Elsewhere the winner of the nearest
  size serves within a factor of `MAX_REACH`; beyond that nothing is extrapolated. Where no size of the same N and K of
  a GEMM answers, the winner of the nearest (M, N, K) does, within the same factor in each of the three. Candidates that
  were ever incorrect, crashed or hung in the family, and have not been good there since, are not interpolated, nor
  taken over from a family below.
- Where a family gives no answer its relatives are asked, in this order: `avg` answered by `sum`; in place by out of
  place and the other way round; symmetric input by plain input (what reads a plain input reads a symmetric one, not the
  other way round); a GEMM with or without bias or gathered input, or with B stored the other way; combinations of
  these; then the same with bfloat16 for float16 or the other way round. Mode, world size and op never relax.
- *Borrowed*: the same two rules over rows of other hardware that the user lets stand in, where rows of this hardware
  give no answer. Their times rank candidates and predict nothing.
- *Heuristic*: eager calls that nothing above answers run as in graphs; the other way round is never done.
- `max_sms` leaves out what takes more SMs. The library takes as many as it likes, so challengers need not beat it then,
  and it serves where nothing fits.
- A challenger must beat the library by more than its noise (skipped where the policy excludes the library).
- Near ties, within noise of the fastest, go to the one that is within noise of the best at more of the nearest two
  sizes below and above, then to the one that loses fewer whole per cent there, then by name: re-tuning does not flip
  the choice and neighbouring sizes tend to share a kernel.

Imports only leaves and the pure modules beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tunedcomm.errors import InfeasibleError
from tunedcomm.selection.decision import Call, Decision, Source, settle
from tunedcomm.selection.interpolate import MAX_GAP, MAX_REACH, interpolated, near_pools, sizes_of
from tunedcomm.selection.score import pool
from tunedcomm.selection.snapshot import Failure, Pinned, Row, Snapshot
from tunedcomm.spec import Candidate, Numerics, NumericsPolicy, Problem, admits

__all__ = ["MAX_GAP", "MAX_REACH", "Decision", "Failure", "Pinned", "Row", "Snapshot", "Source", "choose"]


def choose(
    snapshot: Snapshot,
    problem: Problem,
    *,
    feasible: Callable[[Candidate], str | None],
    source_hash: Callable[[str, str], str | None],
    numerics_of: Callable[[str, str], Numerics | None],
    message_bytes: Callable[[Problem], int],
    policy: NumericsPolicy = "default",
    forced: Candidate | None = None,
    max_sms: int | None = None,
    sms_of: Callable[[Candidate], int] = lambda candidate: -1,
    rounds_of: Callable[[Problem, Candidate], int] = lambda problem, candidate: 0,
    hopeless: Callable[[], str | None] = lambda: None,
) -> Decision:
    """Resolve `problem`; see the module's text for the rules.

    Args:
        snapshot: what the group agreed on.
        problem: what is asked.
        feasible: candidate to the reason why it cannot run `problem` here (unknown variant and a config outside its
            space among them), or None. Not asked about the library.
        source_hash: op and variant to the current source hash, None for an unknown variant.
        numerics_of: op and variant to the numerics class, None for an unknown variant.
        message_bytes: the size by which problems of one family are compared.
        policy: numerics classes that the caller accepts.
        forced: a candidate asked for by name: overrides everything but feasibility, policy and `max_sms` included.
        max_sms: SMs that the caller leaves to the call. What takes more is not considered, and the library, which takes
            as many as it likes, only where nothing else fits.
        sms_of: candidate to the SMs that it takes at most; -1 where that is not known.
        rounds_of: problem and candidate to how often its grid goes round; 0 where that is not known.
        hopeless: why no variant that the policy admits can ever run `problem` here, or None; asked where nothing that
            it admits is known, for tuning is no way out then.

    Raises:
        InfeasibleError: the forced candidate cannot run, or the policy excludes the library and nothing that it admits
            is known.
    """
    call = Call(
        snapshot, problem, feasible, source_hash, numerics_of, policy, message_bytes, max_sms, sms_of, rounds_of
    )
    if forced is not None:
        return _forced(call, forced)
    decision = _pinned(call) or _exact(call) or interpolated(call, MAX_REACH) or _borrowed(call, MAX_REACH)
    decision = decision or _heuristic(call)
    if decision is None and not call.library_admitted:
        # Nothing slower than the library is to be feared here, for the library may not run at all.
        decision = interpolated(call, None) or _borrowed(call, None)
    decision = decision or _library(call, hopeless)
    for row in snapshot.family_rows(problem, borrowed=True) if decision.source != "borrowed" else ():
        if row.problem == problem and not row.is_library:
            call.pass_over(row.candidate, f"measured only on {row.environment.gpu}, which is borrowed")
    passed = {candidate: reason for candidate, reason in call.passed.items() if candidate != decision.candidate}
    return replace(decision, passed_over=tuple(sorted((str(c), reason) for c, reason in passed.items())))


def _forced(call: Call, forced: Candidate) -> Decision:
    problem = call.problem
    reason = f"it is a candidate of {forced.op}" if forced.op != problem.op else None
    if forced != call.library:
        reason = reason or call.feasible(forced)
    if reason is not None:
        raise InfeasibleError(f"forced candidate {forced} cannot run {problem}: {reason}; force another or none")
    numerics = call.numerics_of(forced.op, forced.variant)
    outside = (
        "" if numerics is None or admits(call.policy, numerics) else f", though policy {call.policy!r} excludes it"
    )
    return _measured(call, forced, "forced", f"{forced} was forced{outside}")


def _pinned(call: Call) -> Decision | None:
    for pin in call.snapshot.pins:
        if pin.problem != call.problem:
            continue
        reason = call.objection(pin.candidate) if pin.candidate != call.library or not call.library_admitted else None
        reason = reason or _failed(call, pin.candidate)
        if reason is None:
            text = f"{pin.candidate} is pinned in the {pin.layer} layer: {pin.reason or 'no reason given'}"
            return replace(_measured(call, pin.candidate, "pin", text), layer=pin.layer)
        call.pass_over(pin.candidate, f"pinned, but {reason}")
    return None


def _failed(call: Call, candidate: Candidate) -> str | None:
    """How a candidate failed in the problem's family, unless it is the library or was good at this very problem."""
    if candidate == call.library or any(
        row.candidate == candidate and row.problem == call.problem for row in call.fresh(call.rows(call.problem))
    ):
        return None
    return call.failed({call.problem.family}).get(candidate)


def _measured(call: Call, candidate: Candidate, source: Source, why: str) -> Decision:
    """A decision that does not rest on measurements, with the numbers if there are some."""
    rows = [row for row in call.rows(call.problem) if row.problem == call.problem]
    for row in call.fresh(rows):
        if row.candidate == candidate:
            return Decision(
                candidate=candidate,
                source=source,
                why=why,
                latency_us=row.latency_p50_us,
                library_us=row.baseline_p50_us,
                trial_id=row.trial_id,
                layer=row.layer,
                environment=row.environment,
            )
    return Decision(candidate=candidate, source=source, why=why)


def _exact(call: Call) -> Decision | None:
    rows = [row for row in call.rows(call.problem) if row.problem == call.problem]
    usable = call.usable(rows, predicted=False)
    call.report(rows, usable)
    # The finals were fought for all SMs; who is the best on a few of them is seldom there.
    found = pool(call.fresh(rows), usable, every_trial=call.max_sms is not None)
    if not found.scored:
        return None
    sizes = sizes_of(call, call.problem)
    near = near_pools(call, sizes, call.size(call.problem))
    return settle(call, found, rows, source="exact", text="", near=near)


def _borrowed(call: Call, reach: int | None) -> Decision | None:
    """What the rows of other hardware say where those of this one say nothing."""
    lent = replace(call, borrowed=True)
    decision = _exact(lent) or interpolated(lent, reach)
    if decision is None or decision.environment is None:
        return None
    why = f"borrowed from {decision.environment}, where {decision.why}"
    return replace(decision, source="borrowed", why=why, latency_us=None, library_us=None, runner_up_us=None)


def _heuristic(call: Call) -> Decision | None:
    """An eager call as in graphs: the GPU does the same in both, and what the host adds favours no kernel."""
    if call.problem.mode != "eager":
        return None
    in_graphs = replace(call, problem=replace(call.problem, mode="graph"), asked=call.problem)
    decision = _exact(in_graphs) or interpolated(in_graphs, MAX_REACH)
    if decision is None:
        return None
    why = f"not tuned outside of graphs; in graphs: {decision.why}"
    return replace(decision, source="heuristic", why=why, latency_us=None, library_us=None, runner_up_us=None)


def _library(call: Call, hopeless: Callable[[], str | None]) -> Decision:
    rows, advice = call.rows(call.problem), "; `tunedcomm tune` measures it"
    if rows:
        size = call.size(call.problem)
        nearest = min({call.size(row.problem) for row in rows}, key=lambda s: (abs(math.log(s / size)), s))
        rows = tuple(row for row in rows if call.size(row.problem) == nearest)
        call.report(rows, call.usable(rows, predicted=True))
        why = f"what is measured at {nearest} bytes, the nearest size, may not serve this one"
        if any(row.problem == call.problem for row in rows):
            why, advice = "of what is measured at this very size only the library may serve", ""
    else:
        why = "nothing of this kind is measured for this hardware and world size"
    if not call.library_admitted:
        if reason := hopeless():
            raise InfeasibleError(
                f"policy {call.policy!r} admits no candidate for {call.problem}, and tuning would find none: {reason}. "
                "Allow numerics='default'"
            )
        raise InfeasibleError(
            f"policy {call.policy!r} admits no candidate for {call.problem}: {why}; run `tunedcomm tune`, or allow "
            "numerics='default'"
        )
    return _measured(call, call.library, "library", f"the library: {why}{advice}")
