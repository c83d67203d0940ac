"""Writing the database that a cluster ships, or moving one: a new file with what dispatch and `explain` need, or all.

A SQLite file is self-contained and is what dispatch reads. JSON lines are for people, `diff` and other programs; both
give a snapshot the same digest. A manifest is written beside the file.

The same sources give the same bytes; of SQLite files, under the same SQLite.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO, TypeAlias, get_args

from sqlalchemy import Connection, delete, func, insert, select, update

from tunedcomm.db.engine import Target, make_engine, parse_target, prepare_file, translated
from tunedcomm.db.jsonl import lines
from tunedcomm.db.manifest import Manifest, holdings, manifest_path
from tunedcomm.db.merge import Absorbed, absorb
from tunedcomm.db.nccl_csv import nccl_csv
from tunedcomm.db.needed import keep_needed
from tunedcomm.db.query import table
from tunedcomm.db.records import canonical_json
from tunedcomm.db.replaced import check_database, check_text
from tunedcomm.db.rows import Skipped
from tunedcomm.db.schema import TrialRow, VariantRow
from tunedcomm.db.store import Database
from tunedcomm.db.supply import Supply, fresh, supply
from tunedcomm.errors import DatabaseAccessError, DatabaseBusyError, DatabaseCorruptError

__all__ = ["FORMS", "Export", "Form", "cluster_file", "export_database", "path_setting"]

Form: TypeAlias = Literal["sqlite", "jsonl", "nccl-csv"]
FORMS: tuple[str, ...] = get_args(Form)
_TIMEOUT_S = 30.0
_CLUSTER = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What was written.

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


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The rows to write, in one SQLite file."""

    file: Path
    absorbed: tuple[Absorbed, ...]
    held: int


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
    if not isinstance(out, (str, Path)):
        return _to_stream(sources, out, form, everything=everything, hardware=hardware)
    path = Path(out).expanduser()
    _check_out(path, [parse_target(source) for source in sources], form, force=force)
    command = _command(sources, out, form, everything=everything, hardware=hardware)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            if form == "sqlite" and path.exists():
                check_database(path, sources, Path(folder))
            gathered = _gather(sources, Path(folder), form, everything=everything)
            built, skipped = gathered.file, Skipped()
            if form != "sqlite":
                built = Path(folder) / "built.txt"
                with built.open("w", encoding="utf-8", newline="\n") as file:
                    skipped = _write(gathered, form, file.write, hardware)
            manifest = _describe(path, built, gathered, form, everything=everything, command=command)
            beside = Path(folder) / "manifest.json"
            beside.write_text(manifest.to_json(), encoding="utf-8")
            built.replace(path)
            beside.replace(manifest_path(path))
    except OSError as error:
        raise DatabaseAccessError(
            f"cannot write {path}: {error.strerror}; check the permissions of its directory and the disk space, or "
            "give another path"
        ) from error
    return Export(
        path=path,
        form=form,
        sha256=manifest.sha256,
        num_bytes=manifest.num_bytes,
        rows=manifest.holds["rows"],
        sources=gathered.absorbed,
        left_out=manifest.left_out,
        skipped=skipped,
        manifest=manifest_path(path),
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


def _to_stream(
    sources: Sequence[str | Path], out: TextIO, form: Form, *, everything: bool, hardware: str | None
) -> Export:
    if form == "sqlite":
        raise ValueError("a SQLite file cannot be written to a stream; give a path, or another format")
    with tempfile.TemporaryDirectory(prefix="tunedcomm-export.") as folder:
        gathered = _gather(sources, Path(folder), form, everything=everything)
        counted = _Counted(out)
        skipped = _write(gathered, form, counted.write, hardware)
        with Database.open(gathered.file, readonly=True) as database:
            rows = database.stats()
    return Export(
        path=None,
        form=form,
        sha256=counted.sha256.hexdigest(),
        num_bytes=counted.num_bytes,
        rows=rows,
        sources=gathered.absorbed,
        left_out=gathered.held - rows["trials"],
        skipped=skipped,
    )


class _Counted:
    """Passes lines on to a stream, with the digest and number of their bytes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0

    def write(self, text: str) -> None:
        data = text.encode()
        self.sha256.update(data)
        self.num_bytes += len(data)
        self._out.write(text)


def _write(gathered: _Gathered, form: Form, write: Callable[[str], object], hardware: str | None) -> Skipped:
    """Write the text of a format other than SQLite; returns which rows it could not say."""
    skipped = Skipped()
    if form == "nccl-csv":
        for text in nccl_csv(gathered.file, hardware=hardware):
            write(f"{text}\n")
        return skipped
    with Database.open(gathered.file, readonly=True) as database, database.reading() as connection:
        for line in lines(connection, lambda row, what: skipped.add(f"{row}: {what}")):
            write(canonical_json(line) + "\n")
    return skipped


def _check_out(path: Path, sources: Sequence[Target], form: Form, *, force: bool) -> None:
    if form == "sqlite" or not path.exists():
        prepare_file(path, create=True)
    if path.exists() and any(source.path is not None and _is_same(source.path, path) for source in sources):
        raise DatabaseAccessError(f"{path} is one of the sources and would lose trials; give another path to write to")
    for there in (path, manifest_path(path)):
        if os.path.lexists(there) and not force:
            raise DatabaseAccessError(
                f"{there} exists already; give another path, or --force (force=True) to replace it"
            )
    if form != "sqlite" and path.exists():
        check_text(path, form)
    for suffix in ("-wal", "-journal"):
        # SQLite would take it for the log of the new file and damage it.
        if path.with_name(path.name + suffix).exists():
            raise DatabaseBusyError(
                f"{path.name}{suffix} lies beside {path}: a process has the database open, or one was killed; end it, "
                "open and close the database once, or give another path to write to"
            )


def _is_same(source: Path, path: Path) -> bool:
    return source.exists() and source.samefile(path)


def _gather(sources: Sequence[str | Path], folder: Path, form: Form, *, everything: bool) -> _Gathered:
    """Merge what the sources hold, leave out what is not wanted, and put the rest into one file."""
    supplies = [supply(source, folder / f"source{i}.db") for i, source in enumerate(sources)]
    if everything and form != "sqlite" and len(supplies) == 1:
        file = supplies[0].file.path
        assert file is not None
        with Database.open(file, readonly=True) as database:
            held = database.stats()["trials"]
        return _Gathered(file, (Absorbed(source=supplies[0].name, trials=held, known=0),), held)
    return _build(supplies, folder / "scratch.db", folder / "built.db", everything=everything)


def _build(supplies: Sequence[Supply], scratch: Path, built: Path, *, everything: bool) -> _Gathered:
    target = fresh(scratch)
    engine = make_engine(target, readonly=False, immutable=False, busy_timeout_s=_TIMEOUT_S)
    try:
        with engine.connect() as connection:
            absorbed = tuple(replace(absorb(connection, one.file), source=one.name) for one in supplies)
            with translated(target):
                with connection.begin():
                    held = int(connection.execute(select(func.count(TrialRow.id))).scalar_one())
                    if len(supplies) > 1:
                        _order_trials(connection)
                        _order_variants(connection)
                    if not everything:
                        keep_needed(connection)
                driver = connection.connection.driver_connection
                assert driver is not None
                driver.execute("VACUUM INTO ?", (str(built),))
    finally:
        engine.dispose()
    # The copy of a database with a write-ahead log has one too, which a shipped file cannot have.
    with translated(target), closing(sqlite3.connect(built)) as plain:
        plain.execute("PRAGMA journal_mode=DELETE")
    return _Gathered(built, absorbed, held)


def _describe(path: Path, built: Path, gathered: _Gathered, form: Form, *, everything: bool, command: str) -> Manifest:
    """Read the rows as dispatch will, and say what they are."""
    with Database.open(gathered.file, readonly=True, immutable=form == "sqlite" or None) as database:
        if form == "sqlite":
            _check_whole(database)
        holds = holdings(database)
    data = built.read_bytes()
    return Manifest(
        file=path.name,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        form=form,
        everything=everything,
        holds=holds,
        left_out=gathered.held - holds["rows"]["trials"],
        sources=gathered.absorbed,
        command=command,
    )


def _check_whole(database: Database) -> None:
    with database.reading() as connection:
        verdict = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    if verdict != ["ok"] or dangling:
        raise DatabaseCorruptError(
            f"the export is damaged ({'; '.join(map(str, [*verdict, *dangling]))[:300]}) and was not kept; check "
            "the sources with `PRAGMA integrity_check`, and the disk"
        )


def _command(
    sources: Sequence[str | Path],
    out: str | Path,
    form: Form,
    *,
    everything: bool,
    hardware: str | None,
) -> str:
    """The command that makes the file where there is none yet; without passwords."""
    words = ["tunedcomm", "db", "export", *(word for s in sources for word in ("--db", str(parse_target(s))))]
    words += ["--format", form] if form != "sqlite" else []
    words += ["--all"] if everything else []
    words += ["--hardware", hardware] if hardware is not None else []
    return shlex.join([*words, str(out)])


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
