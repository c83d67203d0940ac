"""`tunedcomm db import`: add what files from elsewhere hold, every value checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json, table

if TYPE_CHECKING:
    from tunedcomm.db.transfer import Transfer

__all__ = ["db_import", "report", "to_dict"]


def db_import(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Files of JSON lines or SQLite files, or URLs.", show_default=False),
    ],
    *,
    db: Annotated[
        str | None,
        typer.Option("--db", help="File or URL to add to; by default the user database.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add the trials and pins of files from elsewhere to a database: all of them, each once, or none.

    Every value is checked, and a manifest beside a file is compared with it.

    Example: tunedcomm db import from-a-colleague.jsonl --db tuned.db
    """
    from tunedcomm.db.layers import writable_database
    from tunedcomm.db.transfer import import_databases

    done = import_databases(sources, writable_database(db))
    if as_json:
        emit_json(to_dict(done))
        return
    report(done)


def report(done: Transfer) -> None:
    """Print what came of each source, and of all together."""
    names = set(done.verified)
    rows = [(s.source, s.trials, s.known, "as its manifest says" if s.source in names else "-") for s in done.sources]
    table(("source", "trials", "in an earlier one", "manifest"), rows)
    known = sum(s.trials - s.known for s in done.sources) - done.added
    emit(f"{done.added} trials added to {done.target}, which had {known} of them")


def to_dict(done: Transfer) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "target": done.target,
        "added": done.added,
        "sources": [
            {"source": s.source, "trials": s.trials, "known": s.known, "verified": s.source in done.verified}
            for s in done.sources
        ],
    }
