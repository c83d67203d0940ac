"""Exponents of the library's time in eager scores, compared on measured rows.

    python bench/eager_scores.py                                             # without GPUs, from what is committed
    python bench/eager_scores.py --csv bench/results/db/eager_scores.csv

A score is the latency times the power of (median baseline / own baseline) with some exponent: 1 is the ratio to the
library, 0 the latency as it is. See `comparable` in tunedcomm/selection/score.py.

Truths: `graph` is what the same candidates take in graphs by their ratio to the library there, of the finals in
tuning_db. At 1 MiB and above an eager call takes the GPUs as long as in a graph. Below it takes what a launch costs,
which a graph does not: numbers of those sizes say how far both are apart, not which exponent is right. `again` is the
same score of the same candidates in another window, minutes later on a host that had become faster (tests/data): it
holds for all sizes, but candidates are few.

Columns: `regret` is the choice's time by the truth over the least of those measured in both; `spread` the standard
deviation of log(score / truth) without each problem's mean, of one window; `past_library` the rows that were no faster
than the library beside them and score faster by more than the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regret import row_of
from rows import ROOT, arguments, of_host, read_trials, show
from rows import Row as CsvRow

from tunedcomm import kernels
from tunedcomm.db.records import Trial
from tunedcomm.hardware import Environment
from tunedcomm.selection.score import comparable, noise
from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Candidate, Problem, format_shape, get_op

SHIPPED = {ranks: ROOT / "tuning_db" / f"h200-nvswitch18-x{ranks}.db" for ranks in (4, 2)}
TWICE = tuple(ROOT / "tests" / "data" / f"verify_h200_x2_{name}.jsonl.gz" for name in ("then", "now"))
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Window:
    """The challengers of one problem, and the median of the library's times beside them."""

    rows: Mapping[Candidate, Row]
    baseline_us: float

    def score(self, candidate: Candidate, exponent: float) -> float:
        return comparable(self.rows[candidate], self.baseline_us, exponent)

    def past_library(self, exponent: float) -> int:
        """Number of rows that score faster than the library and were slower beside it."""
        lost = [c for c, row in self.rows.items() if row.baseline_p50_us and row.latency_p50_us >= row.baseline_p50_us]
        return sum(self.score(c, exponent) < self.baseline_us * (1 - noise(self.rows[c])) for c in lost)


def windows(records: Iterable[Trial]) -> dict[Problem, Window]:
    """The finals of every problem where the library was measured beside them."""
    by_problem: dict[Problem, list[Row]] = {}
    for record in records:
        if record.status == "ok" and record.final and record.baseline_p50_us and record.latency_p50_us is not None:
            by_problem.setdefault(record.problem, []).append(row_of(record))
    return {
        problem: Window(
            {row.candidate: row for row in rows if not row.is_library},
            statistics.median(row.baseline_p50_us for row in rows if row.baseline_p50_us),
        )
        for problem, rows in by_problem.items()
    }


@dataclass(frozen=True, slots=True)
class Pair:
    """One eager problem beside its truth: at least two candidates measured in both."""

    problem: Problem
    eager: Window
    truth: Window
    is_again: bool
    both: tuple[Candidate, ...]

    @property
    def is_large(self) -> bool:
        return get_op(self.problem.op).message_bytes(self.problem) >= LARGE

    def true_us(self, candidate: Candidate, exponent: float) -> float:
        return self.truth.score(candidate, exponent if self.is_again else 1.0)

    def regret(self, exponent: float) -> float:
        choice = min(self.both, key=lambda c: (self.eager.score(c, exponent), str(c)))
        return self.true_us(choice, exponent) / min(self.true_us(c, exponent) for c in self.both)

    def errors(self, exponent: float) -> list[float]:
        """log(score / truth), without their mean."""
        found = [math.log(self.eager.score(c, exponent) / self.true_us(c, exponent)) for c in self.both]
        mean = statistics.mean(found)
        return [value - mean for value in found]


def pairs_of(eager: Mapping[Problem, Window], truth: Mapping[Problem, Window], *, is_again: bool) -> list[Pair]:
    found = []
    for problem, here in eager.items():
        there = truth.get(problem if is_again else replace(problem, mode="graph"))
        if problem.mode == "eager" and there is not None:
            both = tuple(sorted((c for c in here.rows if c in there.rows), key=str))
            if len(both) > 1:
                found.append(Pair(problem, here, there, is_again, both))
    return found


def lines(pairs: Sequence[Pair], truth: str, world_size: int, where: Environment) -> list[CsvRow]:
    """By size class, op and exponent, with columns of the machine that was measured and of this run."""
    ran: dict[str, Any] = {name: getattr(where, name) for name in ("gpu", "torch", "triton", "nccl", "driver")}
    ran |= {name: value for name, value in of_host().items() if name != "cpus"}
    found: list[CsvRow] = []
    for is_large in (True, False):
        sized = [pair for pair in pairs if pair.is_large == is_large]
        named = sorted({pair.problem.op for pair in sized})
        for op in ["all", *named] if len(named) > 1 else named:
            chosen = [pair for pair in sized if op in ("all", pair.problem.op)]
            head = {"truth": truth, "world_size": world_size, "op": op, "sizes": ">= 1 MiB" if is_large else "< 1 MiB"}
            found += [{**head, **numbers(chosen, exponent), **ran} for exponent in EXPONENTS]
    return found


def numbers(pairs: Sequence[Pair], exponent: float) -> dict[str, object]:
    errors = [error for pair in pairs for error in pair.errors(exponent)]
    # Of two windows each has half of the variance.
    freedom = (len(errors) - len(pairs)) * (2 if pairs[0].is_again else 1)
    worst = max(pairs, key=lambda pair: pair.regret(exponent))
    mean, at = statistics.mean(pair.regret(exponent) for pair in pairs), worst.problem
    regrets = {
        "regret_mean": f"{mean:.4f}",
        "regret_worst": f"{worst.regret(exponent):.4f}",
        "worst_at": f"{at.dtype} {format_shape(at.shape)}",
    }
    return {
        "exponent": exponent,
        "problems": len(pairs),
        "candidates": len(errors),
        **(dict.fromkeys(regrets, "") if worst.is_again else regrets),
        "spread": f"{math.sqrt(sum(error**2 for error in errors) / freedom):.4f}",
        "past_library": sum(pair.eager.past_library(exponent) for pair in pairs),
    }


def main() -> None:
    args = arguments(__doc__, csv=None)
    kernels.discover()
    table: list[CsvRow] = []
    for world_size, path in SHIPPED.items():
        records = read_trials(path)
        here = windows(records)
        table += lines(pairs_of(here, here, is_again=False), "graph", world_size, records[0].environment)
    then, now = (read_trials(path) for path in TWICE)
    table += lines(pairs_of(windows(then), windows(now), is_again=True), "again", 2, now[0].environment)
    show(table, args.csv)


if __name__ == "__main__":
    main()
