"""Which candidate runs a problem: a pure function of a snapshot and the problem.

Order of resolution: forced, pin, exact, interpolated, heuristic, library.

- Never considered (except when forced): a candidate that the numerics policy does not admit, that `feasible` refuses,
  or whose source has changed since it was measured. A pin is bound by policy and feasibility but not by the source.
- *Exact*: the rows of that very problem, the most conclusive tier of them (`Row.tier`), compared as `score` says.
- *Interpolated*: rows of the same family at other sizes (`message_bytes`; of shapes with several extents all but the
  first must agree). Between two measured sizes at most `MAX_GAP` times apart, the challengers measured at both are
  predicted by a straight line in log-log. Elsewhere, and where none was measured at both, the winner of the nearest
  size serves within a factor of `MAX_REACH`; beyond that nothing is extrapolated. Candidates that were ever incorrect,
  crashed or hung in the family, and have not been good there since, are not interpolated.
- Where a family gives no answer its relatives are asked, in this order: `avg` answered by `sum`; in place by out of
  place and the other way round; symmetric input by plain input (what reads a plain input reads a symmetric one, not the
  other way round); combinations of these; then the same with bfloat16 for float16 or the other way round. Mode, world
  size and op never relax.
- A challenger must beat the library by more than its noise (skipped where the policy excludes the library).
- Near ties, within noise of the fastest, go to the one that is within noise of the best at more of the nearest two
  sizes below and above, then to the one that loses fewer whole per cent there, then by name: re-tuning does not flip
  the choice and neighbouring sizes tend to share a kernel.

Imports only leaves and the pure modules beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from tunedcomm.db.decision import Call, Decision, Source, settle
from tunedcomm.db.score import Pool, between, pool
from tunedcomm.db.snapshot import Failure, Pinned, Row, Snapshot
from tunedcomm.errors import InfeasibleError
from tunedcomm.spec import Candidate, Numerics, NumericsPolicy, Problem, admits

__all__ = ["MAX_GAP", "MAX_REACH", "Decision", "Failure", "Pinned", "Row", "Snapshot", "Source", "choose", "relatives"]

# A latency curve bends where the algorithm's bound changes from latency to bandwidth, about once in a factor of 16.
MAX_GAP = 16
MAX_REACH = 2
_SIXTEEN_BIT = {"bfloat16": "float16", "float16": "bfloat16"}


def choose(
    snapshot: Snapshot,
    problem: Problem,
    *,
    feasible: Callable[[Candidate], str | None],
    source_hash: Callable[[str, str], str | None],
    numerics_of: Callable[[str, str], Numerics | None],
    message_bytes: Callable[[Problem], int],
    policy: NumericsPolicy = "default",
    heuristic: Callable[[Problem], Candidate | None] | None = None,
    forced: Candidate | None = None,
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
        heuristic: the op's rule for what was never measured.
        forced: a candidate asked for by name: overrides everything but feasibility, the policy included.
        hopeless: why no variant that the policy admits can ever run `problem` here, or None; asked where nothing that
            it admits is known, for tuning is no way out then.

    Raises:
        InfeasibleError: the forced candidate cannot run, or the policy excludes the library and nothing that it admits
            is known.
    """
    call = Call(snapshot, problem, feasible, source_hash, numerics_of, policy, message_bytes)
    if forced is not None:
        return _forced(call, forced)
    decision = _pinned(call) or _exact(call) or _interpolated(call, MAX_REACH) or _heuristic(call, heuristic)
    if decision is None and not call.library_admitted:
        # Nothing slower than the library is to be feared here, for the library may not run at all.
        decision = _interpolated(call, None)
    decision = decision or _library(call, hopeless)
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
        if reason is None:
            text = f"{pin.candidate} is pinned in the {pin.layer} layer: {pin.reason or 'no reason given'}"
            return replace(_measured(call, pin.candidate, "pin", text), layer=pin.layer)
        call.pass_over(pin.candidate, f"pinned, but {reason}")
    return None


def _measured(call: Call, candidate: Candidate, source: Source, why: str) -> Decision:
    """A decision that does not rest on measurements, with the numbers if there are some."""
    rows = [row for row in call.snapshot.family_rows(call.problem) if row.problem == call.problem]
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
    rows = [row for row in call.snapshot.family_rows(call.problem) if row.problem == call.problem]
    usable = call.usable(rows, predicted=False)
    call.report(rows, usable)
    found = pool(call.fresh(rows), usable)
    if not found.scored:
        return None
    sizes = _sizes(call, call.problem)
    near = _near(call, sizes, call.size(call.problem))
    return settle(call, found, rows, source="exact", text="", near=near)


def _sizes(call: Call, like: Problem) -> dict[int, list[Row]]:
    """Rows of the family of `like` by message bytes, where some challenger may be used; smallest first."""
    tail = like.shape[1:]
    rows = [r for r in call.snapshot.family_rows(like) if r.problem.shape[1:] == tail]
    usable = call.usable(rows, predicted=True)
    by_size: dict[int, list[Row]] = {}
    for row in call.fresh(rows):
        by_size.setdefault(call.size(row.problem), []).append(row)
    return {size: by_size[size] for size in sorted(by_size) if pool(by_size[size], usable).scored}


def _near(call: Call, sizes: dict[int, list[Row]], size: int) -> Callable[[], list[Pool]]:
    """The pools of the nearest two sizes below and above, made only if a tie asks for them."""

    def pools() -> list[Pool]:
        below, above = [s for s in sizes if s < size], [s for s in sizes if s > size]
        return [pool(sizes[s], call.usable(sizes[s], predicted=False)) for s in (*below[-2:], *above[:2])]

    return pools


def relatives(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """Problems that may answer for `problem`, nearest first, each with what was relaxed."""
    dtypes = [problem.dtype, *([_SIXTEEN_BIT[problem.dtype]] if problem.dtype in _SIXTEEN_BIT else [])]
    kinds: list[Literal["plain", "symmetric"]] = [problem.input_kind]
    if problem.input_kind == "symmetric":
        kinds.append("plain")
    reductions = [problem.reduction, *(["sum"] if problem.reduction == "avg" else [])]
    places = [problem.in_place, not problem.in_place]
    for dtype, kind, place, reduction in itertools.product(dtypes, kinds, places, reductions):
        like = replace(problem, dtype=dtype, input_kind=kind, in_place=place, reduction=reduction)
        changed = [
            n for n in ("reduction", "in_place", "input_kind", "dtype") if getattr(like, n) != getattr(problem, n)
        ]
        yield like, ", ".join(f"{n}={getattr(like, n)}" for n in changed)


def _interpolated(call: Call, reach: int | None) -> Decision | None:
    """Ask the family, then its relatives; `reach` None lifts the bound on extrapolation."""
    for like, relaxed in relatives(call.problem):
        sizes = _sizes(call, like)
        if sizes and (decision := _between_sizes(call, sizes, reach, f" with {relaxed}" if relaxed else "")):
            return decision
    return None


def _between_sizes(call: Call, sizes: dict[int, list[Row]], reach: int | None, relaxed: str) -> Decision | None:
    size = call.size(call.problem)
    near = _near(call, sizes, size)

    def at(measured: int, text: str, *, exact: bool) -> Decision:
        rows = sizes[measured]
        usable = call.usable(rows, predicted=True)
        call.report(rows, usable)
        decision = settle(call, pool(rows, usable), rows, source="interpolated", text=text, near=near)
        # The winner is known to be right for its size; its time at this one is not.
        return decision if exact else replace(decision, latency_us=None, library_us=None, runner_up_us=None)

    if size in sizes:
        return at(size, f"measured at {size} bytes{relaxed}: ", exact=True)
    below = max((s for s in sizes if s < size), default=None)
    above = min((s for s in sizes if s > size), default=None)
    if below is not None and above is not None and above <= MAX_GAP * below:
        rows = [*sizes[below], *sizes[above]]
        usable = call.usable(rows, predicted=True)
        found = between(sizes[below], sizes[above], math.log(size / below) / math.log(above / below), usable)
        if found.scored:
            call.report(rows, usable)
            text = f"predicted between {below} and {above} bytes{relaxed}: "
            return settle(call, found, rows, source="interpolated", text=text, near=near)
    ends = [s for s in (below, above) if s is not None]
    nearest = min(ends, key=lambda s: (max(s, size) / min(s, size), s))
    if reach is None or max(nearest, size) <= reach * min(nearest, size):
        return at(nearest, f"as at the nearest measured size, {nearest} bytes{relaxed}: ", exact=False)
    return None


def _heuristic(call: Call, heuristic: Callable[[Problem], Candidate | None] | None) -> Decision | None:
    candidate = heuristic(call.problem) if heuristic is not None else None
    if candidate is None:
        return None
    if candidate == call.library and call.library_admitted:
        return _measured(
            call, candidate, "heuristic", f"nothing near is measured; the op's rule of thumb is {candidate}"
        )
    reason = call.objection(candidate)
    for failure in call.snapshot.failures:
        current = call.stale(failure.candidate, failure.source_hash) is None
        if failure.candidate == candidate and failure.problem.family == call.problem.family and current:
            reason = reason or f"was {failure.status} at {failure.problem}"
    if reason is not None:
        call.pass_over(candidate, reason)
        return None
    return _measured(call, candidate, "heuristic", f"nothing near is measured; the op's rule of thumb is {candidate}")


def _library(call: Call, hopeless: Callable[[], str | None]) -> Decision:
    rows = call.snapshot.family_rows(call.problem)
    if rows:
        size = call.size(call.problem)
        nearest = min({call.size(row.problem) for row in rows}, key=lambda s: (abs(math.log(s / size)), s))
        rows = tuple(row for row in rows if call.size(row.problem) == nearest)
        call.report(rows, call.usable(rows, predicted=True))
        why = f"nothing measured at {nearest} bytes, the nearest size, may serve"
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
    return _measured(call, call.library, "library", f"the library: {why}; `tunedcomm tune` measures it")
