"""Scores of measured candidates: noise, comparable latencies, pools of candidates. Pure arithmetic over snapshot rows.

Latencies of different runs are not comparable as they are, because clocks, neighbours and drivers differ. Each row
carries the library's latency in its own interleaved run, its baseline. With t the row's latency, b its baseline and B
the median baseline of the rows compared, a row's score is

    score = t · (B / b)^e,    e = 1 in graphs, e = 1/2 in eager calls.

A row without a baseline scores t. So does one with b > 1.5 B: something else ran at that moment, and not for as long as
both were measured, or the ratio t / b would be like the others'. Eager calls count by the root because the host moves
the library's time more than a challenger's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate

# Below 1 % two medians of one machine cannot be told apart whatever the sample count says, because clocks drift.
# Above 5 % the bound would let a slow but erratic candidate pass for a tie.
MIN_NOISE = 0.01
MAX_NOISE = 0.05
# Times the median baseline. On idle GPUs a baseline is within a tenth of it; a throttled host adds a half.
_DISTURBED = 1.5
_EAGER_EXPONENT = 0.5


class Scored(NamedTuple):
    """A candidate with its expected latency, in µs comparable within one pool, and the relative noise of that.

    `row` is the measurement behind it; of the nearer size, if predicted.
    """

    row: Row
    score: float
    noise: float

    @property
    def candidate(self) -> Candidate:
        return self.row.candidate


@dataclass(frozen=True, slots=True)
class Pool:
    """Challengers that may be compared with each other, and the library that they have to beat.

    Attributes:
        scored: one entry a challenger, least score first.
        library_us: the library's expected latency, None where it was never measured.
        outranked: rows left out because more conclusive ones exist, with the reason.
    """

    scored: tuple[Scored, ...]
    library_us: float | None
    outranked: tuple[tuple[Row, str], ...] = ()


def noise(row: Row) -> float:
    """Relative uncertainty of a row's median: half its 10-90 spread over the root of the samples, within bounds."""
    if row.latency_p10_us is None or row.latency_p90_us is None or row.samples < 1:
        return MIN_NOISE
    spread = (row.latency_p90_us - row.latency_p10_us) / (2 * row.latency_p50_us)
    return min(MAX_NOISE, max(MIN_NOISE, spread / math.sqrt(row.samples)))


def median_baseline(rows: Iterable[Row]) -> float | None:
    """The library's latency: the median baseline, else the median of the library's own rows."""
    rows = list(rows)
    known = [row.baseline_p50_us for row in rows if row.baseline_p50_us is not None]
    if known:
        return statistics.median(known)
    times = [row.latency_p50_us for row in rows if row.is_library]
    return statistics.median(times) if times else None


def quiet_rows(rows: Sequence[Row]) -> list[Row]:
    """Without rows of one candidate beside which the library took far longer than beside another of them.

    The host was loaded then, and the candidate's own time says as little as its ratio to the library's.
    """
    least = min((row.baseline_p50_us for row in rows if row.baseline_p50_us is not None), default=math.inf)
    return [row for row in rows if (row.baseline_p50_us or 0.0) <= _DISTURBED * least]


def comparable(row: Row, baseline_us: float | None) -> float:
    """The row's latency as if the library had taken `baseline_us` beside it; the formula is in the module's docstring.

    The host moves the library's eager times by tens of per cent from run to run, a challenger's by about the root of
    that below 1 MiB and by less above. Counted in full the baseline makes the choice worse
    (bench/results/db/eager_scores.csv). A row that was no faster than the library beside it counts in full, so that it
    is never taken for faster.

    Args:
        row: one measurement.
        baseline_us: None, or a time far below the row's baseline, leaves the latency as it is.
    """
    own_us = row.baseline_p50_us
    if own_us is None or baseline_us is None or own_us > _DISTURBED * baseline_us:
        return row.latency_p50_us
    exponent = _EAGER_EXPONENT if row.problem.mode == "eager" and row.latency_p50_us < own_us else 1.0
    return row.latency_p50_us / math.pow(own_us, exponent) * math.pow(baseline_us, exponent)


def tier_without_finals(row: Row) -> tuple[bool | int, ...]:
    """`Row.tier` without the difference between finals and other trials."""
    return (row.borrowed, row.drift, row.layer_rank)


def why_outranked(row: Row, best: Row) -> str:
    """Return why `best` is more conclusive than `row`."""
    if row.borrowed != best.borrowed:
        return f"measured only on {row.environment.gpu}, which is borrowed"
    if row.final < best.final:
        return "not measured in the finals"
    if row.drift != best.drift:
        return "measured only under other software"
    return f"the {best.layer} layer, which is nearer, has measurements of its own"


def in_order(scored: Iterable[Scored]) -> tuple[Scored, ...]:
    """Least score first; equal scores by name."""
    return tuple(sorted(scored, key=lambda s: (s.score, str(s.candidate))))


def challengers(rows: Iterable[Row], usable: Collection[Candidate]) -> list[Row]:
    """Rows of the candidates `usable`, never the library's."""
    return [row for row in rows if not row.is_library and row.candidate in usable]


def pool(rows: Sequence[Row], usable: Collection[Candidate], *, every_trial: bool = False) -> Pool:
    """The pool of the most conclusive rows of one size.

    Args:
        rows: every row of that size, the library's among them.
        usable: challengers that may run; rows of others are left out.
        every_trial: include trials outside the finals where there are finals.
    """
    allowed = challengers(rows, usable)
    if not allowed:
        return Pool((), median_baseline(row for row in rows if row.is_library))
    rank: Callable[[Row], tuple[bool | int, ...]] = tier_without_finals if every_trial else attrgetter("tier")
    best = min(allowed, key=rank)
    kept = [row for row in allowed if rank(row) == rank(best)]
    outranked = tuple((row, why_outranked(row, best)) for row in allowed if rank(row) != rank(best))
    # The library's rows of the same tier stand in the same runs; others only help where no baseline is known.
    baseline_us = median_baseline([*kept, *(row for row in rows if row.is_library and rank(row) == rank(best))])
    if baseline_us is None:
        baseline_us = median_baseline(row for row in rows if row.is_library)
    scored = in_order(Scored(row, comparable(row, baseline_us), noise(row)) for row in kept)
    return Pool(scored, baseline_us, outranked)
