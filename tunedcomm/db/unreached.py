"""The file of problems that `autotune` did not tune within its budget: JSON lines beside the user database.

The next start leaves them alone unless its budget is larger. Dispatch does not read the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tunedcomm.db.misses import beside_user_database, lines_with, write_lines
from tunedcomm.db.targets import warn_once
from tunedcomm.db.values import canonical_json, parse_problem
from tunedcomm.errors import ConfigError, DatabaseAccessError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Problem, format_shape

_NAME = "unreached.jsonl"


def budgets(environment: Environment) -> dict[Problem, float]:
    """The largest budget in seconds that ended before each problem was tuned, in this very environment."""
    found: dict[Problem, float] = {}
    try:
        lines = lines_with(environment.digest, beside_user_database(_NAME))
    except DatabaseAccessError:
        return {}
    for line in lines:
        try:
            data = json.loads(line)
            problem, budget_s = parse_problem(data["problem"]), float(data["budget_s"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError):
            continue
        found[problem] = max(budget_s, found.get(problem, 0.0))
    return found


def note(environment: Environment, problems: Iterable[Problem], budget_s: float) -> None:
    """Add problems that were not tuned within a budget; a file that cannot be written costs one warning."""
    lines = [
        canonical_json(
            {
                "environment": environment.digest,
                "problem": {**problem.to_dict(), "shape": format_shape(problem.shape)},
                "budget_s": budget_s,
            }
        ).encode("ascii")
        + b"\n"
        for problem in problems
    ]
    try:
        if lines:
            write_lines(beside_user_database(_NAME), lines, smaller="remove it, and its problems are tried again")
    except (OSError, DatabaseAccessError) as error:
        warn_once(f"problems that were not tuned are not noted, so that each start tries them: {error}", _NAME)
