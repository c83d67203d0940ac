"""Decides what every gang runs next: the searches of a family of problems, then the family's finals.

This module holds no tensor, process group or process: gangs ask for commands and results are reported, so that recorded
results can stand in for machines. Each answer is computed anew from what is known and what runs: a candidate that was
not run after all is simply free again.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from tunedcomm.db.records import Trial
from tunedcomm.db.targets import warn_once
from tunedcomm.db.values import LOST, UNUSABLE, Status, was_tried
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, get_variant
from tunedcomm.tuner.gang.protocol import TOO_LARGE, Command, Settings, TrialResult
from tunedcomm.tuner.search.claims import Claim, Claims
from tunedcomm.tuner.search.knowledge import Knowledge, is_library
from tunedcomm.tuner.search.strategy import Strategy
from tunedcomm.tuner.search.study import Search, infeasible_variants

# A candidate is blamed once its gang was killed from outside this many times in a row.
_MAX_KILLED = 2
# A gang may work on for this share of the budget after its end; its trial is then given up.
_OVERTIME = 0.05
# Age in seconds up to which the list of other supervisors' candidates is used again; it only saves refused claims.
_MAX_AGE_S = 0.5


class Coordinator:
    """Answers gangs, which have small numbers.

    Args:
        problems: tuned in this order.
        settings: of the search and the gangs.
        source_hash: (op, variant) to the hash of its kernels, or None if there is no such variant.
        strategy: answers questions about the problems; by default as a sweep does.
        stored: earlier trials, oldest first, in any environment.
        run_id: id of the run, stored with its trials.
        claims: shared with other supervisors; None if there are no others.
        clock: monotonic seconds.
        seconds_left: budget; None: no limit. In a running job it begins now or by `start_clock`, in a sweep when the
            first gang is ready.

    Attributes:
        knowledge: trials of the problems, and the gangs' environment; None until the first gang is ready.
        unstored: trials that ended, each with its claim if it has one; the caller that stores them empties the list.
            A problem's trials join it with the first trial of a challenger: rows of the library alone would have
            dispatch run the library where an untuned call may run something faster.
        claims, run_id: may be set until the first command is asked for.
        searched: problems whose search is over, in that order.
        in_place_shares: the library's time in place over its time at a problem, where this run has measured it.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        settings: Settings,
        *,
        source_hash: Callable[[str, str], str | None],
        strategy: Strategy | None = None,
        stored: Iterable[Trial] = (),
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
        seconds_left: float | None = None,
        run_id: int | None = None,
    ) -> None:
        self.run_id = run_id
        self.knowledge: Knowledge | None = None
        self.searched: dict[Problem, None] = {}
        self.in_place_shares: dict[Problem, float] = {}
        self.unstored: list[tuple[Trial, Claim | None]] = []
        self.claims = claims
        self._settings, self._source_hash = settings, source_hash
        self._strategy = strategy or Strategy(settings)
        self._stored = tuple(stored)
        self._clock = clock
        self._budget_s = math.inf if seconds_left is None else seconds_left
        self._end_s = math.inf
        if settings.in_job:
            self.start_clock()
        self._families = self._strategy.families(problems)
        self._searches: dict[tuple[Problem, bool], Search] = {}  # searches that have begun, and (True) finals
        self._finals_only = False
        self._until_s: dict[Problem, float] = {}  # the time at which a search ends
        # Problem at which a gang works, and True in its finals: a gang keeps to the problem whose tensors it holds.
        self._at: dict[int, tuple[Problem, bool]] = {}
        self._running: dict[int, Command] = {}
        self._begun_s: dict[int, float] = {}
        # Duration of all trials, and their number.
        self._trials_s, self._num_trials = 0.0, 0
        # Gangs in which no trial has ended yet.
        self._fresh: set[int] = set()
        # The first command of a slot's next gang: the last gang died of it, or of a command before.
        self._again: dict[int, Command] = {}
        self._uncompared: dict[Problem, list[tuple[Trial, Claim | None]]] = {}  # not to be stored yet
        self._held: dict[int, Claim] = {}  # claims on `_running` and `_again`
        self._waits = False  # for candidates that other supervisors run
        self._too_large = set[Problem]()
        self._lost, self._killed = Counter[tuple[str, str]](), Counter[tuple[Problem, Candidate]]()

    def measure_only(
        self, candidates: Mapping[Problem, Sequence[Candidate]], exempt: Collection[tuple[Problem, Candidate]]
    ) -> None:
        """Replace the problems: measure the library and these candidates as in the finals, and search nothing.

        Call it between the first `gang_ready` and the first `next`. `exempt` are measured even if they crashed or hung
        at another size of their family.
        """
        self._families, self._knowledge.exempt = self._strategy.families(candidates), frozenset(exempt)
        self._finals_only = True
        for problem, wanted in candidates.items():
            self.searched[problem] = None
            self._begin_finals(problem, [self._knowledge.library(problem), *wanted])

    def start_clock(self) -> None:
        """Let the budget begin now."""
        self._end_s = self._clock() + self._budget_s

    # Reports of gangs

    def gang_ready(self, gang: int, environment: Environment, limits: Limits) -> Knowledge | None:
        """Add a gang that may ask for commands from now on; returns the knowledge if it is the first gang.

        Raises:
            TuningError: the gang runs in another environment than the first one.
        """
        self._fresh.add(gang)
        if self.knowledge is None:
            if not self._settings.in_job:
                self.start_clock()
            self.knowledge = Knowledge(
                self.problems,
                environment,
                limits,
                self._source_hash,
                retry=self._settings.retry,
                stored=self._stored,
            )
            return self.knowledge
        if environment != (first := self.knowledge.environment):
            differences = first.differences(environment).values() or first.drift(environment)
            raise TuningError(
                f"gang {gang} runs in another environment than the first one: {'; '.join(differences)}. A sweep "
                "measures one environment: tune the GPUs of each kind by themselves, with CUDA_VISIBLE_DEVICES"
            )
        return None

    def next(self, gang: int) -> Command:
        """The next command for a gang that runs nothing."""
        if (again := self._again.pop(gang, None)) is not None:
            problem, candidate = again.trial
            if candidate.variant not in self._dropped(candidate.op):
                self._fresh.add(gang)  # blame the candidate next time, so that nothing is tried for ever
                return self._assign(gang, problem, candidate, final=again.final)
            self._release(gang)
        self._waits = False
        num_over = -1
        # Start over after a search has ended: it may be the last one of its family, whose finals come first.
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
        """Learn the result of the trial that `gang` ran.

        Returns:
            The row; None if the trial is run again, or if another supervisor has stored a row since.
        """
        command = self._running.pop(gang)
        problem, candidate = command.trial
        took_s = self._clock() - self._begun_s.pop(gang)
        self._trials_s, self._num_trials = self._trials_s + took_s, self._num_trials + 1
        self._strategy.learn_cost(problem, took_s)
        if result.in_place_share is not None:
            self.in_place_shares[problem] = result.in_place_share
        is_doubtful = self._is_doubtful(gang, candidate, result.status)
        self._fresh.discard(gang)
        self._killed.pop((problem, candidate), None)
        if result.status == TOO_LARGE:  # no candidate is blamed
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
        return self._add_trial(problem, candidate, result, self._held.pop(gang, None), final=command.final)

    def _is_doubtful(self, gang: int, candidate: Candidate, status: str) -> bool:
        """True if an earlier candidate of the gang may be the cause: this one gets a fresh gang before it is blamed.

        In a running job every lost candidate ends the memory of the trials, so only the library gets a second chance.
        """
        may_be_retried = is_library(candidate) or (status == "crashed" and not self._settings.in_job)
        return gang not in self._fresh and status in LOST and may_be_retried

    def lost(
        self, gang: int, status: str, reason: str, *, begun: Candidate | None, killed: bool = False
    ) -> Trial | None:
        """Handle a lost gang.

        Args:
            gang: the gang.
            status, reason: `hung` or `crashed`, and a sentence.
            begun: the candidate that the gang had begun to bind or launch: the trial's, or the library beside it.
            killed: the gang was killed from outside.

        Returns:
            The row of the candidate that is blamed. None if no candidate is blamed; the gang's command is then run
            again. If other candidates had run in the gang before, the next gang of the slot runs it first.
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
        return self._add_trial(command.trial[0], begun, result)

    def abandon(self, gang: int) -> None:
        """Free the candidates that a gang, or its slot's next gang, was to run."""
        self._running.pop(gang, None)
        self._again.pop(gang, None)
        self._release(gang)

    # Questions from outside

    @property
    def dropped(self) -> frozenset[str]:
        """Variants that are not tried any more because they have cost too many gangs."""
        return frozenset(variant for op in {op for op, _ in self._lost} for variant in self._dropped(op))

    def _dropped(self, op: str) -> frozenset[str]:
        most = self._settings.failures_per_variant
        return frozenset(variant for (of, variant), lost in self._lost.items() if of == op and lost >= most)

    @property
    def _knowledge(self) -> Knowledge:
        assert self.knowledge is not None
        return self.knowledge

    @property
    def has_time(self) -> bool:
        """False once the budget is spent: a lost gang is not replaced any more."""
        return self.seconds_left > 0

    @property
    def seconds_left(self) -> float:
        """Seconds left of the budget; infinite if there is none."""
        return min(self._budget_s, self._end_s - self._clock())

    @property
    def is_overdue(self) -> bool:
        """True if gangs that still work must be ended."""
        return self.seconds_left < -_OVERTIME * self._budget_s

    @property
    def unreached(self) -> tuple[Problem, ...]:
        """Problems at which no challenger was tried, though some are left to try: nothing is stored for them."""
        return tuple(p for p in self.problems if p not in self._too_large and not self._is_compared(p))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problems to tune, family by family."""
        return tuple(problem for family in self._families for problem in family)

    def activity(self, gang: int) -> Command | None:
        """The command that a gang runs; None if the gang has nothing to do."""
        return self._running.get(gang)

    def trials_left(self, problem: Problem) -> int | None:
        """The most trials that a problem's search may still need, or its finals after `measure_only`.

        None before the search begins.
        """
        if problem in self.searched and not self._finals_only:
            return 0
        key = (problem, self._finals_only)
        return self._trials_left(problem, final=self._finals_only) if key in self._searches else None

    def _trials_left(self, problem: Problem, *, final: bool) -> int:
        if problem in self._too_large:
            return 0
        return self._searches[problem, final].trials_left(
            self._knowledge.settled(problem, final=final), self._dropped(problem.op)
        )

    # Choosing

    def _places(self, gang: int) -> Iterator[tuple[Problem, bool]]:
        """Problems in whose search or finals (True) a gang may find a candidate to run, most wanted first."""
        at = self._at.get(gang)
        open_problems = [problem for problem in self.problems if problem not in self.searched]
        if self._settings.in_job:  # each problem gets a challenger before any gets a second one
            begun = [(problem, False) for problem in open_problems if not self._is_compared(problem)]
            yield from sorted(begun, key=lambda place: place != at)
        if at is not None and not at[1] and at[0] not in self.searched:
            yield at
        # Finals must not take the time to reach other problems: two trials each, and as much to spare.
        trial_s = self._trials_s / max(self._num_trials, 1)
        can_wait = not self._settings.in_job and len(open_problems) * 4 * trial_s > self.seconds_left
        if not can_wait:
            yield from self._final_places(gang)
        crowded = []
        for problem in open_problems:
            if (problem, False) in self._at.values() or self._in_flight(problem, final=False):
                crowded.append(problem)
            else:
                yield problem, False
        yield from ((problem, False) for problem in sorted(crowded, key=lambda p: -(self.trials_left(p) or 0)))
        if can_wait:
            yield from self._final_places(gang)

    def _final_places(self, gang: int) -> Iterator[tuple[Problem, bool]]:
        """Problems with finals: in each family first this gang's, last the other gangs'."""
        at = self._at.get(gang)
        others = {place for other, place in self._at.items() if other != gang}
        for family in self._families:
            if self._may_have_finals(family):
                places = [(problem, True) for problem in family]
                yield from sorted(places, key=lambda place: (place != at, place in others))

    def _next_at(self, gang: int, problem: Problem, *, final: bool) -> Command | None:
        """Have a gang run the next candidate of a problem's search or finals; None if there is none for now."""
        if final and not self._trials_left(problem, final=True):
            return None
        is_new_here = not final and self._at.get(gang) != (problem, False)
        if (problem, final) not in self._searches or (is_new_here and self._settings.in_job):  # more is known by now
            if not self._strategy.may_begin(problem, self.seconds_left):
                self.searched[problem] = None
                return None
            self._searches[problem, final] = self._new_search(gang, problem)
        if is_new_here:
            self._grant_time(problem)
        commands = [*self._running.values(), *self._again.values()]
        local = {command.trial[1] for command in commands if (command.problem, command.final) == (problem, final)}
        offered = self._searches[problem, final].feasible
        remote = {c for c in self._in_flight(problem, final=final, max_age_s=_MAX_AGE_S) if c in offered}
        while (candidate := self._pick(problem, local | remote, final=final)) is not None:
            if self._claim(gang, problem, candidate, final=final):
                return self._assign(gang, problem, candidate, final=final)
            remote.add(candidate)
        remote -= self._knowledge.settled(problem, final=final).keys()
        self._waits |= bool(remote)
        if not final and not local and not remote:
            self.searched[problem] = None
            self._queue_compared(problem, is_over=True)
        return None

    def _pick(self, problem: Problem, busy: Collection[Candidate], *, final: bool) -> Candidate | None:
        if problem in self._too_large:
            return None
        known = self._knowledge.settled(problem, final=final)
        candidate = self._searches[problem, final].next(known, busy, self._dropped(problem.op))
        if final or candidate is None:
            return candidate
        # The library and one challenger are worth the budget's time wherever a search has begun, one of them is not.
        is_late = self._clock() >= self._until_s[problem] if self._is_compared(problem) else not self.has_time
        return None if is_late else candidate

    def _is_compared(self, problem: Problem) -> bool:
        """True once a challenger was tried at a problem, or once none is left to try."""
        if self.knowledge is None:
            return False
        if any(was_tried(t.status) and t.variant != "library" for t in self.knowledge.trials(problem)):
            return True
        return (problem, False) in self._searches and not self._trials_left(problem, final=False)

    def _new_search(self, gang: int, problem: Problem) -> Search:
        """The search of a problem, which is about to begin."""
        self._note_infeasible(gang, problem)
        knowledge, library = self._knowledge, self._knowledge.library(problem)
        # A candidate that cost a gang at this size is settled; one that cost a gang at another size is left out.
        known = knowledge.settled(problem)
        allowed = [
            candidate
            for candidate in self._strategy.space(problem, knowledge)
            if candidate in known or candidate == library or not knowledge.quarantined(problem, candidate)
        ]
        seeds = self._strategy.seeds(problem, knowledge, self.searched)
        return self._strategy.search(problem, allowed, self._settings, [library, *seeds])

    def _grant_time(self, problem: Problem) -> None:
        """Grant an even share of the time left, so that the last problem is searched as well as the first."""
        remaining = len(self.problems) - len(self.searched)
        left_s = self.seconds_left
        if math.isfinite(left_s):
            left_s -= self._budget_s * (1 - self._settings.search_share)
        share = min(self._settings.gangs, remaining) / remaining
        until_s = self._clock() + left_s * share
        if self._settings.in_job:  # the last trial begins before its time is up and ends half a trial later
            until_s -= self._trials_s / max(self._num_trials, 1) / 2
        self._until_s[problem] = max(self._until_s.get(problem, -math.inf), until_s)

    def _may_have_finals(self, family: list[Problem]) -> bool:
        """True once every search of a family is over, other supervisors' searches too; the finalists are known then."""
        if not self._settings.finals or not self.has_time or any(p not in self.searched for p in family):
            return False
        if (family[0], True) in self._searches:
            return True
        if any(self._in_flight(problem, final=False) for problem in family):
            self._waits = True
            return False
        for problem, finalists in self._strategy.finalists(family, self._knowledge):
            self._begin_finals(problem, finalists)
        return True

    def _begin_finals(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Measure the feasible ones of these candidates in the finals of a problem, in this order."""
        wanted = self._knowledge.feasible(problem, candidates)
        self._searches[problem, True] = Search(problem, wanted, replace(self._settings, trials=len(wanted)), wanted)

    def _assign(self, gang: int, problem: Problem, candidate: Candidate, *, final: bool) -> Command:
        knowledge, library = self._knowledge, self._knowledge.library(problem)
        works = knowledge.status(problem, library) not in UNUSABLE
        command = Command(
            kind="trial",
            problem=problem,
            candidate=candidate,
            baseline=library if works else None,
            threshold_us=knowledge.best_us(problem, get_variant(problem.op, candidate.variant).numerics),
            full_check=problem.nbytes <= self._settings.full_check_bytes and not knowledge.checked(problem, candidate),
            final=final,
        )
        self._running[gang] = command
        self._begun_s[gang] = self._clock()
        self._at[gang] = (problem, final)
        return command

    # Other supervisors

    def _in_flight(self, problem: Problem, *, final: bool, max_age_s: float = 0.0) -> frozenset[Candidate]:
        """Candidates of a problem that other supervisors run now; also reads the trials that they have stored."""
        if self.claims is None:
            return frozenset()
        running = self.claims.in_flight(problem, final=final, max_age_s=max_age_s)
        self._refresh(problem)
        return running

    def _claim(self, gang: int, problem: Problem, candidate: Candidate, *, final: bool) -> bool:
        """Claim a candidate for a gang; False if another supervisor runs it or has run it."""
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
        """Add the trials of a problem that other supervisors had stored by the last look at their claims."""
        assert self.claims is not None
        for trial in self.claims.news(problem):
            if self._knowledge.counts(trial):
                self._knowledge.add(trial)

    def _was_taken_over(self, gang: int) -> bool:
        """True if another supervisor took this one for dead, and runs or has run the gang's candidate."""
        claim = self._held.get(gang)
        if self.claims is None or claim is None or self.claims.holds(claim):
            return False
        self._refresh(claim.problem)
        return True

    def _add_trial(
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
        if trial.status in LOST and not variant.is_library:  # the library is always tried
            self._lost[problem.op, trial.variant] += 1
        self._uncompared.setdefault(problem, []).append((trial, claim))
        self._queue_compared(problem)
        return trial

    def _queue_compared(self, problem: Problem, *, is_over: bool = False) -> None:
        """Have a problem's trials stored once they are compared; forget them if the search is over before that."""
        is_compared = self._finals_only or self._is_compared(problem)
        found = self._uncompared.pop(problem, []) if is_compared or is_over else []
        if is_compared:
            self.unstored += found
        elif self.claims is not None:
            self.claims.release([claim for _, claim in found if claim is not None])

    def _note_infeasible(self, gang: int, problem: Problem) -> None:
        """Store a row for each variant that has no feasible config at all, so that `explain` can say why."""
        for candidate, reason in infeasible_variants(problem, self._knowledge.limits, self._settings.policy):
            known = self._knowledge.status(problem, candidate) is not None
            if not known and self._claim(gang, problem, candidate, final=False):
                result = TrialResult(status="infeasible", reason=reason)
                self._add_trial(problem, candidate, result, self._held.pop(gang, None))
