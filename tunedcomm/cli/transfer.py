"""Verbs of `tunedcomm db` that carry rows between databases and compare them: export, import, merge, diff."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from tunedcomm.cli.options import JsonOption
from tunedcomm.cli.output import attributes, emit, emit_json, format_bytes, format_us, named, note, table

if TYPE_CHECKING:
    from tunedcomm.db.diff import Answer, Change, Comparison, Difference
    from tunedcomm.db.transfer import Export, Transfer

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
    db: Annotated[
        list[str] | None,
        typer.Option("--db", help="File or URL to read; repeat it to merge several. By default the user database."),
    ] = None,
    form: Annotated[
        FileFormat,
        typer.Option("--format", help="sqlite for dispatch, jsonl for people and other programs, nccl-csv for NCCL."),
    ] = "sqlite",
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
    from tunedcomm.db.layers import named_layers
    from tunedcomm.db.transfer import export_database

    path = _checked(out, form, cluster, hardware, as_json=as_json)
    sources = [layer.target for target in db or (None,) for layer in named_layers(target)]
    export = export_database(
        sources,
        sys.stdout if path is None else path,
        form=form,
        everything=everything,
        hardware=hardware,
        force=force,
    )
    if as_json:
        emit_json(_export_to_dict(export, cluster))
    else:
        _print_export(export, cluster)


def _checked(
    out: str | None, form: FileFormat, cluster: str | None, hardware: str | None, *, as_json: bool
) -> Path | None:
    """The file to write, or None for stdout."""
    if hardware is not None and form != "nccl-csv":
        raise typer.BadParameter("only --format nccl-csv is of one kind of hardware", param_hint="--hardware")
    if cluster is not None:
        return _cluster_file(cluster, out, form)
    if out is None:
        raise typer.BadParameter("name the file to write, or a cluster with --cluster", param_hint="OUT")
    if out != "-":
        return Path(out)
    if form == "sqlite":
        raise typer.BadParameter(
            "a SQLite file cannot go to stdout; name a file, or another --format", param_hint="OUT"
        )
    if as_json:
        raise typer.BadParameter("stdout takes the rows or the JSON, not both; name a file", param_hint="--json")
    return None


def _cluster_file(cluster: str, out: str | None, form: FileFormat) -> Path:
    from tunedcomm.db.transfer import cluster_file

    if form != "sqlite":
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


def _print_export(export: Export, cluster: str | None) -> None:
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
        from tunedcomm.db.transfer import path_setting

        emit(f"export {path_setting(export.path)}")


def _export_to_dict(export: Export, cluster: str | None) -> dict[str, Any]:
    from tunedcomm.db.transfer import path_setting

    setting = path_setting(export.path) if cluster is not None and export.path is not None else None
    return {
        "path": str(export.path),
        "format": export.form,
        **attributes(export, "sha256 num_bytes manifest rows left_out"),
        "skipped": export.skipped.count,
        "sources": export.sources,
        "setting": setting,
    }


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
        emit_json(_transfer_to_dict(done))
    else:
        _print_transfer(done)


def _print_transfer(done: Transfer) -> None:
    """Print what came of each source, and of all together."""
    names = set(done.verified)
    rows = [(s.source, s.trials, s.known, "as its manifest says" if s.source in names else "-") for s in done.sources]
    table(("source", "trials", "in an earlier one", "manifest"), rows)
    known = sum(s.trials - s.known for s in done.sources) - done.added
    emit(f"{done.added} trials added to {done.target}, which had {known} of them")


def _transfer_to_dict(done: Transfer) -> dict[str, Any]:
    """As JSON has it."""
    sources = [{**attributes(s, "source trials known"), "verified": s.source in done.verified} for s in done.sources]
    return {**attributes(done, "target added"), "sources": sources}


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
        emit_json(
            {
                **_transfer_to_dict(done),
                "environments": [_merged_to_dict(comparison) for comparison in done.comparisons],
            }
        )
        return
    _print_transfer(done)
    emit("What it answers now:")
    columns = ("environment", "ranks", "problems", "new", "another winner", "another latency")
    table(columns, map(_merged_cells, done.comparisons))


def _merged_cells(comparison: Comparison) -> tuple[Any, ...]:
    found = counts(comparison)
    changed = (found["only after"], found["winner"], found["latency"])
    return (named(comparison.after), comparison.world_size, comparison.problems, *changed)


def _merged_to_dict(comparison: Comparison) -> dict[str, Any]:
    found = counts(comparison)
    return {
        "environment": comparison.after,
        **attributes(comparison, "world_size problems"),
        "new": found["only after"],
        "winner_changed": found["winner"],
        "latency_changed": found["latency"],
        "gone": found["only before"],
    }


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


def counts(comparison: Comparison) -> dict[str, int]:
    """Count the problems with another answer, by kind."""
    return {kind: sum(change.kind == kind for change in comparison.changes) for kind in _KINDS}


def _print_difference(found: Difference, limit: int) -> None:
    for letter, name, index in (("A", found.before, 0), ("B", found.after, 1)):
        held, only = found.trials[index], found.trials_only[index]
        emit(f"{letter}: {name}, schema {found.schemas[index]}, {held} trials, {only} of them in it alone")
    if found.is_empty:
        emit("no difference")
        return
    for letter, environments in zip("AB", found.environments_only, strict=True):
        for environment in environments:
            emit(f"measured only in {letter}: {named(environment)}")
    for retired in found.retired:
        emit(_retired(retired.op, retired.variant, retired.before, retired.after, retired.finals))
    for change in found.pins:
        where = f"{change.problem} on {named(change.environment)}"
        was = "none" if change.before is None else f"{change.before.candidate} ({change.before.reason})"
        now = "none" if change.after is None else f"{change.after.candidate} ({change.after.reason})"
        emit(f"pin of {where}: {was} -> {now}")
    for comparison in found.comparisons:
        _print_comparison(comparison, limit)


def _retired(op: str, variant: str, before: str | None, after: str | None, finals: int) -> str:
    if before is None or after is None:
        return f"{op} {variant}: only {'A' if after is None else 'B'} knows it"
    return f"{op} {variant}: its source changed, {before} -> {after}, which retires {finals} finals of A"


def _print_comparison(comparison: Comparison, limit: int) -> None:
    drift = f"; software: {', '.join(comparison.drift)}" if comparison.drift else ""
    changed = len(comparison.changes)
    emit("")
    emit(
        f"{named(comparison.after)}, {comparison.world_size} ranks: {changed} of {comparison.problems} problems are "
        f"answered otherwise{drift}"
    )
    for kind, title in _KINDS.items():
        changes = [change for change in comparison.changes if change.kind == kind]
        if not changes:
            continue
        emit(f"{title}: {len(changes)}")
        table(("problem", "A", "us", "B", "us", "B is"), map(_change_cells, changes[:limit]))
        if len(changes) > limit:
            emit(f"... and {len(changes) - limit} more; --limit {len(changes)} prints them all")


def _change_cells(change: Change) -> tuple[str, ...]:
    return (str(change.problem), *_answer(change.before), *_answer(change.after), _ratio(change.ratio))


def _answer(answer: Answer | None) -> tuple[str, str]:
    return ("-", "-") if answer is None else (str(answer.candidate), format_us(answer.latency_us))


def _ratio(ratio: float | None) -> str:
    """In words: `1.20x as fast`, or how much slower."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x as fast" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _difference_to_dict(found: Difference) -> dict[str, Any]:
    """As JSON has it."""
    sides = {
        side: {
            "database": (found.before, found.after)[index],
            "schema": found.schemas[index],
            "trials": found.trials[index],
            "trials_only": found.trials_only[index],
            "environments_only": found.environments_only[index],
        }
        for index, side in enumerate(("before", "after"))
    }
    return {
        "differ": not found.is_empty,
        **sides,
        "sources": [
            {**attributes(one, "op variant before after"), "retired_finals": one.finals} for one in found.retired
        ],
        "pins": [
            {
                **attributes(change, "problem environment"),
                "before": _pin_to_dict(change.before),
                "after": _pin_to_dict(change.after),
            }
            for change in found.pins
        ],
        "comparisons": [
            {
                "environments": attributes(comparison, "before after"),
                **attributes(comparison, "drift world_size problems"),
                "changes": [attributes(change, "kind problem before after ratio") for change in comparison.changes],
            }
            for comparison in found.comparisons
        ],
    }


def _pin_to_dict(pin: Any) -> dict[str, Any] | None:
    if pin is None:
        return None
    return {"variant": pin.candidate.variant, "config": pin.candidate.config_dict, "reason": pin.reason}
