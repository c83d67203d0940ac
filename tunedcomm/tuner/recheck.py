"""Measures chosen candidates as finals, and searches nothing: what `db verify` gives to its gangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.commands import Command, Row
from tunedcomm.tuner.coordinator import Coordinator
from tunedcomm.tuner.finals import Finals
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.study import families

__all__ = ["Recheck"]


class Recheck(Coordinator):
    """A coordinator whose work is known once the first gang has said where it runs.

    Nothing that is stored counts as measured: every candidate is checked in full and timed again, beside the library.
    What crashes or hangs costs a gang, as in a sweep, and is not tried at another size of its family.

    Args:
        settings: of the gangs.
        source_hash: see `Coordinator`.
        on_row: see `Coordinator`.
        choose: the environment and limits of the gangs to what is measured of each problem besides the library.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        source_hash: Callable[[str, str], str],
        on_row: Callable[[Row], None],
        choose: Callable[[Environment, Limits], Mapping[Problem, Sequence[Candidate]]],
    ) -> None:
        super().__init__((), settings, source_hash=source_hash, on_row=on_row)
        self._choose = choose

    def gang_ready(self, gang: int, environment: Environment, limits: Limits) -> None:
        """Take a gang in, see `Coordinator`; the first one decides what there is to do."""
        is_first = self.environment is None
        chosen = self._choose(environment, limits) if is_first else {}
        if is_first:
            self._families = families(chosen)
            self._searches = dict.fromkeys(chosen)
        super().gang_ready(gang, environment, limits)
        for family in self._families if is_first else ():
            self._finals[family[0]] = Finals(family, self._knowledge, limits, chosen)

    def planned(self, problem: Problem) -> int:
        """Trials of a problem still to be given out at most."""
        finals = next(finals for first, finals in self._finals.items() if first.family == problem.family)
        return finals.planned(problem)

    def _offers(self, gang: int) -> Iterator[Command | None]:
        for family in self._families:
            yield self._from_finals(gang, family)
