"""Verbs of `tunedcomm db` that carry rows between databases and compare them: export, import, merge, diff."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from tunedcomm.cli.options import JsonOption, WrittenOption, bad_usage
from tunedcomm.cli.output import (
    attributes,
    emit,
    emit_json,
    format_bytes,
    format_us,
    named,
    named_candidate,
    note,
    table,
)

if TYPE_CHECKING:
    from tunedcomm.db.diff import Change, Comparison, Difference
    from tunedcomm.db.records import Pin
    from tunedcomm.db.transfer import Transfer

FileFormat: TypeAlias = Literal["sqlite", "jsonl", "nccl-csv"]
_KINDS = {
    "winner": "another winner",
    "latency": "the same winner, another latency",
    "only before": "only in A",
    "only after": "only in B",
}


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
    db: Annotated[list[str] | None, typer.Option(help="Databases to read; by default the user database.")] = None,
    form: Annotated[
        FileFormat,
        typer.Option("--format", help="sqlite for dispatch, jsonl for other programs, nccl-csv for NCCL."),
    ] = "sqlite",
    everything: Annotated[
        bool, typer.Option("--all", help="All rows, not only what dispatch and explain need.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write NAME.db and print the setting that its users need."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="For nccl-csv: part of the GPU's name, or first digits of a digest.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is an export or empty.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write what dispatch and explain need of one or several databases to one self-contained file.

    A manifest is written beside it.

    Example: tunedcomm db export --db tuned.db --db other-node.db cluster.db
    """
    from tunedcomm.db.layers import named_layers
    from tunedcomm.db.transfer import export_database, path_setting

    if hardware is not None and form != "nccl-csv":
        raise bad_usage("--hardware", "only --format nccl-csv is of one kind of hardware")
    path = _file_named(out, form, as_json=as_json) if cluster is None else _cluster_file(cluster, out, form)
    sources = [layer.target for target in db or (None,) for layer in named_layers(target)]
    into = sys.stdout if path is None else path
    export = export_database(sources, into, form=form, everything=everything, hardware=hardware, force=force)
    setting = None if cluster is None or export.path is None else path_setting(export.path)
    if as_json:
        emit_json(
            {
                "path": str(export.path),
                "format": export.form,
                **attributes(export, "sha256 num_bytes manifest rows left_out"),
                "skipped": export.skipped.count,
                "sources": export.sources,
                "setting": setting,
            }
        )
        return
    if export.skipped.count:
        note(
            f"left out {export.skipped.count} rows that make no sense, the first: {export.skipped.first}; "
            "`tunedcomm db check` lists them"
        )
    if export.path is None:  # the rows are on stdout: whoever pipes or compares them wants nothing else there
        return
    read, known = (sum(getattr(source, name) for source in export.sources) for name in ("trials", "known"))
    table(("table", "rows"), [(name, count) for name, count in export.rows.items() if count])
    databases = f"{len(export.sources)} database{'s' if len(export.sources) > 1 else ''}"
    twice = f", {known} of them in an earlier one too" if known else ""
    emit(f"{read} trials in {databases}{twice}; {export.left_out} left out as not needed")
    emit(f"{export.path}: {format_bytes(export.num_bytes)}, SHA-256 {export.sha256}")
    if setting is not None:
        emit(f"export {setting}")


def _file_named(out: str | None, form: FileFormat, *, as_json: bool) -> Path | None:
    """The file to write, or None for stdout."""
    if out is None:
        raise bad_usage("OUT", "name the file to write, or a cluster with --cluster")
    if out != "-":
        return Path(out)
    if form == "sqlite":
        why = "a SQLite file cannot go to stdout; name a file, or another --format"
        raise bad_usage("OUT", why)
    if as_json:
        raise bad_usage("--json", "stdout takes the rows or the JSON, not both; name a file")
    return None


def _cluster_file(cluster: str, out: str | None, form: FileFormat) -> Path:
    from tunedcomm.db.transfer import cluster_file

    if form != "sqlite":
        raise bad_usage("--format", "dispatch reads SQLite files only")
    folder = Path(out or ".").expanduser()
    if not folder.is_dir():
        why = f"{folder} is not a directory; with --cluster the file is named for you"
        raise bad_usage("OUT", why)
    try:
        return cluster_file(cluster, folder)
    except ValueError as error:
        raise bad_usage("--cluster", str(error)) from None


def db_import(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Files of JSON lines, SQLite files or URLs.")],
    *,
    db: WrittenOption = None,
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
        emit_json(_transfer_to_dict(done))
    else:
        _print_transfer(done)


def _print_transfer(done: Transfer) -> None:
    """Print what came of each source, and of all together."""
    verified = {True: "as its manifest says", False: "-"}
    rows = [(s.source, s.trials, s.known, verified[s.source in done.verified]) for s in done.sources]
    table(("source", "trials", "in an earlier one", "manifest"), rows)
    known = sum(s.trials - s.known for s in done.sources) - done.added
    emit(f"{done.added} trials added to {done.target}, which had {known} of them")


def _transfer_to_dict(done: Transfer) -> dict[str, Any]:
    sources = [{**attributes(s, "source trials known"), "verified": s.source in done.verified} for s in done.sources]
    return {**attributes(done, "target added"), "sources": sources}


def db_merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="Files or URLs; a directory stands for its *.db files.")
    ],
    *,
    into: Annotated[str, typer.Option(metavar="TARGET", help="File or URL that takes all.")],
    as_json: JsonOption = False,
) -> None:
    """Add everything that databases hold to another one, which is made if there is none; nothing is lost or doubled.

    Rows of different environments are never compared: each keeps its own. It says for how many problems of each
    environment another candidate is chosen now.

    Example: tunedcomm db merge per-host/ --into cluster.db
    """
    from tunedcomm.db.transfer import merge_databases

    done = merge_databases(sources, into)
    # Counts by the names that JSON has for them; the table shows the first three.
    kinds = {"new": "only after", "winner_changed": "winner", "latency_changed": "latency", "gone": "only before"}
    counts = [
        {name: sum(change.kind == kind for change in comparison.changes) for name, kind in kinds.items()}
        for comparison in done.comparisons
    ]
    if as_json:
        environments = [
            {"environment": comparison.after, **attributes(comparison, "world_size problems"), **found}
            for comparison, found in zip(done.comparisons, counts, strict=True)
        ]
        emit_json({**_transfer_to_dict(done), "environments": environments})
        return
    _print_transfer(done)
    emit("What it answers now:")
    rows = [
        (named(comparison.after), comparison.world_size, comparison.problems, *list(found.values())[:3])
        for comparison, found in zip(done.comparisons, counts, strict=True)
    ]
    table(("environment", "ranks", "problems", "new", "another winner", "another latency"), rows)


def db_diff(
    before: Annotated[str, typer.Argument(metavar="A", help="File or URL: the older one.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help="File or URL: the newer one.", show_default=False)],
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most problems to print of each kind.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Print what two databases answer differently. As of diff, exit code 1 if they differ and 0 if they do not.

    They are compared as dispatch would choose if all of their kernels could run and were current. A latency is another
    one if it differs by more than the noise of both measurements.

    Example: tunedcomm db diff before.db after.db
    """
    from tunedcomm.db.diff import diff_databases

    found = diff_databases(before, after)
    if as_json:
        emit_json(_difference_to_dict(found))
    else:
        _print_difference(found, limit)
    raise typer.Exit(0 if found.is_empty else 1)


def _print_difference(found: Difference, limit: int) -> None:
    for index, (letter, name) in enumerate((("A", found.before), ("B", found.after))):
        held, only = found.trials[index], found.trials_only[index]
        emit(f"{letter}: {name}, schema {found.schemas[index]}, {held} trials, {only} of them in it alone")
    if found.is_empty:
        emit("no difference")
        return
    for letter, environments in zip("AB", found.environments_only, strict=True):
        for environment in environments:
            emit(f"measured only in {letter}: {named(environment)}")
    for one in found.retired:
        what = f"its source changed, {one.before} -> {one.after}, which retires {one.finals} finals of A"
        if one.before is None or one.after is None:
            what = f"only {'A' if one.after is None else 'B'} knows it"
        emit(f"{one.op} {one.variant}: {what}")
    for change in found.pins:
        was, now = (
            "none" if pin is None else f"{pin.candidate} ({pin.reason})" for pin in (change.before, change.after)
        )
        emit(f"pin of {change.problem} on {named(change.environment)}: {was} -> {now}")
    for comparison in found.comparisons:
        _print_comparison(comparison, limit)


def _print_comparison(comparison: Comparison, limit: int) -> None:
    drift = f"; software: {', '.join(comparison.drift)}" if comparison.drift else ""
    changed = f"{len(comparison.changes)} of {comparison.problems} problems are answered otherwise"
    emit("")
    emit(f"{named(comparison.after)}, {comparison.world_size} ranks: {changed}{drift}")
    for kind, title in _KINDS.items():
        rows = [_change_cells(change) for change in comparison.changes if change.kind == kind]
        if rows:
            emit(f"{title}: {len(rows)}")
            table(("problem", "A", "us", "B", "us", "B is"), rows[:limit])
        if len(rows) > limit:
            emit(f"... and {len(rows) - limit} more; --limit {len(rows)} prints them all")


def _change_cells(change: Change) -> tuple[object, ...]:
    """The problem, what each database answers, and in words how much faster or slower B is."""
    answers = (change.before, change.after)
    cells = [cell for a in answers for cell in (("-", "-") if a is None else (a.candidate, format_us(a.latency_us)))]
    ratio, text = change.ratio, "-"
    if ratio is not None:
        text = f"{ratio:.2f}x as fast" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
    return (change.problem, *cells, text)


def _difference_to_dict(found: Difference) -> dict[str, Any]:
    sides = {
        side: {
            "database": getattr(found, side),
            "schema": found.schemas[index],
            **{name: getattr(found, name)[index] for name in ("trials", "trials_only", "environments_only")},
        }
        for index, side in enumerate(("before", "after"))
    }
    pins = [
        attributes(one, "problem environment") | {"before": _pin_to_dict(one.before), "after": _pin_to_dict(one.after)}
        for one in found.pins
    ]
    comparisons = [
        {
            "environments": attributes(comparison, "before after"),
            **attributes(comparison, "drift world_size problems"),
            "changes": [attributes(change, "kind problem before after ratio") for change in comparison.changes],
        }
        for comparison in found.comparisons
    ]
    sources = [attributes(one, "op variant before after") | {"retired_finals": one.finals} for one in found.retired]
    return {"differ": not found.is_empty, **sides, "sources": sources, "pins": pins, "comparisons": comparisons}


def _pin_to_dict(pin: Pin | None) -> dict[str, Any] | None:
    return None if pin is None else named_candidate(pin.candidate) | {"reason": pin.reason}
