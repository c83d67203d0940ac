"""`tunedcomm db export`: write the database that a cluster ships."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json, format_bytes, table

if TYPE_CHECKING:
    from tunedcomm.db.export import Export

__all__ = ["db_export"]


def db_export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.", show_default=False)],
    *,
    db: Annotated[
        list[str] | None,
        typer.Option("--db", help="File or URL to read; repeat it to merge several. By default the user database."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what dispatch and explain need of one or several databases to one self-contained file.

    Example: tunedcomm db export --db tuned.db --db other-node.db cluster.db
    """
    from tunedcomm.db.export import export_database
    from tunedcomm.db.layers import named_layers

    sources = [layer.target for target in db or (None,) for layer in named_layers(target)]
    export = export_database(sources, out, force=force)
    if as_json:
        emit_json(_to_dict(export))
        return
    table(("table", "rows"), [(name, count) for name, count in export.rows.items() if count])
    read = sum(source.trials for source in export.sources)
    known = sum(source.known for source in export.sources)
    twice = f", {known} of them in an earlier one too" if known else ""
    plural = "s" if len(export.sources) > 1 else ""
    emit(f"{read} trials in {len(export.sources)} database{plural}{twice}; {export.left_out} left out as not needed")
    emit(f"{export.path}: {format_bytes(export.num_bytes)}, SHA-256 {export.sha256}")


def _to_dict(export: Export) -> dict[str, Any]:
    return {
        "path": str(export.path),
        "sha256": export.sha256,
        "num_bytes": export.num_bytes,
        "rows": export.rows,
        "left_out": export.left_out,
        "sources": [{"source": s.source, "trials": s.trials, "known": s.known} for s in export.sources],
    }
