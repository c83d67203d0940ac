"""Writing the database that a cluster ships: one self-contained file with what dispatch and `explain` need.

Kept of the trials: finals; failures and infeasible ones, with the newest good trial of a candidate that also failed;
of what was only searched, the best few candidates of each variant; and how a variant's last trial of a problem ended,
where it did not run. Kept of the rest: pins, what trials and pins refer to, and each variant's newest source. So a
snapshot of the file has the digest that a snapshot of its source has, and decides the same.

The same sources give the same bytes under the same SQLite.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    delete,
    false,
    func,
    insert,
    select,
    true,
    tuple_,
    union_all,
    update,
)

from tunedcomm.db.download import download
from tunedcomm.db.engine import Target, make_engine, parse_target, prepare_file, translated
from tunedcomm.db.merge import Absorbed, absorb
from tunedcomm.db.migrate import ensure_schema
from tunedcomm.db.query import BEST_OF_VARIANT, table
from tunedcomm.db.records import FAILED
from tunedcomm.db.schema import EnvironmentRow, PinRow, ProblemRow, RunRow, TrialRow, VariantRow
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseCorruptError

__all__ = ["Export", "export_database", "needed_trials"]

_TIMEOUT_S = 30.0
_KEPT_STATUSES = (*FAILED, "compile_error", "infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was written.

    Attributes:
        path: the file.
        sha256: of its bytes.
        num_bytes: its size.
        rows: what `Database.stats` says of it.
        sources: what came of each source, in the order given.
        left_out: trials of the sources that neither dispatch nor `explain` needs.
    """

    path: Path
    sha256: str
    num_bytes: int
    rows: dict[str, int]
    sources: tuple[Absorbed, ...]
    left_out: int


def export_database(sources: Sequence[str | Path], out: str | Path, *, force: bool = False) -> Export:
    """Write what dispatch and `explain` need of the sources to one new SQLite file.

    Several sources are merged: what they have in common is there once, trials are appended.

    Args:
        sources: at least one file or URL of a server; none is changed.
        out: the file to write; it appears complete or not at all.
        force: replace `out` if it is a SQLite file.

    Raises:
        DatabaseAccessError: a source cannot be read; `out` is there or cannot be written.
        DatabaseCorruptError: a source is damaged, or contradicts itself or another one.
        DatabaseVersionError: a source has another schema version than this tunedcomm.
        DatabaseBusyError: `out` is open in another process.
        DatabaseAwayError: a server does not answer.
    """
    if not sources:
        raise ValueError("an export needs at least one source database, got none")
    targets = [_source(source) for source in sources]
    path = Path(out).expanduser()
    _check_out(path, targets, force=force)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            built = Path(folder) / "built.db"
            files = [_file_of(target, Path(folder) / f"source{i}.db") for i, target in enumerate(targets)]
            absorbed, held = _build(files, Path(folder) / "scratch.db", built)
            rows = _check_built(built)
            data = built.read_bytes()
            built.replace(path)
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot write {path}: {error.strerror}; check the permissions of its directory and the disk space, or "
            "give another path"
        ) from error
    return Export(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        rows=rows,
        sources=tuple(replace(a, source=str(target)) for a, target in zip(absorbed, targets, strict=True)),
        left_out=held - rows["trials"],
    )


def _source(source: str | Path) -> Target:
    target = parse_target(source)
    if target.is_sqlite and target.path is None:
        raise DatabaseAccessError(f"{target} is not a SQLite file; give the path of a file, or the URL of a server")
    with Database.open(source, readonly=True):
        return target


def _file_of(target: Target, scratch: Path) -> Target:
    """The source as a file: itself, or a copy of what the server holds."""
    if target.path is not None:
        return target
    download(target, scratch)
    return parse_target(scratch)


def _check_out(path: Path, sources: Sequence[Target], *, force: bool) -> None:
    prepare_file(path, create=True)
    if path.exists() and any(source.path is not None and source.path.samefile(path) for source in sources):
        raise DatabaseAccessError(f"{path} is one of the sources and would lose trials; give another path to write to")
    if os.path.lexists(path) and not force:
        raise DatabaseAccessError(f"{path} exists already; give another path, or --force (force=True) to replace it")
    for suffix in ("-wal", "-journal"):
        # SQLite would take it for the log of the new file and damage it.
        if path.with_name(path.name + suffix).exists():
            raise DatabaseBusyError(
                f"{path.name}{suffix} lies beside {path}: a process has the database open, or one was killed; end it, "
                "open and close the database once, or give another path to write to"
            )


def _build(sources: Sequence[Target], scratch: Path, built: Path) -> tuple[tuple[Absorbed, ...], int]:
    """Merge, prune and write `built`; returns what came of the sources and how many trials they gave together."""
    target = parse_target(scratch)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with translated(target):
            ensure_schema(engine, target, create=True, readonly=False)
        with engine.connect() as connection:
            absorbed = tuple(absorb(connection, source) for source in sources)
            with translated(target):
                with connection.begin():
                    held = int(connection.execute(select(func.count(TrialRow.id))).scalar_one())
                    if len(sources) > 1:
                        _order_trials(connection)
                        _order_variants(connection)
                    _prune(connection)
                driver = connection.connection.driver_connection
                assert driver is not None
                driver.execute("VACUUM INTO ?", (str(built),))
    finally:
        engine.dispose()
    # The copy of a database with a write-ahead log has one too, which a shipped file cannot have.
    with translated(target), closing(sqlite3.connect(built)) as plain:
        plain.execute("PRAGMA journal_mode=DELETE")
    return absorbed, held


def _check_built(built: Path) -> dict[str, int]:
    """Read the finished file as dispatch will; returns its row counts."""
    with Database.open(built, immutable=True) as database:
        with database.reading() as connection:
            verdict = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if verdict != ["ok"] or dangling:
            raise DatabaseCorruptError(
                f"the export is damaged ({'; '.join(map(str, [*verdict, *dangling]))[:300]}) and was not kept; check "
                "the sources with `PRAGMA integrity_check`, and the disk"
            )
        return database.stats()


def _order_trials(connection: Connection) -> None:
    """Number trials by their time, as one database would have done: readers that want the last one take the highest."""
    columns = [column for column in table(TrialRow).columns if column.name != "id"]
    held = int(connection.execute(select(func.max(TrialRow.id))).scalar_one() or 0)
    ordered = select(*columns).order_by(TrialRow.created_at, TrialRow.id)
    connection.execute(insert(TrialRow).from_select([column.name for column in columns], ordered))
    connection.execute(delete(TrialRow).where(TrialRow.id <= held))


def _order_variants(connection: Connection) -> None:
    """Number variants by their first trial: the highest number of a name is its newest source."""
    first = func.min(TrialRow.created_at)
    firsts = select(TrialRow.variant_id.label("id"), first.label("first")).group_by(TrialRow.variant_id).subquery()
    ranked = (
        select(VariantRow.id, func.row_number().over(order_by=(firsts.c.first, VariantRow.id)))
        .join(firsts, firsts.c.id == VariantRow.id, isouter=True)
        .order_by(VariantRow.id)
    )
    numbers = {int(old): int(new) for old, new in connection.execute(ranked)}
    connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
    # By way of negative numbers, for two variants may change places.
    for sign in (-1, 1):
        for old, new in numbers.items():
            before, after = (old, -new) if sign < 0 else (-new, new)
            connection.execute(update(VariantRow).where(VariantRow.id == before).values(id=after))
            connection.execute(update(TrialRow).where(TrialRow.variant_id == before).values(variant_id=after))


def needed_trials() -> Select[Any]:
    """Ids of the trials that dispatch or `explain` needs."""
    kept = union_all(_conclusive(), _best_searched(), _good_again(), _last_words()).subquery()
    return select(kept.c.id)


def _prune(connection: Connection) -> None:
    connection.execute(delete(TrialRow).where(TrialRow.id.not_in(needed_trials())))
    newest = select(func.max(VariantRow.id)).group_by(VariantRow.op, VariantRow.name)
    variants = union_all(select(TrialRow.variant_id), newest)
    environments = union_all(select(TrialRow.environment_id), select(PinRow.environment_id))
    problems = union_all(select(TrialRow.problem_id), select(PinRow.problem_id))
    runs = select(TrialRow.run_id).where(TrialRow.run_id.is_not(None))
    for model, used in ((VariantRow, variants), (EnvironmentRow, environments), (ProblemRow, problems), (RunRow, runs)):
        connection.execute(delete(model).where(model.id.not_in(used)))


def _conclusive() -> Select[Any]:
    return select(TrialRow.id).where((TrialRow.final == true()) | TrialRow.status.in_(_KEPT_STATUSES))


_CANDIDATE = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest)
# As dispatch orders the trials of one candidate.
_NEWEST_FIRST = (TrialRow.created_at.desc(), TrialRow.latency_p50_us, TrialRow.id)


def _best_searched() -> Select[Any]:
    """The newest trial outside of the finals of each candidate, and of these the best few of each variant."""
    age = func.row_number().over(partition_by=_CANDIDATE, order_by=_NEWEST_FIRST)
    ages = (
        select(TrialRow.id, *_CANDIDATE, TrialRow.latency_p50_us, age.label("age"))
        .where(TrialRow.status == "ok", TrialRow.final == false(), TrialRow.latency_p50_us > 0)
        .subquery()
    )
    variant = (ages.c.environment_id, ages.c.problem_id, ages.c.variant_id)
    place = func.row_number().over(partition_by=variant, order_by=(ages.c.latency_p50_us, ages.c.id))
    places = select(ages.c.id, place.label("place")).where(ages.c.age == 1).subquery()
    return select(places.c.id).where(places.c.place <= BEST_OF_VARIANT)


def _good_again() -> Select[Any]:
    """The newest good trial of each candidate that failed somewhere: it may have been good since."""
    candidate = (TrialRow.problem_id, TrialRow.variant_id, TrialRow.config_digest)
    failed = select(*candidate).where(TrialRow.status.in_(FAILED))
    age = func.row_number().over(partition_by=_CANDIDATE, order_by=_NEWEST_FIRST)
    ages = (
        select(TrialRow.id, age.label("age")).where(TrialRow.status == "ok", tuple_(*candidate).in_(failed)).subquery()
    )
    return select(ages.c.id).where(ages.c.age == 1)


def _last_words() -> Select[Any]:
    """How the last trial of a variant at a problem ended: `explain` gives that as the reason if none of them ran."""
    of_variant = (TrialRow.environment_id, TrialRow.problem_id, TrialRow.variant_id)
    age = func.row_number().over(partition_by=of_variant, order_by=(TrialRow.created_at.desc(), TrialRow.id.desc()))
    ages = select(TrialRow.id, TrialRow.status, age.label("age")).where(TrialRow.status != "infeasible").subquery()
    return select(ages.c.id).where(ages.c.age == 1, ages.c.status == "pruned")
