"""Tuning in a running job: the ranks of a process group are the gang, and rank 0 decides for all.

There is no supervisor to kill a gang, so what it would do for a sweep is done otherwise:

- Trials run in memory of their own (`Communicator.with_own_memory`), where waits for peers end after `PEER_TIMEOUT_S`.
  A candidate that hangs, or raises on one rank, ends on all of them; then the memory is made anew, and the group's own
  calls know nothing of it.
- Votes and commands go through a gloo group that is made for this and ended with it.
- Only variants of this package are tried unless others are asked for: theirs may wait without a bound.

The search is short: every problem gets an even share of the time, begins with guesses from all that is known, goes on
among the neighbours of its best, and ends with its own finals, while its tensors are there.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from tunedcomm.db.records import Trial
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, get_op, get_variant, variants
from tunedcomm.symm.nodes import make_subgroup
from tunedcomm.tuner.gang.group import Gang
from tunedcomm.tuner.gang.protocol import LOST, Command, Settings, TrialResult
from tunedcomm.tuner.measure.trial import TrialRunner
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import is_library
from tunedcomm.tuner.search.study import LocalSearch, Search, default_candidates, families

# Longest wait of a trial's launch for a peer.
PEER_TIMEOUT_S = 2.0
# Finalists of a problem besides the library.
_FINALISTS = 3
# Times the best one's, up to which another takes part in the finals.
_CLOSE = {"cuda": 1.05, "host": 1.3}
# A variant that took so many times as long as the best near a size is not tried there.
_FAR_BEHIND = 3.0
# What is taken for that of a variant that did not run near it, and how many times as large is near.
_UNKNOWN = 1.5
_NEAR = 8.0
_ROUND_BUDGET_US = 100_000.0
# Of CPU tensors larger ones are checked at their very size alone: there the references take the time, not the launches.
_FULL_CHECK_BYTES = 2 << 20
# Up to here a problem's first trial takes what it takes; beyond, as much more as there are more bytes.
_SMALL_BYTES = {"cuda": 64 << 20, "host": 1 << 20}
# Problems that fit into a budget, by the seconds that each should get; these are searched from small to large messages.
_LEAST_S = 0.2


def job_settings(limits: Limits, problems: Collection[Problem], policy: NumericsPolicy) -> Settings:
    """Settings of a short search: few samples, since time is short, and no second chance for what hung."""
    on_gpu = limits.backend == "cuda"
    # Interpreted kernels take a tenth of a second, and are searched where nothing else is there for CPU tensors.
    is_fast = all(any(v.untuned(problem, limits) for v in variants(problem.op).values()) for problem in problems)
    return Settings(
        backend=limits.backend,
        world_size=next(iter(problems)).world_size,
        trials=64,
        policy=policy,
        reach=1.3 if on_gpu else 1.6,
        first_rounds=2 if on_gpu else 3,
        more_rounds=6 if on_gpu else 8,
        final_rounds=12,
        for_kernels=on_gpu or not is_fast,
        round_budget_us=_ROUND_BUDGET_US,
        short=True,
        peer_timeout_s=PEER_TIMEOUT_S,
        failures_per_variant=1,
    )


def is_own(candidate: Candidate) -> bool:
    """True if this package brings the variant."""
    bind = get_variant(candidate.op, candidate.variant).bind
    owner = getattr(bind, "__self__", None)
    module = getattr(bind, "__module__", "") if owner is None else type(owner).__module__
    return str(module).startswith("tunedcomm.")


def in_order(problems: Sequence[Problem], budget_s: float) -> list[Problem]:
    """The order to search problems in, given the most wanted first.

    As many of these as fit into the budget, family by family and from small to large messages, so that each begins with
    what is good next to it; then the others.
    """
    fitting = max(1, int(budget_s / _LEAST_S))
    parts = (problems[:fitting], problems[fitting:])
    return [problem for part in parts for family in families(part) for problem in family]


class ShortSearch(Coordinator):
    """A coordinator of one gang that searches problem after problem, each with its finals at its end, see `plan`."""

    _search_class = LocalSearch
    _search_share = 0.95

    def plan(self, guesses: Mapping[Problem, Sequence[Candidate]], *, plugins: bool = False) -> None:
        """Set the problems, most wanted first, before the first command is asked for.

        Args:
            guesses: problem to candidates that are tried right after the library.
            plugins: try variants of other packages, too.
        """
        self._families, self._guesses, self._plugins = [[problem] for problem in guesses], guesses, plugins
        self._begun_s, self._first_s = 0.0, dict[Problem, float]()
        self._trials_s, self._num_trials = 0.0, 0

    def _space(self, problem: Problem) -> list[Candidate]:
        return [c for c in super()._space(problem) if self._plugins or is_library(c) or is_own(c)]

    def _seeds(self, problem: Problem) -> list[Candidate]:
        """Guesses, then the defaults of variants, which know the size, in the order of their times near it.

        Where a default did not win next to it, the winner's config comes second.
        """
        limits, known = self._knowledge.limits, self._behind(problem)
        defaults = [c for c in default_candidates(problem, limits) if known.get(c.variant, _UNKNOWN) <= _FAR_BEHIND]
        defaults.sort(key=lambda c: known.get(c.variant, _UNKNOWN))
        found: list[Candidate] = []
        for other in self._near(problem)[:1]:
            usual = default_candidates(other, limits)
            found = [c for c in self._knowledge.winners(other, 1, self._settings.policy) if c not in usual]
        return [*self._guesses[problem], *defaults[:1], *self._knowledge.feasible(problem, found), *defaults[1:]]

    def _near(self, problem: Problem) -> list[Problem]:
        """Problems of the family that were searched, up to so many times smaller or larger, the nearest first."""

        def distance(other: Problem) -> float:
            sizes = [get_op(p.op).message_bytes(p) + 1 for p in (problem, other)]
            return max(sizes) / min(sizes)

        near = [p for p in self.searched if p.family == problem.family and distance(p) <= _NEAR]
        return sorted(near, key=distance)

    def _behind(self, problem: Problem) -> dict[str, float]:
        """Variant to how many times as long as the best it took, at the nearest size where it ran."""
        found: dict[str, float] = {}
        for other in self._near(problem):
            times: dict[str, float] = {}
            for trial in self._knowledge.trials(other):
                if trial.latency_p50_us is not None and not is_library(trial.candidate):
                    times[trial.variant] = min(trial.latency_p50_us, times.get(trial.variant, math.inf))
            found = {variant: us / min(times.values()) for variant, us in times.items()} | found
        return found

    def _grant_time(self, problem: Problem) -> None:
        super()._grant_time(problem)
        self._until_s[problem] -= self._trials_s / max(self._num_trials, 1) / 2  # the last trial ends later

    def _finalists(self, family: Sequence[Problem]) -> Iterator[tuple[Problem, list[Candidate]]]:
        """The best few, where they are too close to tell apart by one look."""
        for problem in family:
            times = self._knowledge.settled(problem)
            best = self._knowledge.winners(problem, _FINALISTS, self._settings.policy)
            close = [c for c in best if (times[c] or 0.0) <= _CLOSE[self._settings.backend] * (times[best[0]] or 0.0)]
            yield problem, close if len(close) > 1 else []

    def _measure(self, problem: Problem, candidates: Iterable[Candidate]) -> None:
        """Measure these again, if there are any: the library is beside each of them."""
        wanted = self._knowledge.feasible(problem, candidates)
        self._searches[problem, True] = Search(problem, wanted, self._settings, wanted)

    def _assign(self, gang: int, problem: Problem, candidate: Candidate, *, final: bool) -> Command:
        command, self._begun_s = super()._assign(gang, problem, candidate, final=final), self._clock()
        is_large = self._settings.backend == "host" and problem.nbytes > _FULL_CHECK_BYTES
        return replace(command, full_check=command.full_check and not is_large)

    def _next_at(self, gang: int, problem: Problem, *, final: bool) -> Command | None:
        if not final and (problem, False) not in self._searches and self._cost_s(problem) > self.seconds_left:
            self.searched[problem] = None  # it is left as it was
            return None
        return super()._next_at(gang, problem, final=final)

    def learn(self, gang: int, result: TrialResult) -> Trial | None:
        """Take in how a trial ended, and what the first one of a problem took."""
        command = self._running[gang]
        took_s = self._clock() - self._begun_s
        self._first_s.setdefault(command.trial[0], took_s)
        self._trials_s, self._num_trials = self._trials_s + took_s, self._num_trials + 1
        return super().learn(gang, result)

    def _is_doubtful(self, gang: int, candidate: Candidate, status: str) -> bool:
        """True for the library alone: what other candidates leave behind is gone with the memory of their trials."""
        return is_library(candidate) and super()._is_doubtful(gang, candidate, status)

    def _cost_s(self, problem: Problem) -> float:
        """Seconds that the first trial of a problem may take, by that of the largest one that ran."""

        def size(of: Problem) -> int:
            return max(get_op(of.op).message_bytes(of), _SMALL_BYTES[self._settings.backend])

        if not self._first_s:
            return 0.0
        largest = max(self._first_s, key=size)
        return self._first_s[largest] * max(1.0, size(problem) / size(largest))


def run_in_job(
    communicator: Communicator,
    settings: Settings,
    coordinator: Coordinator | None,
    tell: Callable[[Command, TrialResult], None] = lambda command, result: None,
) -> None:
    """Run the trials that rank 0's coordinator asks for; collective over the group, outside of any capture.

    Args:
        communicator: of the group; its own memory and plans are left alone.
        settings: the same on every rank.
        coordinator: rank 0's; None on the other ranks.
        tell: called with every trial that ended, on rank 0.

    Raises:
        RuntimeError: a rank is gone, or the library does not run.
    """
    control = make_subgroup(
        communicator.group,
        range(communicator.world_size),
        communicator.exchange(f"tunedcomm-{uuid.uuid4().hex}")[0],
        "cpu",
    )
    runner: TrialRunner | None = None
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group, control)
        stack.enter_context(no_intercept())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(communicator.device.type, enabled=False))
        while True:
            if runner is None:
                own = communicator.with_own_memory(PEER_TIMEOUT_S, for_kernels=settings.for_kernels)
                gang = Gang(control, own)
                gang.synchronize()  # with what the program has launched before: its kernels take room, too
                gang.barrier()
                runner = TrialRunner(gang, settings)
                if coordinator is not None:
                    coordinator.gang_ready(0, communicator.environment, gang.communicator.limits)
            command = gang.gather(Command(kind="wait") if coordinator is None else coordinator.next(0))[0]
            result = runner.run(command) if command.kind == "trial" else None
            if coordinator is not None and result is not None:
                coordinator.learn(0, result)
                tell(command, result)
            if result is None or result.status in LOST:
                gang.synchronize()
                gang.barrier()  # no rank gives memory back that a peer's launch may still use
                runner.close()
                runner = None
            if result is None:
                return
