"""Bringing rows into a database from others: files that somebody sent, or the databases of a cluster's hosts.

Nothing is lost and nothing is there twice: trials are only added, each once, whatever brings it how often. Rows of
different environments are never compared; which row of a candidate counts is decided when a snapshot is read, and
only among rows of the same hardware. All that is brought is added in one transaction, or nothing is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine

from tunedcomm.db.answers import answers, measured
from tunedcomm.db.diff import Comparison, compare
from tunedcomm.db.engine import BUSY_TIMEOUT_S, IMMEDIATE, Target, make_engine, parse_target, prepare_file, translated
from tunedcomm.db.manifest import verify_manifest
from tunedcomm.db.merge import Absorbed, absorb
from tunedcomm.db.migrate import ensure_schema
from tunedcomm.db.supply import Supply, fresh, supply
from tunedcomm.errors import DatabaseAccessError

__all__ = ["Transfer", "import_databases", "merge_databases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What was brought.

    Attributes:
        target: the database that took it.
        sources: what each source holds, and how much of it an earlier source holds too.
        added: trials that the target did not have.
        verified: sources that are what the manifest beside them says.
        comparisons: for each environment of the target what it answers now and answered before; of `merge` alone.
    """

    target: str
    sources: tuple[Absorbed, ...]
    added: int
    verified: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()


def import_databases(sources: Sequence[str | Path], into: str | Path) -> Transfer:
    """Add what the sources hold to a database, which is made if there is none. Every value is checked.

    Args:
        sources: files of JSON lines, SQLite files or URLs of servers, from anywhere.
        into: file or URL.

    Raises:
        DatabaseAccessError: a source or the database cannot be read or written.
        DatabaseCorruptError: a source is not what its manifest says, or a line or row makes no sense; it is named.
        DatabaseVersionError: a source or the database is of a later schema than this tunedcomm.
        DatabaseError: anything else that is wrong with a database. Nothing was added then.
    """
    return _bring(sources, into, is_checked=True)


def merge_databases(sources: Sequence[str | Path], into: str | Path) -> Transfer:
    """Add what the sources hold to a database, which is made if there is none, and say what it answers otherwise.

    Args:
        sources: as of `import_databases`, but trusted as far as databases are: readers skip rows that make no sense. A
            directory stands for its `*.db` files.
        into: file or URL; left out where a directory holds it.

    Raises:
        DatabaseError: as of `import_databases`.
    """
    target = parse_target(into)
    return _bring(_without_directories(sources, target), into, is_checked=False)


def _bring(sources: Sequence[str | Path], into: str | Path, *, is_checked: bool) -> Transfer:
    if not sources:
        raise ValueError("nothing to bring: give at least one source")
    target = parse_target(into)
    for source in sources:
        if _is_same(parse_target(source), target):
            raise DatabaseAccessError(f"{target} is both source and target; name another database as one of them")
    verified = tuple(str(source) for source in sources if _has_manifest(source))
    with tempfile.TemporaryDirectory(prefix="tunedcomm-transfer.") as folder:
        supplies = [
            supply(source, Path(folder) / f"source{i}.db", is_checked=is_checked) for i, source in enumerate(sources)
        ]
        union, absorbed = _union(supplies, Path(folder) / "union.db")
        engine = _open(target)
        try:
            before = None if is_checked else _Asked(target, union)
            added = _add(engine, union, target)
            comparisons = () if before is None else before.compared(target)
        finally:
            engine.dispose()
    return Transfer(target=str(target), sources=absorbed, added=added, verified=verified, comparisons=comparisons)


def _without_directories(sources: Iterable[str | Path], target: Target) -> list[str | Path]:
    found: list[str | Path] = []
    for source in sources:
        path = parse_target(source).path
        if path is None or not path.is_dir():
            found.append(source)
            continue
        inside = [p for p in sorted(path.glob("*.db")) if not _is_same(parse_target(p), target)]
        if not inside:
            raise DatabaseAccessError(f"directory {path} holds no *.db file to merge; name another directory, or files")
        found += inside
    return found


def _is_same(source: Target, target: Target) -> bool:
    if source.path is None or target.path is None:
        return source.path is target.path and source.url == target.url
    return source.path.exists() and target.path.exists() and source.path.samefile(target.path)


def _has_manifest(source: str | Path) -> bool:
    path = parse_target(source).path
    return path is not None and verify_manifest(path)


def _union(supplies: Sequence[Supply], scratch: Path) -> tuple[Target, tuple[Absorbed, ...]]:
    """All sources in one file, so that the target takes them in one transaction; and what came of each."""
    target = fresh(scratch)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=BUSY_TIMEOUT_S)
    try:
        with engine.connect() as connection:
            absorbed = [replace(absorb(connection, one.file, in_order=True), source=one.name) for one in supplies]
    finally:
        engine.dispose()
    return target, tuple(absorbed)


def _open(target: Target) -> Engine:
    """An engine of the target, which has the tables of this schema then."""
    if target.path is not None:
        prepare_file(target.path, create=True)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=BUSY_TIMEOUT_S)
    try:
        with translated(target):
            ensure_schema(engine, target, create=True, readonly=False)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _add(engine: Engine, union: Target, target: Target) -> int:
    with translated(target), engine.connect().execution_options(**{IMMEDIATE: True}) as connection:
        absorbed = absorb(connection, union, in_order=True)
    return absorbed.trials - absorbed.known


class _Asked:
    """What a database answered before another one was added to it."""

    def __init__(self, target: Target, union: Target) -> None:
        held, added = measured(_name(target)), measured(_name(union))
        self._before = [
            answers(_name(target), environment, world_size)
            for environment in {**held, **added}
            for world_size in sorted({*held.get(environment, ()), *added.get(environment, ())})
        ]

    def compared(self, target: Target) -> tuple[Comparison, ...]:
        """Where something was known before or is now."""
        found = []
        for before in self._before:
            asked = before.snapshot
            found.append(compare(before, answers(_name(target), asked.environment, asked.world_size)))
        return tuple(comparison for comparison in found if comparison.problems)


def _name(target: Target) -> str:
    return str(target.path or target.url.render_as_string(hide_password=False))
