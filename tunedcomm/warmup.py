"""`tunedcomm.autotune`: tune untuned problems in the running job."""

from __future__ import annotations

import json
import logging
import math
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tunedcomm.db.layers import Layer, all_layers, is_absent, named_layers, note_made, writable_database
from tunedcomm.db.misses import Note
from tunedcomm.db.records import Trial
from tunedcomm.db.sidecar import note_unreached, spent_budgets
from tunedcomm.db.store import Database
from tunedcomm.db.targets import warn_once
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.decide import MISSES
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.dispatch.misses import note_problem
from tunedcomm.dispatch.plans import explain, plan_for
from tunedcomm.errors import DatabaseError, InfeasibleError, UnsupportedInputError
from tunedcomm.kernels import source_hash_of
from tunedcomm.metrics import format_us, plural
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Check
from tunedcomm.spec import Candidate, Mode, NumericsPolicy, Problem, get_op, why_no_kernel, widest

if TYPE_CHECKING:  # the tuner's import takes tenths of a second; a start with nothing to tune does without it
    from tunedcomm.kernels.common.launch import CompileRequest
    from tunedcomm.tuner.gang.protocol import Command, Settings, TrialResult
    from tunedcomm.tuner.search.coordinator import Coordinator
    from tunedcomm.tuner.search.knowledge import Knowledge
    from tunedcomm.tuner.verify import Winner

logger = logging.getLogger("tunedcomm")

# Command line stored with the run.
COMMAND = "tunedcomm.autotune"
_READY, _LEFT = "ready", "left"
# Check of stored winners: its time limit in seconds, and the tolerated slowdown of a winner.
_CHECK_S, _TOLERANCE = 0.8, 0.25
# Time limit of compiling before the budget begins, in seconds.
_COMPILE_S = 8.0


@dataclass(frozen=True, slots=True)
class Tuned:
    """One problem that was tuned; the same on every rank.

    Attributes:
        problem: with its call mode.
        before, after: candidates that dispatch took before and takes now.
        before_us, after_us, library_us: medians of this run, the last two as dispatch compares them; None where not
            measured.
    """

    problem: Problem
    before: Candidate | None
    after: Candidate
    before_us: float | None
    after_us: float | None
    library_us: float | None


class Autotune:
    """The record of a tuning, made by `autotune`. As a `with` block it tunes when the block is left.

    Attributes:
        results: the problems that were tuned; empty before the tuning, and if no problem was untuned.
        num_problems, num_trials: problems to tune, and trials that ran.
        communicator: communicator of the group.
        seconds: duration of the tuning, from the end of the block on.
    """

    def __init__(
        self, communicator: Communicator, budget_s: float, *, compile_s: float = _COMPILE_S, plugins: bool = False
    ) -> None:
        self.results: tuple[Tuned, ...] = ()
        self.num_problems, self.num_trials, self.seconds = 0, 0, 0.0
        self.communicator, self._plugins = communicator, plugins
        self._budget_s, self._compile_s = budget_s, compile_s
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

    @property
    def summary(self) -> str:
        """One line on the problems that were tuned."""
        ops = Counter(one.problem.op for one in self.results)
        times = [one.library_us / one.after_us for one in self.results if one.library_us and one.after_us]
        gains = f"; {min(times):.2f} to {max(times):.2f} times as fast as the library" if times else ""
        text = f"tuned {len(self.results)} of {plural(self.num_problems, 'problem')} in {self.seconds:.1f} s"
        each = ", ".join(f"{op} {n}" for op, n in ops.items()) or "none"
        return f"{text}, {plural(self.num_trials, 'trial')} ({each}){gains}"

    def __enter__(self) -> Autotune:
        communicator = self.communicator
        self._outer, communicator.noted = communicator.noted, {}
        communicator.forget_eager_plans()  # new plans note their problems
        for plan in communicator.plans.values():
            note_problem(communicator, plan.problem, plan.source, plan.policy)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        noted, self.communicator.noted = self.communicator.noted or {}, self._outer
        if error is None:
            self.tune(most_wanted(noted))
        else:
            self.communicator.barrier(_LEFT, waits=False)

    def tune(self, problems: dict[Problem, NumericsPolicy]) -> None:
        """Tune the problems that rank 0 passes; collective over the group.

        Args:
            problems: numerics policy of the calls by problem, most wanted first.
        """
        begin, communicator = time.monotonic(), self.communicator
        if communicator.rank == 0:
            problems = {p: policy for p, policy in problems.items() if is_open(communicator, p, policy)}
            spent_s = spent_budgets(communicator.environment) if problems else {}
            left_out = [p for p in problems if spent_s.get(p, 0.0) >= self._budget_s]
            if left_out:
                warn_once(
                    f"autotune leaves out {plural(len(left_out), 'problem')} that an earlier start did not tune within "
                    f"{self._budget_s:g} s; raise its budget, or run `tunedcomm tune`"
                )
            problems = {p: policy for p, policy in problems.items() if p not in left_out}
        if agreed := agree_on_work(communicator, problems):
            self._tune(agreed, begin)

    def _tune(self, problems: dict[Problem, NumericsPolicy], begin: float) -> None:
        from tunedcomm.tuner.in_job import compile_together, job_settings, run_in_job

        communicator = self.communicator
        before = {problem: decision_on(communicator, problem, policy) for problem, policy in problems.items()}
        options = job_settings(communicator.limits, problems, widest([*problems.values(), "default"]))
        progress = _Progress(self._budget_s, self._compile_s)
        search, binaries = self._search_and_binaries(before, options) if communicator.rank == 0 else (None, ())
        if options.backend == "cuda":
            capability = communicator.environment.compute_capability
            compile_together(communicator, binaries, capability, self._compile_s, progress.show_compiling)
        if search is not None:
            search.start_clock()
        run_in_job(communicator, options, search, on_result=progress.show)
        progress.close()
        trials = [] if search is None else [trial for trial, _ in search.unstored]
        graphs = {key: plan for key, plan in communicator.plans.items() if key.capturing and plan.problem in problems}
        with tempfile.TemporaryDirectory() as folder:  # for a user database that cannot be written
            communicator.reload_snapshot(lambda: store(trials, f"{COMMAND}(budget_s={self._budget_s:g})", Path(folder)))
        for key, plan in graphs.items():  # now, since nothing can be bound in a capture
            communicator.keep_plans(key[:-1], {True: plan_for(communicator, plan.problem, plan.policy, key.max_sms)})
        times = {(trial.problem, trial.candidate): trial.latency_p50_us for trial in trials}
        times, self.num_trials = communicator.exchange((times, progress.num_trials))[0]
        tuned = {problem for problem, _ in times}
        self.num_problems, results = len(problems), []
        for problem, policy in problems.items():
            was, now = before[problem], decision_on(communicator, problem, policy)
            if problem in tuned and now is not None:
                then = None if was is None else was.candidate
                was_us = times.get((problem, then))
                results.append(Tuned(problem, then, now.candidate, was_us, now.latency_us, now.library_us))
        if communicator.rank == 0:
            note_unreached(communicator.environment, [p for p in problems if p not in tuned], self._budget_s)
        self.results, self.seconds = tuple(results), time.monotonic() - begin
        logger.info("tuned %d problems in %.1f s with %d trials", len(results), self.seconds, self.num_trials)

    def _search_and_binaries(
        self, before: Mapping[Problem, Decision | None], options: Settings
    ) -> tuple[Coordinator, Collection[CompileRequest]]:
        """The search, and the binaries that it launches first."""
        from tunedcomm.tuner.in_job import JobStrategy
        from tunedcomm.tuner.search.coordinator import Coordinator
        from tunedcomm.tuner.search.knowledge import Knowledge

        communicator, stored = self.communicator, user_trials(before)
        guesses = {p: [c for c in (d.candidate, d.runner_up) if c] if d else [] for p, d in before.items()}
        strategy = JobStrategy(options, guesses, plugins=self._plugins)
        search = Coordinator(
            guesses,
            options,
            strategy=strategy,
            source_hash=source_hash_of,
            stored=stored,
            seconds_left=self._budget_s,
        )
        known = Knowledge(guesses, communicator.environment, communicator.limits, source_hash_of, stored=stored)
        return search, strategy.first_binaries(known) if options.backend == "cuda" else ()


def agree_on_work(communicator: Communicator, problems: dict[Problem, NumericsPolicy]) -> dict[Problem, NumericsPolicy]:
    """Rank 0's problems on every rank, once all ranks are ready; none if a rank left its block with an exception."""
    messages = communicator.barrier(f"{_READY} {len(problems)}")
    if _LEFT in messages:
        logger.warning("nothing is tuned: rank %d left the block with an exception", messages.index(_LEFT))
        return {}
    if messages[0] == f"{_READY} 0":
        return {}
    found: dict[Problem, NumericsPolicy] = communicator.exchange(problems)[0]
    return found


def decision_on(communicator: Communicator, problem: Problem, policy: NumericsPolicy) -> Decision | None:
    """Dispatch's decision; None if the policy admits no candidate."""
    try:
        return explain(communicator, problem, policy=policy)
    except InfeasibleError:
        return None


def is_open(communicator: Communicator, problem: Problem, policy: NumericsPolicy) -> bool:
    """True if the problem is not tuned and a kernel may run it."""
    decision = decision_on(communicator, problem, policy)
    is_missed = decision is None or decision.source in MISSES
    return is_missed and why_no_kernel(problem, communicator.limits, policy) is None


def most_wanted(noted: Mapping[Problem, Note]) -> dict[Problem, NumericsPolicy]:
    """Problems that were called untuned; first those with the most time in calls, estimated from count and size."""

    def weight(problem: Problem) -> float:
        # A call takes about 10 µs, and 1 µs more for each 100 kB.
        return noted[problem].count * (10 + get_op(problem.op).message_bytes(problem) / 1e5)

    called = [problem for problem, note in noted.items() if note.count]
    return {problem: noted[problem].policy for problem in sorted(called, key=lambda p: (-weight(p), p))}


def user_trials(problems: Collection[Problem]) -> list[Trial]:
    """Trials of these problems in the user database; none if it cannot be read."""
    from tunedcomm.tuner.search.sweep import stored_trials

    try:
        user = named_layers()[0]
        if is_absent(user):
            return []
        with user.open() as database:
            return stored_trials(database, problems)
    except DatabaseError as error:
        warn_once(f"the user database is left out: {error}")
        return []


def store(trials: Sequence[Trial], command: str, folder: Path) -> list[Layer] | None:
    """Add trials to the user database; returns the layers to read from now on, None for the usual layers.

    If the user database cannot be written, the trials go into a database in `folder`, for this process alone.
    """

    def write(target: str) -> None:
        with Database.open(target, create=True) as database:
            run = database.start_run(command=command, seed=0, budget="in the running job", host=socket.gethostname())
            database.record([replace(trial, run_id=run) for trial in trials])
            database.finish_run(run)

    if not trials:
        return None
    try:
        target = writable_database()
        is_new = is_absent(Layer("user", target))
        write(target)
        if is_new:
            note_made(target)
    except DatabaseError as error:
        logger.warning("what was tuned serves in this process, but is not stored: %s", error)
        write(str(folder / "tuned.db"))
        return [Layer("user", str(folder / "tuned.db")), *all_layers()]
    return None


class _Progress:
    """One line on the terminal, rewritten with every trial; nothing if standard error is no terminal."""

    def __init__(self, budget_s: float, compile_s: float) -> None:
        self.num_trials = 0
        self._budget_s, self._compile_s, self._begin_s = budget_s, compile_s, time.monotonic()

    def show_compiling(self, done: int, wanted: int) -> None:
        """Show how many binaries are compiled."""
        filled = 20 * done // wanted
        self._print(self._compile_s, f"compiling [{'#' * filled}{' ' * (20 - filled)}] {done} of {wanted}")

    def show(self, command: Command, result: TrialResult) -> None:
        """Show a trial that ended."""
        if not self.num_trials:
            self._begin_s = time.monotonic()
        self.num_trials += 1
        time_us = f" {format_us(result.latency.p50_us)} µs" if result.latency else ""
        outcome = f"{command.problem}: {command.candidate} {result.status}{time_us}"
        self._print(self._budget_s, f"trial {self.num_trials}, {outcome}")

    def _print(self, bound_s: float, what: str) -> None:
        if sys.stderr.isatty():
            text = f"tunedcomm: {time.monotonic() - self._begin_s:.1f} of {bound_s:g} s, {what}"
            print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def autotune(
    problems: Iterable[Problem] | None = None,
    *,
    budget_s: float = 3.0,
    compile_s: float = _COMPILE_S,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    plugins: bool = False,
) -> Autotune:
    """Tune in the running job: at the end of a `with` block its untuned problems, or the given problems at once.

        with tunedcomm.autotune(budget_s=3.0) as tuned:
            model(tokens)
        print(tuned)

    Collective over the ranks of the group: all ranks enter and leave the block, or make the call. Rank 0 chooses the
    candidates, its clock ends the search, and the slowest rank's time counts. Each candidate passes the check of
    `tunedcomm tune` before it is timed; a wait of its launches ends after 2 s. A candidate that hangs, raises or is
    wrong is recorded as such on all ranks, and the group goes on. Winners take effect at once, in graphs that are
    captured from then on. Rank 0 stores all trials in the user database, so that the next start has nothing to tune;
    what the budget did not reach is noted beside it and tried again only with a larger budget.

    On GPUs the candidates that come first are compiled before the budget begins, by processes of the first rank of each
    host. The most wanted problems come first, and each problem gets one candidate before any gets a second one.

    Do not call this while a graph is captured. Tuning waits for earlier work on the GPU. Trials run on streams of their
    own. They take as much symmetric memory as the group has (`TUNEDCOMM_WORKSPACE_MIB`), and several copies of a
    problem's inputs and outputs; all of this memory is freed at the end.

    Args:
        problems: tune these problems, most wanted first; None: return a block.
        budget_s: time limit of the trials in seconds, by rank 0's clock.
        compile_s: time limit of compiling before them; 0: candidates are compiled as they are tried.
        group: process group, by default the default group. Calls on other groups are not noted.
        device: device of the tensors; by default the current CUDA device, or the CPU where there is none.
        plugins: try variants of other packages, too. A variant whose waits have no bound can hang the job.

    Returns:
        The record of what was tuned, which prints as a table.

    Raises:
        TuningError: a graph is being captured, or a rank did not come within TUNEDCOMM_PEER_TIMEOUT_S.
        UnsupportedInputError: `budget_s` or `compile_s` is not a number of seconds, or no call on the group has one of
            the problems.
        NotInitializedError, GroupError: see `get_communicator`.

    An exception in the block passes on, and nothing is tuned on any rank.
    """
    for name, seconds in (("budget_s", budget_s), ("compile_s", compile_s)):
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds < math.inf or (name == "budget_s" and not seconds):
            raise UnsupportedInputError(f"{name}={seconds!r} is not a number of seconds; pass one above 0")
    made = Autotune(get_communicator(group, device), budget_s, compile_s=compile_s, plugins=plugins)
    if problems is not None:
        unique = dict.fromkeys(problems)
        for problem in unique:
            decision = decision_on(made.communicator, problem, "default")
            if decision is None or decision.source in MISSES:  # stored problems passed this check before
                from tunedcomm.tuner.search.spec import check_problem

                check_problem(problem)
        made.tune(dict.fromkeys(unique, "default"))
    return made


def check_borrowed(communicator: Communicator) -> tuple[Check, ...]:
    """Check all that the group borrows from other hardware, ahead of first calls; collective.

    Returns:
        The checks of this machine so far, of both call modes on GPUs: no first call of a problem with borrowed rows
        needs another one.
    """
    stored = {row.problem for row in communicator.snapshot.rows if row.borrowed}
    modes: tuple[Mode, ...] = ("graph", "eager") if communicator.device.type == "cuda" else ("eager",)
    for problem in sorted({replace(problem, mode=mode) for problem in stored for mode in modes}):
        with suppress(InfeasibleError):
            plan_for(communicator, problem, "default")
    return communicator.snapshot.checks


def main(result_file: str) -> int:
    """Body of a rank of `tunedcomm db verify --borrowed`; rank 0 writes the checks."""
    from tunedcomm.tuner.gang.ranks import join_group

    communicator = get_communicator(None, join_group())
    checks = check_borrowed(communicator)
    if communicator.rank == 0:
        found = [
            {
                "problem": check.problem.to_dict(),
                "candidate": str(check.candidate),
                "status": check.status,
                "why": check.why,
            }
            for check in checks
        ]
        Path(result_file).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def tune_or_check(group: dist.ProcessGroup, device: torch.device) -> None:
    """Tune or check as TUNEDCOMM_AUTOTUNE says, once for a group; collective over the group then."""
    communicator = get_communicator(group, device)
    noted, wanted = communicator.noted, communicator.settings.autotune
    if noted is None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    communicator.noted = None
    if isinstance(wanted, float):
        tuned = Autotune(communicator, wanted)
        tuned.tune(most_wanted(noted))
        if communicator.rank == 0 and tuned.num_trials:
            print(f"tunedcomm: {tuned.summary}", file=sys.stderr)
    else:
        check_winners(communicator, noted)


def check_winners(communicator: Communicator, noted: Mapping[Problem, Note]) -> None:
    """Time the stored winners of problems that were called, beside the library and a runner-up; collective.

    Stores nothing. A warning names every winner that does not hold on this machine.
    """
    from tunedcomm.tuner.in_job import job_settings, run_in_job
    from tunedcomm.tuner.search.coordinator import Coordinator
    from tunedcomm.tuner.verify import judge, stored_winners

    stored: dict[Problem, tuple[Winner, ...]] = {}
    if communicator.rank == 0:
        stored = stored_winners(communicator.snapshot, communicator.limits, source_hash_of, noted.__contains__)
    agreed = agree_on_work(communicator, {problem: noted[problem].policy for problem in stored})
    if not agreed:
        return
    options = job_settings(communicator.limits, agreed, "any")
    if communicator.rank != 0:
        run_in_job(communicator, options, None)
        return
    first = {problem: winners[0] for problem, winners in stored.items()}
    chosen = {p: [c for c in (w.candidate, w.runner_up) if c is not None] for p, w in first.items()}

    coordinator = Coordinator((), options, source_hash=source_hash_of, seconds_left=_CHECK_S)

    def begin(known: Knowledge) -> None:
        coordinator.measure_only(chosen, {(problem, winner.candidate) for problem, winner in first.items()})

    run_in_job(communicator, options, coordinator, begin)
    trials = [trial for trial, _ in coordinator.unstored]
    for winner in first.values():
        one = judge(winner, trials, tolerance=_TOLERANCE)
        is_close = one.verdict == "slower" and (one.ratio or 0.0) <= 1 + _TOLERANCE
        if one.is_wrong and one.verdict != "unmeasured" and not is_close:
            logger.warning(
                "%s: the stored winner %s does not hold on this machine, %s: %s; tune it again",
                winner.problem, winner.candidate, one.verdict, one.why
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
