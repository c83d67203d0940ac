"""Regret of searches with fewer trials, replayed from recorded trials without a GPU.

python bench/replay_search.py                              # the recording beside the tests
python bench/replay_search.py --records tuned.db --seeds 10

Strategies, each on a problem by itself, with the regret after so many trials:
  tpe         the tuner's search, made to sample
  exhaustive  the tuner's search where the space fits into the trials: defaults first, then the variants in turn
  random      without repetition
and, as a sweep does it, over all problems of a family in turn, so that neighbours' winners are tried first:
  tuner       with the limits of trials and patience as given; `tuner 160/48` is what a sweep on GPUs does if not told

A row of bench/results/replay/replay_search.csv is a problem, a strategy and its limits, over several seeds: the trials
that were used, and the regret, which is the recorded latency of the winner over that of the best of all, under the
default numerics policy (median and worst of the seeds). `num_candidates` are feasible and recorded as run. A patience
of 0 means that the best may stand for as long as there are trials.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from rows import RESULTS, ROOT, Row, arguments, read_trials, write

from tunedcomm import kernels
from tunedcomm.spec import Candidate, Problem, format_shape, get_op
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.study import families, search_space

sys.path.insert(0, str(ROOT / "tests"))
from replay import Replay, run_search

RECORDS = ROOT / "tests" / "data" / "trials_h200_x4.jsonl.gz"
COUNTS = (8, 16, 24, 32, 48, 64, 96)
TUNER = ((160, 48), (128, 48), (128, 0), (96, 48), (96, 0), (64, 48), (64, 32), (64, 24), (48, 24), (32, 16), (24, 12))


class Limit(NamedTuple):
    """A strategy with its limits."""

    strategy: str
    trials: int
    patience: int


# One search, with a seed: of one problem, or of a family for the strategy `tuner`.
Task = tuple[tuple[Problem, ...], Limit, int]
# One search on one problem: with which limits, the trials used, and the regret.
Point = tuple[Problem, Limit, int, float]


class Recording:
    """The recorded trials, and searches in them."""

    def __init__(self, path: Path) -> None:
        kernels.discover()
        self.replay = Replay(read_trials(path))
        world_sizes = {problem.world_size for problem in self.replay.problems()}
        self.limits = {size: limits_for(self.replay.environment, size) for size in world_sizes}
        self.candidates: dict[Problem, list[Candidate]] = {}
        self.latencies: dict[Problem, dict[Candidate, float]] = {}
        for problem in self.replay.problems():
            settings = Settings(backend="cuda", world_size=problem.world_size, trials=1)
            space = search_space(problem, self.limits[problem.world_size], settings)
            # Where something feasible was not tried, nobody knows the best.
            if {record.candidate for record in self.replay.records(problem)}.issuperset(space):
                ran = self.replay.measured(problem)
                self.candidates[problem] = [candidate for candidate in space if candidate in ran]
                self.latencies[problem] = self.replay.measured(problem, "default")

    def regret(self, problem: Problem, tried: Iterable[Candidate]) -> float:
        """Recorded latency of the best of `tried` over that of all."""
        latencies = self.latencies[problem]
        best = min(latencies[candidate] for candidate in self.candidates[problem] if candidate in latencies)
        return min((latencies[candidate] for candidate in tried if candidate in latencies), default=math.inf) / best

    def run(self, problems: tuple[Problem, ...], limit: Limit, seed: int) -> list[Point]:
        """Search, and tell where the search stood after so many trials."""
        if limit.strategy == "random":
            tried = list(self.candidates[problems[0]])
            random.Random(seed).shuffle(tried)
            orders = {problems[0]: tried}
        else:
            orders = self.search(problems, limit, seed)
        return [
            (problem, limit._replace(trials=count), len(order[:count]), self.regret(problem, order[:count]))
            for problem, order in orders.items()
            for count in ((limit.trials,) if limit.strategy == "tuner" else COUNTS)
        ]

    def search(self, problems: tuple[Problem, ...], limit: Limit, seed: int) -> dict[Problem, list[Candidate]]:
        """The candidates that the tuner tried on each problem, in order."""
        world_size, (_, trials, patience) = problems[0].world_size, limit
        settings = Settings(
            backend="cuda", world_size=world_size, trials=trials, patience=patience, seed=seed, finals=False
        )
        done = run_search(problems, settings, self.replay, limits=self.limits[world_size])
        orders: dict[Problem, list[Candidate]] = {problem: [] for problem in problems}
        for step in done.steps:
            assert step.command.problem is not None
            assert step.command.candidate is not None
            orders[step.command.problem].append(step.command.candidate)
        return orders

    def tasks(self, seeds: int) -> list[Task]:
        """Longest first."""
        found: list[Task] = [
            (tuple(family), Limit("tuner", *limits), seed)
            for family in families(tuple(self.candidates))
            for limits in TUNER
            for seed in range(seeds)
        ]
        for problem, candidates in self.candidates.items():
            found.append(((problem,), Limit("exhaustive", 10**6, 0), 0))
            found += [((problem,), Limit("random", len(candidates), 0), seed) for seed in range(20 * seeds)]
            # One trial less than there are candidates, failing ones counted, and the search samples.
            fewer = min(len(candidates) - 1, max(COUNTS))
            found += [((problem,), Limit("tpe", fewer, 0), seed) for seed in range(seeds)]
        return found


# A worker process keeps it between tasks.
recording_at = cache(Recording)


def run(path: Path, task: Task) -> list[Point]:
    return recording_at(path).run(*task)


def rows_of(path: Path, points: Iterable[Point]) -> list[Row]:
    """One for each problem, strategy and limits."""
    grouped: dict[tuple[Problem, Limit], list[tuple[int, float]]] = defaultdict(list)
    for problem, limit, used, regret in points:
        grouped[problem, limit].append((used, regret))
    recording = recording_at(path)
    return [
        {
            "records": path.name,
            "environment": recording.replay.environment,
            "op": problem.op,
            "shape": format_shape(problem.shape),
            "dtype": problem.dtype,
            "world_size": problem.world_size,
            "mode": problem.mode,
            "message_bytes": get_op(problem.op).message_bytes(problem),
            "num_candidates": len(recording.candidates[problem]),
            **limit._asdict(),
            "num_seeds": len(group),
            "trials_used": f"{statistics.mean(used for used, _ in group):.1f}",
            "regret_p50": f"{statistics.median(regret for _, regret in group):.4f}",
            "regret_max": f"{max(regret for _, regret in group):.4f}",
        }
        for (problem, limit), group in sorted(grouped.items())
    ]


def main() -> None:
    args = arguments(__doc__, records=RECORDS, seeds=5, jobs=2, out=RESULTS / "replay" / "replay_search.csv")
    points: list[Point] = []
    tasks = recording_at(args.records).tasks(args.seeds)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for done in pool.map(run, itertools.repeat(args.records), tasks):
            points += done
            sys.stderr.write(".")
            sys.stderr.flush()
    write(args.out, rows_of(args.records, points))


if __name__ == "__main__":
    main()
