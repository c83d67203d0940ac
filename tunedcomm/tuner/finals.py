"""One family's finals, shared out to gangs: what dispatch answers with.

On every shape all winners of the family run, so that each has a latency curve; the shape's own best few, for dispatch
at a size between two shapes takes what was measured at the larger one and can run; and the fastest of those that take
few SMs. `db verify` chooses otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.study import default_candidates

__all__ = ["BEST_OF_SHAPE", "Finals"]

_FINALISTS_PER_SHAPE = 2
# With the best four of each shape dispatch between the shapes loses as little as with all that were tried
# (bench/regret.py); twice as many leave room for what cannot run at a size between.
BEST_OF_SHAPE = 8


class Finals:
    """Gives out the finals of a family, problem by problem.

    Args:
        family: problems in the order in which they are measured.
        knowledge: of the sweep, with every search of the family over.
        limits: of the gangs.
        chosen: what to measure of each problem besides the library, instead of what this module's text says.
        must: what is measured of a problem even if it took a gang along at another size.

    Attributes:
        elsewhere: what other supervisors run.
    """

    def __init__(
        self,
        family: Sequence[Problem],
        knowledge: Knowledge,
        limits: Limits,
        chosen: Mapping[Problem, Sequence[Candidate]] | None = None,
        must: Collection[tuple[Problem, Candidate]] = (),
    ) -> None:
        self._knowledge = knowledge
        self._must = frozenset(must)
        self._left: dict[Problem, list[Candidate]] = {}
        self.elsewhere: list[tuple[Problem, Candidate]] = []
        finalists = knowledge.finalists(family, _FINALISTS_PER_SHAPE) if chosen is None else []
        for problem in family:
            library = default_candidates(problem, limits)[:1]
            if chosen is None:
                best = knowledge.winners(problem, BEST_OF_SHAPE, "default")
                wanted: Sequence[Candidate] = [*finalists, *best, *knowledge.frugal(problem)]
            else:
                wanted = chosen[problem]
            self._left[problem] = knowledge.feasible(problem, [*library, *wanted])

    def planned(self, problem: Problem) -> int:
        """Trials of a problem still to be given out at most."""
        return len(self._left[problem])

    def ask(
        self,
        own: Problem | None,
        others: Collection[Problem],
        dropped: Collection[str],
        claim: Callable[[Problem, Candidate], bool],
    ) -> tuple[Problem, Candidate] | None:
        """The next final, or None if there is none for now.

        Args:
            own: problem whose finals the gang is at; it stays there while it can.
            others: problems whose finals other gangs are at, taken last.
            dropped: variants that are left alone.
            claim: False for a final that another supervisor runs, or has run.
        """
        for problem in sorted(self._left, key=lambda p: (p != own, p in others)):
            queue = self._left[problem]
            while queue:
                candidate = queue.pop(0)
                if candidate.variant in dropped or not self._wants(problem, candidate):
                    continue
                if claim(problem, candidate):
                    return problem, candidate
                if self._wants(problem, candidate):
                    self.elsewhere.append((problem, candidate))
        return None

    def _wants(self, problem: Problem, candidate: Candidate) -> bool:
        must = (problem, candidate) in self._must
        return self._knowledge.wants_final(problem, candidate, whatever_elsewhere=must)

    def recheck(self, problem: Problem, in_flight: Collection[Candidate]) -> None:
        """Take over what others had claimed and do not run any more."""
        mine = [candidate for of, candidate in self.elsewhere if of == problem and candidate not in in_flight]
        self.elsewhere = [(of, c) for of, c in self.elsewhere if of != problem or c in in_flight]
        self._left[problem] += mine

    def skip(self, problem: Problem) -> None:
        """Give out nothing of a problem any more."""
        self._left[problem] = []
        self.elsewhere = [(of, candidate) for of, candidate in self.elsewhere if of != problem]

    def give_back(self, problem: Problem, candidate: Candidate) -> None:
        """Take a final back that was not run after all; it is the next one of its problem."""
        self._left[problem].insert(0, candidate)
