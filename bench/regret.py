"""How much dispatch loses between and outside the tuned sizes, on GPUs and from what was recorded there.

    python bench/regret.py sizes                                         # 40 shapes, for tunedcomm tune --shape
    tunedcomm tune --op all_reduce --db base.db                          # powers of two only
    cp base.db odd.db; tunedcomm tune --op all_reduce --shape $(python bench/regret.py sizes) --db odd.db
    torchrun --nproc-per-node 4 bench/regret.py measure --base base.db --tuned odd.db --csv regret.csv
    python bench/regret.py record --tuned odd.db OUT.jsonl.gz
    python bench/regret.py report                                        # without GPUs, from what is committed
    python bench/regret.py report --records OUT.jsonl.gz --measured regret.csv
    python bench/regret.py thin                                          # the same with finals left out at random

`measure` times, interleaved in one process and run, what each rule of selection chooses from the powers of two, the
best that tuning found at that very size, the next best of its search, and the library. Regret is the latency of a
rule's choice over that of the fastest of them all. `report` works from that CSV and the recorded trials alone, so a
rule can be changed and compared without a GPU; a choice that was not timed beside the others counts with its recorded
ratio to the library.

Rules: `dispatch` is what the library does, see tunedcomm/selection/interpolate.py; `rounds unknown` is the same without
what variants say of their rounds; `line` predicts by straight lines in log-log between the nearest sizes, from the
finals or from every trial; `nearest`, `larger` and `smaller` take that measured size's winner in the finals, as a table
of thresholds would.

`thin` tells a rule that holds from one that fits 40 sizes: of each measured size's finals some are left out at random,
so that other candidates are what there is to choose from, many times over.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regret_rules import RULES, Known, candidate_of, is_asked
from rows import Line, append

from tunedcomm import kernels
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from replay import read_recording, write_recording  # noqa: E402

RECORDS = tuple(ROOT / "tests" / "data" / f"regret_h200_x{ranks}.jsonl.gz" for ranks in (4, 2))
MEASURED = ROOT / "bench" / "results" / "regret_h200.csv"
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

    from tunedcomm.dispatch.communicator import get_communicator
    from tunedcomm.tuner.measure import timing

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


def trials_of(database: Database) -> list[TrialRecord]:
    """All bf16 sums of plain tensors out of place, in graphs, in the environment that was measured last."""
    found = [t for t in database.trials(op="all_reduce") if is_asked(t.problem)]
    return [t for t in found if t.environment == found[-1].environment]


# Reporting


@dataclass(frozen=True, slots=True)
class Measured:
    """What was recorded and measured with one number of ranks: the trials, and by size and contender the latency."""

    records: list[TrialRecord]
    known: Known
    timed: Mapping[int, Mapping[str, float]]

    @classmethod
    def read(cls, recording: Path, measured: Path) -> Measured:
        records = read_recording(recording)
        known, timed = Known.of(records), defaultdict[int, dict[str, float]](dict)
        with measured.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if int(line["world_size"]) == known.snapshot.world_size:
                    timed[int(line["shape"])][line["config"]] = float(line["latency_p50_us"])
        return cls(records, known, timed)

    def regrets(self, rule: Callable[[Known, Problem], Candidate]) -> list[Regret]:
        return [regret(self.known, self.records, rule, numel, self.timed) for numel in sorted(self.timed)]


def report(args: argparse.Namespace) -> None:
    """Print and write, by ranks and rule: mean and worst regret, and the least speed-up over the library."""
    table = []
    for path in args.records:
        measured = Measured.read(path, args.measured)
        for name, rule in RULES.items():
            found = measured.regrets(rule)
            table.append({"world_size": measured.known.snapshot.world_size, "rule": name, **summary(found)})
            if args.verbose and name in args.verbose:
                for f in found:
                    print(f"{f.numel:>10} {f.regret:.3f} {f.speedup:.2f}x {f.choice} ({f.source})  best {f.best}")
    show(table, args.csv)


def summary(found: list[Regret]) -> dict[str, object]:
    worst = max(found, key=lambda f: f.regret)
    return {
        "sizes": len(found),
        "regret_mean": round(statistics.mean(f.regret for f in found), 4),
        "regret_worst": round(worst.regret, 4),
        "worst_at_elements": worst.numel,
        "library_over_choice_least": round(min(f.speedup for f in found), 4),
        "not_interleaved": sum(f.source != "interleaved" for f in found),
    }


def show(table: list[dict[str, object]], path: Path | None) -> None:
    for entry in table:
        print("  ".join(f"{key} {value}" for key, value in entry.items()))
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


def thin(args: argparse.Namespace) -> None:
    """Print and write how often what variants say of their rounds changes a choice, and what that is worth."""
    table = []
    for path in args.records:
        measured = Measured.read(path, args.measured)
        for kept in (0.8, 0.6, 0.4):
            several = (replace(measured, known=thinned(measured.known, kept, seed)) for seed in range(args.seeds))
            found = [pair for few in several for pair in changed_by_rounds(few)]
            pairs = [pair for pair in found if pair is not None]
            table.append(
                {
                    "world_size": measured.known.snapshot.world_size,
                    "kept": kept,
                    "choices": args.seeds * len(measured.timed),
                    "changed": len(found),
                    "better": sum(ours < theirs for ours, theirs in pairs),
                    "worse": sum(ours > theirs for ours, theirs in pairs),
                    "unmeasured": len(found) - len(pairs),
                    "regret_mean": round(statistics.mean(ours for ours, _ in pairs), 4),
                    "regret_mean_rounds_unknown": round(statistics.mean(theirs for _, theirs in pairs), 4),
                }
            )
    show(table, args.csv)


def changed_by_rounds(few: Measured) -> list[tuple[float, float] | None]:
    """Regrets with and without rounds where that makes two choices; None where one of them was not measured."""
    found: list[tuple[float, float] | None] = []
    for numel in sorted(few.timed):
        problem = replace(few.known.measured_sizes()[0], shape=(numel,))
        rules = RULES["dispatch"], RULES["rounds unknown"]
        if rules[0](few.known, problem) == rules[1](few.known, problem):
            continue
        try:
            ours, theirs = (regret(few.known, few.records, rule, numel, few.timed).regret for rule in rules)
        except Unmeasured:
            found.append(None)
        else:
            found.append((ours, theirs))
    return found


def thinned(known: Known, kept: float, seed: int) -> Known:
    """With a share of each size's rows, the library's and at least one more among them."""
    generator = random.Random(seed)
    rows: list[Row] = []
    for problem in known.measured_sizes():
        here = sorted((r for r in known.snapshot.rows if r.problem == problem), key=lambda r: str(r.candidate))
        challengers = [row for row in here if not row.is_library]
        rows += [row for row in here if row.is_library]
        rows += [row for row in challengers if generator.random() < kept] or challengers[:1]
    return replace(known, snapshot=replace(known.snapshot, rows=tuple(rows)))


class Unmeasured(SystemExit):
    """A choice whose time is known neither at its size nor at a larger one."""


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
            raise Unmeasured(f"{choice} was measured neither at {numel} elements nor above; tune that size longer")
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
    verb.add_argument("out", type=Path)
    for name in ("report", "thin"):
        verb = verbs.add_parser(name)
        verb.add_argument("--records", type=Path, nargs="+", default=RECORDS)
        verb.add_argument("--measured", type=Path, default=MEASURED)
        verb.add_argument("--csv", type=Path)
    verb.add_argument("--seeds", type=int, default=30)
    verbs.choices["report"].add_argument("--verbose", nargs="*", metavar="RULE")
    args = parser.parse_args()
    kernels.discover()
    if args.verb == "sizes":
        print(",".join(map(str, sizes())))
    else:
        {"measure": measure, "record": record, "report": report, "thin": thin}[args.verb](args)


if __name__ == "__main__":
    main()
