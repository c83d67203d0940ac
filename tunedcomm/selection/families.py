"""The rows of a snapshot by family, shape and size: the part of a choice that every size of a family shares. Pure.

The tables of a family are made at its first problem and stay with the snapshot. So a size never seen before only looks
at the rows of its neighbours. When the source of a kernel changes, new tables are made.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property

from tunedcomm.selection.interpolate import related_forms, related_problems
from tunedcomm.selection.snapshot import Pinned, Row, Snapshot
from tunedcomm.spec import Candidate, Problem

Shape = tuple[int, ...]


class Sizes:
    """Rows by message bytes."""

    def __init__(self, rows: Mapping[int, list[Row]]) -> None:
        self.rows = rows
        self._order = sorted(rows)

    def below(self, size: int) -> Iterator[int]:
        """The sizes below `size`, nearest first."""
        return reversed(self._order[: bisect_left(self._order, size)])

    def above(self, size: int) -> Iterator[int]:
        """The sizes above `size`, nearest first."""
        return iter(self._order[bisect_right(self._order, size) :])


class Family:
    """The rows of one family, of this hardware or borrowed.

    Attributes:
        problem: the family, which is a problem without a shape.
        by_shape: every row.
    """

    def __init__(self, problem: Problem, rows: Sequence[Row], tables: Tables) -> None:
        self.problem = problem
        self.by_shape: dict[Shape, list[Row]] = {}
        self._tables = tables
        for row in rows:
            self.by_shape.setdefault(row.problem.shape, []).append(row)

    @cached_property
    def fresh_by_shape(self) -> Mapping[Shape, list[Row]]:
        """Rows whose kernel is still the same; shapes without any are left out."""
        fresh = ((shape, list(filter(self._tables.is_fresh, rows))) for shape, rows in self.by_shape.items())
        return {shape: rows for shape, rows in fresh if rows}

    @cached_property
    def every_size(self) -> Sizes:
        """Every row by size."""
        return self._sizes(self.by_shape)

    @cached_property
    def _fresh_sizes(self) -> Mapping[Shape, Sizes]:
        alike: dict[Shape, dict[Shape, list[Row]]] = {}
        for shape, rows in self.fresh_by_shape.items():
            alike.setdefault(shape[1:], {})[shape] = rows
        return {rest: self._sizes(by_shape) for rest, by_shape in alike.items()}

    def fresh_sizes(self, shape: Shape) -> Sizes | None:
        """Fresh rows by size, where all extents but the first are as in `shape`; None if there are none."""
        return self._fresh_sizes.get(shape[1:])

    def _sizes(self, by_shape: Mapping[Shape, list[Row]]) -> Sizes:
        by_size: dict[int, list[Row]] = {}
        for rows in by_shape.values():
            by_size.setdefault(self._tables.size_of(rows[0].problem), []).extend(rows)
        return Sizes(by_size)


class Tables:
    """The families of one op, with the source hashes of one moment."""

    def __init__(
        self,
        snapshot: Snapshot,
        op: str,
        hashes: Mapping[tuple[str, str], str | None],
        size_of: Callable[[Problem], int],
    ) -> None:
        self._hashes, self.size_of = hashes, size_of
        self._rows = snapshot.families(op)
        self._families: dict[tuple[Problem, bool], Family] = {}
        self._related: dict[Hashable, tuple[tuple[Family, str], ...]] = {}
        self._pins = {pin.problem: pin for pin in snapshot.pins}
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

    def pin(self, problem: Problem) -> Pinned | None:
        return self._pins.get(problem)

    def family(self, problem: Problem, *, borrowed: bool) -> Family:
        """The family of that name, `problem` without a shape."""
        key = (problem, borrowed)
        if key not in self._families:
            self._families[key] = Family(problem, self._rows.get(key, ()), self)
        return self._families[key]

    def related(self, problem: Problem, *, borrowed: bool) -> tuple[tuple[Family, str], ...]:
        """Families with rows that may answer for `problem`, nearest first, each with what was relaxed."""
        key = (problem.family, tuple(related_forms(problem)), borrowed)
        if key not in self._related:
            related = ((like.family, relaxed) for like, relaxed in related_problems(problem))
            self._related[key] = tuple(
                (self.family(like, borrowed=borrowed), relaxed)
                for like, relaxed in related
                if (like, borrowed) in self._rows
            )
        return self._related[key]

    def failed(self, families: Collection[Problem]) -> Mapping[Candidate, str]:
        """Candidates whose current kernels failed in these families, each with the status and the problem."""
        found = [failure for family in families for failure in self._failures.get(family, ())]
        failed: dict[Candidate, str] = {}
        for _, candidate, how in sorted(found, key=lambda failure: failure[0]):
            failed.setdefault(candidate, how)
        return failed
