"""One problem's search as several gangs share it: what is out, what came back, when it is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from tunedcomm.db.engine import warn_once
from tunedcomm.spec import Candidate, Limits, Problem, get_variant
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.study import Search, default_candidates, search_space, stray_defaults

__all__ = ["ProblemSearch"]

# Proposals taken from each neighbour.
_PROPOSALS = 3


class ProblemSearch:
    """Gives out a problem's candidates until its search is over.

    Args:
        problem: what is tuned.
        settings: of the sweep.
        knowledge: of the sweep.
        limits: of the gangs.
        searched: problems whose search was over before, in that order.
        dropped: variants that are left alone.
        shared: other supervisors may search the problem too; what they have tried counts as this one's trials do.

    Attributes:
        until: the clock's reading after which nothing more is given out.
        over: nothing is out and nothing is left.
        elsewhere: candidates that other supervisors run.
    """

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        knowledge: Knowledge,
        limits: Limits,
        *,
        searched: Collection[Problem],
        dropped: Collection[str],
        shared: bool,
    ) -> None:
        self.problem = problem
        self.until = -math.inf
        self.over = self._closed = False
        self.elsewhere: list[Candidate] = []
        self._settings, self._knowledge, self._limits = settings, knowledge, limits
        self._searched, self._shared = tuple(searched), shared
        self._out: set[Candidate] = set()
        self._returned: list[Candidate] = []
        self._search = self._make_search(dropped)
        # The library is asked for first and whatever the clock says: no problem is left without it.
        self._must: set[Candidate] = {c for c in self._feasible[:1] if c not in knowledge.settled(problem)}

    def _make_search(self, dropped: Collection[str]) -> Search:
        problem, knowledge = self.problem, self._knowledge
        defaults = default_candidates(problem, self._limits)
        found = search_space(problem, self._limits, self._settings, dropped)
        for text in stray_defaults(problem, self._limits, {candidate.variant for candidate in found}):
            warn_once(text)
        # What took a gang along at this size is settled, at another size it is left alone.
        known = knowledge.settled(problem)
        self._feasible = [c for c in found if c in known or c in defaults[:1] or not knowledge.quarantined(problem, c)]
        allowed = self._everything = frozenset(self._feasible)
        seeds = [*defaults[:1], *knowledge.proposals(problem, _PROPOSALS, self._searched), *defaults]
        settled = {c: us for c, us in known.items() if c in allowed}
        return Search(
            problem, self._feasible, self._settings, seeds=[s for s in seeds if s in allowed], settled=settled
        )

    @property
    def planned(self) -> int:
        """Trials still to be given out at most."""
        if self._closed:
            return 0
        return len(self._returned) + self._search.planned

    @property
    def is_out(self) -> bool:
        """True while a gang of this supervisor, or another supervisor, runs a candidate of it."""
        return bool(self._out or self.elsewhere)

    def close(self) -> None:
        """Give out nothing any more."""
        self._closed = True

    def drop(self, dropped: Collection[str]) -> None:
        """Begin again without these variants; what is settled is gone through at once."""
        self._search = self._make_search(dropped)
        for candidate in [*self._out, *self._returned, *self.elsewhere]:
            self._search.take(candidate)
        self._returned = [c for c in self._returned if c.variant not in dropped]
        self.elsewhere = [c for c in self.elsewhere if c.variant not in dropped]
        self._must &= set(self._feasible)

    def ask(self, now: float, claim: Callable[[Candidate], bool]) -> Candidate | None:
        """The next candidate, or None if there is none for now.

        Args:
            now: the clock's reading.
            claim: False for a candidate that another supervisor runs, or has run.
        """
        if self._closed:
            return None
        kept: list[Candidate] = []
        found = None
        while found is None and (now < self.until or self._must - {*self.elsewhere, *kept}) and not self._is_used_up():
            candidate = self._next()
            if candidate is None:
                break
            if claim(candidate):
                found = candidate
            elif candidate not in self._knowledge.settled(self.problem):
                kept.append(candidate)
        self.elsewhere += kept
        if found is not None:
            self._must.discard(found)
            self._out.add(found)
        return found

    def _is_used_up(self) -> bool:
        """True if as many candidates as there may be have been tried by anybody, or are being tried."""
        if not self._shared:
            return False  # the search counts what was settled when its turn comes
        tried = sum(candidate in self._everything for candidate in self._knowledge.settled(self.problem))
        return tried + len(self._out) + len(self.elsewhere) >= self._settings.trials

    def _next(self) -> Candidate | None:
        if self._returned:
            return self._returned.pop(0)
        return self._search.ask()

    def recheck(self, in_flight: Collection[Candidate]) -> None:
        """Count what others run now, and take over what they had claimed and do not run any more, without a result."""
        self._returned += [candidate for candidate in self.elsewhere if candidate not in in_flight]
        self.elsewhere = [candidate for candidate in self.elsewhere if candidate in in_flight]
        self.elsewhere += sorted(filter(self._search.take, in_flight), key=str)

    def tell(self, candidate: Candidate, latency_us: float | None) -> None:
        """Report the end of a candidate that was given out, or a result of another supervisor."""
        self._out.discard(candidate)
        self._must.discard(candidate)
        if candidate in self.elsewhere:
            self.elsewhere.remove(candidate)
        self._search.take(candidate)
        self._search.tell(candidate, latency_us)

    def give_back(self, candidate: Candidate) -> None:
        """Take a candidate back that was not run after all; it is the next to be given out."""
        self._out.discard(candidate)
        if candidate not in self._everything:  # its variant was dropped meanwhile
            return
        self._returned.insert(0, candidate)
        if get_variant(candidate.op, candidate.variant).is_library:
            self._must.add(candidate)
