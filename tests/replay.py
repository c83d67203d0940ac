"""Recorded trials in a gang's place: the whole search runs without GPUs, and the same way every time.

A `Replay` answers a command as the recorded gang did; `run_search` walks a coordinator to its end with such answers,
in this process. `python -m replay RECORDING TRIAL_S SUPERVISOR_PID FD PROTOCOL` is a gang of one process for a whole
sweep, see `stand_in`: no group, no device, no kernel.

A recording is a text file of JSON lines: the environment first, then a line for each problem, followed by one for each
of its trials.
"""

from __future__ import annotations

import functools
import gzip
import heapq
import json
import math
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tunedcomm.db.records import Trial
from tunedcomm.db.values import LOST, canonical_json
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, admits, variants
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.gang.protocol import Command, Latency, Settings, TrialResult, pruned, rounds_after_look
from tunedcomm.tuner.gang.ranks import die_with_parent
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.strategy import Strategy

RECORDING = Path(__file__).parent / "data" / "trials_h200_x4.jsonl.gz"
_NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
# Standard error of a median in standard errors of a mean, for normal samples.
_MEDIAN_ERROR = 1.2533
# Standard deviations between a normal distribution's median and its 10th or 90th percentile.
_P90_DEVIATIONS = 1.2816


class Replay:
    """Answers commands from recorded trials.

    A candidate's newest trial counts; a search prefers trials of searches, the finals those of finals. Where there is
    a latency, `ok` or `pruned` is decided anew from the command's threshold, by the same rule as on GPUs. A candidate
    that was never measured on a problem is `infeasible`: no latency is ever made up.

    Args:
        records: trials of one environment, in any order.
        noise_seed: None answers recorded medians as they are; a number moves each by what the recorded spread and the
            number of rounds make likely, the same for the same seed, problem, candidate and rounds.
    """

    def __init__(self, records: Iterable[Trial], *, noise_seed: int | None = None) -> None:
        found = list(records)
        (self.environment,) = {r.environment for r in found}
        self._noise_seed = noise_seed
        self._rows: dict[tuple[Problem, Candidate], dict[bool, Trial]] = {}
        self._hashes: dict[tuple[str, str], str] = {}
        for record in sorted(found, key=_age):
            self._rows.setdefault((record.problem, record.candidate), {})[record.final] = record
            self._hashes[record.problem.op, record.variant] = record.source_hash

    def problems(self) -> tuple[Problem, ...]:
        """Problems with a trial, sorted."""
        return tuple(sorted({problem for problem, _ in self._rows}))

    def records(self, problem: Problem) -> list[Trial]:
        """The trials that answer for a problem: the newest of each candidate, in a search and in the finals."""
        return [record for (of, _), rows in self._rows.items() if of == problem for record in rows.values()]

    def source_hash(self, op: str, variant: str) -> str:
        """Of the newest trial of the variant; "" if there is none."""
        return self._hashes.get((op, variant), "")

    def recorded_us(self, problem: Problem, candidate: Candidate, *, final: bool = False) -> float | None:
        """Recorded median without noise; None if the candidate never ran there."""
        row = self._row(problem, candidate, final=final)
        return row.latency_p50_us if row is not None else None

    def measured(self, problem: Problem, policy: NumericsPolicy = "any") -> dict[Candidate, float]:
        """Recorded medians of the search, of every candidate that ran and that `policy` admits; the library's too."""
        medians = {c: self.recorded_us(p, c) for p, c in self._rows if p == problem}
        return {
            candidate: us
            for candidate, us in medians.items()
            if us is not None
            and (variant := variants(candidate.op).get(candidate.variant)) is not None  # some are gone
            and admits(policy, variant.numerics)
        }

    def answer(self, command: Command, settings: Settings) -> TrialResult:
        """What a gang with these settings would have found."""
        problem, candidate = command.problem, command.candidate
        assert problem is not None
        assert candidate is not None
        row = self._row(problem, candidate, final=command.final)
        if row is None:
            return TrialResult(status="infeasible", reason=f"{candidate} was never measured on {problem}")
        if row.latency_p50_us is None:
            return TrialResult(status=row.status, reason=row.reason, error=row.error)
        look = self._latency(row, settings.first_rounds)
        rounds = rounds_after_look(command, look.p50_us, settings)
        if not rounds:
            return pruned(command, look, row.error)
        baseline_us = self._baseline_us(row, command.baseline)
        return TrialResult(status="ok", latency=self._latency(row, rounds), baseline_us=baseline_us, error=row.error)

    def _row(self, problem: Problem, candidate: Candidate, *, final: bool) -> Trial | None:
        rows = self._rows.get((problem, candidate), {})
        return rows.get(final, rows.get(not final))

    def _baseline_us(self, row: Trial, baseline: Candidate | None) -> float | None:
        if baseline is None:
            return None
        return row.baseline_p50_us or self.recorded_us(row.problem, baseline, final=row.final)

    def _latency(self, row: Trial, rounds: int) -> Latency:
        middle = row.latency_p50_us
        assert middle is not None
        low, high = row.latency_p10_us or middle, row.latency_p90_us or middle
        if self._noise_seed is not None:
            seed = f"{self._noise_seed}-{row.problem.digest}-{row.candidate}-{rounds}"
            draw = random.Random(seed).gauss(0.0, 1.0)
            spread = (high - middle if draw > 0 else middle - low) / _P90_DEVIATIONS
            middle = min(max(middle + draw * _MEDIAN_ERROR * spread / rounds**0.5, low), high)
        return Latency(p10_us=low, p50_us=middle, p90_us=high, samples=rounds)


def _age(record: Trial) -> tuple[datetime, int, str]:
    """Sorts trials from old to new; the text keeps equally old ones in one order."""
    told = [record.source_hash, record.status, record.reason, record.baseline_p50_us, record.error, record.samples]
    latency = [record.latency_p10_us, record.latency_p50_us, record.latency_p90_us]
    return record.created_at, record.id or 0, canonical_json([told, latency])


@dataclass(frozen=True, slots=True)
class Step:
    """A command and its answer."""

    command: Command
    result: TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """What a replayed search did."""

    steps: tuple[Step, ...]  # in the order in which answers came
    stored: tuple[Trial, ...]  # what is known afterwards, what was known before included, oldest first
    reason: str  # `done`, `budget`, or `interrupted` by `max_trials`
    num_gangs: int  # that a sweep would have started
    seconds: float  # on the simulated clock
    dropped: frozenset[str]  # variants that were left alone in the end

    def table(self) -> dict[tuple[Problem, Candidate, bool], Trial]:
        """The last trial of each candidate by problem, in a search (False) and in the finals (True)."""
        return {(trial.problem, trial.candidate, trial.final): trial for trial in self.stored}

    def winner(self, problem: Problem, policy: NumericsPolicy = "default") -> Trial | None:
        """The fastest `ok` trial that `policy` admits, the library's too; finals count before searches."""
        ran = [t for t in self.table().values() if t.problem == problem and t.status == "ok"]
        ran = [t for t in ran if admits(policy, t.numerics)]
        ran = [t for t in ran if t.final] or ran
        return min(ran, key=lambda t: (t.latency_p50_us or 0.0, str(t.candidate)), default=None)


def run_search(
    problems: Iterable[Problem],
    settings: Settings,
    replay: Replay,
    *,
    limits: Limits,
    stored: Iterable[Trial] = (),
    seconds_left: float | None = None,
    max_trials: float = math.inf,
    trial_seconds: float = 0.0,
    strategy: Strategy | None = None,
) -> SearchRun:
    """Drive a coordinator to its end with recorded answers; no process, no clock, no tensor.

    A candidate that crashed or hung ends its gang, and another one takes its place. The ops and variants of the
    problems must be registered.

    Args:
        problems: in the order in which they are tuned.
        settings: how; `settings.gangs` of them answer side by side.
        replay: answers.
        limits: of the recorded machine.
        stored: trials that are known already, e.g. an earlier run's.
        seconds_left: of the budget.
        max_trials: stop after so many answers, as a kill would.
        trial_seconds: how long a gang is busy with a trial, on a simulated clock.
        strategy: answers the coordinator's questions; by default a sweep's.
    """
    now, reason, num_gangs = 0.0, "", settings.gangs
    steps: list[Step] = []
    kept = list(stored)
    busy: list[tuple[float, int]] = []  # when each busy gang is done; equal times in the order of the gangs
    coordinator = Coordinator(
        tuple(problems),
        settings,
        source_hash=replay.source_hash,
        stored=tuple(kept),
        clock=lambda: now,
        seconds_left=seconds_left,
        strategy=strategy,
    )

    def take_trials() -> None:
        kept.extend(replace(trial, created_at=_NOON) for trial, _ in coordinator.unstored)  # runs are compared
        coordinator.unstored.clear()

    idle = list(range(num_gangs))
    for gang in idle:
        coordinator.gang_ready(gang, replay.environment, limits)
    while True:
        waiting = []  # gangs that end, or wait while all others have ended, stay idle
        for gang in idle:
            command = coordinator.next(gang)
            if command.kind == "trial":
                heapq.heappush(busy, (now + trial_seconds, gang))
            else:
                waiting.append(gang)
                reason = command.reason or reason
        idle = waiting
        if not busy or len(steps) >= max_trials:
            break
        now, gang = heapq.heappop(busy)
        running = coordinator.activity(gang)
        assert running is not None
        result = replay.answer(running, settings)
        steps.append(Step(running, result))
        coordinator.learn(gang, result)
        take_trials()
        if result.status in LOST:
            coordinator.lost(gang, result.status, result.reason, begun=None)
            if not coordinator.has_time:
                reason = "budget"
                continue
            num_gangs += 1
            coordinator.gang_ready(gang, replay.environment, limits)
        idle.append(gang)
    take_trials()
    return SearchRun(
        steps=tuple(steps),
        stored=tuple(kept),
        reason="interrupted" if busy else reason,
        num_gangs=num_gangs,
        seconds=now,
        dropped=coordinator.dropped,
    )


_FORMAT = 1
# Left out of a line where they are empty.
_OPTIONAL = "reason latency_p10_us latency_p50_us latency_p90_us samples baseline_p50_us error final".split()


def write_recording(path: Path, records: Iterable[Trial]) -> None:
    """Write the newest trials of one environment, sorted; compressed if the name ends in `.gz`.

    The same trials in any order give the same bytes. Numbers are kept to six digits, times to the second.
    """
    replay = Replay(records)
    lines: list[dict[str, Any]] = [{"format": _FORMAT, "environment": replay.environment.to_dict()}]
    for problem in replay.problems():
        lines.append({"problem": problem.to_dict()})
        lines += sorted(map(_trial_line, replay.records(problem)), key=canonical_json)
    data = "".join(f"{canonical_json(line)}\n" for line in lines).encode()
    # No time in the header of the compressed file: the same trials are the same bytes.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _trial_line(record: Trial) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in _OPTIONAL}
    kept = {name: _round(value) for name, value in values.items() if value not in (None, "", False)}
    return {
        "variant": record.variant,
        "config": record.config,
        "numerics": record.numerics,
        "source_hash": record.source_hash,
        "status": record.status,
        "created_at": record.created_at.isoformat(timespec="seconds"),
        **kept,
    }


def _round(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_recording(path: Path) -> list[Trial]:
    """Inverse of `write_recording`."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["format"] == _FORMAT, path
    environment = Environment.from_dict(lines[0]["environment"])
    records: list[Trial] = []
    values: dict[str, Any] = {"environment": environment}
    for line in lines[1:]:
        if "problem" in line:
            values["problem"] = Problem.from_dict(line["problem"])
        else:
            values["created_at"] = datetime.fromisoformat(line["created_at"])
            records.append(Trial(**{**line, **values}))
    return records


@functools.cache
def recorded() -> tuple[Trial, ...]:
    """Trials of a sweep of all_reduce on 4 H200 GPUs."""
    from tunedcomm import kernels

    kernels.discover()
    return tuple(read_recording(RECORDING))


def recorded_limits() -> Limits:
    """Of the machine that ran them."""
    return limits_for(recorded()[0].environment, 4)


def answer_as_gang(recording: Path, trial_s: float, supervisor: int, line: Connection) -> None:
    """Answer until the supervisor kills this process."""
    die_with_parent(supervisor)
    settings: Settings = line.recv()
    replay = Replay(read_recording(recording))
    limits = limits_for(replay.environment, settings.world_size)
    line.recv()
    line.send(("ready", (replay.environment, limits)))
    while True:
        command: Command = line.recv()
        for event in ("bind", "run"):
            line.send((event, command.candidate))
        time.sleep(trial_s)
        line.send(("result", replay.answer(command, settings)))


def stand_in(recording: Path, trial_s: float = 0.0) -> tuple[str, ...]:
    """A sweep's `stand_in` that answers from a recording and pretends to need so many seconds for a trial."""
    return "replay", str(recording), str(trial_s)


if __name__ == "__main__":
    answer_as_gang(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Connection(int(sys.argv[4])))
