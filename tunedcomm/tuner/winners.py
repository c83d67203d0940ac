"""What dispatch answers on a machine at every measured problem, and what to measure to see whether it still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tunedcomm.errors import InfeasibleError
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import noise
from tunedcomm.selection.select import Decision, Registered, choose
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, get_op, ops

__all__ = ["Stored", "Winner", "candidates_to_measure", "stored_winners", "uncertainty"]

# The default comes first: it is what most callers get.
_POLICIES: tuple[NumericsPolicy, ...] = ("default", "ordered", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """What dispatch answers at a measured problem under at least one numerics policy.

    Attributes:
        problem, candidate: what it answers, and to what.
        policies: numerics policies that it is the answer under.
        latency_us, library_us: what is stored of it and of the library, comparable with each other; None where the
            library was never measured beside it.
        noise: relative uncertainty of `latency_us`.
        measured_us: what it took itself, in the run that it was measured in.
        uncertainty: by how much `measured_us` may differ in another run of the same machine, as a share.
        environment: where it was measured.
        layer: name of the layer that holds it.
        created_at: when it was measured, ISO 8601 in UTC.
        is_drift: it was measured under other software.
    """

    problem: Problem
    candidate: Candidate
    policies: tuple[NumericsPolicy, ...]
    latency_us: float
    library_us: float | None
    noise: float
    measured_us: float
    uncertainty: float
    environment: Environment
    layer: str
    created_at: str
    is_drift: bool

    @property
    def is_library(self) -> bool:
        """True where no challenger beat the library."""
        return self.candidate.variant == "library"

    @property
    def ratio(self) -> float | None:
        """Its latency over the library's."""
        return None if self.library_us is None else self.latency_us / self.library_us


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known about one problem.

    Attributes:
        winners: the default policy's first.
        runner_up: the fastest other challenger under the default policy, if there is one.
    """

    winners: tuple[Winner, ...]
    runner_up: Candidate | None

    @property
    def age(self) -> tuple[bool, str]:
        """Sorts first what is most in doubt: other software, then the oldest."""
        return min((not winner.is_drift, winner.created_at) for winner in self.winners)


def uncertainty(row: Row) -> float:
    """By how much a median may differ in another run, as a share.

    In graphs that is `noise`. An eager call of a small message takes what the host takes, and what moves a host lasts
    longer than a run: many samples of one run say little about the next. So all of half the 10-90 spread counts.
    """
    known = row.latency_p10_us is not None and row.latency_p90_us is not None
    if row.problem.mode != "eager" or not known:
        return noise(row)
    assert row.latency_p10_us is not None
    assert row.latency_p90_us is not None
    return max(noise(row), (row.latency_p90_us - row.latency_p10_us) / (2 * row.latency_p50_us))


def stored_winners(
    snapshot: Snapshot,
    limits: Limits,
    source_hash: Callable[[str, str], str | None],
    wanted: Callable[[Problem], bool] = lambda problem: True,
) -> dict[Problem, Stored]:
    """The winners at the wanted problems of a snapshot, pins aside, by problem.

    A problem is left out if nothing that was measured at it may be used any more, e.g. since its kernels have changed.
    """
    measured = replace(snapshot, pins=())
    known = ops()
    problems = sorted({row.problem for row in snapshot.rows if row.problem.op in known and wanted(row.problem)})
    found = {problem: _stored(measured, problem, limits, source_hash) for problem in problems}
    return {problem: stored for problem, stored in found.items() if stored is not None}


def _stored(
    snapshot: Snapshot, problem: Problem, limits: Limits, source_hash: Callable[[str, str], str | None]
) -> Stored | None:
    here = snapshot.environment.hard_key
    rows = {
        row.candidate: row
        for row in snapshot.family_rows(problem)
        if row.problem == problem
        and row.environment.hard_key == here
        and (row.is_library or source_hash(problem.op, row.candidate.variant) == row.source_hash)
    }
    decisions: dict[Candidate, Decision] = {}
    policies: dict[Candidate, list[NumericsPolicy]] = {}
    for policy in _POLICIES:
        decision = _decide(snapshot, problem, limits, source_hash, policy)
        if decision is not None and decision.candidate in rows and decision.latency_us is not None:
            decisions.setdefault(decision.candidate, decision)
            policies.setdefault(decision.candidate, []).append(policy)
    if not decisions:
        return None
    winners = [_winner(problem, decision, rows[c], policies[c]) for c, decision in decisions.items()]
    return Stored(tuple(winners), next(iter(decisions.values())).runner_up)


def _decide(
    snapshot: Snapshot,
    problem: Problem,
    limits: Limits,
    source_hash: Callable[[str, str], str | None],
    policy: NumericsPolicy,
) -> Decision | None:
    """Dispatch's answer from measurements of this very problem; None if it has none."""
    try:
        decision = choose(snapshot, problem, Registered(limits, source_hash), policy=policy)
    except InfeasibleError:  # nothing that the policy admits is known
        return None
    return decision if decision.source == "exact" else None


def _winner(problem: Problem, decision: Decision, row: Row, policies: Iterable[NumericsPolicy]) -> Winner:
    assert decision.latency_us is not None
    return Winner(
        problem=problem,
        candidate=decision.candidate,
        policies=tuple(policies),
        latency_us=decision.latency_us,
        library_us=decision.library_us,
        noise=noise(row),
        measured_us=row.latency_p50_us,
        uncertainty=uncertainty(row),
        environment=row.environment,
        layer=row.layer,
        created_at=row.created_at,
        is_drift=row.drift,
    )


def candidates_to_measure(stored: Mapping[Problem, Stored]) -> dict[Problem, tuple[Candidate, ...]]:
    """What to measure of each problem besides the library, in the order of the problems.

    That is its winners, its runner-up, and the winners of the next problem of its family on either side: between two
    sizes dispatch compares what was measured at both, and of measurements under other software or in farther layers it
    takes none where there are better ones.
    """
    by_family: dict[tuple[Problem, tuple[int, ...]], list[Problem]] = {}
    for problem in stored:
        by_family.setdefault((problem.family, problem.shape[1:]), []).append(problem)
    near: dict[Problem, list[Problem]] = {}
    for members in by_family.values():
        members.sort(key=lambda p: (get_op(p.op).message_bytes(p), p))
        for place, problem in enumerate(members):
            near[problem] = [*members[max(place - 1, 0) : place], *members[place + 1 : place + 2]]
    found = {}
    for problem, known in stored.items():
        mine = [winner.candidate for winner in known.winners]
        mine += [] if known.runner_up is None else [known.runner_up]
        mine += [winner.candidate for other in near[problem] for winner in stored[other].winners]
        found[problem] = tuple(dict.fromkeys(c for c in mine if c.variant != "library"))
    return found
