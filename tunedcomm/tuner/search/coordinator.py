"""Decides what every gang of a sweep runs next: searches family by family, then each family's finals.

No tensor, no process group, no process in here: gangs ask for commands and are answered, outcomes are told, so that
recorded outcomes can stand in for machines.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from tunedcomm.db.engine import warn_once
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, get_variant
from tunedcomm.tuner.budget import Budget
from tunedcomm.tuner.commands import LOST, TOO_LARGE, Assignment, Command, Outcome, Row
from tunedcomm.tuner.finals import Finals
from tunedcomm.tuner.job import FAILED, Settings, StoredTrial
from tunedcomm.tuner.one_environment import other_environment
from tunedcomm.tuner.problem_search import ProblemSearch
from tunedcomm.tuner.search.claims import Claim, Claims
from tunedcomm.tuner.search.knowledge import Knowledge
from tunedcomm.tuner.search.study import default_candidates, families, infeasible_variants

__all__ = ["Coordinator"]

# Share of a budget that searches may use; the rest is for the finals, without which nothing is known between shapes.
_SEARCH_SHARE = 0.85
# A gang that somebody else killed says little about its candidate, the second one in a row says enough.
_MAX_KILLED = 2


class Coordinator:
    """Answers gangs, which are known by small numbers.

    Args:
        problems, settings: what is tuned, in this order, and how.
        source_hash: (op, variant) to the hash of its kernels.
        on_row: called with every trial that ended, as soon as it did.
        stored, environments: what was known before, oldest first, and digest to environment of it.
        claims: shared with other supervisors; None if there are none.
        news: trials of a problem that other supervisors have stored since the last call; asked where there are claims.
        clock, seconds_left: seconds, and how many the budget has left; None is no bound.

    Attributes:
        environment, limits: of the gangs; None until the first is ready.
        claims: may be set until the first command is asked for, by when the environment is known.
        searched: problems whose search is over, in that order.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        settings: Settings,
        *,
        source_hash: Callable[[str, str], str],
        on_row: Callable[[Row], None],
        stored: Iterable[StoredTrial] = (),
        environments: Mapping[str, Environment] | None = None,
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
        news: Callable[[Problem], Iterable[StoredTrial]] = lambda problem: (),
        seconds_left: float | None = None,
    ) -> None:
        self.environment: Environment | None = None
        self.limits: Limits | None = None
        self.searched: list[Problem] = []
        self._settings, self._source_hash, self._on_row = settings, source_hash, on_row
        self._stored, self._environments = tuple(stored), environments or {}
        self._clock, self.claims, self._news = clock, claims, news
        self._budget = Budget(clock, seconds_left)
        self._families = families(problems)
        self._searches: dict[Problem, ProblemSearch | None] = {p: None for family in self._families for p in family}
        self._finals: dict[Problem, Finals] = {}  # by the first problem of the family
        self._libraries: dict[Problem, Candidate] = {}
        # Problem that a gang is at, and whether in the finals: it keeps to it, whose tensors it holds.
        self._at: dict[int, tuple[Problem, bool]] = {}
        self._running: dict[int, Assignment] = {}
        self._blocked, self._too_large = set[Problem](), set[Problem]()  # others' searches that finals wait for
        self._lost, self._killed = Counter[str](), Counter[tuple[Problem, Candidate]]()
        self._finished: list[Claim] = []  # their trials are not in the database yet

    # What gangs say

    def gang_ready(self, gang: int, environment: Environment, limits: Limits) -> None:
        """Take a gang in; it may ask for commands from now on.

        Raises:
            TuningError: it does not run in the environment of the first one.
        """
        if self.environment is None:
            self.environment, self.limits = environment, limits
            self._knowledge = Knowledge(
                self._searches,
                environment,
                limits,
                self._source_hash,
                retry=self._settings.retry,
                stored=self._stored,
                environments=self._environments,
            )
        elif environment.digest != self.environment.digest:
            raise other_environment(gang, self.environment, environment)

    def next(self, gang: int) -> Command:
        """What a gang that runs nothing does next."""
        over = -1
        # Again where a search turned out to be over: it may be the last of its family, whose finals come first.
        while over != len(self.searched):
            over = len(self.searched)
            for command in self._offers(gang):
                if command is not None:
                    return command
                if len(self.searched) != over:
                    break
        if self._running or (self._budget.left() > 0 and self._is_elsewhere()):
            return Command(kind="wait")
        return Command(kind="end", reason="budget" if self._budget.left() <= 0 else "done")

    def learn(self, gang: int, outcome: Outcome) -> Row | None:
        """Take in how the trial that `gang` was told to run ended; None if another supervisor has stored one since."""
        running = self._running.pop(gang)
        self._killed.pop((running.problem, running.candidate), None)
        if outcome.status == TOO_LARGE:
            self._skip(running, outcome.reason)
            return None
        if self._was_taken_over(running):
            self._give_back(running)  # the other supervisor stores its row
            return None
        row = self._store(running.problem, running.candidate, outcome, final=running.command.final)
        if running.claim is not None:
            self._finished.append(running.claim)
        if not running.command.final:
            self._search(running.problem).tell(running.candidate, outcome.latency_us)
        if outcome.status in LOST:
            self._count_lost(running.candidate.variant)
        return row

    def lost(self, gang: int, status: str, reason: str, *, begun: Candidate | None, killed: bool = False) -> Row | None:
        """Take in that a gang is gone.

        Args:
            gang: which.
            status: `hung` or `crashed`.
            reason: a sentence.
            begun: the candidate that it had begun to bind or launch: its own, or the library beside it.
            killed: somebody else killed it.

        Returns:
            The row of the candidate that is blamed; None if none is, and what the gang was to run is given out again.
        """
        self._at.pop(gang, None)
        running = self._running.get(gang)
        if running is None:
            return None
        if killed:
            self._killed[running.problem, running.candidate] += 1
        spared = killed and self._killed[running.problem, running.candidate] < _MAX_KILLED
        outcome = Outcome(status=status, reason=reason)
        if begun == running.candidate and not spared:
            return self.learn(gang, outcome)
        del self._running[gang]
        self._give_back(running)
        if begun is None or spared:
            return None
        row = self._store(running.problem, begun, outcome, final=False)
        self._count_lost(begun.variant)
        return row

    def rows_stored(self) -> None:
        """Release the claims of all rows so far, which are in the database now."""
        if self.claims is not None:
            self.claims.release(self._finished)
        self._finished = []

    # What others want to know

    @property
    def dropped(self) -> frozenset[str]:
        """Variants that are left alone, after they have cost too many gangs."""
        return frozenset(v for v, lost in self._lost.items() if lost >= self._settings.failures_per_variant)

    @property
    def _known_limits(self) -> Limits:
        assert self.limits is not None
        return self.limits

    @property
    def has_time(self) -> bool:
        """False once the budget is spent: a gang that is gone is not replaced any more."""
        return self._budget.left() > 0

    def activity(self, gang: int) -> Command | None:
        """What a gang runs; None if it has nothing to do."""
        running = self._running.get(gang)
        return running.command if running is not None else None

    def planned(self, problem: Problem) -> int | None:
        """Trials still to be given out in a problem's search, at most; None before it is begun."""
        search = self._searches[problem]
        return None if search is None else 0 if search.over else search.planned

    # Choosing

    def _offers(self, gang: int) -> Iterator[Command | None]:
        """What a gang could do, most wanted first; None where there turned out to be nothing."""
        at, final = self._at.get(gang, (None, False))
        if at is not None and not final:
            yield self._from_search(gang, at)
        for family in self._families:
            yield self._from_finals(gang, family)
        busy = []
        attended = {problem for problem, final in self._at.values() if not final} | set(self.searched)
        for problem in [problem for problem in self._searches if problem not in attended]:
            if self._in_flight(problem, final=False):
                busy.append(problem)
            else:
                yield self._from_search(gang, problem)
        for search in sorted(self._open(), key=lambda s: -s.planned):
            yield self._from_search(gang, search.problem)
        for problem in busy:
            yield self._from_search(gang, problem)

    def _open(self) -> list[ProblemSearch]:
        return [search for search in self._searches.values() if search is not None and not search.over]

    def _search(self, problem: Problem) -> ProblemSearch:
        search = self._searches[problem]
        if search is None:
            self._note_infeasible(problem)
            search = self._searches[problem] = ProblemSearch(
                problem,
                self._settings,
                self._knowledge,
                self._known_limits,
                searched=self.searched,
                dropped=self.dropped,
                shared=self.claims is not None,
            )
        return search

    def _from_search(self, gang: int, problem: Problem) -> Command | None:
        search = self._search(problem)
        if self._at.get(gang) != (problem, False):
            self._grant_time(search)
        if self.claims is not None:
            search.recheck(self._in_flight(problem, final=False))
        taken: list[Claim] = []
        candidate = search.ask(self._clock(), partial(self._claim, problem, taken, final=False))
        if candidate is not None:
            return self._assign(gang, problem, candidate, taken, final=False)
        if not search.is_out and not search.over:
            search.over = True
            self.searched.append(problem)
        return None

    def _grant_time(self, search: ProblemSearch) -> None:
        """An even share of what is left, so that the last problem is searched as well as the first."""
        remaining = sum(other is None or not other.over for other in self._searches.values())
        share = min(self._settings.gangs, remaining) / max(remaining, 1)
        search.until = max(search.until, self._clock() + self._budget.left(_SEARCH_SHARE) * share)

    def _from_finals(self, gang: int, family: list[Problem]) -> Command | None:
        if not self._settings.finals or self._budget.left() <= 0:
            return None
        finals = self._finals.get(family[0])
        if finals is None:
            searches = [self._searches[problem] for problem in family]
            if any(search is None or not search.over for search in searches):
                return None
            self._blocked = {p for p in family if self._in_flight(p, final=False)}
            if self._blocked:
                return None
            fitting = [p for p in family if p not in self._too_large]
            finals = self._finals[family[0]] = Finals(fitting, self._knowledge, self._known_limits)
        for problem in dict.fromkeys(problem for problem, _ in finals.elsewhere):
            finals.recheck(problem, self._in_flight(problem, final=True))
        own = next((problem for problem, final in [self._at.get(gang, (None, False))] if final), None)
        others = {problem for other, (problem, final) in self._at.items() if other != gang and final}
        taken: list[Claim] = []
        found = finals.ask(own, others, self.dropped, lambda p, c: self._claim(p, taken, c, final=True))
        return None if found is None else self._assign(gang, *found, taken, final=True)

    def _assign(self, gang: int, problem: Problem, candidate: Candidate, taken: list[Claim], *, final: bool) -> Command:
        library = self._libraries.get(problem)
        if library is None:
            library = self._libraries[problem] = default_candidates(problem, self._known_limits)[0]
        works = self._knowledge.status(problem, library) not in FAILED and library.variant not in self.dropped
        command = Command(
            kind="trial",
            problem=problem,
            candidate=candidate,
            baseline=library if works else None,
            threshold_us=self._knowledge.best_us(problem, get_variant(problem.op, candidate.variant).numerics),
            full_check=not self._knowledge.checked(problem, candidate),
            final=final,
        )
        self._running[gang] = Assignment(command, problem, candidate, taken[0] if taken else None)
        self._at[gang] = (problem, final)
        return command

    # Other supervisors

    def _in_flight(self, problem: Problem, *, final: bool) -> frozenset[Candidate]:
        """What other supervisors run of a problem; what they had stored by then is known."""
        if self.claims is None:
            return frozenset()
        running = self.claims.in_flight(problem, final=final)  # first: a row is stored before its claim ends
        self._refresh(problem)
        return running

    def _claim(self, problem: Problem, taken: list[Claim], candidate: Candidate, *, final: bool) -> bool:
        """Claim a candidate; False if another supervisor runs it, or has run it, which is known then."""
        if self.claims is None:
            return True
        claim = self.claims.acquire(problem, candidate, final=final)
        # A row is stored before its claim ends, so this look sees whatever was run before this claim was made.
        self._refresh(problem)
        if claim is None:
            return False
        if self._knowledge.measured(problem, candidate, final=final):
            self.claims.release([claim])
            return False
        taken.append(claim)
        return True

    def _refresh(self, problem: Problem) -> None:
        """Take in what other supervisors have stored of a problem."""
        for trial in self._news(problem):
            if not self._knowledge.counts(trial):
                continue
            self._knowledge.add(trial)
            search = self._searches[trial.problem]
            if search is not None and not trial.final:
                search.tell(trial.candidate, trial.latency_us if trial.status not in FAILED else None)

    def _was_taken_over(self, running: Assignment) -> bool:
        """True if another supervisor took this one for dead, and runs or has run what this one ran."""
        if self.claims is None or running.claim is None or self.claims.holds(running.claim):
            return False
        self._refresh(running.problem)
        return True

    def _is_elsewhere(self) -> bool:
        """True if other supervisors run something that is to be waited for."""
        searches, finals = self._open(), self._finals.values()
        return bool(self._blocked) or any(s.elsewhere for s in searches) or any(f.elsewhere for f in finals)

    def _give_back(self, running: Assignment) -> None:
        if running.claim is not None:
            assert self.claims is not None
            self.claims.release([running.claim])
        if running.command.final:
            family = next(family for family in self._families if running.problem in family)
            self._finals[family[0]].give_back(running.problem, running.candidate)
        else:
            self._search(running.problem).give_back(running.candidate)

    def _skip(self, running: Assignment, reason: str) -> None:
        """Leave a problem alone that a gang has no memory for, and blame nobody."""
        self._give_back(running)
        self._too_large.add(running.problem)
        warn_once(f"{running.problem} is skipped, there is no memory for it here: {reason}")
        if (search := self._searches[running.problem]) is not None:
            search.close()
        for finals in self._finals.values():
            finals.skip(running.problem)

    def _store(self, problem: Problem, candidate: Candidate, outcome: Outcome, *, final: bool) -> Row:
        assert self.environment is not None
        source_hash, is_final = self._source_hash(candidate.op, candidate.variant), final and outcome.status == "ok"
        row = Row(problem=problem, candidate=candidate, outcome=outcome, source_hash=source_hash, final=is_final)
        self._knowledge.add(row.steering(self.environment.digest))
        self._on_row(row)
        return row

    def _count_lost(self, variant: str) -> None:
        before = self.dropped
        self._lost[variant] += 1
        if self.dropped != before:
            for search in self._open():
                search.drop(self.dropped)

    def _note_infeasible(self, problem: Problem) -> None:
        """One row for each variant that has no feasible config at all, so that `explain` can say why."""
        for candidate, reason in infeasible_variants(problem, self._known_limits, self._settings.policy):
            taken: list[Claim] = []
            known = self._knowledge.status(problem, candidate) is not None
            if not known and self._claim(problem, taken, candidate, final=False):
                self._store(problem, candidate, Outcome(status="infeasible", reason=reason), final=False)
                self._finished += taken
