"""Moving databases: export to one new file, import of files that somebody sent, merge of a cluster's databases.

Nothing is lost and nothing is there twice: trials are only added, each once. Rows of different environments are never
compared; which row of a candidate counts is decided when a snapshot is read. All that is brought is added in one
transaction, or nothing is.

An exported SQLite file is self-contained and is what dispatch reads. JSON lines are for people, `diff` and other
programs; both give a snapshot the same digest. The same sources give the same bytes; of SQLite files, under the same
SQLite.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias, get_args

from sqlalchemy import Connection, delete, func, insert, select

from tunedcomm.db.copying import Absorbed, Source, absorb, as_sqlite
from tunedcomm.db.diff import Answers, Comparison, answers, compare, measured
from tunedcomm.db.engine import IMMEDIATE, Target, connected, make_engine, parse_target, prepare_file, translated
from tunedcomm.db.jsonl import FORMAT, lines
from tunedcomm.db.manifest import Manifest, holdings, manifest_path, verify_manifest
from tunedcomm.db.migrate import create_file, ensure_schema
from tunedcomm.db.nccl_csv import nccl_csv
from tunedcomm.db.query import table
from tunedcomm.db.records import Skipped, canonical_json
from tunedcomm.db.schema import PinRow, TrialRow
from tunedcomm.db.snapshot import keep_needed
from tunedcomm.db.store import Database
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseCorruptError

Form: TypeAlias = Literal["sqlite", "jsonl", "nccl-csv"]
FORMS: tuple[str, ...] = get_args(Form)
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
# The beginnings of text files that an export may replace.
_BEGINNINGS: Mapping[str, bytes] = {"jsonl": f'{{"format":"{FORMAT}"'.encode(), "nccl-csv": b"# tunedcomm"}


# Import and merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The result of an import or a merge.

    Attributes:
        target: the database that took the rows.
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
    paths = {str(source): parse_target(source).path for source in sources}
    verified = tuple(name for name, path in paths.items() if path is not None and verify_manifest(path))
    with tempfile.TemporaryDirectory(prefix="tunedcomm-transfer.") as folder:
        files = [as_sqlite(one, Path(folder) / f"source{i}.db", is_checked=is_checked) for i, one in enumerate(sources)]
        # All sources in one file, so that the target takes them in one transaction.
        union = Source(str(target), Path(folder) / "union.db", "")
        with connected(create_file(union.path)) as connection:
            absorbed = tuple(absorb(connection, one, in_order=True) for one in files)
        if target.path is not None:
            prepare_file(target.path, create=True)
        engine = make_engine(target, readonly=False)
        try:
            with translated(target):
                ensure_schema(engine, target, create=True, readonly=False)
            before = [] if is_checked else _answers(target, union.path)
            with translated(target), engine.connect().execution_options(**{IMMEDIATE: True}) as connection:
                added = absorb(connection, union, in_order=True)
        finally:
            engine.dispose()
        compared = (
            compare(asked, answers(target.name, asked.snapshot.environment, asked.snapshot.world_size))
            for asked in before
        )
        comparisons = tuple(comparison for comparison in compared if comparison.problems)
    return Transfer(
        target=str(target),
        sources=absorbed,
        added=added.trials - added.known,
        verified=verified,
        comparisons=comparisons,
    )


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


def _answers(target: Target, union: Path) -> list[Answers]:
    """Answers of a database before another one is added to it, wherever either of them has trials."""
    held, added = measured(target.name), measured(union)
    return [
        answers(target.name, environment, world_size)
        for environment in {**held, **added}
        for world_size in sorted({*held.get(environment, ()), *added.get(environment, ())})
    ]


# Export


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The result of an export.

    Attributes:
        path: the file; None where it was a stream.
        form: `sqlite`, `jsonl` or `nccl-csv`.
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
    hardware: str | None = None,
    force: bool = False,
) -> Export:
    """Write what dispatch and `explain` need of the sources to one new file, with its manifest beside it.

    Several sources are merged: what they have in common is there once, trials are appended.

    Args:
        sources: at least one SQLite file, file of JSON lines or URL of a server; none is changed.
        out: the file to write, which appears complete or not at all; or, except for SQLite, an open text stream.
        form: what to write; see `nccl_csv` for what that format can say.
        everything: leave no row out.
        hardware: for `nccl-csv`, part of the GPU's name or the first digits of the environment's digest.
        force: replace `out` if it is a file that this function wrote, as the manifest beside it says, or a database all
            of whose trials and pins the sources hold.

    Raises:
        DatabaseAccessError: a source cannot be read; `out` is there, cannot be written, or would lose rows.
        DatabaseCorruptError: a source is damaged, or contradicts itself or another one.
        DatabaseVersionError: a source has a later schema than this tunedcomm.
        DatabaseBusyError: `out` is open in another process.
        DatabaseAwayError: a server does not answer.
        UnknownNameError: `nccl-csv` of several kinds of hardware, and `hardware` names none of them or several.
    """
    if not sources:
        raise ValueError("an export needs at least one source database, got none")
    if form not in FORMS:
        raise ValueError(f"unknown format {form!r}; the formats are {', '.join(FORMS)}")
    path = Path(out).expanduser() if isinstance(out, (str, Path)) else None
    if path is not None:
        _check_out(path, [parse_target(source) for source in sources], form, force=force)
    elif form == "sqlite":
        raise ValueError("a SQLite file cannot be written to a stream; give a path, or another format")
    place = {"prefix": "tunedcomm-export."} if path is None else {"prefix": f".{path.name}.", "dir": path.parent}
    try:
        with tempfile.TemporaryDirectory(**place) as scratch:
            folder = Path(scratch)
            if path is not None and form == "sqlite" and path.exists():
                _check_replaced(path, sources, folder)
            file, absorbed, held = _gather(sources, folder, form, everything=everything)
            built, skipped = file, Skipped()
            if form != "sqlite":
                built = folder / "built.txt"
                skipped = _write_text(file, form, built, hardware)
            with Database.open(file, readonly=True, immutable=form == "sqlite" or None) as database:
                if form == "sqlite":
                    _check_whole(database)
                holds = holdings(database)
            data = built.read_bytes()
            manifest = Manifest(
                file="" if path is None else path.name,
                sha256=hashlib.sha256(data).hexdigest(),
                num_bytes=len(data),
                form=form,
                everything=everything,
                holds=holds,
                left_out=held - holds["rows"]["trials"],
                sources=absorbed,
                command=_command(sources, out, form, everything=everything, hardware=hardware),
            )
            if path is None:
                assert not isinstance(out, (str, Path))
                out.write(data.decode())
            else:
                beside = folder / "manifest.json"
                beside.write_text(manifest.to_json(), encoding="utf-8")
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
        sha256=manifest.sha256,
        num_bytes=manifest.num_bytes,
        rows=holds["rows"],
        sources=absorbed,
        left_out=manifest.left_out,
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


def _check_out(path: Path, sources: Sequence[Target], form: Form, *, force: bool) -> None:
    if form == "sqlite" or not path.exists():
        prepare_file(path, create=True)
    if any(source.path is not None and _is_same(source, parse_target(path)) for source in sources):
        raise DatabaseAccessError(f"{path} is one of the sources and would lose trials; give another path to write to")
    for there in (path, manifest_path(path)):
        if os.path.lexists(there) and not force:
            raise DatabaseAccessError(
                f"{there} exists already; give another path, or --force (force=True) to replace it"
            )
    if form != "sqlite" and path.exists():
        _check_text(path, _BEGINNINGS[form], form)
    for suffix in ("-wal", "-journal"):
        # SQLite would take it for the log of the new file and damage it.
        if path.with_name(path.name + suffix).exists():
            raise DatabaseBusyError(
                f"{path.name}{suffix} lies beside {path}: a process has the database open, or one was killed; end it, "
                "open and close the database once, or give another path to write to"
            )


def _check_text(path: Path, beginning: bytes, form: Form) -> None:
    """Refuse to replace a file that this format did not write."""
    if not path.is_file():
        raise DatabaseAccessError(f"{path} is not a regular file; give the path of a file to write")
    with path.open("rb") as file:
        there = file.read(len(beginning))
    if there != beginning:
        raise DatabaseAccessError(
            f"{path} is no file of the format {form} (it starts with {there!r}) and is not replaced; give another path"
        )


def _check_replaced(path: Path, sources: Sequence[str | Path], scratch: Path) -> None:
    """Refuse to replace a database that somebody tuned into or pinned in, unless the sources hold all of it."""
    with contextlib.suppress(DatabaseCorruptError):  # it was changed since it was exported
        if path.stat().st_size == 0 or verify_manifest(path):
            return
    # A reader would leave a log beside it, and no log may lie beside what is replaced.
    copy = shutil.copyfile(path, scratch / "replaced-copy.db")
    with connected(create_file(scratch / "replaced.db")) as connection:
        for number, source in enumerate(sources):
            absorb(connection, as_sqlite(source, scratch / f"replaced{number}.db"))
        pins = _pins(connection)
        old = absorb(connection, as_sqlite(copy, scratch / "replaced-old.db"))
        lost = {"trials": old.trials - old.known, "pins": len(_pins(connection) - pins)}
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


def _gather(
    sources: Sequence[str | Path], folder: Path, form: Form, *, everything: bool
) -> tuple[Path, tuple[Absorbed, ...], int]:
    """Merge what the sources hold and leave out what is not wanted; returns a file, and how many trials there were."""
    files = [as_sqlite(source, folder / f"source{i}.db") for i, source in enumerate(sources)]
    if everything and form != "sqlite" and len(files) == 1:
        with Database.open(files[0].path, readonly=True) as database:
            held = database.stats()["trials"]
        return files[0].path, (Absorbed(source=files[0].name, trials=held, known=0),), held
    built = folder / "built.db"
    with connected(create_file(folder / "scratch.db")) as connection:
        absorbed = tuple(absorb(connection, one, in_order=True) for one in files)
        with connection.begin():
            held = int(connection.execute(select(func.count(TrialRow.id))).scalar_one())
            if len(files) > 1:
                _order_trials(connection)
            if not everything:
                keep_needed(connection)
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("VACUUM INTO ?", (str(built),))
    # The copy of a database with a write-ahead log has one too, which a shipped file cannot have.
    with translated(parse_target(built)), closing(sqlite3.connect(built)) as plain:
        plain.execute("PRAGMA journal_mode=DELETE")
    return built, absorbed, held


def _order_trials(connection: Connection) -> None:
    """Number trials by their time, as one database would have done: readers that want the last one take the highest."""
    columns = [column for column in table(TrialRow).columns if column.name != "id"]
    held = int(connection.execute(select(func.max(TrialRow.id))).scalar_one() or 0)
    ordered = select(*columns).order_by(TrialRow.created_at, TrialRow.id)
    connection.execute(insert(TrialRow).from_select([column.name for column in columns], ordered))
    connection.execute(delete(TrialRow).where(TrialRow.id <= held))


def _write_text(file: Path, form: Form, built: Path, hardware: str | None) -> Skipped:
    """Write a format other than SQLite; returns which rows it could not say."""
    skipped = Skipped()
    with built.open("w", encoding="utf-8", newline="\n") as out:
        if form == "nccl-csv":
            out.writelines(f"{text}\n" for text in nccl_csv(file, hardware=hardware))
            return skipped
        with Database.open(file, readonly=True) as database, database.reading() as connection:
            for line in lines(connection, lambda name, id_, what: skipped.add(f"{name} {id_}: {what}")):
                out.write(canonical_json(line) + "\n")
    return skipped


def _check_whole(database: Database) -> None:
    with database.reading() as connection:
        verdict = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    if verdict != ["ok"] or dangling:
        raise DatabaseCorruptError(
            f"the export is damaged ({'; '.join(map(str, [*verdict, *dangling]))[:300]}) and was not kept; check "
            "the sources with `PRAGMA integrity_check`, and the disk"
        )


def _command(sources: Sequence[str | Path], out: object, form: Form, *, everything: bool, hardware: str | None) -> str:
    """The command that makes the file where there is none yet; without passwords."""
    words = ["tunedcomm", "db", "export", *(word for s in sources for word in ("--db", str(parse_target(s))))]
    words += ["--format", form] if form != "sqlite" else []
    words += ["--all"] if everything else []
    words += ["--hardware", hardware] if hardware is not None else []
    return shlex.join([*words, str(out)])
