"""Decides what every gang of a sweep runs next: searches family by family, then each family's finals.

No tensor, no process group, no process in here: gangs ask for commands and are answered, results are told, so that
recorded results can stand in for machines.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import cast

from tunedcomm.db.engine import warn_once
from tunedcomm.db.records import Status, Trial
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, get_variant
from tunedcomm.tuner.gang.protocol import FAILED, LOST, TOO_LARGE, Command, Settings, TrialResult
from tunedcomm.tuner.search.claims import Claim, Claims
from tunedcomm.tuner.search.knowledge import Knowledge, is_library
from tunedcomm.tuner.search.study import (
    Search,
    default_candidates,
    families,
    infeasible_variants,
    search_space,
    stray_defaults,
)

# Proposals taken from each neighbour.
_PROPOSALS = 3


class ProblemSearch:
    """Gives out a problem's candidates until its search is over.

    `searched` are the problems whose search was over before, in that order. Where other supervisors may search the
    problem too (`shared`), what they have tried counts as this one's trials do.

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

        `claim` is False for a candidate that another supervisor runs, or has run.
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


_FINALISTS_PER_SHAPE = 2
# With the best four of each shape dispatch between the shapes loses as little as with all that were tried
# (bench/regret.py); twice as many leave room for what cannot run at a size between.
BEST_OF_SHAPE = 8


class Finals:
    """Gives out the finals of a family, problem by problem.

    Every search of the family is over, or `chosen` says what to measure of each problem besides the library; `must` is
    measured even if it took a gang along at another size. `elsewhere` is what other supervisors run.
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
                wanted: Sequence[Candidate] = [*finalists, *best, *knowledge.best_per_sm_limit(problem)]
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
            claim: as in `ProblemSearch.ask`.
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
        return self._knowledge.needs_final(problem, candidate, ignore_quarantine=must)

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


# Share of a budget that searches may use; the rest is for the finals, without which nothing is known between shapes.
_SEARCH_SHARE = 0.85
# A gang that somebody else killed says little about its candidate, the second one in a row says enough.
_MAX_KILLED = 2
# What others run is looked at so often while it only saves claims that would be refused.
_MAX_AGE_S = 0.5


class Coordinator:
    """Answers gangs, which are known by small numbers.

    Args:
        problems, settings: what is tuned, in this order, and how.
        source_hash: (op, variant) to the hash of its kernels.
        stored: trials that were known before, oldest first, in any environment.
        run_id: of the trials.
        claims: shared with other supervisors; None if there are none.
        clock, seconds_left: seconds, and how many the budget has left; None is no bound.

    Attributes:
        environment, limits: of the gangs; None until the first is ready.
        knowledge: of the problems; None until then.
        unstored: trials that ended, each with its claim if there is one; whoever stores them empties the list.
        claims: may be set until the first command is asked for, by when the environment is known.
        searched: problems whose search is over, in that order.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        settings: Settings,
        *,
        source_hash: Callable[[str, str], str],
        stored: Iterable[Trial] = (),
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
        seconds_left: float | None = None,
        run_id: int | None = None,
    ) -> None:
        self.run_id = run_id
        self.environment: Environment | None = None
        self.limits: Limits | None = None
        self.knowledge: Knowledge | None = None
        self.searched: list[Problem] = []
        self.unstored: list[tuple[Trial, Claim | None]] = []
        self._settings, self._source_hash = settings, source_hash
        self._stored = tuple(stored)
        self._clock, self.claims = clock, claims
        self._budget_s = math.inf if seconds_left is None else seconds_left
        self._end_s = clock() + self._budget_s
        self._families = families(problems)
        self._searches: dict[Problem, ProblemSearch | None] = {p: None for family in self._families for p in family}
        self._finals: dict[Problem, Finals] = {}  # by the first problem of the family
        self._libraries: dict[Problem, Candidate] = {}
        # Problem that a gang is at, and whether in the finals: it keeps to it, whose tensors it holds.
        self._at: dict[int, tuple[Problem, bool]] = {}
        self._running: dict[int, Command] = {}
        # Gangs in which no trial has ended yet, and what a slot's next gang runs first: the last one died of it, or of
        # what had run there before.
        self._fresh: set[int] = set()
        self._again: dict[int, Command] = {}
        self._held: dict[tuple[Problem, Candidate, bool], Claim] = {}  # on what runs, in the finals or not
        self._blocked, self._too_large = set[Problem](), set[Problem]()  # others' searches that finals wait for
        self._lost, self._killed = Counter[str](), Counter[tuple[Problem, Candidate]]()

    # What gangs say

    def gang_ready(self, gang: int, environment: Environment, limits: Limits) -> None:
        """Take a gang in; it may ask for commands from now on.

        Raises:
            TuningError: it does not run in the environment of the first one.
        """
        self._fresh.add(gang)
        if self.environment is None:
            self.environment, self.limits = environment, limits
            self.knowledge = Knowledge(
                self._searches,
                environment,
                limits,
                self._source_hash,
                retry=self._settings.retry,
                stored=self._stored,
            )
        elif environment != self.environment:
            differences = self.environment.differences(environment).values() or self.environment.drift(environment)
            raise TuningError(
                f"gang {gang} runs in another environment than the first one: {'; '.join(differences)}. A sweep "
                "measures one environment: tune the GPUs of each kind by themselves, with CUDA_VISIBLE_DEVICES"
            )

    def next(self, gang: int) -> Command:
        """The next command for a gang that runs nothing."""
        if (again := self._again.pop(gang, None)) is not None:
            problem, candidate = again.trial
            if candidate.variant not in self.dropped:
                self._fresh.add(gang)  # blamed next time in any case: nothing is tried for ever
                return self._assign(gang, problem, candidate, final=again.final)
            self._give_back(again)
        over = -1
        # Again where a search turned out to be over: it may be the last of its family, whose finals come first.
        while over != len(self.searched):
            over = len(self.searched)
            for command in self._offers(gang):
                if command is not None:
                    return command
                if len(self.searched) != over:
                    break
        if self._running or (self.has_time and (self._again or self._is_elsewhere())):
            return Command(kind="wait")
        return Command(kind="end", reason="budget" if not self.has_time else "done")

    def learn(self, gang: int, result: TrialResult) -> Trial | None:
        """Take in how the trial that `gang` was told to run ended.

        Returns:
            Its row; None if it is tried again, or if another supervisor has stored one since.
        """
        command = self._running.pop(gang)
        problem, candidate = command.trial
        doubtful = self._is_doubtful(gang, candidate, result.status)
        self._fresh.discard(gang)
        self._killed.pop((problem, candidate), None)
        if result.status == TOO_LARGE:
            self._skip(command, result.reason)
            return None
        if self._was_taken_over(command):
            self._give_back(command)  # the other supervisor stores its row
            return None
        if doubtful:
            self._again[gang] = command
            return None
        claim = self._held.pop((problem, candidate, command.final), None)
        row = self._store(problem, candidate, result, claim, final=command.final)
        if not command.final:
            self._search(problem).tell(candidate, result.latency_us)
        if result.status in LOST:
            self._count_lost(candidate)
        return row

    def _is_doubtful(self, gang: int, candidate: Candidate, status: str) -> bool:
        """True if what ran in the gang before may have done it: the candidate gets a fresh gang before it is blamed."""
        return gang not in self._fresh and (status == "crashed" or (status in LOST and is_library(candidate)))

    def lost(
        self, gang: int, status: str, reason: str, *, begun: Candidate | None, killed: bool = False
    ) -> Trial | None:
        """Take in that a gang is gone.

        Args:
            gang: which.
            status, reason: `hung` or `crashed`, and a sentence.
            begun: the candidate that it had begun to bind or launch: its own, or the library beside it.
            killed: somebody else killed it.

        Returns:
            The row of the candidate that is blamed; None if none is, and what the gang was to run is run again: if
            other candidates had run in the gang before, by the next gang of its slot and as its first trial.
        """
        self._at.pop(gang, None)
        command = self._running.get(gang)
        if command is None:
            return None
        if killed:
            self._killed[command.trial] += 1
        spared = killed and self._killed[command.trial] < _MAX_KILLED
        result = TrialResult(status=status, reason=reason)
        if begun == command.candidate and not spared:
            return self.learn(gang, result)
        del self._running[gang]
        if begun is not None and not spared and self._is_doubtful(gang, begun, status):
            self._again[gang] = command
            return None
        self._give_back(command)
        if begun is None or spared:
            return None
        row = self._store(command.trial[0], begun, result)
        self._count_lost(begun)
        return row

    def abandon(self, gang: int) -> None:
        """Have others run what the slot's next gang was to try again: there will be none."""
        if (again := self._again.pop(gang, None)) is not None:
            self._give_back(again)

    # What others want to know

    @property
    def dropped(self) -> frozenset[str]:
        """Variants that are left alone, after they have cost too many gangs."""
        return frozenset(v for v, lost in self._lost.items() if lost >= self._settings.failures_per_variant)

    @property
    def _knowledge(self) -> Knowledge:
        assert self.knowledge is not None
        return self.knowledge

    @property
    def _known_limits(self) -> Limits:
        assert self.limits is not None
        return self.limits

    @property
    def has_time(self) -> bool:
        """False once the budget is spent: a gang that is gone is not replaced any more."""
        return self._seconds_left > 0

    @property
    def _seconds_left(self) -> float:
        return self._end_s - self._clock()

    def activity(self, gang: int) -> Command | None:
        """The command that a gang runs; None if it has nothing to do."""
        return self._running.get(gang)

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
            search.recheck(self._in_flight(problem, final=False, max_age_s=_MAX_AGE_S))
        candidate = search.ask(self._clock(), lambda c: self._claim(problem, c, final=False))
        if candidate is not None:
            return self._assign(gang, problem, candidate, final=False)
        if not search.is_out and not search.over:
            search.over = True
            self.searched.append(problem)
        return None

    def _grant_time(self, search: ProblemSearch) -> None:
        """An even share of what is left, so that the last problem is searched as well as the first."""
        remaining = sum(other is None or not other.over for other in self._searches.values())
        share = min(self._settings.gangs, remaining) / max(remaining, 1)
        left_s = self._seconds_left
        if math.isfinite(left_s):
            left_s -= self._budget_s * (1 - _SEARCH_SHARE)
        search.until = max(search.until, self._clock() + left_s * share)

    def _from_finals(self, gang: int, family: list[Problem]) -> Command | None:
        if not self._settings.finals or not self.has_time:
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
            finals.recheck(problem, self._in_flight(problem, final=True, max_age_s=_MAX_AGE_S))
        own = next((problem for problem, final in [self._at.get(gang, (None, False))] if final), None)
        others = {problem for other, (problem, final) in self._at.items() if other != gang and final}
        found = finals.ask(own, others, self.dropped, lambda p, c: self._claim(p, c, final=True))
        return None if found is None else self._assign(gang, *found, final=True)

    def _assign(self, gang: int, problem: Problem, candidate: Candidate, *, final: bool) -> Command:
        library = self._libraries.get(problem)
        if library is None:
            library = self._libraries[problem] = default_candidates(problem, self._known_limits)[0]
        works = self._knowledge.status(problem, library) not in FAILED
        command = Command(
            kind="trial",
            problem=problem,
            candidate=candidate,
            baseline=library if works else None,
            threshold_us=self._knowledge.best_us(problem, get_variant(problem.op, candidate.variant).numerics),
            full_check=not self._knowledge.checked(problem, candidate),
            final=final,
        )
        self._running[gang] = command
        self._at[gang] = (problem, final)
        return command

    # Other supervisors

    def _in_flight(self, problem: Problem, *, final: bool, max_age_s: float = 0.0) -> frozenset[Candidate]:
        """What other supervisors run of a problem; what they had stored by then is known."""
        if self.claims is None:
            return frozenset()
        running = self.claims.in_flight(problem, final=final, max_age_s=max_age_s)
        self._refresh(problem)
        return running

    def _claim(self, problem: Problem, candidate: Candidate, *, final: bool) -> bool:
        """Claim a candidate; False if another supervisor runs it, or has run it, which is known then."""
        if self.claims is None:
            return True
        claim = self.claims.acquire(problem, candidate, final=final)
        self._refresh(problem)
        if claim is None:
            return False
        if self._knowledge.measured(problem, candidate, final=final):
            self.claims.release([claim])
            return False
        self._held[problem, candidate, final] = claim
        return True

    def _refresh(self, problem: Problem) -> None:
        """Take in what other supervisors have stored of a problem, as of the last look at their claims."""
        assert self.claims is not None
        for trial in self.claims.news(problem):
            if not self._knowledge.counts(trial):
                continue
            self._knowledge.add(trial)
            search = self._searches[trial.problem]
            if search is not None and not trial.final:
                search.tell(trial.candidate, trial.latency_p50_us if trial.status not in FAILED else None)

    def _was_taken_over(self, command: Command) -> bool:
        """True if another supervisor took this one for dead, and runs or has run what this one ran."""
        claim = self._held.get((*command.trial, command.final))
        if self.claims is None or claim is None or self.claims.holds(claim):
            return False
        self._refresh(claim.problem)
        return True

    def _is_elsewhere(self) -> bool:
        """True if other supervisors run something that is to be waited for."""
        searches, finals = self._open(), self._finals.values()
        return bool(self._blocked) or any(s.elsewhere for s in searches) or any(f.elsewhere for f in finals)

    def _give_back(self, command: Command) -> None:
        problem, candidate = command.trial
        if (claim := self._held.pop((problem, candidate, command.final), None)) is not None:
            assert self.claims is not None
            self.claims.release([claim])
        if command.final:
            family = next(family for family in self._families if problem in family)
            self._finals[family[0]].give_back(problem, candidate)
        else:
            self._search(problem).give_back(candidate)

    def _skip(self, command: Command, reason: str) -> None:
        """Leave a problem alone that a gang has no memory for, and blame nobody."""
        self._give_back(command)
        problem, _ = command.trial
        self._too_large.add(problem)
        warn_once(f"{problem} is skipped, there is no memory for it here: {reason}")
        if (search := self._searches[problem]) is not None:
            search.close()
        for finals in self._finals.values():
            finals.skip(problem)

    def _store(
        self,
        problem: Problem,
        candidate: Candidate,
        result: TrialResult,
        claim: Claim | None = None,
        *,
        final: bool = False,
    ) -> Trial:
        assert self.environment is not None
        variant, latency = get_variant(candidate.op, candidate.variant), result.latency
        trial = Trial(
            problem=problem,
            environment=self.environment,
            variant=candidate.variant,
            numerics=variant.numerics,
            source_hash=self._source_hash(candidate.op, candidate.variant),
            config=candidate.config_dict,
            status=cast("Status", result.status),
            reason=result.reason,
            latency_p10_us=latency.p10_us if latency else None,
            latency_p50_us=latency.p50_us if latency else None,
            latency_p90_us=latency.p90_us if latency else None,
            samples=latency.samples if latency else 0,
            baseline_p50_us=result.baseline_us,
            error=result.error,
            final=final and result.status == "ok",
            run_id=self.run_id,
        )
        self._knowledge.add(trial)
        self.unstored.append((trial, claim))
        return trial

    def _count_lost(self, candidate: Candidate) -> None:
        if is_library(candidate):  # everything is compared with it: it is tried at every problem
            return
        before = self.dropped
        self._lost[candidate.variant] += 1
        if self.dropped != before:
            for search in self._open():
                search.drop(self.dropped)

    def _note_infeasible(self, problem: Problem) -> None:
        """One row for each variant that has no feasible config at all, so that `explain` can say why."""
        for candidate, reason in infeasible_variants(problem, self._known_limits, self._settings.policy):
            known = self._knowledge.status(problem, candidate) is not None
            if not known and self._claim(problem, candidate, final=False):
                result = TrialResult(status="infeasible", reason=reason)
                self._store(problem, candidate, result, self._held.pop((problem, candidate, False), None))
