"""Regret of dispatch between and outside the tuned sizes, on GPUs and from what was recorded there.

    python bench/regret.py sizes                                         # 40 shapes, for tunedcomm tune --shape
    tunedcomm tune --op all_reduce --db base.db                          # powers of two only
    cp base.db odd.db; tunedcomm tune --op all_reduce --shape $(python bench/regret.py sizes) --db odd.db
    torchrun --nproc-per-node 4 bench/regret.py measure --base base.db --tuned odd.db --csv regret.csv
    python bench/regret.py record --tuned odd.db OUT.jsonl.gz
    python bench/regret.py report                                        # without GPUs, from what is committed
    python bench/regret.py report --records OUT.jsonl.gz --measured regret.csv

`measure` times, interleaved in one process and run, what each rule of selection chooses from the powers of two, the
best that tuning found at that very size, the next best of its search, and the library. Regret is the latency of a
rule's choice over that of the fastest of them all. `report` works from that CSV and the recorded trials alone, so a
rule can be changed and compared without a GPU; a choice that was not timed beside the others counts with its recorded
ratio to the library.

Rules: `dispatch` is what the library does, see tunedcomm/selection/interpolate.py; `rounds unknown` is the same without
what variants say of their rounds; `line` predicts by straight lines in log-log between the nearest sizes, from the
finals or from every trial; `nearest`, `larger` and `smaller` take that measured size's winner in the finals, as a table
of thresholds would; `library` never runs anything else.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

import typer
from rows import RESULTS, ROOT, read_trials, show

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import Trial
from tunedcomm.db.snapshot import row_of
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.selection.select import Registered, choose
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Limits, Problem, check_candidate, get_op
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.search.strategy import BEST_OF_SHAPE

sys.path.insert(0, str(ROOT / "tests"))
from replay import write_recording

RECORDS = [ROOT / "tests" / "data" / f"regret_h200_x{ranks}.jsonl.gz" for ranks in (4, 2)]
MEASURED = RESULTS / "regret_h200.csv"
# Timed besides the rules' choices: the best of the search at that very size.
_BEST = 5
# Of 4 GPUs: the finals of that sweep did not hold each size's best few yet, so they are taken from its search.
BEST_FROM_SEARCH = frozenset({4})


Named: TypeAlias = Annotated[str, typer.Option(help="A database.")]
app = typer.Typer(help=__doc__, add_completion=False)


def sizes(count: int = 40, seed: int = 2026) -> list[int]:
    """Elements: two below 1 KiB of bf16, two above 256 MiB, the rest between; prime to 2, 3, 5, 7 and 11."""
    generator = random.Random(seed)
    bounds = [(300, 500)] * 2 + [(520, 1 << 27)] * (count - 4) + [(1 << 27, 1 << 28)] * 2
    found = []
    for low, high in bounds:
        numel = round(math.exp(generator.uniform(math.log(low), math.log(high))))
        while math.gcd(numel, 2310) > 1 or numel in found:
            numel += 1
        found.append(numel)
    return sorted(found)


@app.command("sizes")
def print_sizes() -> None:
    """Print the shapes for `tunedcomm tune --shape`."""
    print(",".join(map(str, sizes())))


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
    """Rows at powers of two, all trials, and by odd size and contender the latency that was timed."""

    snapshot: Snapshot
    limits: Limits
    records: list[Trial]
    timed: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def stored(cls, database: str, environment: Environment, world_size: int, records: list[Trial]) -> Known:
        """The rows that dispatch itself reads of a database."""
        snapshot = load_snapshot(environment, world_size, layers=[Layer("user", database)], strict=True)
        rows = tuple(row for row in snapshot.rows if is_asked(row.problem))
        return cls(replace(snapshot, rows=rows), limits_for(environment, world_size), records)

    @classmethod
    def read(cls, recording: Path, measured: Path) -> Known:
        """Trials at powers of two as the finals of a sweep hold them: every winner on every shape, each shape's best.

        Where the recorded sweep's finals did not hold the latter, they are taken from its search.
        """
        records = read_trials(recording)
        latest: dict[tuple[Problem, Candidate], Trial] = {}
        for record in records:
            if record.status == "ok" and not record.problem.numel & (record.problem.numel - 1):
                old = latest.setdefault((record.problem, record.candidate), record)
                if (record.final, record.created_at) >= (old.final, old.created_at):
                    latest[record.problem, record.candidate] = record
        kept = [record for record in latest.values() if record.final]
        for problem in {problem for problem, _ in latest if problem.world_size in BEST_FROM_SEARCH}:
            ran = [r for r in latest.values() if r.problem == problem and r.variant != "library"]
            kept += sorted(ran, key=lambda record: record.latency_p50_us or math.inf)[:BEST_OF_SHAPE]
        environment, world_size = kept[0].environment, kept[0].problem.world_size
        rows = tuple({(row.problem, row.candidate): row for row in map(row_of, kept)}.values())
        snapshot = Snapshot(environment=environment, world_size=world_size, rows=rows)
        timed: dict[int, dict[str, float]] = defaultdict(dict)
        with measured.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if int(line["world_size"]) == world_size:
                    timed[int(line["shape"])][line["config"]] = float(line["latency_p50_us"])
        return cls(snapshot, limits_for(environment, world_size), records, dict(sorted(timed.items())))

    def winner(self, problem: Problem, *, runs: Problem | None = None, rounds: bool = True) -> Candidate:
        """The choice for `problem`, of candidates that can run `runs`."""
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


Rule = Callable[[Known, Problem], Candidate]


def _line(*, finals: bool) -> Rule:
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


def _of_size(order: Callable[[int, int], float]) -> Rule:
    def rule(known: Known, problem: Problem) -> Candidate:
        here = problem.shape[0]
        near = min(known.measured_sizes(), key=lambda measured: order(measured.shape[0], here))
        return known.winner(near, runs=problem)

    return rule


RULES: Mapping[str, Rule] = {
    "dispatch": lambda known, problem: known.winner(problem),
    "rounds unknown": lambda known, problem: known.winner(problem, rounds=False),
    "line, finals": _line(finals=True),
    "line, every trial": _line(finals=False),
    "nearest": _of_size(lambda there, here: abs(math.log(there / here))),
    "larger": _of_size(lambda there, here: there / here if there >= here else here / there + 1e9),
    "smaller": _of_size(lambda there, here: here / there if there <= here else there / here + 1e9),
    "library": lambda known, problem: Candidate.of(problem.op, "library", {}),
}


def is_asked(problem: Problem) -> bool:
    """True of bf16 sums of plain tensors out of place, in graphs."""
    return problem == Problem("all_reduce", problem.shape, "bfloat16", problem.world_size, reduction="sum")


def contenders(known: Known, problem: Problem) -> list[Candidate]:
    """The library, what the rules choose, the best of the search."""
    found = [RULES["library"](known, problem), *(rule(known, problem) for rule in RULES.values())]
    good = [t for t in known.records if t.problem == problem and t.status == "ok" and t.latency_p50_us is not None]
    good = [t for t in good if check_candidate(problem, t.candidate, known.limits) is None]
    for final in (True, False):
        ranked = sorted((t for t in good if t.final == final), key=lambda t: t.latency_p50_us or math.inf)
        found += [t.candidate for t in ranked[:_BEST]]
    return list(dict.fromkeys(found))


@app.command()
def measure(*, base: Named, tuned: Named, csv: Path = MEASURED, rounds: int = 60) -> None:
    """Time the contenders of every size on all ranks; rank 0 writes."""
    import ranks
    import torch

    from tunedcomm.dispatch.groups import get_communicator
    from tunedcomm.tuner.gang.ranks import join_group
    from tunedcomm.tuner.measure import timing

    join_group()
    communicator, stream = get_communicator(), torch.cuda.Stream()
    known = Known.stored(base, communicator.environment, communicator.world_size, trials_of(tuned))
    op, lines = get_op("all_reduce"), []
    for numel in sizes():
        problem = ranks.bf16_sum(numel)
        inputs = op.make_inputs(problem, communicator.rank, 1, "random", "cuda")
        outputs = op.make_outputs(problem, "cuda")
        made, candidates = [], contenders(known, problem)
        calls = timing.calls_for(op.message_bytes(problem) / 200e3)
        for candidate in candidates:
            launch = communicator.bind(problem, candidate)
            with torch.cuda.stream(stream):
                launch(inputs, outputs, stream.cuda_stream)
                made.append(timing.make_run(launch, inputs, outputs, calls=calls, graph=True, stream=stream))
        found = ranks.slowest(ranks.times_in_turn(made, rounds, stream))
        communicator.check_peers()
        for candidate, latency in zip(candidates, found, strict=True):
            kind = "library" if candidate.variant == "library" else "candidate"
            lines.append(ranks.row_of(problem, kind, str(candidate), latency))
        del made, inputs, outputs
    ranks.finish(communicator, lines, csv)


@app.command()
def record(out: Path, *, tuned: Named) -> None:
    """Keep the trials of a database."""
    write_recording(out, trials_of(tuned))


def trials_of(database: str) -> list[Trial]:
    """All trials that are asked for, in the environment that was measured last."""
    with Database.open(database, readonly=True) as opened:
        found = [t for t in opened.trials(op="all_reduce") if is_asked(t.problem)]
    return [t for t in found if t.environment == found[-1].environment]


class Regret(NamedTuple):
    """A rule's choice at one size against the fastest that was timed there, and against the library."""

    regret: float
    speedup: float
    is_interleaved: bool


def regret(known: Known, rule: Rule, numel: int) -> Regret | None:
    """None where the choice's time is known neither at its size nor at a larger one."""
    problem, times = replace(known.measured_sizes()[0], shape=(numel,)), known.timed[numel]
    choice, library_us = rule(known, problem), times["library()"]
    latency = times.get(str(choice)) or recorded(known.records, problem, choice, library_us)
    if latency is None:
        # More work takes longer: a bound from above.
        larger = (found[str(choice)] for size, found in known.timed.items() if size > numel and str(choice) in found)
        latency = next(larger, None)
    if latency is None:
        return None
    return Regret(max(1.0, latency / min(times.values())), library_us / latency, str(choice) in times)


def recorded(records: Iterable[Trial], problem: Problem, choice: Candidate, library_us: float) -> float | None:
    """The choice's time when its size was tuned, by its ratio to the library there; None if it was not tried."""
    mine = [t for t in records if t.problem == problem and t.candidate == choice and t.status == "ok"]
    ratios = [t.latency_p50_us / t.baseline_p50_us for t in mine if t.latency_p50_us and t.baseline_p50_us]
    return statistics.median(ratios) * library_us if ratios else None


@app.command()
def report(*, records: list[Path] = RECORDS, measured: Path = MEASURED, csv: Path | None = None) -> None:
    """By ranks and rule: mean and worst regret, and the least speed-up over the library."""
    table = []
    for path in records:
        known = Known.read(path, measured)
        for name, rule in RULES.items():
            found = {numel: regret(known, rule, numel) for numel in known.timed}
            known_regrets = {numel: one for numel, one in found.items() if one is not None}
            if len(known_regrets) < len(found):
                sys.exit(f"{name}: a choice was measured neither at its size nor above; tune that size longer")
            worst = max(known_regrets, key=lambda numel: known_regrets[numel].regret)
            table.append(
                {
                    "world_size": known.snapshot.world_size,
                    "rule": name,
                    "sizes": len(found),
                    "regret_mean": round(statistics.mean(one.regret for one in known_regrets.values()), 4),
                    "regret_worst": round(known_regrets[worst].regret, 4),
                    "worst_at_elements": worst,
                    "library_over_choice_least": round(min(one.speedup for one in known_regrets.values()), 4),
                    "not_interleaved": sum(not one.is_interleaved for one in known_regrets.values()),
                }
            )
    show(table, csv)


if __name__ == "__main__":
    kernels.discover()
    app()
