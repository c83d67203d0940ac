"""`tunedcomm.autotune`: tune in the running job what it calls untuned."""

from __future__ import annotations

import logging
import math
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tunedcomm.db.engine import warn_once
from tunedcomm.db.layers import Layer, all_layers, is_absent, named_layers, writable_database
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.dispatch.dispatcher import MISSES
from tunedcomm.dispatch.misses import POLICIES, Note, counter
from tunedcomm.dispatch.plans import explain, plan_for
from tunedcomm.errors import DatabaseError, InfeasibleError, UnsupportedInputError
from tunedcomm.metrics import format_us
from tunedcomm.selection.select import Decision
from tunedcomm.spec import Candidate, NumericsPolicy, Problem, get_op, why_no_kernel

if TYPE_CHECKING:  # a start that has nothing to tune does without the tuner, whose import takes tenths of a second
    from tunedcomm.tuner.gang.protocol import Command, TrialResult
    from tunedcomm.tuner.search.knowledge import Knowledge
    from tunedcomm.tuner.verify import Winner

logger = logging.getLogger("tunedcomm")

# What provenance says of such a run.
COMMAND = "tunedcomm.autotune"
_READY, _LEFT = "ready", "left"
# A look at stored winners: the seconds that it may take, and how much slower one may have become.
_CHECK_S, _TOLERANCE = 0.8, 0.25


@dataclass(frozen=True, slots=True)
class Tuned:
    """One problem that was tuned; the same on every rank.

    Attributes:
        problem: with its call mode.
        before, after: candidates that dispatch took before and takes now.
        before_us, after_us, library_us: medians in µs of this run, the last two as dispatch compares them; None where
            there is none.
    """

    problem: Problem
    before: Candidate | None
    after: Candidate
    before_us: float | None
    after_us: float | None
    library_us: float | None


class Autotune:
    """The record of a tuning, made by `autotune`; in a `with` block it tunes when the block is left.

    Attributes:
        results: the problems that were tuned; empty before, and where nothing was to do.
        num_trials: trials that were run.
        communicator: of the group.
        seconds: that tuning took, from the last call of the block on.
    """

    def __init__(self, communicator: Communicator, budget_s: float, *, plugins: bool) -> None:
        self.results: tuple[Tuned, ...] = ()
        self.num_trials, self.seconds = 0, 0.0
        self.communicator, self._budget_s, self._plugins = communicator, budget_s, plugins
        self._outer: dict[Problem, Note] | None = None

    def __str__(self) -> str:
        if not self.results:
            return "nothing to tune"
        lines: list[tuple[str, ...]] = [("problem", "before", "µs", "now", "µs", "library µs")]
        for one in self.results:
            times = [format_us(us) for us in (one.before_us, one.after_us, one.library_us)]
            lines.append((str(one.problem), str(one.before), times[0], str(one.after), *times[1:]))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def __enter__(self) -> Autotune:
        communicator = self.communicator
        self._outer, communicator.noted = communicator.noted, {}
        communicator.forget_eager_plans()  # with those that are made now problems are noted
        for plan in communicator.plans.values():
            counter(communicator, plan.problem, plan.decision.source, plan.policy)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        noted, self.communicator.noted = self.communicator.noted or {}, self._outer
        if error is None:
            self.tune(most_wanted(noted))
        else:
            self.communicator.meet(_LEFT, stay=False)

    def tune(self, problems: dict[Problem, NumericsPolicy]) -> None:
        """Tune what rank 0 passes; collective over the group.

        Args:
            problems: most wanted first, with the numerics policy that they are called with.
        """
        begin, communicator = time.monotonic(), self.communicator
        if communicator.rank == 0:
            problems = {p: policy for p, policy in problems.items() if is_open(communicator, p, policy)}
        if agreed := agree_on_work(communicator, problems):
            self._tune(agreed, begin)

    def _tune(self, problems: dict[Problem, NumericsPolicy], begin: float) -> None:
        from tunedcomm.tuner.in_job import ShortSearch, in_order, job_settings, run_in_job
        from tunedcomm.tuner.search.sweep import hash_if_known

        communicator = self.communicator
        before = {problem: decision_on(communicator, problem, policy) for problem, policy in problems.items()}
        options = job_settings(communicator.limits, problems, max(*problems.values(), "default", key=POLICIES.index))
        search = None
        if communicator.rank == 0:
            left_s = self._budget_s - (time.monotonic() - begin)
            stored = stored_here(problems)
            search = ShortSearch(problems, options, source_hash=hash_if_known, stored=stored, seconds_left=left_s)
            guesses = {p: [c for c in (d.candidate, d.runner_up) if c] if d else [] for p, d in before.items()}
            search.plan({p: guesses[p] for p in in_order(list(problems), left_s)}, plugins=self._plugins)
        progress = _Progress(self._budget_s)
        run_in_job(communicator, options, search, progress.tell)
        progress.close()
        trials = [] if search is None else worth_storing(trial for trial, _ in search.unstored)
        graphs = {key: plan for key, plan in communicator.plans.items() if key[-1] and plan.problem in problems}
        with tempfile.TemporaryDirectory() as folder:  # stands in for a user database that cannot be written
            communicator.reload_snapshot(lambda: store(trials, f"{COMMAND}(budget_s={self._budget_s:g})", Path(folder)))
        for key, plan in graphs.items():  # in a capture nothing can be bound
            communicator.plans[key] = plan_for(communicator, plan.problem, plan.policy, key[2])
        times = {(trial.problem, trial.candidate): trial.latency_p50_us for trial in trials}
        times, self.num_trials = communicator.exchange((times, progress.num_trials))[0]
        tuned = {problem for problem, _ in times}
        results = []
        for problem, policy in problems.items():
            was, now = before[problem], decision_on(communicator, problem, policy)
            if problem in tuned and now is not None:
                then = None if was is None else was.candidate
                was_us = times.get((problem, then))
                results.append(Tuned(problem, then, now.candidate, was_us, now.latency_us, now.library_us))
        self.results, self.seconds = tuple(results), time.monotonic() - begin
        logger.info("tuned %d problems in %.1f s with %d trials", len(results), self.seconds, self.num_trials)


def agree_on_work(communicator: Communicator, problems: dict[Problem, NumericsPolicy]) -> dict[Problem, NumericsPolicy]:
    """Rank 0's problems on every rank, once all have come; none where a rank left its block with an exception."""
    words = communicator.meet(f"{_READY} {len(problems)}")
    if _LEFT in words:
        logger.warning("nothing is tuned: rank %d left the block with an exception", words.index(_LEFT))
        return {}
    if words[0] == f"{_READY} 0":
        return {}
    found: dict[Problem, NumericsPolicy] = communicator.exchange(problems)[0]
    return found


def decision_on(communicator: Communicator, problem: Problem, policy: NumericsPolicy) -> Decision | None:
    """Dispatch's decision; None if it knows nothing that the policy admits."""
    try:
        return explain(communicator, problem, policy=policy)
    except InfeasibleError:
        return None


def is_open(communicator: Communicator, problem: Problem, policy: NumericsPolicy) -> bool:
    """True if nothing was measured for the problem, and a kernel may run it."""
    decision = decision_on(communicator, problem, policy)
    is_missed = decision is None or decision.source in MISSES
    return is_missed and why_no_kernel(problem, communicator.limits, policy) is None


def most_wanted(noted: Mapping[Problem, Note]) -> dict[Problem, NumericsPolicy]:
    """Problems that were called untuned: those first on which calls spent most, as their number and size tell."""

    def weight(problem: Problem) -> float:
        # A call takes some 10 µs, and 1 µs more for each 100 kB.
        return noted[problem].count * (10 + get_op(problem.op).message_bytes(problem) / 1e5)

    called = [problem for problem, note in noted.items() if note.count]
    return {problem: noted[problem].policy for problem in sorted(called, key=lambda p: (-weight(p), p))}


def stored_here(problems: Collection[Problem]) -> list[Trial]:
    """The user database's trials of problems; none where it cannot be read."""
    from tunedcomm.tuner.search.sweep import stored_records

    try:
        user = named_layers()[0]
        if is_absent(user):
            return []
        with user.open() as database:
            return stored_records(database, problems)
    except DatabaseError as error:
        warn_once(f"the user database is left out: {error}")
        return []


def worth_storing(trials: Iterable[Trial]) -> list[Trial]:
    """Trials of problems of which more than the library was tried: others would pass for tuned at the next start."""
    known = list(trials)
    tried = {trial.problem for trial in known if trial.variant != "library" and trial.status != "infeasible"}
    return [trial for trial in known if trial.problem in tried]


def store(trials: Sequence[Trial], command: str, folder: Path) -> list[Layer] | None:
    """Add trials to the user database; the layers to read then, None for the usual ones.

    Where it cannot be written they go into a database in `folder`, for this process alone.
    """

    def write(target: str) -> None:
        with Database.open(target, create=True) as database:
            run = database.start_run(command=command, seed=0, budget="in the running job", host=socket.gethostname())
            database.record([replace(trial, run_id=run) for trial in trials])
            database.finish_run(run)

    if not trials:
        return None
    try:
        write(writable_database())
    except DatabaseError as error:
        logger.warning("what was tuned serves in this process, but is not stored: %s", error)
        write(str(folder / "tuned.db"))
        return [Layer("user", str(folder / "tuned.db")), *all_layers()]
    return None


class _Progress:
    """One line on a terminal, written anew with every trial; nothing where standard error is none."""

    def __init__(self, budget_s: float) -> None:
        self.num_trials = 0
        self._budget_s, self._begin_s = budget_s, time.monotonic()

    def tell(self, command: Command, result: TrialResult) -> None:
        """Show a trial that ended."""
        self.num_trials += 1
        if sys.stderr.isatty():
            took_s = time.monotonic() - self._begin_s
            time_us = f" {format_us(result.latency.p50_us)} µs" if result.latency else ""
            what = f"{command.problem}: {command.candidate} {result.status}{time_us}"
            text = f"tunedcomm: {took_s:.1f} of {self._budget_s:g} s, trial {self.num_trials}, {what}"
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.num_trials and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def autotune(
    problems: Iterable[Problem] | None = None,
    *,
    budget_s: float = 3.0,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    plugins: bool = False,
) -> Autotune:
    """Tune in the running job: what a `with` block calls untuned, when it is left, or the given problems at once.

        with tunedcomm.autotune(budget_s=3.0) as tuned:
            model(tokens)
        print(tuned)

    Collective over the ranks of the group: all enter and leave the block, or make the call. Rank 0 decides what is
    tried, its clock ends the search, and the slowest rank's time counts. Each candidate passes the check of
    `tunedcomm tune` before it is timed; a wait of its launches ends after 2 s. One that hangs, raises or is wrong is
    recorded as such on all ranks, and the group goes on. Winners take effect at once, in graphs that are captured from
    then on, and rank 0 stores all trials in the user database: the next start finds them and has nothing to tune.

    Not while a graph is captured. Work on the GPU that was launched before is waited for. Trials take as much symmetric
    memory as the group has (`TUNEDCOMM_WORKSPACE_MIB`), inputs and outputs of the problem several times, and are on
    streams of their own; all of it is given back.

    Args:
        problems: tune these, most wanted first; None: return a block.
        budget_s: seconds that tuning may take, by rank 0's clock.
        group: process group, by default the default group. Calls on other groups are not noted.
        device: where its tensors live; by default the current CUDA device, or the CPU where there is none.
        plugins: try variants of other packages, too. A launch of theirs that waits without a bound hangs the job.

    Returns:
        The record of what was tuned, which prints as a table.

    Raises:
        TuningError: a graph is being captured, or a rank did not come within TUNEDCOMM_PEER_TIMEOUT_S.
        UnsupportedInputError: `budget_s` is no number of seconds, or a problem that no call on the group asks.
        NotInitializedError, GroupError: see `get_communicator`.

    An exception in the block passes on, and nothing is tuned on any rank.
    """
    if not isinstance(budget_s, (int, float)) or isinstance(budget_s, bool) or not 0 < budget_s < math.inf:
        raise UnsupportedInputError(f"budget_s={budget_s!r} is no number of seconds; pass one above 0")
    made = Autotune(get_communicator(group, device), budget_s, plugins=plugins)
    if problems is not None:
        asked = dict.fromkeys(problems)
        for problem in asked:
            decision = decision_on(made.communicator, problem, "default")
            if decision is None or decision.source in MISSES:  # what is stored has passed
                from tunedcomm.tuner.search.sweep import check_problem

                check_problem(problem)
        made.tune(dict.fromkeys(asked, "default"))
    return made


def after_warmup(group: dist.ProcessGroup, device: torch.device) -> None:
    """Do what TUNEDCOMM_AUTOTUNE says, once for a group; collective over it then."""
    communicator = get_communicator(group, device)
    noted, wanted = communicator.noted, communicator.settings.autotune
    if noted is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    communicator.noted = None
    if isinstance(wanted, float):
        Autotune(communicator, wanted, plugins=False).tune(most_wanted(noted))
    else:
        check_winners(communicator, noted)


def check_winners(communicator: Communicator, noted: Mapping[Problem, Note]) -> None:
    """Time the stored winners of problems that were called beside the library and a runner-up; collective.

    Nothing is stored. A warning names every winner that does not hold on this machine.
    """
    from tunedcomm.tuner.in_job import job_settings, run_in_job
    from tunedcomm.tuner.search.sweep import hash_if_known
    from tunedcomm.tuner.verify import Recheck, judge, stored_winners

    stored: dict[Problem, tuple[Winner, ...]] = {}
    if communicator.rank == 0:
        stored = stored_winners(communicator.snapshot, communicator.limits, hash_if_known, noted.__contains__)
    asked = agree_on_work(communicator, {problem: noted[problem].policy for problem in stored})
    if not asked:
        return
    options = job_settings(communicator.limits, asked, "any")
    if communicator.rank != 0:
        run_in_job(communicator, options, None)
        return
    first = {problem: winners[0] for problem, winners in stored.items()}
    chosen = {p: [c for c in (w.candidate, w.runner_up) if c is not None] for p, w in first.items()}

    def begin(known: Knowledge) -> None:
        recheck.measure(chosen, {(problem, winner.candidate) for problem, winner in first.items()})

    recheck = Recheck((), options, source_hash=hash_if_known, seconds_left=_CHECK_S, on_known=begin)
    run_in_job(communicator, options, recheck)
    trials = [trial for trial, _ in recheck.unstored]
    for winner in first.values():
        one = judge(winner, trials, tolerance=_TOLERANCE)
        is_close = one.verdict == "slower" and (one.ratio or 0.0) <= 1 + _TOLERANCE
        if one.is_wrong and one.verdict != "unmeasured" and not is_close:
            logger.warning(
                "%s: the stored winner %s does not hold on this machine, %s: %s; tune it again",
                winner.problem, winner.candidate, one.verdict, one.why
            )  # fmt: skip
