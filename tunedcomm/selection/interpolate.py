"""Selection between and outside the measured sizes of a family of problems, and from its relatives. Pure.

What a candidate takes at twice a size bounds what it takes there, for there it has less to do. A straight line between
two measured sizes is no such bound: kernels go round their loops a whole number of times, so their latency is a
staircase, and a grid that fits one size to the packet goes round once more just above it. Nor are the finals enough:
each of them has been fitted to some measured size, and few can run at any size between. So every challenger with a
trial at the next larger or the next smaller measured size takes part, and is expected to take

- what the straight line in log-log between both measured sizes says, or
- what it takes at twice the size (at the larger measured size, if that is nearer), less what the library saves on the
  way or what the fastest save, whichever is less; or twice what it takes at half the size, if that is less still,

whichever is worse. Of a challenger that was measured at one of the sizes alone only one of the bounds is known. The
library changes its protocol between some sizes, and what it saves there says nothing about a kernel.

The step from one round to two is the steepest. Where the one that is expected to take least goes round more than once,
`num_rounds` of its variant tells, another config of the variant may do in one round what none that was measured at the
two sizes does. So the best of those that were measured at the size after them, and go round once here, takes part: with
what it takes there over the fastest there, less the root of the rounds that it saves.

GEMMs, shapes (M, N, K), are neighbours by size as all others are: of the same N and K and another M. Where a family and
its relatives have none of those within reach, the measured shape that is nearest in log-log of (M, N, K) serves, the
one that is off by the least factor in all, if each of M, N and K is within a factor of `MAX_REACH`. Its winner is run;
nothing is predicted, and nothing extrapolated beyond that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from tunedcomm.selection.decision import Call, Decision, settle
from tunedcomm.selection.score import Further, Place, Pool, between, pool
from tunedcomm.selection.snapshot import Row
from tunedcomm.shapes import format_shape
from tunedcomm.spec import Mode, Problem

__all__ = ["MAX_GAP", "MAX_REACH", "interpolated", "kin", "near_pools", "relatives", "sizes_of"]

# A latency curve bends where the algorithm's bound changes from latency to bandwidth, about once in a factor of 16.
MAX_GAP = 16
MAX_REACH = 2
_GEMM_EXTENTS = 3
_RELAXED = ("reduction", "in_place", "input_kind", "dtype", "layout", "scaling")
_SIXTEEN_BIT = {"bfloat16": "float16", "float16": "bfloat16"}


def sizes_of(call: Call, like: Problem) -> dict[int, list[Row]]:
    """Rows of the family of `like` by message bytes, where some challenger may be used; smallest first."""
    tail = like.shape[1:]
    rows = [r for r in call.rows(like) if r.problem.shape[1:] == tail]
    usable = call.usable(rows, predicted=True)
    by_size: dict[int, list[Row]] = {}
    for row in call.fresh(rows):
        by_size.setdefault(call.size(row.problem), []).append(row)
    return {size: by_size[size] for size in sorted(by_size) if pool(by_size[size], usable).scored}


def near_pools(call: Call, sizes: dict[int, list[Row]], size: int) -> Callable[[], list[Pool]]:
    """The pools of the nearest two sizes below and above, made only if a tie asks for them."""

    def pools() -> list[Pool]:
        below, above = [s for s in sizes if s < size], [s for s in sizes if s > size]
        chosen = [sizes[s] for s in (*below[-2:], *above[:2])]
        return [pool(rows, call.usable(rows, predicted=False)) for rows in chosen]

    return pools


def relatives(problem: Problem) -> Iterator[tuple[Problem, str]]:
    """Problems that may answer for `problem`, nearest first, each with what was relaxed."""
    dtypes = [problem.dtype, *([_SIXTEEN_BIT[problem.dtype]] if problem.dtype in _SIXTEEN_BIT else [])]
    kinds: list[Literal["plain", "symmetric"]] = [problem.input_kind]
    if problem.input_kind == "symmetric":
        kinds.append("plain")
    reductions = [problem.reduction, *(["sum"] if problem.reduction == "avg" else [])]
    places = [problem.in_place, not problem.in_place]
    extras = [(problem.layout, problem.scaling), *_fewer_extras(problem)]
    # The other 16-bit dtype before the other place: out of place the library's time holds a copy.
    for place, dtype, kind, (layout, scaling), reduction in itertools.product(
        places, dtypes, kinds, extras, reductions
    ):
        like = replace(
            problem, dtype=dtype, input_kind=kind, in_place=place, reduction=reduction, layout=layout, scaling=scaling
        )
        changed = [n for n in _RELAXED if getattr(like, n) != getattr(problem, n)]
        yield like, ", ".join(f"{n}={_said(getattr(like, n))}" for n in changed)


def _said(value: object) -> object:
    return "none" if value == "" else value


def _fewer_extras(problem: Problem) -> list[tuple[str, str]]:
    """(layout, scaling) of problems that move the same bytes between the ranks; the most usual first."""
    if len(problem.shape) == _GEMM_EXTENTS:
        return _other_operands(problem)
    if problem.op != "all_reduce_rms_norm":
        return []
    layouts = dict.fromkeys((problem.layout, "residual", "bias+residual", "", "bias"))
    scalings = dict.fromkeys((problem.scaling, ""))
    return [(layout, scaling) for scaling in scalings for layout in layouts][1:]


def _other_operands(problem: Problem) -> list[tuple[str, str]]:
    """The same of a GEMM: without what is added or given besides, then with it, then with B stored the other way."""
    stored, *rest = problem.layout.split("+")
    extra = {"ag_gemm": "gathered", "gemm_ar": "bias"}.get(problem.op)
    dtype = [part for part in rest if part != extra]
    stores = [stored, *(store for store in ("nk", "kn") if store != stored)]
    endings = [rest, dtype, *([[extra, *dtype]] if extra else [])]
    layouts = dict.fromkeys("+".join([store, *ending]) for store in stores for ending in endings)
    scalings = dict.fromkeys((problem.scaling, *(("rowwise", "tensorwise") if problem.scaling else ())))
    return [(layout, scaling) for scaling in scalings for layout in layouts][1:]


def kin(problem: Problem) -> list[Problem]:
    """Every problem, of whatever size, whose rows the choice for `problem` may look at."""
    modes: tuple[Mode, ...] = ("eager", "graph") if problem.mode == "eager" else ("graph",)
    return [like for mode in modes for like, _ in relatives(replace(problem, mode=mode))]


def interpolated(call: Call, reach: int | None) -> Decision | None:
    """Ask the family, then its relatives; `reach` None lifts the bound on extrapolation."""
    for like, relaxed in relatives(call.problem):
        sizes = sizes_of(call, like)
        if sizes and (decision := _betweensizes_of(call, sizes, reach, f" with {relaxed}" if relaxed else "")):
            return decision
    for like, relaxed in relatives(call.problem):
        rows = _nearest_matrices(call, like, reach)
        if rows:
            text = f"as at the nearest measured shape, {format_shape(rows[0].problem.shape)}"
            return _as_measured(call, rows, f"{text}{f' with {relaxed}' if relaxed else ''}: ")
    return None


def _nearest_matrices(call: Call, like: Problem, reach: int | None) -> list[Row]:
    """Rows of the nearest shape of a GEMM, of those within reach where some challenger may be used."""
    if len(call.problem.shape) != _GEMM_EXTENTS or 0 in call.problem.shape:
        return []
    by_shape: dict[tuple[int, ...], list[Row]] = {}
    for row in call.fresh(call.rows(like)):
        by_shape.setdefault(row.problem.shape, []).append(row)

    def factors(shape: tuple[int, ...]) -> list[float]:
        return [max(x, y, 1) / max(min(x, y), 1) for x, y in zip(shape, call.problem.shape, strict=True)]

    near = [shape for shape in by_shape if reach is None or max(factors(shape)) <= reach]
    for shape in sorted(near, key=lambda shape: (math.prod(factors(shape)), shape)):
        rows = by_shape[shape]
        if pool(rows, call.usable(rows, predicted=True)).scored:
            return rows
    return []


def _as_measured(call: Call, rows: list[Row], text: str) -> Decision:
    """What was best at another shape; its time here is not known."""
    usable = call.usable(rows, predicted=True)
    call.report(rows, usable)
    found = pool(rows, usable, every_trial=True)
    decision = settle(call, found, rows, source="interpolated", text=text, near=None)
    return replace(decision, latency_us=None, library_us=None, runner_up_us=None)


def _further(call: Call, sizes: dict[int, list[Row]], size: int, above: int) -> Further:
    """Of the size after `above`, if it is within reach."""
    after = min((s for s in sizes if s > above), default=None)
    rows = sizes[after] if after is not None and after <= MAX_GAP * size else []
    like = rows[0].problem if rows else call.problem
    return Further(
        rows,
        here=lambda candidate: call.rounds_of(call.problem, candidate),
        there=lambda candidate: call.rounds_of(like, candidate),
    )


def _betweensizes_of(call: Call, sizes: dict[int, list[Row]], reach: int | None, relaxed: str) -> Decision | None:
    size = call.size(call.problem)

    def at(measured: int, text: str, *, exact: bool) -> Decision:
        rows, near = sizes[measured], near_pools(call, sizes, size) if exact else None
        usable = call.usable(rows, predicted=True)
        call.report(rows, usable)
        found = pool(rows, usable, every_trial=not exact)
        decision = settle(call, found, rows, source="interpolated", text=text, near=near)
        # The winner is known to be right for its size; its time at this one is not.
        return decision if exact else replace(decision, latency_us=None, library_us=None, runner_up_us=None)

    if size in sizes:
        return at(size, f"measured at {size} bytes{relaxed}: ", exact=True)
    below = max((s for s in sizes if s < size), default=None)
    above = min((s for s in sizes if s > size), default=None)
    if below is not None and above is not None and above <= MAX_GAP * below:
        rows, further = [*sizes[below], *sizes[above]], _further(call, sizes, size, above)
        usable = call.usable([*rows, *further.rows], predicted=True)
        found = between(sizes[below], sizes[above], Place.of(size, below, above), usable, further)
        if found.scored:
            call.report(rows, usable)
            text = f"predicted between {below} and {above} bytes{relaxed}: "
            return settle(call, found, rows, source="interpolated", text=text, near=None)
    ends = [s for s in (below, above) if s is not None]
    nearest = min(ends, key=lambda s: (max(s, size) / min(s, size), s))
    if reach is None or max(nearest, size) <= reach * min(nearest, size):
        return at(nearest, f"as at the nearest measured size, {nearest} bytes{relaxed}: ", exact=False)
    return None
