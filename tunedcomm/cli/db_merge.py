"""`tunedcomm db merge`: the databases of several hosts in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json, table
from tunedcomm.cli.db_diff import counts
from tunedcomm.cli.db_import import report, to_dict

if TYPE_CHECKING:
    from tunedcomm.db.diff import Comparison

__all__ = ["db_merge"]


def db_merge(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...", help="Files or URLs; a directory stands for its *.db files.", show_default=False
        ),
    ],
    *,
    into: Annotated[
        str, typer.Option("--into", metavar="TARGET", help="File or URL that takes all.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Add everything that databases hold to another one, which is made if there is none; nothing is lost or doubled.

    Rows of different environments are never compared: each keeps its own. It says for how many problems of each
    environment another candidate is chosen now.

    Example: tunedcomm db merge per-host/ --into cluster.db
    """
    from tunedcomm.db.transfer import merge_databases

    done = merge_databases(sources, into)
    if as_json:
        emit_json({**to_dict(done), "environments": [_to_dict(comparison) for comparison in done.comparisons]})
        return
    report(done)
    emit("What it answers now:")
    columns = ("environment", "ranks", "problems", "new", "another winner", "another latency")
    table(columns, [_cells(comparison) for comparison in done.comparisons])


def _cells(comparison: Comparison) -> tuple[Any, ...]:
    found, environment = counts(comparison), comparison.after
    name = f"{environment} [{environment.digest[:8]}]"
    cells = (found["only after"], found["winner"], found["latency"])
    return (name, comparison.world_size, comparison.problems, *cells)


def _to_dict(comparison: Comparison) -> dict[str, Any]:
    found = counts(comparison)
    return {
        "environment": {"digest": comparison.after.digest, **comparison.after.to_dict()},
        "world_size": comparison.world_size,
        "problems": comparison.problems,
        "new": found["only after"],
        "winner_changed": found["winner"],
        "latency_changed": found["latency"],
        "gone": found["only before"],
    }
