"""`tunedcomm db check`: is a database sound, and what to do where it is not."""

from __future__ import annotations

from dataclasses import asdict

import typer

from tunedcomm.cli._choice import read_layers
from tunedcomm.cli._options import DatabaseOption, JsonOption
from tunedcomm.cli._output import emit, emit_json

__all__ = ["db_check"]


def db_check(*, db: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Look at a file, its schema and every row of it; exit code 1 if something is not sound.

    Each finding is ok, warn (it works, and somebody should know) or fail, with what to do. Nothing is changed.

    Example: tunedcomm db check --db cluster.db
    """
    from tunedcomm import kernels
    from tunedcomm.db.check import check_database
    from tunedcomm.db.engine import parse_target
    from tunedcomm.dispatch.dispatcher import source_hash_of

    kernels.discover()
    found = {
        (layer.name, str(parse_target(layer.target))): check_database(layer.target, source_hash_of)
        for layer in read_layers(db)
    }
    if as_json:
        emit_json(
            [
                {"layer": name, "database": target, "findings": [asdict(finding) for finding in findings]}
                for (name, target), findings in found.items()
            ]
        )
    for (name, target), findings in {} if as_json else found.items():
        emit(f"{name} database {target}")
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            emit(f"{finding.level:<4}  {finding.name:<{width}}  {finding.detail}")
            if finding.mend:
                emit(f"{'':4}  {'':{width}}  -> {finding.mend}")
    if any(finding.level == "fail" for findings in found.values() for finding in findings):
        raise typer.Exit(1)
