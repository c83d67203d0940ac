"""Decides what every gang of a sweep runs next: searches family by family, then each family's finals.

No tensor, no process group, no process in here: gangs ask for commands and are answered, results are told, so that
recorded results can stand in for machines. What to run next is worked out anew from what is known and what runs: a
candidate that was not run after all is simply free again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from tunedcomm.db.engine import warn_once
from tunedcomm.db.records import Status, Trial
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, get_variant
from tunedcomm.tuner.gang.protocol import FAILED, LOST, TOO_LARGE, Command, Settings, TrialResult
from tunedcomm.tuner.search.claims import Claim, Claims
from tunedcomm.tuner.search.knowledge import Knowledge, is_library
from tunedcomm.tuner.search.study import Search, default_candidates, families, infeasible_variants, search_space

# Proposals taken from each neighbour.
_PROPOSALS = 3
_FINALISTS_PER_SHAPE = 2
# With the best four of each shape dispatch between the shapes loses as little as with all that were tried
# (bench/regret.py); twice as many leave room for what cannot run at a size between.
BEST_OF_SHAPE = 8
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
        source_hash: (op, variant) to the hash of its kernels, or None if there is no such variant.
        stored: trials that were known before, oldest first, in any environment.
        run_id: of the trials.
        claims: shared with other supervisors; None if there are none.
        on_known: called when it is known where gangs run, before the first is told what to do.
        clock, seconds_left: seconds, and how many the budget has left; None is no bound.

    Attributes:
        knowledge: of the problems, and where gangs run; None until the first is ready.
        unstored: trials that ended, each with its claim if there is one; whoever stores them empties the list.
        claims: may be set until the first command is asked for.
        searched: problems whose search is over, in that order.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        settings: Settings,
        *,
        source_hash: Callable[[str, str], str | None],
        stored: Iterable[Trial] = (),
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
        seconds_left: float | None = None,
        run_id: int | None = None,
        on_known: Callable[[Knowledge], None] = lambda known: None,
    ) -> None:
        self.run_id = run_id
        self.knowledge: Knowledge | None = None
        self.searched: dict[Problem, None] = {}
        self.unstored: list[tuple[Trial, Claim | None]] = []
        self._settings, self._source_hash, self._on_known = settings, source_hash, on_known
        self._stored = tuple(stored)
        self._clock, self.claims = clock, claims
        self._budget_s = math.inf if seconds_left is None else seconds_left
        self._end_s = clock() + self._budget_s
        self._families = families(problems)
        self._searches: dict[tuple[Problem, bool], Search] = {}  # those that are begun, and (True) the finals
        self._until_s: dict[Problem, float] = {}  # by the clock, when nothing more is searched
        # Problem that a gang is at, and whether in the finals: it keeps to it, whose tensors it holds.
        self._at: dict[int, tuple[Problem, bool]] = {}
        self._running: dict[int, Command] = {}
        # Gangs in which no trial has ended yet, and what a slot's next gang runs first: the last one died of it, or of
        # what had run there before.
        self._fresh: set[int] = set()
        self._again: dict[int, Command] = {}
        self._held: dict[int, Claim] = {}  # on what a gang runs, or its slot's next one is to run again
        self._waits = False  # for what other supervisors run
        self._too_large = set[Problem]()
        self._lost, self._killed = Counter[str](), Counter[tuple[Problem, Candidate]]()

    # What gangs say

    def gang_ready(self, gang: int, environment: Environment, limits: Limits) -> None:
        """Take a gang in; it may ask for commands from now on.

        Raises:
            TuningError: it does not run in the environment of the first one.
        """
        self._fresh.add(gang)
        if self.knowledge is None:
            self.knowledge = Knowledge(
                self.problems,
                environment,
                limits,
                self._source_hash,
                retry=self._settings.retry,
                stored=self._stored,
            )
            self._on_known(self.knowledge)
        elif environment != (first := self.knowledge.environment):
            differences = first.differences(environment).values() or first.drift(environment)
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
            self._release(gang)
        self._waits = False
        num_over = -1
        # Again where a search turned out to be over: it may be the last of its family, whose finals come first.
        while num_over != len(self.searched):
            num_over = len(self.searched)
            for problem, final in self._places(gang):
                if (command := self._next_at(gang, problem, final=final)) is not None:
                    return command
                if len(self.searched) != num_over:
                    break
        if self._running or (self.has_time and (self._again or self._waits)):
            return Command(kind="wait")
        return Command(kind="end", reason="budget" if not self.has_time else "done")

    def learn(self, gang: int, result: TrialResult) -> Trial | None:
        """Take in how the trial that `gang` was told to run ended.

        Returns:
            Its row; None if it is tried again, or if another supervisor has stored one since.
        """
        command = self._running.pop(gang)
        problem, candidate = command.trial
        is_doubtful = self._is_doubtful(gang, candidate, result.status)
        self._fresh.discard(gang)
        self._killed.pop((problem, candidate), None)
        if result.status == TOO_LARGE:  # nobody is blamed
            self._release(gang)
            self._too_large.add(problem)
            warn_once(f"{problem} is skipped, there is no memory for it here: {result.reason}")
            return None
        if self._was_taken_over(gang):
            self._release(gang)  # the other supervisor stores its row
            return None
        if is_doubtful:
            self._again[gang] = command
            return None
        return self._store(problem, candidate, result, self._held.pop(gang, None), final=command.final)

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
        self._killed[command.trial] += killed
        if begun is None or (killed and self._killed[command.trial] < _MAX_KILLED):
            self.abandon(gang)
            return None
        result = TrialResult(status=status, reason=reason)
        if begun == command.candidate:
            return self.learn(gang, result)
        if self._is_doubtful(gang, begun, status):
            self._again[gang] = self._running.pop(gang)
            return None
        self.abandon(gang)
        return self._store(command.trial[0], begun, result)

    def abandon(self, gang: int) -> None:
        """Have others run what a gang, or its slot's next one, was to run."""
        self._running.pop(gang, None)
        self._again.pop(gang, None)
        self._release(gang)

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
    def has_time(self) -> bool:
        """False once the budget is spent: a gang that is gone is not replaced any more."""
        return self.seconds_left > 0

    @property
    def seconds_left(self) -> float:
        """Of the budget; infinite if there is none."""
        return self._end_s - self._clock()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems to tune, family by family."""
        return tuple(problem for family in self._families for problem in family)

    def activity(self, gang: int) -> Command | None:
        """The command that a gang runs; None if it has nothing to do."""
        return self._running.get(gang)

    def planned(self, problem: Problem) -> int | None:
        """Trials still to come in a problem's search, at most; None before it is begun."""
        if problem in self.searched:
            return 0
        return self._num_left(problem, final=False) if (problem, False) in self._searches else None

    def _num_left(self, problem: Problem, *, final: bool) -> int:
        if problem in self._too_large:
            return 0
        return self._searches[problem, final].planned(self._knowledge.settled(problem, final=final), self.dropped)

    # Choosing

    def _places(self, gang: int) -> Iterator[tuple[Problem, bool]]:
        """Problems in whose search or finals (True) a gang may find something to do, most wanted first."""
        at = self._at.get(gang)
        if at is not None and not at[1] and at[0] not in self.searched:
            yield at
        others = {place for other, place in self._at.items() if other != gang}
        for family in self._families:
            if self._may_have_finals(family):
                places = [(problem, True) for problem in family]
                yield from sorted(places, key=lambda place: (place != at, place in others))
        crowded = []
        for problem in [problem for problem in self.problems if problem not in self.searched]:
            if (problem, False) in self._at.values() or self._in_flight(problem, final=False):
                crowded.append(problem)
            else:
                yield problem, False
        yield from ((problem, False) for problem in sorted(crowded, key=lambda p: -(self.planned(p) or 0)))

    def _next_at(self, gang: int, problem: Problem, *, final: bool) -> Command | None:
        """Have a gang run the next candidate of a problem's search or finals; None if there is none for now."""
        if final and not self._num_left(problem, final=True):
            return None
        if (problem, final) not in self._searches:
            self._searches[problem, final] = self._new_search(gang, problem)
        if not final and self._at.get(gang) != (problem, False):
            self._grant_time(problem)
        commands = [*self._running.values(), *self._again.values()]
        mine = {command.trial[1] for command in commands if (command.problem, command.final) == (problem, final)}
        offered = self._searches[problem, final].feasible
        theirs = {c for c in self._in_flight(problem, final=final, max_age_s=_MAX_AGE_S) if c in offered}
        while (candidate := self._pick(problem, mine | theirs, final=final)) is not None:
            if self._claim(gang, problem, candidate, final=final):
                return self._assign(gang, problem, candidate, final=final)
            theirs.add(candidate)
        theirs -= self._knowledge.settled(problem, final=final).keys()
        self._waits |= bool(theirs)
        if not final and not mine and not theirs:
            self.searched[problem] = None
        return None

    def _pick(self, problem: Problem, busy: Collection[Candidate], *, final: bool) -> Candidate | None:
        if problem in self._too_large:
            return None
        known = self._knowledge.settled(problem, final=final)
        candidate = self._searches[problem, final].next(known, busy, self.dropped)
        is_late = not final and self._clock() >= self._until_s[problem]
        # The library is asked for first and whatever the clock says: no problem is left without it.
        return None if candidate is None or (is_late and not is_library(candidate)) else candidate

    def _new_search(self, gang: int, problem: Problem) -> Search:
        """The search of a problem, which is about to begin."""
        self._note_infeasible(gang, problem)
        knowledge, library = self._knowledge, self._library(problem)
        # What took a gang along at this size is settled, at another size it is left alone.
        known = knowledge.settled(problem)
        allowed = [
            candidate
            for candidate in self._space(problem)
            if candidate in known or candidate == library or not knowledge.quarantined(problem, candidate)
        ]
        return self._search_class(problem, allowed, self._settings, [library, *self._seeds(problem)])

    _search_class: Callable[..., Search] = Search
    _search_share = _SEARCH_SHARE

    def _space(self, problem: Problem) -> list[Candidate]:
        """Every candidate that may be tried."""
        return search_space(problem, self._knowledge.limits, self._settings)

    def _seeds(self, problem: Problem) -> list[Candidate]:
        """The candidates to try first, besides the library."""
        proposals = self._knowledge.proposals(problem, _PROPOSALS, self.searched)
        return [*proposals, *default_candidates(problem, self._knowledge.limits)]

    def _grant_time(self, problem: Problem) -> None:
        """An even share of what is left, so that the last problem is searched as well as the first."""
        remaining = len(self.problems) - len(self.searched)
        left_s = self.seconds_left
        if math.isfinite(left_s):
            left_s -= self._budget_s * (1 - self._search_share)
        share = min(self._settings.gangs, remaining) / remaining
        self._until_s[problem] = max(self._until_s.get(problem, -math.inf), self._clock() + left_s * share)

    def _may_have_finals(self, family: list[Problem]) -> bool:
        """True once every search of a family is over, here and elsewhere: then it is known what its finals measure."""
        if not self._settings.finals or not self.has_time or any(p not in self.searched for p in family):
            return False
        if (family[0], True) in self._searches:
            return True
        if any(self._in_flight(problem, final=False) for problem in family):
            self._waits = True
            return False
        for problem, finalists in self._finalists(family):
            self._measure(problem, finalists)
        return True

    def _finalists(self, family: Sequence[Problem]) -> Iterator[tuple[Problem, list[Candidate]]]:
        """The candidates to measure in the finals of each problem of a family.

        The best of its search comes first: a final outranks it, also where a budget ends soon after.
        """
        knowledge = self._knowledge
        finalists = knowledge.finalists(family, _FINALISTS_PER_SHAPE)
        for problem in family:
            best = knowledge.winners(problem, BEST_OF_SHAPE, "default")
            yield problem, [*best[:1], *finalists, *best, *knowledge.best_per_sm_limit(problem)]

    def _measure(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Measure the library and candidates of a problem as in the finals, in this order, if they are feasible."""
        wanted = self._knowledge.feasible(problem, [self._library(problem), *candidates])
        self._searches[problem, True] = Search(problem, wanted, replace(self._settings, trials=len(wanted)), wanted)

    def _library(self, problem: Problem) -> Candidate:
        variant = get_variant(problem.op, "library")
        return Candidate.of(problem.op, variant.name, variant.default_config(problem, self._knowledge.limits))

    def _assign(self, gang: int, problem: Problem, candidate: Candidate, *, final: bool) -> Command:
        library = self._library(problem)
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
        """Candidates of a problem that other supervisors run now; reads what they have stored, too."""
        if self.claims is None:
            return frozenset()
        running = self.claims.in_flight(problem, final=final, max_age_s=max_age_s)
        self._refresh(problem)
        return running

    def _claim(self, gang: int, problem: Problem, candidate: Candidate, *, final: bool) -> bool:
        """Claim a candidate for a gang; False if another supervisor runs it, or has run it, which is known then."""
        if self.claims is None:
            return True
        claim = self.claims.acquire(problem, candidate, final=final)
        self._refresh(problem)
        if claim is None:
            return False
        self._held[gang] = claim
        if candidate in self._knowledge.settled(problem, final=final):
            self._release(gang)
            return False
        return True

    def _release(self, gang: int) -> None:
        if (claim := self._held.pop(gang, None)) is not None and self.claims is not None:
            self.claims.release([claim])

    def _refresh(self, problem: Problem) -> None:
        """Take in what other supervisors have stored of a problem, as of the last look at their claims."""
        assert self.claims is not None
        for trial in self.claims.news(problem):
            if self._knowledge.counts(trial):
                self._knowledge.add(trial)

    def _was_taken_over(self, gang: int) -> bool:
        """True if another supervisor took this one for dead, and runs or has run what the gang ran."""
        claim = self._held.get(gang)
        if self.claims is None or claim is None or self.claims.holds(claim):
            return False
        self._refresh(claim.problem)
        return True

    def _store(
        self,
        problem: Problem,
        candidate: Candidate,
        result: TrialResult,
        claim: Claim | None = None,
        *,
        final: bool = False,
    ) -> Trial:
        variant, latency = get_variant(candidate.op, candidate.variant), result.latency
        trial = Trial(
            problem=problem,
            environment=self._knowledge.environment,
            variant=candidate.variant,
            numerics=variant.numerics,
            source_hash=self._source_hash(candidate.op, candidate.variant) or "",
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
        if trial.status in LOST and not variant.is_library:  # everything is compared with it: it is always tried
            self._lost[trial.variant] += 1
        self.unstored.append((trial, claim))
        return trial

    def _note_infeasible(self, gang: int, problem: Problem) -> None:
        """One row for each variant that has no feasible config at all, so that `explain` can say why."""
        for candidate, reason in infeasible_variants(problem, self._knowledge.limits, self._settings.policy):
            known = self._knowledge.status(problem, candidate) is not None
            if not known and self._claim(gang, problem, candidate, final=False):
                result = TrialResult(status="infeasible", reason=reason)
                self._store(problem, candidate, result, self._held.pop(gang, None))
