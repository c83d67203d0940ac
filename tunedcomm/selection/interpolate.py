"""Prediction between two measured sizes, and the problems whose measurements may answer for another. Pure.

Let a < s < b be message sizes, a and b measured, t_c(x) the comparable latency of candidate c at a measured size x, and

    w(x)    = log(x / a) / log(b / a)                    place of x between a and b, 0 to 1
    line(x) = t(a)^(1 - w(x)) · t(b)^w(x)                straight line in log-log
    s2      = min(2 s, b)                                twice the size
    shrink  = max(line(s) / line(s2))                    over the library and over the fastest at a and at b
    high    = line_c(s2) · shrink                        upper bound from above
    low     = t_c(a) · 2^ceil(log2(s / a))               upper bound from below

Then the predicted latency of c at s is

    t_c(s)  = max(line_c(s), min(high, low)).

The latency at twice the size bounds that at s, because there is less to do. The straight line is no such bound: kernels
go round their loops a whole number of times, so latency is a staircase, and a grid that fits one size to the packet
goes round once more just above it. `shrink` takes the smaller saving of the library and of the fastest, because the
library changes its protocol between some sizes, and that saving says nothing about a kernel. Of a candidate that was
measured at one of the two sizes alone only one bound is known: `high` is then t_c(b) · shrink. Every challenger with a
trial at a or b takes part, not the finalists alone: each finalist fits some measured size, and few can run between.

The step from one round to two is the steepest. Where the candidate that is expected to be fastest goes round more than
once at s, another config of its variant may need one round only. Let d be the measured size after b, r_c the rounds of
c there, and f(x) the fastest at x, which between a and b is the line through the fastest of each. Of the configs that
were measured at d alone and go round once at s, the best one joins with

    t_c(s)  = max(t_c(d) · f(s) / f(d) / sqrt(r_c), f(s)) · (1 + MAX_NOISE).

Sizes more than a factor of `MAX_GAP` apart are not interpolated. Outside of the measured sizes the winner of the
nearest one serves up to a factor of `MAX_REACH`; no latency is predicted there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Literal

from tunedcomm.selection.score import (
    MAX_NOISE,
    Pool,
    Scored,
    challengers,
    comparable,
    in_order,
    median_baseline,
    noise,
    tier_without_finals,
    why_outranked,
)
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, Mode, Problem, find_op

# A latency curve bends where the algorithm's bound changes from latency to bandwidth, about once in a factor of 16.
MAX_GAP = 16
MAX_REACH = 2
GEMM_EXTENTS = 3
_SCORE = attrgetter("score")
_RELAXED = ("reduction", "in_place", "input_kind", "dtype", "layout", "scaling")
_SIXTEEN_BIT = {"bfloat16": "float16", "float16": "bfloat16"}


class Between:
    """The prediction between two measured sizes, as far as it is the same at all sizes between them.

    Args:
        low, high: the two sizes, each with its rows.
        usable: as for `pool`; only challengers of the most conclusive rows take part.
        further: rows of the size after the larger one, whose candidates may save a round.
    """

    def __init__(
        self,
        low: tuple[int, Sequence[Row]],
        high: tuple[int, Sequence[Row]],
        usable: Collection[Candidate],
        further: Sequence[Row] = (),
    ) -> None:
        (self._below, low_rows), (self._above, high_rows) = low, high
        self._further, self._usable = further, usable
        self._joining: dict[Hashable, _Joining] = {}
        at_low, at_high = ({row.candidate: row for row in challengers(rows, usable)} for rows in (low_rows, high_rows))
        pairs = {c: (at_low.get(c), at_high.get(c)) for c in {**at_high, **at_low}}
        kept, self._outranked = _most_conclusive(pairs) if pairs else ([], ())
        self._known = frozenset(kept)
        both = ((at_low, low_rows), (at_high, high_rows))
        library = tuple(median_baseline(at[c] for c in kept if c in at) or median_baseline(rows) for at, rows in both)
        times = [
            tuple(None if row is None else comparable(row, base) for row, base in zip(pairs[c], library, strict=True))
            for c in kept
        ]
        ends_of_all = list(zip(*times, strict=True)) or [(), ()]
        self._library = _Line(*library)
        self._fastest = _Line(*(min((t for t in ends if t is not None), default=None) for ends in ends_of_all))
        self._measured = []
        for candidate, ends in sorted(zip(kept, times, strict=True), key=lambda one: str(one[0])):
            measured = [row for row in pairs[candidate] if row is not None]
            level = max(map(noise, measured))
            self._measured.append((_Line(*ends), measured[0], measured[-1], level))

    def at(self, size: int, problem: Problem, num_rounds: Callable[[Problem, Candidate], int]) -> Pool:
        """The expected latencies at a size between the two, by the formula in the module's docstring.

        Args:
            size: s.
            problem: of that size.
            num_rounds: `Catalog.num_rounds`.
        """
        if not self._measured:
            return Pool((), None)
        below, above, library, fastest = self._below, self._above, self._library, self._fastest
        weight, doubled = (math.log(at / below) / math.log(above / below) for at in (size, min(2 * size, above)))
        savings = [(line.at(weight), line.at(doubled)) for line in (library, fastest)]
        shrink = max((at_size / at_double for at_size, at_double in savings if at_size and at_double), default=1.0)
        growth = 2 ** math.ceil(math.log2(size / below))
        scored = []
        for line, near_low, near_high, level in self._measured:
            score = line.expected(weight, doubled, shrink, growth)
            scored.append(Scored(near_low if weight < 0.5 else near_high, score, level))
        found = tuple(sorted(scored, key=_SCORE))  # equal ones stay in the order of their names
        if (joining := self._in_one_round(found[0], fastest.at(weight), problem, num_rounds)) is not None:
            found = in_order([*found, joining])
        return Pool(found, library.at(weight), self._outranked)

    def _in_one_round(
        self,
        best: Scored,
        fastest_us: float | None,
        problem: Problem,
        num_rounds: Callable[[Problem, Candidate], int],
    ) -> Scored | None:
        """The best config that saves the second round, if `best` needs one; the formula is above."""
        if fastest_us is None or not self._further or num_rounds(problem, best.candidate) <= 1:
            return None
        tier = tier_without_finals(best.row)
        if tier not in self._joining:
            self._joining[tier] = _Joining(self._further, self._usable, self._known, tier)
        joining = self._joining[tier]
        unknown = joining.unknown.get(best.candidate.variant, ())
        fitting = [(row, us) for row, us in unknown if num_rounds(problem, row.candidate) == 1]
        if not fitting:
            return None
        scale = fastest_us / joining.least_us

        def expected(row: Row, us: float) -> float:
            return us * scale / math.sqrt(max(1, num_rounds(row.problem, row.candidate)))

        chosen = min(fitting, key=lambda fits: (expected(*fits), str(fits[0].candidate)))
        # It was measured further away, so it loses a tie.
        score = max(expected(*chosen), fastest_us) * (1 + MAX_NOISE)
        return Scored(row=chosen[0], score=score, noise=MAX_NOISE)


class _Line:
    """The straight line in log-log between the latencies at two sizes, each None where it is not known."""

    __slots__ = ("_logs", "high", "low")

    def __init__(self, low: float | None, high: float | None) -> None:
        self.low, self.high = low, high
        self._logs = None if low is None or high is None else (math.log(low), math.log(high))

    def at(self, weight: float) -> float | None:
        """Latency at a place between the sizes, 0 to 1; None where an end is not known."""
        if self._logs is None:
            return None
        low, high = self._logs
        return math.exp((1 - weight) * low + weight * high)

    def expected(self, weight: float, doubled: float, shrink: float, growth: float) -> float:
        """The latency that is predicted at `weight`; `doubled` is the place of twice the size."""
        at_size, at_double = self.at(weight), self.at(doubled)
        if at_size is None or at_double is None:
            return self.low * growth if self.low is not None else (self.high or 0.0) * shrink
        return max(at_size, min(at_double * shrink, (self.low or 0.0) * growth))


class _Joining:
    """The challengers of the size after the larger one, of one tier.

    Attributes:
        unknown: variant to its rows of candidates that are not `known`, each with the comparable latency.
        least_us: of all.
    """

    def __init__(
        self,
        further: Sequence[Row],
        usable: Collection[Candidate],
        known: Collection[Candidate],
        tier: tuple[bool | int, ...],
    ) -> None:
        rows = [row for row in challengers(further, usable) if tier_without_finals(row) == tier]
        base = median_baseline(rows) or median_baseline(further)
        times = [(row, comparable(row, base)) for row in rows]
        self.least_us = min((us for _, us in times), default=math.inf)
        self.unknown: dict[str, list[tuple[Row, float]]] = {}
        for row, us in times:
            if row.candidate not in known:
                self.unknown.setdefault(row.candidate.variant, []).append((row, us))


def _most_conclusive(
    pairs: Mapping[Candidate, tuple[Row | None, Row | None]],
) -> tuple[list[Candidate], tuple[tuple[Row, str], ...]]:
    """The candidates with the most conclusive rows, and the rows of the others with the reason."""
    worst = {c: max((row for row in pair if row is not None), key=tier_without_finals) for c, pair in pairs.items()}
    tiers = {c: tier_without_finals(row) for c, row in worst.items()}
    best = min(tiers.values())
    kept = [c for c, tier in tiers.items() if tier == best]
    reference = worst[kept[0]]
    return kept, tuple((row, why_outranked(row, reference)) for c, row in worst.items() if tiers[c] != best)


def related_problems(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """Problems of the same shape that may answer for `problem`, nearest first, each with what was relaxed.

    `avg` is answered by `sum`; in place by out of place and the other way round; symmetric input by plain input (a
    kernel that reads a plain input reads a symmetric one, not the other way round), unless kernels of the op run
    unmeasured (`OpSpec.shape_reach`): then the ones for symmetric memory do; bfloat16 by float16 and the other way
    round; layouts and scalings as the op lists them; and combinations of these. Op, world size and mode never relax.
    """
    spec = find_op(problem.op)
    dtypes = [problem.dtype, *([_SIXTEEN_BIT[problem.dtype]] if problem.dtype in _SIXTEEN_BIT else [])]
    kinds: list[Literal["plain", "symmetric"]] = [problem.input_kind]
    if problem.input_kind == "symmetric" and not (spec and spec.shape_reach):
        kinds.append("plain")
    reductions = [problem.reduction, *(["sum"] if problem.reduction == "avg" else [])]
    places = [problem.in_place, not problem.in_place]
    # The other 16-bit dtype before the other place: out of place the library's time holds a copy.
    for place, dtype, kind, (layout, scaling), reduction in itertools.product(
        places, dtypes, kinds, related_forms(problem), reductions
    ):
        like = replace(
            problem, dtype=dtype, input_kind=kind, in_place=place, reduction=reduction, layout=layout, scaling=scaling
        )
        changed = {name: getattr(like, name) for name in _RELAXED if getattr(like, name) != getattr(problem, name)}
        yield like, ", ".join(f"{name}={'none' if value == '' else value}" for name, value in changed.items())


def related_forms(problem: Problem) -> list[tuple[str, str]]:
    """The problem's (layout, scaling), then those that may answer for it (`OpSpec.related_forms`), nearest first."""
    spec = find_op(problem.op)
    layouts, scalings = ((), ()) if spec is None else spec.related_forms(problem)
    every_layout = dict.fromkeys((problem.layout, *layouts))
    return [(layout, scaling) for scaling in dict.fromkeys((problem.scaling, *scalings)) for layout in every_layout]


def problems_to_load(problem: Problem) -> list[Problem]:
    """Problems, of whatever size, whose rows the choice for `problem` may read; eager calls read graph rows too."""
    modes: tuple[Mode, ...] = ("eager", "graph") if problem.mode == "eager" else ("graph",)
    return [like for mode in modes for like, _ in related_problems(replace(problem, mode=mode))]
