"""Moving databases: export to one new file, import of files that somebody sent, merge of a cluster's databases.

Nothing is lost and nothing is there twice: trials are only added, each once. Rows of different environments are never
compared; which row of a candidate counts is decided when a snapshot is read. All sources are added in one
transaction, or nothing is.

An exported SQLite file is self-contained and is what dispatch reads. JSON lines are for people, `diff` and other
programs; both give a snapshot the same digest. The same sources give the same bytes; of SQLite files, under the same
SQLite.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias, get_args

from sqlalchemy import Connection, delete, func, insert, select

from tunedcomm.db.diff import Comparison, StoredCatalog, compare
from tunedcomm.db.engine import connected, create_file, ensure_schema
from tunedcomm.db.jsonl import lines
from tunedcomm.db.layers import identity_of
from tunedcomm.db.manifest import make_manifest, manifest_path, verify_manifest
from tunedcomm.db.query import table
from tunedcomm.db.records import Skipped
from tunedcomm.db.schema import PinRow, TrialRow
from tunedcomm.db.snapshot import keep_needed
from tunedcomm.db.store import Database
from tunedcomm.db.stream import Absorbed, absorb
from tunedcomm.db.targets import leftovers, parse_target, prepare_file
from tunedcomm.db.values import canonical_json
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseCorruptError

Form: TypeAlias = Literal["sqlite", "jsonl"]
FORMS: tuple[str, ...] = get_args(Form)
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")


# Import and merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The result of an import or a merge.

    Attributes:
        target: the database that took the rows.
        sources: what each source holds, and how much of it an earlier source holds too.
        added: trials that the target did not have.
        verified: sources that are what the manifest beside them says.
        comparisons: answers before and after, for each environment of the target; of `merge` alone.
    """

    target: str
    sources: tuple[Absorbed, ...]
    added: int
    verified: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()


def import_databases(sources: Sequence[str | Path], into: str | Path) -> Transfer:
    """Add the sources' rows to a database, created if missing. Every value is checked.

    Args:
        sources: files of JSON lines, SQLite files or URLs of servers, from anywhere.
        into: file or URL.

    Raises:
        DatabaseAccessError: a source or the database cannot be read or written.
        DatabaseCorruptError: a source differs from its manifest, or a line or row makes no sense; it is named.
        DatabaseVersionError: a source or the database is of a later schema than this tunedcomm.
        DatabaseError: anything else that is wrong with a database. Nothing was added then.
    """
    return _add_all(sources, into, is_compared=False)


def merge_databases(sources: Sequence[str | Path], into: str | Path) -> Transfer:
    """Add the sources' rows to a database, created if missing, and compare its answers before and after.

    Args:
        sources: as of `import_databases`; a directory stands for its `*.db` files.
        into: file or URL; left out where a directory holds it.

    Raises:
        DatabaseError: as of `import_databases`.
    """
    return _add_all(_without_directories(sources, into), into, is_compared=True)


def _add_all(sources: Sequence[str | Path], into: str | Path, *, is_compared: bool) -> Transfer:
    """Add all sources in one transaction; if `is_compared`, with what the database answers before and after."""
    if not sources:
        raise ValueError("nothing to add: give at least one source")
    target = parse_target(into)
    if identity_of(into) in map(identity_of, sources):
        raise DatabaseAccessError(f"{target} is both source and target; name another database as one of them")
    paths = {str(source): parse_target(source).path for source in sources}
    verified = tuple(name for name, path in paths.items() if path is not None and verify_manifest(path))
    with tempfile.TemporaryDirectory(prefix="tunedcomm-transfer.") as folder:
        # All sources in one file, so that the target takes them in one transaction.
        union = Path(folder) / "union.db"
        with connected(create_file(union)) as connection:
            absorbed = tuple(absorb(connection, source) for source in sources)
        if target.path is not None:
            prepare_file(target.path, create=True)
        with connected(target) as connection:
            ensure_schema(connection.engine, target, create=True, readonly=False)
            if not is_compared:
                added, comparisons = absorb(connection, union), []
            else:
                before, new = StoredCatalog(target.name), StoredCatalog(union)
                environments = dict.fromkeys((*before.environments, *new.environments))
                world_sizes = sorted(before.world_sizes | new.world_sizes)
                answered = {(e, size): before.answers(e, size) for e in environments for size in world_sizes}
                added, after = absorb(connection, union), StoredCatalog(target.name)
                comparisons = [compare((e, e), n, old, after.answers(e, n)) for (e, n), old in answered.items()]
    return Transfer(
        target=str(target),
        sources=absorbed,
        added=added.trials - added.known,
        verified=verified,
        comparisons=tuple(comparison for comparison in comparisons if comparison.problems),
    )


def _without_directories(sources: Iterable[str | Path], into: str | Path) -> list[str | Path]:
    found: list[str | Path] = []
    for source in sources:
        path = parse_target(source).path
        if path is None or not path.is_dir():
            found.append(source)
            continue
        inside = [file for file in sorted(path.glob("*.db")) if identity_of(file) != identity_of(into)]
        if not inside:
            raise DatabaseAccessError(f"directory {path} holds no *.db file to merge; name another directory, or files")
        found += inside
    return found


# Export


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The result of an export.

    Attributes:
        path: the file; None where it was a stream.
        form: `sqlite` or `jsonl`.
        sha256: of its bytes.
        num_bytes: its size.
        rows: what `Database.stats` says of the rows that it was made of.
        sources: what came of each source, in the order given.
        left_out: trials of the sources that neither dispatch nor `explain` needs.
        skipped: rows that made no sense and are not among the lines; 0 for other forms.
        manifest: where it was described.
    """

    path: Path | None
    form: Form
    sha256: str
    num_bytes: int
    rows: dict[str, int]
    sources: tuple[Absorbed, ...]
    left_out: int
    skipped: Skipped = field(default_factory=Skipped)
    manifest: Path | None = None


def export_database(
    sources: Sequence[str | Path],
    out: str | Path | TextIO,
    *,
    form: Form = "sqlite",
    everything: bool = False,
    force: bool = False,
) -> Export:
    """Export the rows of the sources that dispatch and `explain` need to one new file, with its manifest beside it.

    Several sources are merged; common rows are written once.

    Args:
        sources: at least one SQLite file, file of JSON lines or URL of a server; none is changed.
        out: the file to write, which appears complete or not at all; or, except for SQLite, an open text stream.
        form: what to write.
        everything: leave no row out.
        force: replace `out` if this function wrote it, as the manifest beside it says, or if it is a database or a file
            of JSON lines all of whose trials and pins the sources hold.

    Raises:
        DatabaseAccessError: a source cannot be read; `out` is there, cannot be written, or would lose rows.
        DatabaseCorruptError: a source is damaged, or contradicts itself or another one.
        DatabaseVersionError: a source has a later schema than this tunedcomm.
        DatabaseBusyError: `out` is open in another process.
        DatabaseAwayError: a server does not answer.
    """
    if not sources:
        raise ValueError("an export needs at least one source database, got none")
    if form not in FORMS:
        raise ValueError(f"unknown format {form!r}; the formats are {', '.join(FORMS)}")
    path = Path(out).expanduser() if isinstance(out, (str, Path)) else None
    if path is not None:
        _check_out(path, sources, force=force)
    elif form == "sqlite":
        raise ValueError("a SQLite file cannot be written to a stream; give a path, or another format")
    skipped = Skipped()
    temporary = {"prefix": "tunedcomm-export."} if path is None else {"prefix": f".{path.name}.", "dir": path.parent}
    try:
        with tempfile.TemporaryDirectory(**temporary) as scratch:
            folder = Path(scratch)
            if path is not None and path.exists():
                _check_replaced(path, sources, folder)
            accepted = None if form == "sqlite" else skipped
            file, absorbed, held = _gather(sources, folder, accepted, everything=everything)
            built = file if form == "sqlite" else folder / "built.jsonl"
            with Database.open(file, readonly=True, immutable=True) as database:
                if form == "jsonl":
                    with database.reading() as connection, built.open("w", encoding="utf-8", newline="\n") as text:
                        text.writelines(f"{canonical_json(line)}\n" for line in lines(connection))
                facts = make_manifest(
                    built,
                    database,
                    file="" if path is None else path.name,
                    file_format=form,
                    everything=everything,
                    left_out=held - database.stats()["trials"],
                    sources=[asdict(source) for source in absorbed],
                    command=_command(sources, out, form, everything=everything),
                )
            if path is None:
                assert not isinstance(out, (str, Path))
                out.write(built.read_text(encoding="utf-8"))
            else:
                beside = folder / "manifest.json"
                plain = json.dumps(facts, indent=2, sort_keys=True, ensure_ascii=False)
                beside.write_text(f"{plain}\n", encoding="utf-8")
                built.replace(path)
                beside.replace(manifest_path(path))
    except OSError as error:
        if path is None:
            raise
        raise DatabaseAccessError(
            f"cannot write {path}: {error.strerror}; check the permissions of its directory and the disk space, or "
            "give another path"
        ) from error
    return Export(
        path=path,
        form=form,
        **{name: facts[name] for name in ("sha256", "num_bytes", "rows", "left_out")},
        sources=absorbed,
        skipped=skipped,
        manifest=None if path is None else manifest_path(path),
    )


def cluster_file(name: str, folder: str | Path = ".") -> Path:
    """The file of a cluster's database: `NAME.db` in a folder that the cluster's machines see.

    Raises:
        ValueError: the name cannot be part of a path on every machine.
    """
    if not _CLUSTER.fullmatch(name) or name.endswith(".db"):
        raise ValueError(
            f"{name!r} cannot name a cluster: up to 64 of a-z, 0-9, '-', '_' and '.', a letter or digit first and "
            "last, without .db; e.g. h200-prod"
        )
    return Path(folder).expanduser() / f"{name}.db"


def path_setting(path: Path) -> str:
    """The setting with which every process on a machine reads the file: `TUNEDCOMM_DB_PATH=...`, for a shell."""
    text = str(path.absolute())
    # A colon would separate two files, unless something else does.
    return f"TUNEDCOMM_DB_PATH={shlex.quote(text + ';' if ':' in text else text)}"


def _check_out(path: Path, sources: Sequence[str | Path], *, force: bool) -> None:
    """Refuse to replace what an export must not replace, and make the directory of a new file."""
    if identity_of(path) in map(identity_of, sources):
        raise DatabaseAccessError(f"{path} is one of the sources and would lose trials; give another path to write to")
    for existing in (path, manifest_path(path)):
        if os.path.lexists(existing) and not force:
            raise DatabaseAccessError(f"{existing} exists already; give another path, or --force to replace it")
    if not path.is_file():
        prepare_file(path, create=True)
    if left := leftovers(path):
        # SQLite would take it for the log of the new file and damage it.
        raise DatabaseBusyError(
            f"{left[0].name} lies beside {path}: a process has the database open, or one was killed; end it, open and "
            "close the database once, or give another path to write to"
        )


def _check_replaced(path: Path, sources: Sequence[str | Path], scratch: Path) -> None:
    """Refuse to replace a file that is not an export as it was written, unless the sources hold all that it holds."""
    with contextlib.suppress(DatabaseCorruptError):  # it was changed since it was exported
        if path.stat().st_size == 0 or verify_manifest(path):
            return
    # A reader would leave a log beside it, and no log may lie beside what is replaced.
    copy = shutil.copyfile(path, scratch / "replaced-copy.db")
    with connected(create_file(scratch / "replaced.db")) as connection:
        for source in sources:
            absorb(connection, source)
        pins = _pins(connection)
        old = absorb(connection, copy)
        lost = {"trials": old.trials - old.known, "pins": len(_pins(connection) - pins)}
    if any(lost.values()):
        what = " and ".join(f"{count} {name}" for name, count in lost.items() if count)
        raise DatabaseAccessError(
            f"{path} is not an export as it was written: it holds {what} that the sources lack, which would be lost; "
            f"give another path, or save them first with `tunedcomm db merge {path} --into FILE`, FILE being a source, "
            "or move it away"
        )


def _pins(connection: Connection) -> set[tuple[Any, ...]]:
    with connection.begin():
        columns = [column for column in table(PinRow).columns if column.name != "id"]
        return {tuple(row) for row in connection.execute(select(*columns))}


def _gather(
    sources: Sequence[str | Path], folder: Path, skipped: Skipped | None, *, everything: bool
) -> tuple[Path, tuple[Absorbed, ...], int]:
    """Merge what the sources hold and leave out what is not wanted; returns a file, and how many trials there were."""
    built = folder / "built.db"
    with connected(create_file(folder / "scratch.db")) as connection:
        absorbed = tuple(absorb(connection, source, skipped) for source in sources)
        with connection.begin():
            held = int(connection.execute(select(func.count(TrialRow.id))).scalar_one())
            if len(sources) > 1:
                _order_trials(connection)
            if not everything:
                keep_needed(connection)
        driver = connection.connection.driver_connection
        assert driver is not None
        # The copy of a database with a write-ahead log has one too, which a shipped file cannot have.
        driver.execute("PRAGMA journal_mode=DELETE")
        driver.execute("VACUUM INTO ?", (str(built),))
    return built, absorbed, held


def _order_trials(connection: Connection) -> None:
    """Number trials by their time, as one database would have done: readers that want the last one take the highest."""
    columns = [column for column in table(TrialRow).columns if column.name != "id"]
    held = int(connection.execute(select(func.max(TrialRow.id))).scalar_one() or 0)
    ordered = select(*columns).order_by(TrialRow.created_at, TrialRow.id)
    connection.execute(insert(TrialRow).from_select([column.name for column in columns], ordered))
    connection.execute(delete(TrialRow).where(TrialRow.id <= held))


def _command(sources: Sequence[str | Path], out: object, form: Form, *, everything: bool) -> str:
    """The command that makes the file where there is none yet; without passwords."""
    words = ["tunedcomm", "db", "export", *(word for s in sources for word in ("--db", str(parse_target(s))))]
    words += ["--format", form] if form != "sqlite" else []
    words += ["--all"] if everything else []
    return shlex.join([*words, str(out)])
