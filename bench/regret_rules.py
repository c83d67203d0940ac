"""What is known at the tuned sizes, and the rules that choose between them; see regret.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import TrialRecord
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Registered, choose
from tunedcomm.selection.snapshot import Row, Snapshot
from tunedcomm.spec import Candidate, Limits, Problem, check_candidate
from tunedcomm.tuner.search.coordinator import BEST_OF_SHAPE

# Of 4 GPUs: the finals of that sweep did not hold each size's best few yet, so they are taken from its search.
BEST_FROM_SEARCH = frozenset({4})


@dataclass(frozen=True)
class Asked(Registered):
    """The registered variants, as far as a rule knows them: what can run `runs`, with or without rounds."""

    runs: Problem | None
    rounds: bool

    def infeasible_reason(self, problem: Problem, candidate: Candidate, *, by_name: bool) -> str | None:
        return check_candidate(self.runs or problem, candidate, self.limits)

    def num_rounds(self, problem: Problem, candidate: Candidate) -> int:
        return super().num_rounds(problem, candidate) if self.rounds else 0


@dataclass(frozen=True, slots=True)
class Known:
    """What was measured at powers of two, and where."""

    snapshot: Snapshot
    limits: Limits

    @classmethod
    def stored(cls, database: str, environment: Environment, world_size: int) -> Known:
        """What dispatch itself reads of a database: bf16 sums of plain tensors out of place, in graphs."""
        snapshot = load_snapshot(environment, world_size, layers=[Layer("user", database)], strict=True)
        rows = [row for row in snapshot.rows if is_asked(row.problem)]
        return cls(replace(snapshot, rows=tuple(rows)), limits_for(environment, world_size))

    @classmethod
    def of(cls, records: Iterable[TrialRecord]) -> Known:
        """Trials at powers of two as the finals of a sweep hold them: every winner on every shape, each shape's best.

        Where the recorded sweep's finals did not hold the latter, they are taken from its search.
        """
        latest: dict[tuple[Problem, Candidate], TrialRecord] = {}
        for record in records:
            numel = math.prod(record.problem.shape)
            if record.status != "ok" or numel & (numel - 1):
                continue
            key = (record.problem, candidate_of(record))
            if key not in latest or (record.final, record.created_at) >= (latest[key].final, latest[key].created_at):
                latest[key] = record
        kept = [record for record in latest.values() if record.final]
        wanting = {problem for problem, _ in latest if problem.world_size in BEST_FROM_SEARCH}
        for problem in wanting:
            ran = [record for (measured, _), record in latest.items() if measured == problem]
            ran = [record for record in ran if record.variant != "library"]
            kept += sorted(ran, key=lambda record: record.latency_p50_us or math.inf)[:BEST_OF_SHAPE]
        environment, world_size = kept[0].environment, kept[0].problem.world_size
        rows = {(row.problem, row.candidate): row for row in map(row_of, kept)}
        snapshot = Snapshot(environment=environment, world_size=world_size, rows=tuple(rows.values()))
        return cls(snapshot, limits_for(environment, world_size))

    def winner(self, problem: Problem, *, runs: Problem | None = None, rounds: bool = True) -> Candidate:
        """What is chosen for `problem`, of what can run `runs`."""
        hashes = {(row.problem.op, row.candidate.variant): row.source_hash for row in self.snapshot.rows}
        catalog = Asked(self.limits, lambda op, variant: hashes.get((op, variant)), runs, rounds)
        return choose(self.snapshot, problem, catalog).candidate

    def latencies(self, numel: int, problem: Problem, *, finals: bool) -> dict[Candidate, float]:
        """Latencies at a measured size, by their ratio to the library, of what can run `problem`."""
        rows = [row for row in self.snapshot.rows if row.problem.shape == (numel,) and (row.final or not finals)]
        baseline = statistics.median(row.baseline_p50_us for row in rows if row.baseline_p50_us)
        return {
            row.candidate: row.latency_p50_us / (row.baseline_p50_us or baseline) * baseline
            for row in rows
            if check_candidate(problem, row.candidate, self.limits) is None
        }

    def measured_sizes(self) -> list[Problem]:
        return sorted({row.problem for row in self.snapshot.rows}, key=lambda problem: problem.shape)


def candidate_of(record: TrialRecord) -> Candidate:
    return Candidate.of(record.problem.op, record.variant, record.config)


def row_of(record: TrialRecord) -> Row:
    return Row(
        problem=record.problem,
        candidate=candidate_of(record),
        source_hash=record.source_hash,
        environment=record.environment,
        latency_p50_us=record.latency_p50_us or math.inf,
        latency_p10_us=record.latency_p10_us,
        latency_p90_us=record.latency_p90_us,
        samples=record.samples,
        baseline_p50_us=record.baseline_p50_us,
        final=record.final,
        created_at=record.created_at.isoformat(),
    )


def _dispatch(known: Known, problem: Problem) -> Candidate:
    return known.winner(problem)


def _rounds_unknown(known: Known, problem: Problem) -> Candidate:
    return known.winner(problem, rounds=False)


def _line(*, finals: bool) -> Callable[[Known, Problem], Candidate]:
    """Straight lines in log-log between the two nearest sizes, of candidates measured at both."""

    def rule(known: Known, problem: Problem) -> Candidate:
        here, sizes = problem.shape[0], [measured.shape[0] for measured in known.measured_sizes()]
        below, above = [s for s in sizes if s < here], [s for s in sizes if s > here]
        if not below or not above:
            return known.winner(problem)
        weight = math.log(here / below[-1]) / math.log(above[0] / below[-1])
        low, high = (known.latencies(size, problem, finals=finals) for size in (below[-1], above[0]))
        lines = {c: low[c] ** (1 - weight) * high[c] ** weight for c in low if c in high}
        return min(lines, key=lambda c: (lines[c], str(c)), default=Candidate.of(problem.op, "library", {}))

    return rule


def _of_size(order: Callable[[int, int], float]) -> Callable[[Known, Problem], Candidate]:
    def rule(known: Known, problem: Problem) -> Candidate:
        here = problem.shape[0]
        near = min(known.measured_sizes(), key=lambda measured: order(measured.shape[0], here))
        return known.winner(near, runs=problem)

    return rule


RULES: Mapping[str, Callable[[Known, Problem], Candidate]] = {
    "dispatch": _dispatch,
    "rounds unknown": _rounds_unknown,
    "line, finals": _line(finals=True),
    "line, every trial": _line(finals=False),
    "nearest": _of_size(lambda there, here: abs(math.log(there / here))),
    "larger": _of_size(lambda there, here: there / here if there >= here else here / there + 1e9),
    "smaller": _of_size(lambda there, here: here / there if there <= here else there / here + 1e9),
}


def is_asked(problem: Problem) -> bool:
    asked = (problem.dtype, problem.mode, problem.input_kind, problem.in_place, problem.reduction)
    return problem.op == "all_reduce" and asked == ("bfloat16", "graph", "plain", False, "sum")
