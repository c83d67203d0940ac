"""What a new timing says about a stored winner. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tunedcomm.db.records import TrialRecord
from tunedcomm.selection.score import noise
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, admits
from tunedcomm.tuner.commands import LOST
from tunedcomm.tuner.winners import Winner, uncertainty

__all__ = ["Verdict", "Verified", "judge"]

Verdict: TypeAlias = Literal["ok", "tied", "drifted", "slower", "failed", "unmeasured"]
_WRONG = frozenset({"drifted", "slower", "failed", "unmeasured"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A stored winner and what it did now.

    Attributes:
        winner: as it was stored.
        verdict: `ok`; `tied`: it is as fast as the library within the noise, which will serve instead; `drifted`: it
            takes longer than it did, by itself and against the library, and by more than is tolerated; `slower`: it is
            slower than the library, beyond the noise; `failed`: it does not run or is not right; `unmeasured`: it was
            not tried.
        why: one sentence.
        latency_us, library_us: of it and of the library in one interleaved run; None where there is none.
        noise: relative uncertainty of `latency_us`; None where there is none.
        faster: what was measured too and is faster now, by itself and against the library, beyond the noise.
        faster_us: its latency, comparable with `latency_us`.
    """

    winner: Winner
    verdict: Verdict
    why: str
    latency_us: float | None = None
    library_us: float | None = None
    noise: float | None = None
    faster: Candidate | None = None
    faster_us: float | None = None

    @property
    def is_wrong(self) -> bool:
        """True if somebody should look at it."""
        return self.verdict in _WRONG

    @property
    def ratio(self) -> float | None:
        """Its latency over the library's, as measured now."""
        if self.latency_us is None or self.library_us is None:
            return None
        return self.latency_us / self.library_us


def judge(winner: Winner, records: Iterable[TrialRecord], *, tolerance: float) -> Verified:
    """Compare a winner with the trials that were made now.

    Args:
        winner: as it was stored.
        records: all trials of the verification, in order.
        tolerance: how much slower it may have become besides the noise, as a share.
    """
    found = list(records)
    latest = {record.candidate: record for record in found if record.problem == winner.problem}
    mine = latest.get(winner.candidate)
    if mine is None:
        return Verified(winner=winner, verdict="unmeasured", why=_why_unmeasured(winner, found))
    if mine.status != "ok" or mine.latency_p50_us is None:
        return Verified(winner=winner, verdict="failed", why=f"{mine.status}: {mine.reason}")
    library_us = mine.latency_p50_us if winner.is_library else mine.baseline_p50_us
    if library_us is None:
        why = "the library, which it is compared with, could not be measured beside it"
        return Verified(winner=winner, verdict="unmeasured", why=why, latency_us=mine.latency_p50_us)
    now = _row(mine)
    verdict, why = _compare(winner, now, library_us, tolerance)
    faster, faster_us = _faster(winner, list(latest.values()), now, library_us)
    return Verified(
        winner=winner,
        verdict=verdict,
        why=why,
        latency_us=mine.latency_p50_us,
        library_us=library_us,
        noise=noise(now),
        faster=faster,
        faster_us=faster_us,
    )


def _compare(winner: Winner, row: Row, library_us: float, tolerance: float) -> tuple[Verdict, str]:
    """What became of it. The library's time moves too: a loss against it alone is no fault of the winner."""
    if winner.is_library:
        return "ok", "the library serves"
    ratio, now = row.latency_p50_us / library_us, noise(row)
    # Where the library may not run at all, being slower than it is no fault.
    may_be_library = any(admits(policy, "library") for policy in winner.policies)
    if may_be_library and ratio > 1 + now:
        return "slower", f"it takes {ratio - 1:.1%} longer than the library, and the noise is {now:.1%}"
    uncertain = max(winner.uncertainty, uncertainty(row))
    lost = 0.0 if winner.ratio is None else ratio / winner.ratio - 1
    longer = row.latency_p50_us / winner.measured_us - 1
    if min(lost, longer) > tolerance + uncertain:
        return "drifted", (
            f"against the library it lost {lost:.1%}, and by itself it takes {longer:.1%} longer; {tolerance:.1%} and "
            f"a noise of {uncertain:.1%} are tolerated"
        )
    if may_be_library and ratio >= 1 - now:
        return "tied", f"it is no longer faster than the library by more than the noise of {now:.1%}"
    if lost > tolerance + uncertain:
        return "ok", f"against the library it lost {lost:.1%}, which is the library's doing: by itself {longer:+.1%}"
    return "ok", "as fast against the library as it was" if winner.ratio is not None else "faster than the library"


def _why_unmeasured(winner: Winner, records: list[TrialRecord]) -> str:
    lost = [r for r in records if r.variant == winner.candidate.variant and r.status in LOST]
    if lost:
        where = "; ".join(f"{record.status} at {record.problem}" for record in lost)
        name = winner.candidate.variant
        return f"not tried, for {name} had cost {len(lost)} gangs: {where}. Tune it again, or pin another one"
    return "not tried: the command was stopped, or there was no memory for the problem, as the log says then"


def _faster(
    winner: Winner, records: list[TrialRecord], mine: Row, library_us: float
) -> tuple[Candidate | None, float | None]:
    """The fastest other challenger that every policy of the winner admits, if it beats the winner beyond the noise.

    Each was timed beside the library, but not beside the winner: it must be faster as it was timed, and by its ratio to
    the library.
    """
    best: tuple[float, Candidate] | None = None
    for record in records:
        may_run = all(admits(policy, record.numerics) for policy in winner.policies)
        is_other = record.candidate != winner.candidate and record.variant != "library"
        if not (may_run and is_other and record.status == "ok" and record.latency_p50_us and record.baseline_p50_us):
            continue
        score = record.latency_p50_us / record.baseline_p50_us * library_us
        uncertain = max(uncertainty(_row(record)), uncertainty(mine))
        clearly = max(score, record.latency_p50_us) * (1 + uncertain) < mine.latency_p50_us
        if clearly and (best is None or score < best[0]):
            best = (score, record.candidate)
    return (None, None) if best is None else (best[1], best[0])


def _row(record: TrialRecord) -> Row:
    assert record.latency_p50_us is not None
    return Row(
        problem=record.problem,
        candidate=record.candidate,
        source_hash=record.source_hash,
        environment=record.environment,
        latency_p50_us=record.latency_p50_us,
        latency_p10_us=record.latency_p10_us,
        latency_p90_us=record.latency_p90_us,
        samples=record.samples,
        baseline_p50_us=record.baseline_p50_us,
        final=record.final,
    )
