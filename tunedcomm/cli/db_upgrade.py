"""`tunedcomm db upgrade`: bring a database of an older tunedcomm to the schema of this one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json

__all__ = ["db_upgrade"]


def db_upgrade(
    *,
    db: Annotated[
        str | None, typer.Option("--db", help="File or SQLAlchemy URL to upgrade; by default the user database.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 if there is something to upgrade.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Upgrade a database of an older tunedcomm, all or nothing; a file is copied to NAME.bak-REVISION before.

    Example: tunedcomm db upgrade --db cluster.db
    """
    from tunedcomm.db.layers import writable_database
    from tunedcomm.db.upgrade import upgrade_database

    done = upgrade_database(writable_database(db), check=check)
    if as_json:
        emit_json({**asdict(done), "is_needed": done.is_needed})
    elif not done.is_needed:
        emit(f"{done.target} has schema {done.after} already")
    elif check:
        emit(f"{done.target} has schema {done.before}; `tunedcomm db upgrade --db {done.target}` makes it {done.after}")
    else:
        emit(f"{done.target} was upgraded from schema {done.before} to {done.after}")
        emit(f"as it was: {done.copy}" if done.copy else "no copy was made: of a server, make dumps with its own tools")
    if check and done.is_needed:
        raise typer.Exit(1)
