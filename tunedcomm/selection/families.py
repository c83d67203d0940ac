"""The rows of a snapshot by family, shape and size: the part of a choice that every size of a family shares. Pure.

The tables of a family are made at its first problem and stay with the snapshot. So a size never seen before only looks
at the rows of its neighbours. When the source of a kernel changes, new tables are made.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter
from typing import Any, TypeVar

from tunedcomm.selection.interpolate import Between, related_forms, related_problems
from tunedcomm.selection.score import Pool, pool
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Problem

Shape = tuple[int, ...]
T = TypeVar("T")


# Fields of a family, but for its op and mode.
_form_of = attrgetter("dtype", "world_size", "reduction", "input_kind", "in_place", "layout", "scaling")
# Answers that are kept; sizes side by side mostly admit the same candidates.
_MAX_POOLS = 8
_MAX_PREDICTIONS = 256


class Rows(list[Row]):
    """Rows of one shape or size.

    Attributes:
        fresh: those whose kernel is still the same.
    """

    def __init__(self, rows: Iterable[Row] = (), *, fresh: Rows | None = None) -> None:
        super().__init__(rows)
        self.fresh = self if fresh is None else fresh
        self._pools: dict[Hashable, Pool] = {}

    @cached_property
    def challengers(self) -> tuple[Candidate, ...]:
        """Every candidate once, without the library."""
        return tuple(dict.fromkeys(row.candidate for row in self if not row.is_library))

    def pool(self, verdicts: tuple[bool, ...], *, every_trial: bool) -> Pool:
        """`score.pool` of these rows; `verdicts` tells for each of `challengers` if it may run."""
        key = (verdicts, every_trial)
        found = self._pools.get(key)
        if found is None:
            found = pool(self, set(compress(self.challengers, verdicts)), every_trial=every_trial)
            _keep(self._pools, key, found, _MAX_POOLS)
        return found


class Sizes:
    """Rows by message bytes."""

    def __init__(self, rows: Mapping[int, Rows]) -> None:
        self.rows = rows
        self._order = sorted(rows)
        self._challengers: dict[tuple[int, int, int | None], tuple[Candidate, ...]] = {}
        self._between: dict[Hashable, Between] = {}

    def below(self, size: int) -> Iterator[int]:
        """The sizes below `size`, nearest first."""
        return reversed(self._order[: bisect_left(self._order, size)])

    def above(self, size: int) -> Iterator[int]:
        """The sizes above `size`, nearest first."""
        return iter(self._order[bisect_right(self._order, size) :])

    def challengers(self, below: int, above: int, after: int | None) -> tuple[Candidate, ...]:
        """Every candidate of these sizes once, without the library."""
        key = (below, above, after)
        if key not in self._challengers:
            sizes = (size for size in key if size is not None)
            found = chain.from_iterable(self.rows[size].challengers for size in sizes)
            self._challengers[key] = tuple(dict.fromkeys(found))
        return self._challengers[key]

    def between(self, below: int, above: int, after: int | None, verdicts: tuple[bool, ...]) -> Between:
        """The prediction between two sizes; `verdicts` tells for each of `challengers` if it may run."""
        key = (below, above, after, verdicts)
        found = self._between.get(key)
        if found is None:
            usable = set(compress(self.challengers(below, above, after), verdicts))
            further = () if after is None else self.rows[after]
            found = Between((below, self.rows[below]), (above, self.rows[above]), usable, further)
            _keep(self._between, key, found, _MAX_PREDICTIONS)
        return found


def _keep(kept: dict[Hashable, T], key: Hashable, value: T, most: int) -> None:
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


class Family:
    """The rows of one family, of this hardware or borrowed.

    Attributes:
        problem: the family, which is a problem without a shape.
        by_shape: every row.
    """

    def __init__(self, problem: Problem, rows: Sequence[Row], tables: Tables) -> None:
        self.problem = problem
        self._tables = tables
        by_shape: dict[Shape, list[Row]] = {}
        for row in rows:
            by_shape.setdefault(row.problem.shape, []).append(row)
        self.by_shape = {shape: self._arranged(rows) for shape, rows in by_shape.items()}

    @cached_property
    def fresh_by_shape(self) -> Mapping[Shape, Rows]:
        """Rows whose kernel is still the same; shapes without any are left out."""
        return {shape: rows.fresh for shape, rows in self.by_shape.items() if rows.fresh}

    @cached_property
    def every_size(self) -> Sizes:
        """Every row by size."""
        return self._sizes(self.by_shape)

    @cached_property
    def _fresh_sizes(self) -> Mapping[Shape, Sizes]:
        alike: dict[Shape, dict[Shape, Rows]] = {}
        for shape, rows in self.fresh_by_shape.items():
            alike.setdefault(shape[1:], {})[shape] = rows
        return {rest: self._sizes(by_shape) for rest, by_shape in alike.items()}

    def fresh_sizes(self, shape: Shape) -> Sizes | None:
        """Fresh rows by size, where all extents but the first are as in `shape`; None if there are none."""
        return self._fresh_sizes.get(shape[1:])

    def _sizes(self, by_shape: Mapping[Shape, Rows]) -> Sizes:
        by_size: dict[int, list[Row]] = {}
        for rows in by_shape.values():
            by_size.setdefault(self._tables.size_of(rows[0].problem), []).extend(rows)
        return Sizes({size: self._arranged(rows) for size, rows in by_size.items()})

    def _arranged(self, rows: Sequence[Row]) -> Rows:
        fresh = Rows(filter(self._tables.is_fresh, rows))
        return fresh if len(fresh) == len(rows) else Rows(rows, fresh=fresh)


class Tables:
    """The families of one op, with the source hashes of one moment.

    Attributes:
        borrows: some rows are borrowed.
        library: the op's library.
        state: what the catalog said of the variants when the tables were made.
        pins: by problem.
        judges: checks of candidates, that choices have made.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        op: str,
        hashes: Mapping[tuple[str, str], str | None],
        size_of: Callable[[Problem], int],
        state: Sequence[object],
    ) -> None:
        self._hashes, self.size_of, self.state = hashes, size_of, state
        self.library = Candidate.of(op, "library", {})
        self.judges: list[Any] = []
        self._rows = snapshot.families(op)
        self._families: dict[Hashable, Family] = {}
        self._related: dict[Hashable, tuple[tuple[Family, str], ...]] = {}
        self.borrows = any(borrowed for _, borrowed in self._rows)
        self._last: Problem | None = None
        self.pins = {pin.problem: pin for pin in snapshot.pins}
        self._failures: dict[Problem, list[tuple[int, Candidate, str]]] = {}
        for place, failure in enumerate(snapshot.failures):
            if failure.problem.op == op and self.hash_of(failure.candidate) == failure.source_hash:
                found = self._failures.setdefault(failure.problem.family, [])
                found.append((place, failure.candidate, f"was {failure.status} at {failure.problem}"))

    def hash_of(self, candidate: Candidate) -> str | None:
        """Source hash of the candidate's variant; None if there is no such variant."""
        return self._hashes.get((candidate.op, candidate.variant))

    def is_fresh(self, row: Row) -> bool:
        """True if the row's kernel is still the same; the library always is."""
        return row.is_library or self.hash_of(row.candidate) == row.source_hash

    @cached_property
    def measured(self) -> frozenset[str]:
        """Variants with fresh rows."""
        return frozenset(row.candidate.variant for rows in self._rows.values() for row in rows if self.is_fresh(row))

    def in_any_mode(self, problem: Problem) -> Problem:
        """Return one object for both modes of a problem: by it `_Judge` knows the problem that it has just checked."""
        last = self._last
        if last is None or last.shape != problem.shape or _form_of(last) != _form_of(problem):
            self._last = last = problem
        return last

    def family(self, problem: Problem, *, borrowed: bool) -> Family:
        """The family of `problem`."""
        key = (_form_of(problem), problem.mode, borrowed)
        found = self._families.get(key)
        if found is None:
            named = problem.family
            found = self._families[key] = Family(named, self._rows.get((named, borrowed), ()), self)
        return found

    def related(self, problem: Problem, *, borrowed: bool) -> tuple[tuple[Family, str], ...]:
        """Families with rows that may answer for `problem`, nearest first, each with what was relaxed."""
        key = (_form_of(problem), problem.mode, tuple(related_forms(problem)), borrowed)
        if key not in self._related:
            related = ((like.family, relaxed) for like, relaxed in related_problems(problem))
            self._related[key] = tuple(
                (self.family(like, borrowed=borrowed), relaxed)
                for like, relaxed in related
                if (like, borrowed) in self._rows
            )
        return self._related[key]

    def failed(self, *problems: Problem) -> Mapping[Candidate, str]:
        """Candidates whose current kernels failed in the problems' families, each with the status and the problem."""
        if not self._failures:
            return {}
        families = dict.fromkeys(problem.family for problem in problems)
        found = [failure for family in families for failure in self._failures.get(family, ())]
        failed: dict[Candidate, str] = {}
        for _, candidate, how in sorted(found, key=lambda failure: failure[0]):
            failed.setdefault(candidate, how)
        return failed
