"""Numbers behind selection: noise, comparable scores, predictions between sizes. Pure arithmetic over snapshot rows.

Latencies of different runs are not compared as they are: clocks, neighbours and drivers differ. Every row carries the
library's latency in its own interleaved run, so a row's *score* is its ratio to that baseline times the median baseline
of the rows compared. A row without a baseline counts with its latency, and so does one whose baseline is far above that
median: something else ran then, and not for as long as both were measured, or the ratio would be like the others'.

Of eager calls the ratio counts by half, with its root: the host moves the library's time more than a challenger's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate

__all__ = ["MAX_NOISE", "MIN_NOISE", "Further", "Place", "Pool", "Scored", "between", "comparable", "noise", "pool"]

# Below one per cent two medians of one machine cannot be told apart whatever the sample count says (clocks drift);
# above five the bound would let a slow but erratic candidate pass for a tie.
MIN_NOISE = 0.01
MAX_NOISE = 0.05
# Times the median baseline, of which a baseline on idle GPUs is within a tenth; a throttled host takes a half more.
_DISTURBED = 1.5
# Exponent of the baseline's deviation from the median in eager calls; in graphs it is 1.
_EAGER_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with what it is expected to take.

    Attributes:
        row: the measurement that stands behind it (of the nearer size, if predicted).
        score: expected latency in µs, comparable within one pool.
        noise: relative uncertainty of `score`.
    """

    row: Row
    score: float
    noise: float

    @property
    def candidate(self) -> Candidate:
        return self.row.candidate


@dataclass(frozen=True, slots=True)
class Pool:
    """Challengers that may be compared with each other, and the library they have to beat.

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


def _baseline(rows: Iterable[Row]) -> float | None:
    """The library's latency: the median baseline, else the library's own rows."""
    rows = list(rows)
    known = [row.baseline_p50_us for row in rows if row.baseline_p50_us is not None]
    if known:
        return statistics.median(known)
    own = [row.latency_p50_us for row in rows if row.is_library]
    return statistics.median(own) if own else None


def comparable(row: Row, baseline_us: float | None, share: float | None = None) -> float:
    """The row's latency as if the library had taken `baseline_us` beside it.

    The host moves the library's eager times by tens of per cent from run to run, a challenger's by about the root of
    that below 1 MiB and by less above; counted in full it makes the choice worse (bench/results/db/eager_scores.csv,
    by bench/eager_scores.py). What was no faster than the library beside it is never taken for faster.

    Args:
        row: one measurement.
        baseline_us: None, or a time far below the row's baseline, leaves the latency as it is.
        share: exponent of the baseline's part of `baseline_us`; None takes that of the row's mode.
    """
    own_us = row.baseline_p50_us
    if own_us is None or baseline_us is None or own_us > _DISTURBED * baseline_us:
        return row.latency_p50_us
    if share is None:
        share = _EAGER_SHARE if row.problem.mode == "eager" and row.latency_p50_us < own_us else 1.0
    return row.latency_p50_us / math.pow(own_us, share) * math.pow(baseline_us, share)


def _tier(row: Row) -> tuple[bool | int, ...]:
    return row.tier


def _standing(row: Row) -> tuple[bool | int, ...]:
    """The tier, whether or not the row is of the finals."""
    return (row.borrowed, row.drift, row.layer_rank)


def _why_outranked(row: Row, best: Row) -> str:
    if row.borrowed != best.borrowed:
        return f"measured only on {row.environment.gpu}, which is borrowed"
    if row.final < best.final:
        return "not measured in the finals"
    if row.drift != best.drift:
        return "measured only under other software"
    return f"the {best.layer} layer, which is nearer, has measurements of its own"


def _sorted(scored: Iterable[Scored]) -> tuple[Scored, ...]:
    return tuple(sorted(scored, key=lambda s: (s.score, str(s.candidate))))


def pool(rows: Sequence[Row], usable: Mapping[Candidate, str | None], *, every_trial: bool = False) -> Pool:
    """What the rows of one size say.

    Args:
        rows: every row of that size, the library's among them.
        usable: challenger to the reason why it may not run, or None; rows of others are left out.
        every_trial: not the finals alone where there are finals.
    """
    challengers = [row for row in rows if not row.is_library and usable.get(row.candidate, "") is None]
    if not challengers:
        return Pool((), _baseline(row for row in rows if row.is_library))
    tier = _standing if every_trial else _tier
    best = min(challengers, key=tier)
    kept = [row for row in challengers if tier(row) == tier(best)]
    outranked = tuple((row, _why_outranked(row, best)) for row in challengers if tier(row) != tier(best))
    # The library's rows of the same tier stand in the same runs; others only help where no baseline is known.
    baseline_us = _baseline([*kept, *(row for row in rows if row.is_library and tier(row) == tier(best))])
    if baseline_us is None:
        baseline_us = _baseline(row for row in rows if row.is_library)
    scored = _sorted(Scored(row, comparable(row, baseline_us), noise(row)) for row in kept)
    return Pool(scored, baseline_us, outranked)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a size lies between two measured ones.

    Attributes:
        weight: 0 at the smaller size, 1 at the larger, linear in the logarithm of the bytes.
        doubled: the same for twice the size, at most 1.
        doublings: how often the smaller size has to be doubled until it is no less.
    """

    weight: float
    doubled: float
    doublings: int

    @classmethod
    def of(cls, size: int, below: int, above: int) -> Place:
        """Of `size`, which lies between `below` and `above`."""
        span = math.log(above / below)
        weight, doubled = (math.log(at / below) / span for at in (size, min(2 * size, above)))
        return cls(weight, doubled, math.ceil(math.log2(size / below)))


@dataclass(frozen=True, slots=True)
class Further:
    """What was measured at the size after the larger one, and how often grids go round.

    Attributes:
        rows: of that size.
        here: candidate to its rounds at the size that is asked; 0 where that is not known.
        there: candidate to its rounds at the size of `rows`.
    """

    rows: Sequence[Row]
    here: Callable[[Candidate], int]
    there: Callable[[Candidate], int]


def between(
    low: Sequence[Row],
    high: Sequence[Row],
    place: Place,
    usable: Mapping[Candidate, str | None],
    further: Further | None = None,
) -> Pool:
    """Expect from two measured sizes the latencies at a size between them; see `interpolate` for the reasons.

    Args:
        low: rows of the smaller size.
        high: rows of the larger size.
        place: where the size lies.
        usable: as for `pool`; only challengers of the most conclusive rows take part.
        further: who may join where the least that is expected goes round more than once.
    """
    at_low, at_high = (
        {row.candidate: row for row in rows if not row.is_library and usable.get(row.candidate, "") is None}
        for rows in (low, high)
    )
    pairs = {c: (at_low.get(c), at_high.get(c)) for c in {**at_high, **at_low}}
    if not pairs:
        return Pool((), None)
    worst = {c: max((row for row in pair if row is not None), key=_standing) for c, pair in pairs.items()}
    reference = min(worst.values(), key=_standing)
    kept = [c for c, row in worst.items() if _standing(row) == _standing(reference)]
    outranked = tuple((row, _why_outranked(row, reference)) for c, row in worst.items() if c not in kept)
    base_low = _baseline(at_low[c] for c in kept if c in at_low) or _baseline(low)
    base_high = _baseline(at_high[c] for c in kept if c in at_high) or _baseline(high)
    library = _Line(base_low, base_high)
    lines = {c: _Line.of(*pairs[c], base_low, base_high) for c in kept}
    fastest = _Line(_least(line.low for line in lines.values()), _least(line.high for line in lines.values()))
    shrunk = max((line.shrunk(place) for line in (library, fastest) if line.is_known), default=1.0)
    scored = []
    for candidate, own in lines.items():
        one, other = pairs[candidate]
        near = one if one is not None and (other is None or place.weight < 0.5) else other
        assert near is not None
        expected = own.expected(place, shrunk)
        scored.append(Scored(row=near, score=expected, noise=max(noise(row) for row in (one, other) if row)))
    found = _sorted(scored)
    joining = _in_one_round(found, fastest.at(place.weight), further, usable)
    return Pool(_sorted([*found, *joining]), library.at(place.weight), outranked)


def _in_one_round(
    found: Sequence[Scored], fastest_us: float | None, further: Further | None, usable: Mapping[Candidate, str | None]
) -> list[Scored]:
    """Where the best goes round more than once, another of its variant that goes round once and is expected to be best.

    It takes as many times the fastest as where it was measured, less the root of the rounds that it saves; but no less
    than the fastest, and by `MAX_NOISE` more, for it was measured further away.
    """
    best = found[0]
    if further is None or fastest_us is None or further.here(best.candidate) <= 1:
        return []
    rows = [row for row in further.rows if not row.is_library and usable.get(row.candidate, "") is None]
    rows = [row for row in rows if _standing(row) == _standing(best.row)]
    base, known = _baseline(rows) or _baseline(further.rows), {scored.candidate for scored in found}
    fitting = [row for row in rows if row.candidate.variant == best.candidate.variant and row.candidate not in known]
    fitting = [row for row in fitting if further.here(row.candidate) == 1]
    if not fitting:
        return []
    here_over_there = fastest_us / min(comparable(row, base) for row in rows)

    def expected(row: Row) -> float:
        return comparable(row, base) * here_over_there / math.sqrt(max(1, further.there(row.candidate)))

    chosen = min(fitting, key=lambda row: (expected(row), str(row.candidate)))
    score = max(expected(chosen), fastest_us) * (1 + MAX_NOISE)
    return [Scored(row=chosen, score=score, noise=MAX_NOISE)]


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class _Line:
    """A straight line in log-log between two sizes; None where it is not known."""

    low: float | None
    high: float | None

    @classmethod
    def of(cls, low: Row | None, high: Row | None, base_low: float | None, base_high: float | None) -> _Line:
        """Of a candidate's rows, as they are comparable."""
        pairs = ((low, base_low), (high, base_high))
        return cls(*(None if row is None else comparable(row, base) for row, base in pairs))

    def at(self, weight: float) -> float | None:
        if self.low is None or self.high is None:
            return None
        return math.exp((1 - weight) * math.log(self.low) + weight * math.log(self.high))

    @property
    def is_known(self) -> bool:
        return self.low is not None and self.high is not None

    def shrunk(self, place: Place) -> float:
        """What the line takes at a place over what it takes at twice the size."""
        here, there = self.at(place.weight), self.at(place.doubled)
        assert here is not None
        assert there is not None
        return here / there

    def expected(self, place: Place, shrunk: float) -> float:
        """A candidate's latency: the line, or a bound where that is worse; `shrunk` is the part of the way.

        The bounds are what it takes at twice the size times `shrunk`, and what it took at the smaller size, once more
        for each doubling.
        """
        bounds = []
        if self.high is not None:
            bounds.append((self.at(place.doubled) or self.high) * shrunk)
        if self.low is not None:
            bounds.append(self.low * 2**place.doublings)
        return max(self.at(place.weight) or 0.0, min(bounds))
