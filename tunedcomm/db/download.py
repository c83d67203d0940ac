"""Copying all that a server's database holds to a new SQLite file, as it was at one moment."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import insert, select

from tunedcomm.db.engine import Target, make_engine, parse_target, translated
from tunedcomm.db.migrate import ensure_schema
from tunedcomm.db.schema import Base

__all__ = ["download"]

_TIMEOUT_S = 30.0
_CHUNK = 2000


def download(source: Target, path: Path) -> None:
    """Write every row of `source`, with its id, to the new file `path`; tuners may go on writing meanwhile.

    Raises:
        DatabaseError: the source cannot be read, or has another schema version than this tunedcomm.
    """
    copy = parse_target(path)
    theirs = make_engine(source, readonly=True, immutable=False, busy_timeout_s=_TIMEOUT_S)
    ours = make_engine(copy, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(source):
            ensure_schema(theirs, source, create=False, readonly=True)
        with translated(copy):
            ensure_schema(ours, copy, create=True, readonly=False)
        reading = theirs.execution_options(isolation_level="REPEATABLE READ")
        with translated(source), reading.begin() as there, ours.begin() as here:
            for table in Base.metadata.sorted_tables:
                rows = there.execution_options(yield_per=_CHUNK).execute(select(table).order_by(table.c.id))
                for chunk in rows.mappings().partitions(_CHUNK):
                    here.execute(insert(table), [dict(row) for row in chunk])
    finally:
        theirs.dispose()
        ours.dispose()
