"""Answers a coordinator's questions about its problems: how to group them, what to try first, what finals measure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from tunedcomm.spec import Candidate, Problem, get_op
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.knowledge import BESIDE_WORK_SMS, Knowledge
from tunedcomm.tuner.search.study import Search, default_candidates, search_space

# Proposals taken from each neighbour.
_PROPOSALS = 3
_FINALISTS_PER_SHAPE = 2
# With the best four candidates of each shape, dispatch between the shapes loses as little as with all candidates
# (bench/regret.py). Twice as many leave room for candidates that cannot run at a size between.
BEST_OF_SHAPE = 8


class Strategy:
    """The answers of a sweep; `JobStrategy` of `tuner/in_job.py` answers for a short search in a running job.

    Attributes:
        search: the order in which a problem's candidates are tried.
    """

    search: type[Search] = Search

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def families(self, problems: Iterable[Problem]) -> list[list[Problem]]:
        """The problems in the order of their searches, in groups that have their finals together.

        These are families in order of appearance, each from small to large messages.
        """
        grouped: dict[Problem, list[Problem]] = {}
        for problem in problems:
            grouped.setdefault(problem.family, []).append(problem)
        return [sorted(group, key=lambda p: (get_op(p.op).message_bytes(p), p.shape)) for group in grouped.values()]

    def space(self, problem: Problem, known: Knowledge) -> list[Candidate]:
        """Every candidate that may be tried."""
        return search_space(problem, known.limits, self._settings)

    def seeds(self, problem: Problem, known: Knowledge, searched: Collection[Problem]) -> list[Candidate]:
        """The candidates to try first after the library, best guess first.

        Defaults that calls run untuned come before all, also the one for calls beside work: no search may end without.
        """
        proposals = known.proposals(problem, _PROPOSALS, searched)
        untuned = [known.catalog.default_beating_library(problem, sms) for sms in (None, BESIDE_WORK_SMS)]
        return [*filter(None, untuned), *proposals, *default_candidates(problem, known.limits)]

    def finalists(self, family: Sequence[Problem], known: Knowledge) -> Iterator[tuple[Problem, list[Candidate]]]:
        """The candidates that the finals of each problem of a searched group measure, in this order.

        The best candidate of the search follows the library: a final outranks a search, also where a budget ends soon.
        """
        shared = known.finalists(family, _FINALISTS_PER_SHAPE)
        for problem in family:
            best = known.fastest(problem, BEST_OF_SHAPE, "default")
            library = known.library(problem)
            yield problem, [library, *best[:1], *shared, *best, *known.best_per_sm_limit(problem)]

    def may_begin(self, problem: Problem, seconds_left: float) -> bool:
        """True if the search of a problem may begin; a problem that may not is skipped."""
        return seconds_left > 0

    def learn_cost(self, problem: Problem, seconds: float) -> None:
        """Learn how long a trial of a problem took."""
