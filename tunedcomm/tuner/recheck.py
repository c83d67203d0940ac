"""Measures chosen candidates as finals, and searches nothing: what `db verify` gives to its gangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.commands import Command, Row
from tunedcomm.tuner.finals import Finals
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.study import families

__all__ = ["Recheck", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be measured.

    Attributes:
        candidates: of each problem, besides the library.
        must: those of a problem that are tried even if they took a gang along at another size: nobody else finds out
            what they do there.
    """

    candidates: Mapping[Problem, Sequence[Candidate]] = field(default_factory=dict)
    must: frozenset[tuple[Problem, Candidate]] = frozenset()


class Recheck(Coordinator):
    """A coordinator whose work is known once the first gang has said where it runs.

    Nothing that is stored counts as measured: every candidate is checked in full and timed again, beside the library.
    What crashes or hangs costs a gang, as in a sweep, and is tried at other sizes of its family only where it must be.

    Args:
        settings: of the gangs.
        source_hash: see `Coordinator`.
        on_row: see `Coordinator`.
        choose: the environment and limits of the gangs to what there is to do.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        source_hash: Callable[[str, str], str],
        on_row: Callable[[Row], None],
        choose: Callable[[Environment, Limits], Work],
    ) -> None:
        super().__init__((), settings, source_hash=source_hash, on_row=on_row)
        self._choose = choose

    def gang_ready(self, gang: int, environment: Environment, limits: Limits) -> None:
        """Take a gang in, see `Coordinator`; the first one decides what there is to do."""
        is_first = self.environment is None
        work = self._choose(environment, limits) if is_first else Work()
        if is_first:
            self._families = families(work.candidates)
            self._searches = dict.fromkeys(work.candidates)
        super().gang_ready(gang, environment, limits)
        for family in self._families if is_first else ():
            self._finals[family[0]] = Finals(family, self._knowledge, limits, work.candidates, work.must)

    def planned(self, problem: Problem) -> int:
        """Trials of a problem still to be given out at most."""
        finals = next(finals for first, finals in self._finals.items() if first.family == problem.family)
        return finals.planned(problem)

    def _offers(self, gang: int) -> Iterator[Command | None]:
        for family in self._families:
            yield self._from_finals(gang, family)
