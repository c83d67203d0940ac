"""How much dispatch loses between and outside the tuned sizes, on GPUs and from what was recorded there.

    python bench/regret.py sizes                                         # 40 shapes, for tunedcomm tune --shape
    tunedcomm tune --op all_reduce --db base.db                          # powers of two only
    cp base.db odd.db; tunedcomm tune --op all_reduce --shape $(python bench/regret.py sizes) --db odd.db
    torchrun --nproc-per-node 4 bench/regret.py measure --base base.db --tuned odd.db --csv regret.csv
    python bench/regret.py record --tuned odd.db OUT.jsonl.gz
    python bench/regret.py report                                        # without GPUs, from what is committed

`measure` times, interleaved in one process and run, what each rule of selection chooses from the powers of two, the
best that tuning found at that very size, the next best of its search, and the library. Regret is the latency of a
rule's choice over that of the fastest of them all. `report` works from that CSV and the recorded trials alone, so a
rule can be changed and compared without a GPU; a choice that was not timed beside the others counts with its recorded
ratio to the library.

Rules: `dispatch` is what the library does, see tunedcomm/db/interpolate.py; `line` predicts by straight lines in
log-log between the nearest sizes, from the finals or from every trial; `nearest`, `larger` and `smaller` take that
measured size's winner in the finals, as a table of thresholds would.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rows import Line, append

from tunedcomm import kernels
from tunedcomm.communicator import limits_for
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.select import Snapshot, choose
from tunedcomm.db.snapshot import Row
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem, check_candidate, get_op, variants
from tunedcomm.tuner.finals import BEST_OF_SHAPE
from tunedcomm.tuner.recording import read_recording, write_recording

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "data" / "regret_h200_x4.jsonl.gz"
MEASURED = ROOT / "bench" / "results" / "regret_h200.csv"
REPORT = ROOT / "bench" / "results" / "regret_rules_h200.csv"
# Timed besides the rules' choices: the best of the search at that very size.
_BEST = 5


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


# Rules


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

        The recorded sweep's finals did not yet hold the latter, so they are taken from its search.
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
        for problem in {problem for problem, _ in latest}:
            ran = [record for (measured, _), record in latest.items() if measured == problem]
            ran = [record for record in ran if record.variant != "library"]
            kept += sorted(ran, key=lambda record: record.latency_p50_us or math.inf)[:BEST_OF_SHAPE]
        environment, world_size = kept[0].environment, kept[0].problem.world_size
        rows = {(row.problem, row.candidate): row for row in map(row_of, kept)}
        snapshot = Snapshot(environment=environment, world_size=world_size, rows=tuple(rows.values()))
        return cls(snapshot, limits_for(environment, world_size))

    def winner(self, problem: Problem, *, runs: Problem | None = None, snapshot: Snapshot | None = None) -> Candidate:
        """What is chosen for `problem`, of what can run `runs`."""
        snapshot = snapshot or self.snapshot
        hashes = {(row.problem.op, row.candidate.variant): row.source_hash for row in snapshot.rows}
        known = variants(problem.op)
        return choose(
            snapshot,
            problem,
            feasible=lambda candidate: check_candidate(runs or problem, candidate, self.limits),
            source_hash=lambda op, variant: hashes.get((op, variant)),
            numerics_of=lambda op, variant: known[variant].numerics if variant in known else None,
            message_bytes=get_op(problem.op).message_bytes,
        ).candidate

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
    "line, finals": _line(finals=True),
    "line, every trial": _line(finals=False),
    "nearest": _of_size(lambda there, here: abs(math.log(there / here))),
    "larger": _of_size(lambda there, here: there / here if there >= here else here / there + 1e9),
    "smaller": _of_size(lambda there, here: here / there if there <= here else there / here + 1e9),
}


# Measuring


def contenders(known: Known, trials: list[TrialRecord], problem: Problem) -> list[Candidate]:
    """The library, what the rules choose, the best of the search."""
    found = [Candidate.of(problem.op, "library", {})]
    found += [rule(known, problem) for rule in RULES.values()]
    good = [t for t in trials if t.problem == problem and t.status == "ok" and t.latency_p50_us is not None]
    good = [t for t in good if check_candidate(problem, candidate_of(t), known.limits) is None]
    for final in (True, False):
        ranked = sorted((t for t in good if t.final == final), key=lambda t: t.latency_p50_us or math.inf)
        found += [candidate_of(t) for t in ranked[:_BEST]]
    return list(dict.fromkeys(found))


def measure(args: argparse.Namespace) -> None:
    """Time the contenders of every size on all ranks; rank 0 writes."""
    import torch
    import torch.distributed as dist
    from bound_cost import Fence

    from tunedcomm.communicator import get_communicator
    from tunedcomm.tuner import measure as timing

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    communicator, stream = get_communicator(), torch.cuda.Stream()
    known = Known.stored(args.base, communicator.environment, communicator.world_size)
    with Database.open(args.tuned, readonly=True) as tuned:
        trials = trials_of(tuned)
    op, fence, lines = get_op("all_reduce"), Fence(), []
    for numel in sizes():
        problem = Problem("all_reduce", (numel,), "bfloat16", communicator.world_size)
        inputs, outputs = op.make_inputs(problem, rank, 1, "random", "cuda"), op.make_outputs(problem, "cuda")
        made, candidates = [], contenders(known, trials, problem)
        calls = timing.calls_for(op.message_bytes(problem) / 200e3)
        for candidate in candidates:
            launch = communicator.bind(problem, candidate)
            with torch.cuda.stream(stream):
                launch(inputs, outputs, stream.cuda_stream)
                made.append(timing.contend(launch, inputs, outputs, calls=calls, graph=True, stream=stream))
        times = timing.take_rounds(fence, made, args.rounds, stream)
        communicator.check_peers()
        everyone: list[Any] = [None] * communicator.world_size
        dist.all_gather_object(everyone, times)
        for index, candidate in enumerate(candidates):
            latency = timing.summarise([ranks[index] for ranks in everyone])
            kind = "library" if candidate.variant == "library" else "candidate"
            lines.append(Line(numel, kind, str(candidate), latency.p10_us, latency.p50_us, latency.p90_us))
        del made, inputs, outputs
        if rank == 0:
            print(f"{op.message_bytes(problem):>10} bytes: {len(candidates)} contenders", file=sys.stderr, flush=True)
    if rank == 0:
        append(args.csv, lines, communicator.environment, world_size=communicator.world_size, mode="graph")
    dist.barrier()
    dist.destroy_process_group()


def is_asked(problem: Problem) -> bool:
    asked = (problem.dtype, problem.mode, problem.input_kind, problem.in_place, problem.reduction)
    return problem.op == "all_reduce" and asked == ("bfloat16", "graph", "plain", False, "sum")


def trials_of(database: Database) -> list[TrialRecord]:
    """All bf16 sums of plain tensors out of place, in graphs, in the environment that was measured last."""
    found = [t for t in database.trials(op="all_reduce") if is_asked(t.problem)]
    return [t for t in found if t.environment == found[-1].environment]


# Reporting


def report(args: argparse.Namespace) -> None:
    """Print and write, by rule: mean and worst regret, and the least speed-up over the library."""
    records = read_recording(args.records)
    known = Known.of(records)
    timed: dict[int, dict[str, float]] = {}
    with args.measured.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            timed.setdefault(int(line["shape"]), {})[line["config"]] = float(line["latency_p50_us"])
    table = []
    for name, rule in RULES.items():
        found = [regret(known, records, rule, numel, timed) for numel in sorted(timed)]
        table.append(
            {
                "rule": name,
                "sizes": len(found),
                "regret_mean": round(statistics.mean(f.regret for f in found), 4),
                "regret_worst": round(max(f.regret for f in found), 4),
                "worst_at_elements": max(found, key=lambda f: f.regret).numel,
                "library_over_choice_least": round(min(f.speedup for f in found), 4),
                "not_interleaved": sum(f.source != "interleaved" for f in found),
            }
        )
        if args.verbose and name in args.verbose:
            for f in found:
                print(f"{f.numel:>10} {f.regret:.3f} {f.speedup:.2f}x {f.choice} ({f.source})  best {f.best}")
    for entry in table:
        print("  ".join(f"{key} {value}" for key, value in entry.items()))
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


@dataclass(frozen=True, slots=True)
class Regret:
    """What a rule made of one size; `source` says where the choice's time is from."""

    numel: int
    choice: str
    best: str
    regret: float
    speedup: float
    source: str


def regret(
    known: Known,
    records: list[TrialRecord],
    rule: Callable[[Known, Problem], Candidate],
    numel: int,
    timed: Mapping[int, Mapping[str, float]],
) -> Regret:
    """A rule's choice at one size against the fastest that was timed there."""
    problem, times = replace(known.measured_sizes()[0], shape=(numel,)), timed[numel]
    choice, library_us = rule(known, problem), times["library()"]
    latency, source = times.get(str(choice)), "interleaved"
    if latency is None:
        latency, source = recorded(records, problem, choice, library_us), "recorded"
    if latency is None:
        # More work takes longer: a bound from above.
        larger = [size for size in sorted(timed) if size > numel and str(choice) in timed[size]]
        if not larger:
            raise SystemExit(f"{choice} was measured neither at {numel} elements nor above; tune that size longer")
        latency, source = timed[larger[0]][str(choice)], f"at most, from {larger[0]}"
    best = min(times, key=lambda name: times[name])
    return Regret(numel, str(choice), best, max(1.0, latency / times[best]), library_us / latency, source)


def recorded(records: list[TrialRecord], problem: Problem, choice: Candidate, library_us: float) -> float | None:
    """What the choice took when its size was tuned, by its ratio to the library there; None if it was not tried."""
    mine = [t for t in records if t.problem == problem and candidate_of(t) == choice and t.status == "ok"]
    ratios = [t.latency_p50_us / t.baseline_p50_us for t in mine if t.latency_p50_us and t.baseline_p50_us]
    return statistics.median(ratios) * library_us if ratios else None


def record(args: argparse.Namespace) -> None:
    """Write the trials that a report needs."""
    with Database.open(args.tuned, readonly=True) as database:
        write_recording(args.out, trials_of(database))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("sizes")
    verb = verbs.add_parser("measure")
    verb.add_argument("--base", required=True)
    verb.add_argument("--tuned", required=True)
    verb.add_argument("--csv", type=Path, default=MEASURED)
    verb.add_argument("--rounds", type=int, default=60)
    verb = verbs.add_parser("record")
    verb.add_argument("--tuned", required=True)
    verb.add_argument("out", type=Path, nargs="?", default=RECORDS)
    verb = verbs.add_parser("report")
    verb.add_argument("--records", type=Path, default=RECORDS)
    verb.add_argument("--measured", type=Path, default=MEASURED)
    verb.add_argument("--csv", type=Path)
    verb.add_argument("--verbose", nargs="*", metavar="RULE")
    args = parser.parse_args()
    kernels.discover()
    if args.verb == "sizes":
        print(",".join(map(str, sizes())))
    else:
        {"measure": measure, "record": record, "report": report}[args.verb](args)


if __name__ == "__main__":
    main()
