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

Rules: `dispatch` is what the library does (log-log between neighbours that were measured in the finals); `all trials`
the same over every trial, not the finals alone; `nearest`, `larger` and `smaller` take that measured size's winner.
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
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.select import Snapshot, choose
from tunedcomm.db.snapshot import Row
from tunedcomm.db.store import Database
from tunedcomm.spec import Candidate, Limits, Problem, check_candidate, format_shape, get_op, variants
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
    def of(cls, records: Iterable[TrialRecord]) -> Known:
        """Trials at powers of two, as a snapshot holds them: the newest of a candidate, finals before others."""
        kept: dict[tuple[Problem, Candidate], TrialRecord] = {}
        for record in records:
            numel = math.prod(record.problem.shape)
            if record.status != "ok" or numel & (numel - 1):
                continue
            key = (record.problem, candidate_of(record))
            if key not in kept or (record.final, record.created_at) >= (kept[key].final, kept[key].created_at):
                kept[key] = record
        environment, world_size = next((r.environment, r.problem.world_size) for r in kept.values())
        rows = tuple(map(row_of, kept.values()))
        snapshot = Snapshot(environment=environment, world_size=world_size, rows=rows)
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


def _all_trials(known: Known, problem: Problem) -> Candidate:
    rows = tuple(replace(row, final=False) for row in known.snapshot.rows)
    return known.winner(problem, snapshot=replace(known.snapshot, rows=rows))


def _of_size(order: Callable[[int, int], float]) -> Callable[[Known, Problem], Candidate]:
    def rule(known: Known, problem: Problem) -> Candidate:
        here = problem.shape[0]
        near = min(known.measured_sizes(), key=lambda measured: order(measured.shape[0], here))
        return known.winner(near, runs=problem)

    return rule


RULES: Mapping[str, Callable[[Known, Problem], Candidate]] = {
    "dispatch": _dispatch,
    "all trials": _all_trials,
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
    with Database.open(args.base, readonly=True) as base, Database.open(args.tuned, readonly=True) as tuned:
        known, trials = Known.of(trials_of(base)), trials_of(tuned)
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


def trials_of(database: Database) -> list[TrialRecord]:
    """All bf16 sums of plain tensors out of place, in graphs, in the environment that was measured last."""
    found = [
        t
        for t in database.trials(op="all_reduce")
        if (t.problem.dtype, t.problem.mode, t.problem.input_kind, t.problem.in_place, t.problem.reduction)
        == ("bfloat16", "graph", "plain", False, "sum")
    ]
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
        found = [regret(known, records, rule, numel, times) for numel, times in sorted(timed.items())]
        table.append(
            {
                "rule": name,
                "sizes": len(found),
                "regret_mean": round(statistics.mean(f.regret for f in found), 4),
                "regret_worst": round(max(f.regret for f in found), 4),
                "worst_at_elements": max(found, key=lambda f: f.regret).numel,
                "library_over_choice_least": round(min(f.speedup for f in found), 4),
                "not_timed": sum(not f.timed for f in found),
            }
        )
        if args.verbose and name in args.verbose:
            for f in found:
                print(f"{f.numel:>10} {f.regret:.3f} {f.speedup:.2f}x {f.choice}  best {f.best}")
    for entry in table:
        print("  ".join(f"{key} {value}" for key, value in entry.items()))
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)


@dataclass(frozen=True, slots=True)
class Regret:
    """What a rule made of one size."""

    numel: int
    choice: str
    best: str
    regret: float
    speedup: float
    timed: bool


def regret(
    known: Known,
    records: list[TrialRecord],
    rule: Callable[[Known, Problem], Candidate],
    numel: int,
    times: Mapping[str, float],
) -> Regret:
    """A rule's choice at one size against the fastest that was timed there."""
    problem = replace(known.measured_sizes()[0], shape=(numel,))
    choice, library_us = rule(known, problem), times["library()"]
    best = min(times, key=lambda name: times[name])
    latency = times.get(str(choice))
    if latency is None:
        mine = [t for t in records if t.problem == problem and candidate_of(t) == choice and t.status == "ok"]
        if not mine:
            raise SystemExit(f"{choice} was never measured at {format_shape(problem.shape)}; tune that size longer")
        ratios = [t.latency_p50_us / t.baseline_p50_us for t in mine if t.latency_p50_us and t.baseline_p50_us]
        latency = statistics.median(ratios) * library_us
    speedup = library_us / latency
    return Regret(numel, str(choice), best, latency / min(times.values()), speedup, str(choice) in times)


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
