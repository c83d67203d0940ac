"""What an export may replace: what was exported, and a database that holds nothing but what the sources hold."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from tunedcomm.db.engine import make_engine
from tunedcomm.db.manifest import verify_manifest
from tunedcomm.db.merge import absorb
from tunedcomm.db.query import table
from tunedcomm.db.schema import PinRow
from tunedcomm.db.supply import fresh, supply
from tunedcomm.errors import DatabaseAccessError, DatabaseCorruptError

__all__ = ["check_database", "check_text"]

_TIMEOUT_S = 30.0
# With what a file of the format begins that may be replaced.
_BEGINNINGS: Mapping[str, bytes] = {"jsonl": b'{"format":"tunedcomm-jsonl"', "nccl-csv": b"# tunedcomm"}


def check_text(path: Path, form: str) -> None:
    """Refuse to replace what this format did not write.

    Raises:
        DatabaseAccessError: it did not.
    """
    beginning = _BEGINNINGS[form]
    if not path.is_file():
        raise DatabaseAccessError(f"{path} is not a regular file; give the path of a file to write")
    with path.open("rb") as file:
        there = file.read(len(beginning))
    if there != beginning:
        raise DatabaseAccessError(
            f"{path} is no file of the format {form} (it starts with {there!r}) and is not replaced; give another path"
        )


def check_database(path: Path, sources: Sequence[str | Path], scratch: Path) -> None:
    """Refuse to replace a database that somebody tuned into or pinned in, unless the sources hold all of it.

    Args:
        path: the SQLite file to be replaced.
        sources: what is exported.
        scratch: a folder for the rows that are compared.

    Raises:
        DatabaseAccessError: rows would be lost.
        DatabaseError: it, or a source, cannot be read.
    """
    with contextlib.suppress(DatabaseCorruptError):  # it was changed since it was exported
        if path.stat().st_size == 0 or verify_manifest(path):
            return
    # A reader would leave a log beside it, and no log may lie beside what is replaced.
    copy = shutil.copyfile(path, scratch / "replaced-copy.db")
    target = fresh(scratch / "replaced.db")
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with engine.connect() as connection:
            for number, source in enumerate(sources):
                absorb(connection, supply(source, scratch / f"replaced{number}.db").file)
            pins = _pins(connection)
            old = absorb(connection, supply(copy, scratch / "replaced-old.db").file)
            lost = {"trials": old.trials - old.known, "pins": len(_pins(connection) - pins)}
    finally:
        engine.dispose()
    if any(lost.values()):
        what = " and ".join(f"{count} {name}" for name, count in lost.items() if count)
        raise DatabaseAccessError(
            f"{path} is no export as it was written: it holds {what} that the sources lack, which would be lost; give "
            f"another path, or save them first with `tunedcomm db merge {path} --into FILE`, FILE being a source, or "
            "move it away"
        )


def _pins(connection: Connection) -> set[tuple[Any, ...]]:
    with connection.begin():
        columns = [column for column in table(PinRow).columns if column.name != "id"]
        return {tuple(row) for row in connection.execute(select(*columns))}
