"""What a choice consists of: the question, the candidates' standing, and the decision with its reasons. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from tunedcomm.hardware import Environment
from tunedcomm.selection.score import Pool, Scored
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Numerics, NumericsPolicy, Problem, admits

__all__ = ["Call", "Decision", "Source", "settle"]

Source: TypeAlias = Literal["forced", "pin", "exact", "interpolated", "borrowed", "heuristic", "library"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to run, and why.

    Attributes:
        candidate: what to run.
        source: which rule chose it. `exact`, `interpolated` and `borrowed` may well choose the library.
        latency_us: expected latency, None where it is not known.
        library_us: the library's expected latency, None where it is not known.
        runner_up: the fastest other challenger, None if there was none.
        runner_up_us: its expected latency.
        trial_id: the trial that decided, within its layer.
        layer: name of that trial's layer.
        environment: where that trial was measured.
        why: one sentence for a person.
        passed_over: every other candidate that was looked at, with the reason.
    """

    candidate: Candidate
    source: Source
    why: str
    latency_us: float | None = None
    library_us: float | None = None
    runner_up: Candidate | None = None
    runner_up_us: float | None = None
    trial_id: int | None = None
    layer: str | None = None
    environment: Environment | None = None
    passed_over: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = [name for name in type(self).__dataclass_fields__ if name not in ("candidate", "runner_up")]
        plain = {name: getattr(self, name) for name in names}
        return {
            "variant": self.candidate.variant,
            "config": self.candidate.config_dict,
            **plain,
            "runner_up": None if self.runner_up is None else str(self.runner_up),
            "environment": None if self.environment is None else asdict(self.environment),
            "passed_over": [list(entry) for entry in self.passed_over],
        }


@dataclass(slots=True)
class Call:
    """The arguments of one `choose`, with what has been found out so far.

    `borrowed` says which rows are looked at; where `problem` stands in for the one that is asked, that is `asked`.
    """

    snapshot: Snapshot
    problem: Problem
    feasible: Callable[[Candidate], str | None]
    source_hash: Callable[[str, str], str | None]
    numerics_of: Callable[[str, str], Numerics | None]
    policy: NumericsPolicy
    message_bytes: Callable[[Problem], int]
    max_sms: int | None = None
    sms_of: Callable[[Candidate], int] = lambda candidate: -1
    rounds_of: Callable[[Problem, Candidate], int] = lambda problem, candidate: 0
    passed: dict[Candidate, str] = field(default_factory=dict)
    objections: dict[Candidate, str | None] = field(default_factory=dict)
    borrowed: bool = False
    asked: Problem | None = None

    def rows(self, like: Problem) -> tuple[Row, ...]:
        """Rows of all sizes of the family of `like`."""
        return self.snapshot.family_rows(like, borrowed=self.borrowed)

    @property
    def library(self) -> Candidate:
        return Candidate.of(self.problem.op, "library", {})

    @property
    def library_admitted(self) -> bool:
        return admits(self.policy, "library")

    def size(self, problem: Problem) -> int:
        return max(1, self.message_bytes(problem))

    def pass_over(self, candidate: Candidate, reason: str) -> None:
        self.passed.setdefault(candidate, reason)

    def objection(self, candidate: Candidate) -> str | None:
        """Why the candidate may not run this problem here under this policy, or None."""
        if candidate not in self.objections:
            numerics = self.numerics_of(candidate.op, candidate.variant)
            if numerics is None:
                self.objections[candidate] = f"variant {candidate.variant!r} is not known to this version of tunedcomm"
            elif not admits(self.policy, numerics):
                self.objections[candidate] = f"numerics class {numerics!r} is not admitted by policy {self.policy!r}"
            else:
                self.objections[candidate] = self.feasible(candidate) or self._too_large(candidate)
        return self.objections[candidate]

    def _too_large(self, candidate: Candidate) -> str | None:
        if self.max_sms is None or 0 <= (sms := self.sms_of(candidate)) <= self.max_sms:
            return None
        taken = f"takes {sms} SMs" if sms >= 0 else "takes nobody knows how many SMs"
        return f"{taken}, with max_sms={self.max_sms}"

    def stale(self, candidate: Candidate, source_hash: str) -> str | None:
        current = self.source_hash(candidate.op, candidate.variant)
        if current is None or current == source_hash:
            return None if current is not None else f"variant {candidate.variant!r} has no source here"
        return "its source has changed since it was measured; `tunedcomm tune` measures it again"

    def fresh(self, rows: Iterable[Row]) -> list[Row]:
        """Rows whose kernel is still the same; the library's always are."""
        return [row for row in rows if row.is_library or self.stale(row.candidate, row.source_hash) is None]

    def usable(self, rows: Sequence[Row], *, predicted: bool) -> dict[Candidate, str | None]:
        """Each challenger with the objection to it.

        A prediction also takes failures into account: in the family of the rows and in that of the problem.
        """
        families = set() if self.asked is None else {self.asked.family}
        if predicted:
            families |= {self.problem.family, *(row.problem.family for row in rows)}
        failed = {
            candidate: f"{how}; it is not used where it was not measured"
            for candidate, how in self.failed(families).items()
        }
        return {
            row.candidate: self.objection(row.candidate) or failed.get(row.candidate)
            for row in rows
            if not row.is_library
        }

    def failed(self, families: Collection[Problem]) -> dict[Candidate, str]:
        """How and where candidates failed in these families, with the kernels that they have now."""
        found: dict[Candidate, str] = {}
        for failure in self.snapshot.failures if families else ():
            if failure.problem.family in families and self.stale(failure.candidate, failure.source_hash) is None:
                found.setdefault(failure.candidate, f"was {failure.status} at {failure.problem}")
        return found

    def report(self, rows: Iterable[Row], usable: Mapping[Candidate, str | None]) -> None:
        """Note why rows that were looked at could not even compete."""
        rows = [row for row in rows if not row.is_library]
        fresh = {row.candidate for row in self.fresh(rows)}
        for row in rows:
            if row.candidate not in fresh:
                self.pass_over(row.candidate, self.stale(row.candidate, row.source_hash) or "")
            elif reason := usable.get(row.candidate):
                self.pass_over(row.candidate, reason)


def settle(
    call: Call,
    found: Pool,
    rows: Sequence[Row],
    *,
    source: Source,
    text: str,
    near: Callable[[], Sequence[Pool]] | None,
) -> Decision:
    """Choose among the challengers of a pool and the library.

    Args:
        call: the question.
        found: who competes.
        rows: the rows behind the pool, the library's among them.
        source: the rule that found the pool.
        text: how the numbers were found, the beginning of the sentence that explains.
        near: the pools of the neighbouring sizes, asked only to break a tie; None lets the least score win.
    """
    for row, reason in found.outranked:
        call.pass_over(row.candidate, reason)
    beating = [scored for scored in found.scored if _beats_library(call, found, scored)]
    if not beating:
        return _library_wins(call, found, rows, source, text)
    best = beating[0]
    tied = [s for s in beating if near and s.score <= best.score * (1 + max(best.noise, s.noise))]
    winner = min(tied, key=_preference(near())) if near and len(tied) > 1 else best
    for other in beating:
        tie = "a tie within the noise, decided by the neighbouring sizes and the name: " if other in tied else ""
        call.pass_over(
            other.candidate, f"{tie}{other.score:.2f} µs against {winner.score:.2f} µs of {winner.candidate}"
        )
    others = [s for s in found.scored if s is not winner]
    runner_up = others[0] if others else None
    return Decision(
        candidate=winner.candidate,
        source=source,
        why=text + _margins(winner, found.library_us, runner_up, tied),
        latency_us=winner.score,
        library_us=found.library_us,
        runner_up=runner_up.candidate if runner_up else None,
        runner_up_us=runner_up.score if runner_up else None,
        trial_id=winner.row.trial_id,
        layer=winner.row.layer,
        environment=winner.row.environment,
    )


def _beats_library(call: Call, found: Pool, scored: Scored) -> bool:
    if not call.library_admitted or call.max_sms is not None:
        return True
    if found.library_us is None:
        call.pass_over(scored.candidate, "was never compared with the library")
        return False
    if scored.score < found.library_us * (1 - scored.noise):
        return True
    call.pass_over(
        scored.candidate,
        f"{scored.score:.2f} µs is not less than the library's {found.library_us:.2f} µs by more than the noise of "
        f"{scored.noise:.1%}",
    )
    return False


def _library_wins(call: Call, found: Pool, rows: Sequence[Row], source: Source, text: str) -> Decision:
    own = min((row for row in rows if row.is_library), key=lambda row: row.tier, default=None)
    nearest = found.scored[0]
    known = "no challenger was compared with it"
    if found.library_us is not None:
        known = f"at {found.library_us:.2f} µs no challenger beats it by more than the noise"
    return Decision(
        candidate=call.library if own is None else own.candidate,
        source=source,
        why=f"{text}the library: {known}; the nearest is {nearest.candidate} at {nearest.score:.2f} µs",
        latency_us=found.library_us,
        library_us=found.library_us,
        runner_up=nearest.candidate,
        runner_up_us=nearest.score,
        trial_id=(own or nearest.row).trial_id,
        layer=(own or nearest.row).layer,
        environment=(own or nearest.row).environment,
    )


def _preference(pools: Sequence[Pool]) -> Callable[[Scored], tuple[int, int, str]]:
    """Order of tied challengers: most sizes nearby where they are about the best, least lost there, name."""

    def key(scored: Scored) -> tuple[int, int, str]:
        wins, lost = 0, 0.0
        for near in pools:
            there = next((s for s in near.scored if s.candidate == scored.candidate), None)
            if there is None:
                lost += 1.0
                continue
            best = near.scored[0]
            wins += there.score <= best.score * (1 + max(best.noise, there.noise))
            lost += there.score / best.score - 1
        return (-wins, round(100 * lost / max(1, len(pools))), str(scored.candidate))

    return key


def _margins(winner: Scored, library_us: float | None, runner_up: Scored | None, tied: Sequence[Scored]) -> str:
    parts = [f"{winner.candidate} takes {winner.score:.2f} µs"]
    if library_us is not None:
        parts.append(f"{library_us / winner.score:.2f}x as fast as the library ({library_us:.2f} µs)")
    if runner_up is not None:
        named = f"the runner-up {runner_up.candidate} ({runner_up.score:.2f} µs)"
        if runner_up.score >= winner.score:
            parts.append(f"{runner_up.score / winner.score - 1:+.1%} to {named}")
        elif runner_up in tied:
            level = max(winner.noise, runner_up.noise)
            parts.append(
                f"{winner.score / runner_up.score - 1:.1%} slower than {named}, a tie within the noise of {level:.1%} "
                "that the neighbouring sizes and the name decide"
            )
        else:
            parts.append(
                f"{winner.score / runner_up.score - 1:.1%} slower than {named}, which does not beat the library by "
                f"more than its noise of {runner_up.noise:.1%}"
            )
    trial = "" if winner.row.trial_id is None else f"trial {winner.row.trial_id} of "
    return f"{', '.join(parts)}; {trial}the {winner.row.layer} layer"
