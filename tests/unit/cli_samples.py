"""The command line, run in the process of the test, and databases of real variants to run it on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from db_samples import H200

from tunedcomm import kernels
from tunedcomm.cli import main
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import Environment, detect
from tunedcomm.spec import Problem, get_variant
from tunedcomm.symm.layout import limits_for
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.search.spec import SweepSpec
from tunedcomm.tuner.search.summary import ProblemResult, SweepOutcome

PROBLEM = Problem("all_reduce", (98304,), "bfloat16", 4)


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What was printed as JSON."""
        return json.loads(self.out)

    def line(self, part: str) -> str:
        """The first line on stdout that has `part`, with single blanks."""
        return " ".join(next(line for line in self.out.splitlines() if part in line).split())


def run(*arguments: object) -> Ended:
    """Run the command line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main.code_of([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())


def refused(*arguments: object) -> str:
    """The message about bad usage, in one line: exit code 2, nothing on stdout, no traceback."""
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, ""), ended
    assert "Traceback" not in ended.err
    assert ended.err.strip()
    return " ".join(ended.err.replace("│", " ").split())


def asked(problem: Problem) -> list[str]:
    """The options that name an all_reduce."""
    return f"--op all_reduce --shape {problem.shape[0]} --world-size {problem.world_size}".split()


def real_trial(variant: str, latency_us: float | None, environment: Environment = H200, **changes: Any) -> Trial:
    """A final as `tune` would store it: of a real variant with its default config and its source as it is now."""
    kernels.discover()
    known = get_variant("all_reduce", variant)
    problem = changes.get("problem", PROBLEM)
    values: dict[str, Any] = {
        "problem": problem,
        "environment": environment,
        "variant": variant,
        "numerics": known.numerics,
        "source_hash": kernels.source_hash(known),
        "config": known.default(problem, limits_for(environment, problem.world_size)),
        "status": "ok",
        "latency_p10_us": latency_us,
        "latency_p50_us": latency_us,
        "latency_p90_us": latency_us,
        "samples": 100,
        "baseline_p50_us": None if latency_us is None else 14.0,
        "error": 1e-3,
        "final": True,
    }
    return Trial(**{**values, **changes})


def record(path: Path | str, *trials: Trial) -> str:
    """Record trials in a database, made if it is not there; its path as text."""
    with Database.open(path, create=True) as database:
        database.record(trials)
    return str(path)


def outcome(*results: ProblemResult, **changes: Any) -> SweepOutcome:
    """The outcome of a sweep of 17 trials, of which 3 failed."""
    failures = {"hung": 1, "compile_error": 2}
    values: dict[str, Any] = {
        "run_id": 3,
        "environment": detect(None),
        "problems": results,
        "reason": "done",
        "progress": Progress(
            problems=1,
            problems_done=1,
            trials=17,
            trials_planned=0,
            failures=failures,
            gangs=(),
            num_gangs=2,
            elapsed_s=12.3,
        ),
        "dropped": (),
        "start_s": 3.5,
        "compiled_ahead": 0,
    }
    return SweepOutcome(**{**values, **changes})


class Sweep:
    """Stands in for `sweep`: keeps what it was asked for, and returns or raises `result`."""

    def __init__(self) -> None:
        self.result: SweepOutcome | BaseException = outcome()
        self.specs: list[SweepSpec] = []
        self.path: Path | None = None

    def __call__(
        self, spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None
    ) -> SweepOutcome:
        self.path = database.path
        self.specs.append(spec)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result
