"""`tunedcomm db export`: write the database that a cluster ships, or its rows in another format."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json, format_bytes, note, table

if TYPE_CHECKING:
    from tunedcomm.db.export import Export

__all__ = ["db_export"]


class FileFormat(str, enum.Enum):
    """Values of `--format`."""

    sqlite = "sqlite"
    jsonl = "jsonl"
    nccl_csv = "nccl-csv"


def db_export(
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="[OUT]",
            help="File to write; - for stdout, except for SQLite. With --cluster the folder, by default this one.",
            show_default=False,
        ),
    ] = None,
    *,
    db: Annotated[
        list[str] | None,
        typer.Option("--db", help="File or URL to read; repeat it to merge several. By default the user database."),
    ] = None,
    form: Annotated[
        FileFormat,
        typer.Option("--format", help="sqlite for dispatch, jsonl for people and other programs, nccl-csv for NCCL."),
    ] = FileFormat.sqlite,
    everything: Annotated[
        bool, typer.Option("--all", help="Write every row, not only what dispatch and explain need.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="NAME", help="Write NAME.db and print the setting that a cluster's users need."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="For nccl-csv, where several are stored: part of the GPU's name, or first digits of a digest.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT if it was exported, or holds nothing else.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what dispatch and explain need of one or several databases to one self-contained file.

    A manifest is written beside it.

    Example: tunedcomm db export --db tuned.db --db other-node.db cluster.db
    """
    from tunedcomm.db.export import export_database
    from tunedcomm.db.layers import named_layers

    path = _checked(out, form, cluster, hardware, as_json=as_json)
    sources = [layer.target for target in db or (None,) for layer in named_layers(target)]
    export = export_database(
        sources,
        sys.stdout if path is None else path,
        form=form.value,
        everything=everything,
        hardware=hardware,
        force=force,
    )
    if as_json:
        emit_json(_to_dict(export, cluster))
        return
    _report(export, cluster)


def _checked(
    out: str | None, form: FileFormat, cluster: str | None, hardware: str | None, *, as_json: bool
) -> Path | None:
    """The file to write, or None for stdout."""
    if hardware is not None and form is not FileFormat.nccl_csv:
        raise typer.BadParameter("only --format nccl-csv is of one kind of hardware", param_hint="--hardware")
    if cluster is not None:
        return _cluster_file(cluster, out, form)
    if out is None:
        raise typer.BadParameter("name the file to write, or a cluster with --cluster", param_hint="OUT")
    if out != "-":
        return Path(out)
    if form is FileFormat.sqlite:
        raise typer.BadParameter(
            "a SQLite file cannot go to stdout; name a file, or another --format", param_hint="OUT"
        )
    if as_json:
        raise typer.BadParameter("stdout takes the rows or the JSON, not both; name a file", param_hint="--json")
    return None


def _cluster_file(cluster: str, out: str | None, form: FileFormat) -> Path:
    from tunedcomm.db.export import cluster_file

    if form is not FileFormat.sqlite:
        raise typer.BadParameter("dispatch reads SQLite files only", param_hint="--format")
    folder = Path(out or ".").expanduser()
    if not folder.is_dir():
        raise typer.BadParameter(
            f"{folder} is not a directory; with --cluster the file is named for you", param_hint="OUT"
        )
    try:
        return cluster_file(cluster, folder)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--cluster") from None


def _report(export: Export, cluster: str | None) -> None:
    """Results on stdout, unless the rows are there: whoever pipes or compares them wants nothing else."""
    if export.skipped.count:
        note(
            f"left out {export.skipped.count} rows that make no sense, the first: {export.skipped.first}; "
            "`tunedcomm db check` lists them"
        )
    if export.path is None:
        return
    read = sum(source.trials for source in export.sources)
    known = sum(source.known for source in export.sources)
    twice = f", {known} of them in an earlier one too" if known else ""
    plural = "s" if len(export.sources) > 1 else ""
    table(("table", "rows"), [(name, count) for name, count in export.rows.items() if count])
    emit(f"{read} trials in {len(export.sources)} database{plural}{twice}; {export.left_out} left out as not needed")
    emit(f"{export.path}: {format_bytes(export.num_bytes)}, SHA-256 {export.sha256}")
    if cluster is not None:
        from tunedcomm.db.export import path_setting

        emit(f"export {path_setting(export.path)}")


def _to_dict(export: Export, cluster: str | None) -> dict[str, Any]:
    from tunedcomm.db.export import path_setting

    return {
        "path": str(export.path),
        "format": export.form,
        "sha256": export.sha256,
        "num_bytes": export.num_bytes,
        "manifest": str(export.manifest),
        "rows": export.rows,
        "left_out": export.left_out,
        "skipped": export.skipped.count,
        "sources": [{"source": s.source, "trials": s.trials, "known": s.known} for s in export.sources],
        "setting": path_setting(export.path) if cluster is not None and export.path is not None else None,
    }
