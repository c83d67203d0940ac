"""How few trials would have done: searches replayed from recorded trials, no GPU needed.

python bench/replay_search.py                              # the recording beside the tests
python bench/replay_search.py --records tuned.db --seeds 10

Strategies, each on a problem by itself, with the regret after so many trials:
  tpe         the tuner's search, made to sample
  exhaustive  the tuner's search where the space fits into the trials: defaults first, then the variants in turn
  random      without repetition
and, as a sweep does it, over all problems of a family in turn, so that neighbours' winners are tried first:
  tuner       with the limits of trials and patience as given; `tuner 160/48` is what a sweep on GPUs does if not told
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tunedcomm import kernels
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.dispatch.communicator import limits_for
from tunedcomm.spec import Candidate, Problem, format_shape, get_op
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.study import families, search_space

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from replay import Replay, read_recording, run_search  # noqa: E402

RECORDS = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
RESULTS = ROOT / "bench" / "results" / "replay" / "replay_search.csv"

COLUMNS = {
    "records": "file of the recorded trials",
    "environment": "where they were recorded",
    "op": "of the problem, as the next four",
    "shape": "N or MxNxK",
    "dtype": "of the payload",
    "world_size": "ranks",
    "mode": "graph or eager",
    "message_bytes": "as the op counts them",
    "num_candidates": "feasible and recorded as run",
    "strategy": "see the head of bench/replay_search.py",
    "trials": "most trials allowed",
    "patience": "trials for which the best may stand before the search ends; 0: no such end",
    "num_seeds": "searches behind the row, which differ in their seed only",
    "trials_used": "mean over the seeds",
    "regret_p50": "recorded latency of the winner / of the best of all, default numerics policy; median over seeds",
    "regret_max": "the worst seed's",
}
COUNTS = (8, 16, 24, 32, 48, 64, 96)
TUNER = ((160, 48), (128, 48), (128, 0), (96, 48), (96, 0), (64, 48), (64, 32), (64, 24), (48, 24), (32, 16), (24, 12))


@dataclass(frozen=True)
class Point:
    """Where one search stood."""

    problem: Problem
    strategy: str
    trials: int
    patience: int
    trials_used: int
    regret: float


@dataclass(frozen=True)
class Task:
    """One search: of one problem, or of a family for the strategy `tuner`."""

    problems: tuple[Problem, ...]
    strategy: str
    trials: int
    patience: int
    seed: int


class Bench:
    """The recording, and searches in it."""

    def __init__(self, path: Path) -> None:
        kernels.discover()
        self.replay = Replay(load(path))
        world_sizes = {problem.world_size for problem in self.replay.problems()}
        self.limits = {size: limits_for(self.replay.environment, size) for size in world_sizes}
        spaces = {problem: self.space(problem) for problem in self.replay.problems()}
        # Where something feasible was not tried, nobody knows the best.
        self.problems = tuple(problem for problem, space in spaces.items() if self.tried(problem).issuperset(space))
        self.latencies = {problem: self.replay.measured(problem, "default") for problem in self.problems}
        self.candidates: dict[Problem, list[Candidate]] = {}
        for problem in self.problems:
            ran = self.replay.measured(problem)
            self.candidates[problem] = [candidate for candidate in spaces[problem] if candidate in ran]

    def space(self, problem: Problem) -> list[Candidate]:
        """What the tuner may try."""
        settings = Settings(backend="cuda", world_size=problem.world_size, trials=1)
        return search_space(problem, self.limits[problem.world_size], settings)

    def tried(self, problem: Problem) -> set[Candidate]:
        return {record.candidate for record in self.replay.records(problem)}

    def regret(self, problem: Problem, tried: Iterable[Candidate]) -> float:
        """Recorded latency of the best of `tried` over that of all."""
        latencies = self.latencies[problem]
        best = min(latencies[candidate] for candidate in self.candidates[problem] if candidate in latencies)
        return min((latencies[candidate] for candidate in tried if candidate in latencies), default=math.inf) / best

    def run(self, task: Task) -> list[Point]:
        """Search, and say where it stood."""
        if task.strategy == "random":
            tried = list(self.candidates[task.problems[0]])
            random.Random(task.seed).shuffle(tried)
            orders = {task.problems[0]: tried}
        else:
            orders = self.search(task)
        points = []
        for problem, order in orders.items():
            if task.strategy == "tuner":
                points.append(self.point(task, problem, order, task.trials))
            else:
                points += [self.point(task, problem, order[:count], count) for count in COUNTS]
        return points

    def point(self, task: Task, problem: Problem, tried: Sequence[Candidate], trials: int) -> Point:
        return Point(problem, task.strategy, trials, task.patience, len(tried), self.regret(problem, tried))

    def search(self, task: Task) -> dict[Problem, list[Candidate]]:
        """What the tuner tried on each problem, in order."""
        world_size = task.problems[0].world_size
        settings = Settings(
            backend="cuda",
            world_size=world_size,
            trials=task.trials,
            patience=task.patience,
            seed=task.seed,
            finals=False,
        )
        done = run_search(task.problems, settings, self.replay, limits=self.limits[world_size])
        orders: dict[Problem, list[Candidate]] = {problem: [] for problem in task.problems}
        for step in done.steps:
            assert step.command.problem is not None
            assert step.command.candidate is not None
            orders[step.command.problem].append(step.command.candidate)
        return orders

    def tasks(self, seeds: int) -> list[Task]:
        """Longest first."""
        found = []
        for family in families(self.problems):
            for trials, patience in TUNER:
                found += [Task(tuple(family), "tuner", trials, patience, seed) for seed in range(seeds)]
        for problem in self.problems:
            size = len(self.candidates[problem])
            found.append(Task((problem,), "exhaustive", 10**6, 0, 0))
            found += [Task((problem,), "random", size, 0, seed) for seed in range(20 * seeds)]
            # One trial less than there are candidates, failing ones counted, and the search samples.
            found += [Task((problem,), "tpe", min(size - 1, max(COUNTS)), 0, seed) for seed in range(seeds)]
        return found


def load(path: Path) -> list[TrialRecord]:
    """Trials of a database or a recording."""
    if path.suffix != ".db":
        return read_recording(path)
    with Database.open(path, readonly=True) as database:
        return database.trials()


_bench: Bench | None = None


def start(path: Path) -> None:
    global _bench  # noqa: PLW0603 - what a worker process keeps between tasks
    _bench = Bench(path)


def run(task: Task) -> list[Point]:
    assert _bench is not None
    return _bench.run(task)


def rows(path: Path, bench: Bench, points: Iterable[Point]) -> list[dict[str, object]]:
    """One for each problem, strategy and limits."""
    grouped: dict[tuple[Problem, str, int, int], list[Point]] = defaultdict(list)
    for point in points:
        grouped[point.problem, point.strategy, point.trials, point.patience].append(point)
    found = []
    for (problem, strategy, trials, patience), group in sorted(grouped.items()):
        regrets = [point.regret for point in group]
        values = (
            path.name,
            bench.replay.environment,
            problem.op,
            format_shape(problem.shape),
            problem.dtype,
            problem.world_size,
            problem.mode,
            get_op(problem.op).message_bytes(problem),
            len(bench.candidates[problem]),
            strategy,
            trials,
            patience,
            len(group),
            f"{statistics.mean(point.trials_used for point in group):.1f}",
            f"{statistics.median(regrets):.4f}",
            f"{max(regrets):.4f}",
        )
        found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def summary(found: Sequence[dict[str, object]]) -> str:
    """Over all problems: a line for each strategy and limits."""
    grouped: dict[tuple[object, ...], list[dict[str, object]]] = defaultdict(list)
    for row in sorted(
        found, key=lambda row: (str(row["strategy"]), int(str(row["trials"])), int(str(row["patience"])))
    ):
        grouped[row["strategy"], row["trials"], row["patience"]].append(row)
    lines = [
        "| strategy | trials | patience | used a problem | median regret | worst median | worst seed |",
        "|---|" + "---:|" * 6,
    ]
    for (strategy, trials, patience), group in grouped.items():
        used, middle, worst = (
            [float(str(row[name])) for row in group] for name in ("trials_used", "regret_p50", "regret_max")
        )
        lines.append(
            f"| {strategy} | {trials} | {patience} | {statistics.mean(used):.0f} | {statistics.median(middle):.4f} "
            f"| {max(middle):.4f} | {max(worst):.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS, help="database or recording")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    bench = Bench(args.records)
    points: list[Point] = []
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), start, (args.records,)) as pool:
        for done in pool.map(run, bench.tasks(args.seeds)):
            points += done
            sys.stderr.write(".")
            sys.stderr.flush()
    found = rows(args.records, bench, points)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    sys.stdout.write(f"\n{summary(found)}\n")


if __name__ == "__main__":
    main()
