"""Reads a spoilt database in every way in which tunedcomm reads one, and says what is not as promised.

Promised is: a snapshot is always had; whatever else fails does so with an error of `tunedcomm.errors`; a decision is
the library, or a candidate that passes the check; the command line ends with 0, 1 or 2 and without a traceback; nothing
takes long; reading changes no file. A case is known by its number: `run_case(number)` runs it again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import pickle
import random
import shutil
import sqlite3
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cli_samples import real_trial, run
from db_samples import H200, OLDER, START

from tunedcomm import kernels
from tunedcomm.db import engine
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.records import LATENCIES, Trial, config_digest
from tunedcomm.db.store import Database
from tunedcomm.dispatch.decide import decide
from tunedcomm.errors import DatabaseError
from tunedcomm.kernels import source_hash_of
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Candidate, Problem, check_candidate
from tunedcomm.symm.layout import limits_for

WORLD_SIZE = 4
SIDES = ("", "-wal", "-shm", "-journal")


@dataclass(frozen=True)
class Base:
    """The files of a sound database: what is appended to the path, to the content."""

    name: str
    files: dict[str, bytes] = field(repr=False)
    page_size: int


def problems() -> list[Problem]:
    """What the sweep has measured: six sizes in two modes."""
    return [
        Problem("all_reduce", (1 << log2,), "bfloat16", WORLD_SIZE, mode=mode)
        for log2, mode in itertools.product(range(11, 22, 2), ("graph", "eager"))
    ]


def record(problem: Problem, variant: str, **changes: Any) -> Trial:
    """A trial with a time that depends on the variant."""
    us = 5.0 + len(variant)
    return real_trial(variant, us, **{"problem": problem, "baseline_p50_us": 40.0, "final": False, **changes})


def _records(run: int) -> list[Trial]:
    found = []
    for problem in problems():
        found += [record(problem, name, final=True) for name in ("library", "lamport", "two_shot", "two_shot_lamport")]
        found += [record(problem, "one_shot"), record(problem, "lamport", source_hash="0123456789abcdef")]
        found.append(record(problem, "multimem_one_shot", status="infeasible", reason="no multicast"))
    first = problems()[0]
    found.append(real_trial("two_shot", None, problem=first, status="hung", final=False))
    found.append(replace(record(replace(first, world_size=2), "lamport", final=True), environment=OLDER))
    found.append(replace(record(replace(first, dtype="float16"), "lamport"), environment=OLDER))
    return [replace(r, run_id=run, created_at=START + timedelta(seconds=i)) for i, r in enumerate(found)]


def _fill(path: Path) -> None:
    with Database.open(path, create=True) as database:
        run = database.start_run(command="tunedcomm tune", seed=0, budget="", host="fuzz")
        database.record(_records(run))
        database.pin(problems()[2], Candidate.of("all_reduce", "library", {}), environment=H200, reason="as agreed")
        database.finish_run(run)


def _rewrite(path: Path, *pragmas: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("journal_mode=DELETE", *pragmas):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("VACUUM")


def _in_utf16(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        statements = list(connection.iterdump())
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA encoding='UTF-16le'")
        connection.executescript("\n".join(statements))


def _busy(path: Path, *pragmas: str) -> dict[str, bytes]:
    """The files while a writer is in the middle of a transaction that it cannot hold in memory."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in (*pragmas, "cache_size=2", "cache_spill=1"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN")
        connection.execute("UPDATE trial SET samples = samples + 1, reason = reason || 'again'")
        if "journal_mode=WAL" in pragmas:
            connection.execute("COMMIT")
        files = {side: path.with_name(path.name + side) for side in SIDES}
        return {side: file.read_bytes() for side, file in files.items() if file.exists()}


def bases(folder: Path) -> list[Base]:
    """One database in every state."""
    _fill(folder / "sound.db")
    states: dict[str, tuple[int, Callable[[Path], dict[str, bytes] | None]]] = {
        "closed": (4096, lambda path: None),
        "rollback": (512, lambda path: _rewrite(path, "page_size=512", "auto_vacuum=FULL")),
        "utf16": (4096, _in_utf16),
        "wal": (4096, lambda path: _busy(path, "journal_mode=WAL", "wal_autocheckpoint=0")),
        "journal": (4096, lambda path: _busy(path, "journal_mode=DELETE")),
    }
    found = []
    for name, (page_size, make) in states.items():
        path = folder / f"{name}.db"
        shutil.copy(folder / "sound.db", path)
        files = make(path) or {"": path.read_bytes()}
        found.append(Base(name, files, page_size))
    assert set(found[3].files) == {"", "-wal", "-shm"}
    assert set(found[4].files) == {"", "-journal"}
    return found


# Values, configs, versions and schemas that no tuner stores.

_SQL = "'; DROP TABLE trial; --"
_TEXTS = ("", "a\x00b", _SQL, "%s%n{0}{x}", "../../etc/passwd", "\x1b[31mred\x1b[0m\x07", "\u202edlrow", "x" * 100_001)
_NUMBERS = ("NaN", "-Infinity", "0x10", "1e999", "٣", "1_000", "9" * 5000, "-1", "0", "4096x", "2x" * 40 + "2")
_WORDS = ("ok", "hung", "OK", "graph\n", "eager", "symmetric", "library", "ordered", "all_reduce", "float64", "avg")
_TIMES = ("2026-13-45 99:99:99", "2026-01-01", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-W01-1")
_INTEGERS = (0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS = (-0.0, 1.0, -1.5, 1e-320, 1e308, float("inf"), float("nan"))
_BYTES = (b"", b"\x00", b"\xff\xfe\xfd", b"{}", bytes(70_000))
VALUES: tuple[object, ...] = (*_TEXTS, *_NUMBERS, *_WORDS, *_TIMES, *_INTEGERS, *_FLOATS, *_BYTES, None)
AXES: tuple[dict[str, Any], ...] = (
    {"num_blocks": 10**9, "num_warps": 4},
    {"num_blocks": -1, "num_warps": 0},
    {"num_blocks": True, "num_warps": 4, "launch_pdl": 1},
    {"num_blocks": "1", "num_warps": "4"},
    {"num_blocks": 1},
    {"num_blocks": 1, "num_warps": 4, "extra": 1},
    {"num_blocks": 10**4000, "num_warps": 4},
    {"items": 4, "num_blocks": 264, "num_warps": 16},
    {"": 1, _SQL: _SQL},
    {f"axis{i}": i for i in range(500)},
)
_NO_CONFIGS = ("", "null", "[]", "1", "{", "{}", "[" * 200_000, '{"a":' * 1500 + "1" + "}" * 1500)
CONFIGS: tuple[object, ...] = (
    *map(json.dumps, AXES),
    *_NO_CONFIGS,
    *(f'{{"num_blocks": {value}}}' for value in ("1.0", "1e400", "NaN", "null", "[1]", '{"b": 1}', "9" * 9000)),
    '{"num_blocks": 1, "num_blocks": 999999, "num_warps": 4}',
    '{"num_blocks": "\\ud800", "num_warps": 4}',
    '{"a": "' + "x" * 2_000_000 + '"}',
    b"\xff\xff",
    None,
    1.5,
)
VERSIONS: tuple[object, ...] = ("0000", "0002", "0999", "", "head", "0001\x00", _SQL, "x" * 1_000_000, None, 1, b"0001")
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
_KEPT = "ALTER TABLE {table} RENAME TO kept; CREATE"
_MASTER = "PRAGMA writable_schema=ON; UPDATE sqlite_master SET"
# {table} is one of ours, {columns} its columns and {column} one of them.
SCHEMAS: tuple[str, ...] = (
    f"{_KEPT} VIEW {{table}} AS {_ENDLESS} kept.* FROM n, kept",
    f"{_KEPT} VIEW {{table}} AS SELECT * FROM {{table}}",
    f"{_KEPT} VIEW {{table}} AS SELECT load_extension('x'), * FROM kept",
    f"{_KEPT} VIRTUAL TABLE {{table}} USING fts5({{columns}})",
    "DELETE FROM {table} WHERE rowid % 2 = 0",
    "UPDATE trial SET problem_id = 99, run_id = -(1 << 63) WHERE rowid % 3 = 0",
    "UPDATE OR IGNORE trial SET environment_id = 'one', variant_id = rowid % 3 + 1",
    "CREATE TABLE untyped AS SELECT * FROM {table}; DROP TABLE {table}; ALTER TABLE untyped RENAME TO {table}; "
    "INSERT INTO {table} SELECT * FROM {table}",
    "DROP TABLE {table}",
    "DROP TABLE {table}; CREATE TABLE {table} ({columns}); INSERT INTO {table} DEFAULT VALUES",
    "ALTER TABLE {table} RENAME COLUMN {column} TO other",
    "ALTER TABLE {table} DROP COLUMN {column}",
    "ALTER TABLE {table} RENAME COLUMN {column} TO other; ALTER TABLE {table} ADD COLUMN {column} AS (randomblob(9))",
    f"CREATE TRIGGER t BEFORE INSERT ON {{table}} BEGIN DELETE FROM trial WHERE id IN ({_ENDLESS} i FROM n); END",
    "CREATE TRIGGER t AFTER INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'no'); END",
    "DROP INDEX ix_trial_snapshot; CREATE INDEX ix_trial_snapshot ON trial (reason)",
    "CREATE INDEX odd ON trial (latency_p50_us + 1, upper(reason)) WHERE length(config) > 3",
    f"{_MASTER} sql = replace(sql, 'TEXT', 'COLLATE nothing') WHERE 1",
    f"{_MASTER} sql = 'CREATE TABLE trial (id, id)' WHERE name = '{{table}}'",
    f"{_MASTER} rootpage = 2 WHERE 1",
    f"{_MASTER} rootpage = 99999 WHERE name = '{{table}}'",
    f"{_MASTER} name = upper(name), tbl_name = upper(tbl_name)",
    "PRAGMA writable_schema=ON; DELETE FROM sqlite_master WHERE name LIKE '%{table}%'",
    "ANALYZE; UPDATE sqlite_stat1 SET stat = 'unordered sz=0 99999999999999999999 -1'",
)
TABLES = ("environment", "problem", "variant", "trial", "run", "pin", "tunedcomm_version")


# Bytes. Each takes the content and returns another one.

_EDGES = (0, 1, 2, 3, 4, 7, 8, 0x0D, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
# Page size, format versions, reserved bytes, fractions, counters, freelist, schema format, encoding and so on.
_HEADER = (16, 18, 19, 20, 21, 22, 23, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 92, 96)


def flip_bits(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def set_numbers(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    """Big-endian numbers at the edge of something: in the file's header, in the header of a page, anywhere."""
    for _ in range(rng.choice((1, 1, 3, 10))):
        page = rng.randrange(max(1, len(data) // base.page_size)) * base.page_size
        anywhere = rng.randrange(len(data))
        at = rng.choice((rng.choice(_HEADER), page + (0 if page else 100) + rng.randrange(24), anywhere))
        size = rng.choice((1, 2, 4))
        value = rng.choice((*_EDGES, base.page_size, len(data) // base.page_size))
        data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "big")
    return data


def shorten(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    whole = rng.randrange(len(data) // base.page_size + 1) * base.page_size
    return data[: rng.choice((whole, whole, rng.randrange(len(data)), rng.randrange(120)))]


def lengthen(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    size = rng.choice((1, base.page_size, 3 * base.page_size, 100_000))
    return data + (bytes(size) if rng.random() < 0.5 else rng.randbytes(size))


def spoil_pages(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    """Pages emptied, filled with noise, or put in each other's places."""
    size, pages = base.page_size, len(data) // base.page_size
    for _ in range(rng.choice((1, 1, 2, 5))):
        one, other = rng.randrange(pages) * size, rng.randrange(pages) * size
        page = bytes(data[other : other + size])
        data[one : one + size] = rng.choice((bytes(size), rng.randbytes(size), page, page))
    return data


def spoil_texts(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    """What lies where texts do, so that SQLite finds nothing wrong."""
    for word in rng.sample((b"num_blocks", b"all_reduce", b"bfloat16", b"lamport", b"CREATE", b"trial", b'":'), 3):
        at = data.find(word, rng.randrange(len(data)))
        if at >= 0:
            size = len(word)
            noise = (rng.randbytes(size), b"\xff" * size, bytes(size), b"'; DROP TABLE trial;--"[:size], b"[" * size)
            data[at : at + size] = rng.choice(noise).ljust(size)
    return data


# Numbers and texts are drawn more often: SQLite itself finds most of the rest.
MUTATIONS = (flip_bits, set_numbers, set_numbers, shorten, lengthen, spoil_pages, spoil_texts, spoil_texts)


def _put(path: Path, files: Mapping[str, bytes | bytearray]) -> None:
    for side, content in files.items():
        path.with_name(path.name + side).write_bytes(content)


def _by_bytes(rng: random.Random, path: Path, bases: list[Base]) -> None:
    base = rng.choice(bases)
    files: dict[str, bytes | bytearray] = dict(base.files)
    for mutate in rng.sample(MUTATIONS, rng.choice((1, 1, 1, 2, 3))):
        if len(files[""]) > base.page_size:
            files[""] = mutate(rng, bytearray(files[""]), base)
    _put(path, files)


def _by_side_file(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """A log or journal that is damaged, another one's, or not there."""
    base = rng.choice([base for base in bases if len(base.files) > 1])
    files: dict[str, bytes | bytearray] = dict(base.files)
    other = rng.choice(bases)
    side = rng.choice([side for side in files if side])
    match rng.randrange(6):
        case 0:
            del files[side]
        case 1:
            files[side] = rng.randbytes(rng.choice((0, 1, 32, 4096, 40_000)))
        case 2:
            files[""] = other.files[""]
        case 3:
            files |= {name: content for name, content in other.files.items() if name}
        case _:
            for mutate in rng.sample((flip_bits, set_numbers, shorten, lengthen), 2):
                if len(files[side]) > 64:
                    files[side] = mutate(rng, bytearray(files[side]), base)
    _put(path, files)


# Rows and schemas, by SQL on a copy that takes whatever it is given.


def _open(path: Path, bases: list[Base]) -> sqlite3.Connection:
    _put(path, {"": next(base for base in bases if base.name == "rollback").files[""]})
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("foreign_keys=OFF", "ignore_check_constraints=ON", "synchronous=OFF", "journal_mode=MEMORY"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _untype(connection: sqlite3.Connection, table: str) -> None:
    """The same rows in a table without types, keys and constraints."""
    connection.execute(f"CREATE TABLE untyped AS SELECT * FROM {table}")
    connection.execute(f"DROP TABLE {table}")
    connection.execute(f"ALTER TABLE untyped RENAME TO {table}")


def _by_values(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Hostile values in any column: of one row, of some, of all."""
    with closing(_open(path, bases)) as connection:
        if rng.random() < 0.5:
            _untype(connection, rng.choice(TABLES))
        for _ in range(rng.choice((1, 1, 3, 10))):
            table = rng.choice(TABLES)
            column = rng.choice(_columns(connection, table))
            value = rng.choice({"config": CONFIGS, "version_num": VERSIONS}.get(column, VALUES))
            where = rng.choice(("1", "rowid = 1", "rowid % 3 = 0", f"rowid = (SELECT max(rowid) FROM {table})"))
            with suppress(sqlite3.IntegrityError):
                connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE {where}', (value,))


def _by_configs(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Configs outside the space of their variant, of current source and faster than anything else."""
    with closing(_open(path, bases)) as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM trial WHERE status = 'ok'")]
        for chosen in rng.sample(ids, rng.choice((1, 5, len(ids)))):
            config = rng.choice(AXES)
            values = (json.dumps(config), config_digest(config), *[rng.choice((0.001, 1e-300, 2.0))] * 3, chosen)
            with suppress(sqlite3.IntegrityError):
                connection.execute(f"UPDATE trial SET {', '.join(_FASTEST)} WHERE id = ?", values)
        name = rng.choice(("lamport", "library", "torch_one_shot", "nothing", "", "../../x", "🦀" * 99))
        with suppress(sqlite3.IntegrityError):
            connection.execute("UPDATE pin SET variant = ?, config = ?", (name, rng.choice(CONFIGS)))


_FASTEST = [f"{name} = ?" for name in ("config", "config_digest", *LATENCIES[:3])]


def _by_schema(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Views, triggers, computed columns, indexes and tables that are not as they should be, and rows of no other."""
    with closing(_open(path, bases)) as connection:
        table = rng.choice(TABLES)
        column = rng.choice(_columns(connection, table))
        names = {"table": table, "column": column, "columns": ", ".join(f'"{n}"' for n in _columns(connection, table))}
        with suppress(sqlite3.Error):
            connection.executescript(rng.choice(SCHEMAS).format(**names))


# What lies at the path is no database at all.


# How often each kind is drawn: most of what can be wrong is in the bytes.
KINDS = {_by_bytes: 49, _by_side_file: 8, _by_values: 18, _by_configs: 10, _by_schema: 13}


def spoil(seed: int, path: Path, bases: list[Base]) -> None:
    """Make case `seed` at `path`, which is not there yet."""
    rng = random.Random(seed)
    (make,) = rng.choices(list(KINDS), list(KINDS.values()))
    make(rng, path, bases)


LIMITS = limits_for(H200, WORLD_SIZE)
MOST_SECONDS = 60.0  # of some thirty readings, on a machine with other things to do
DIGEST = H200.digest[:10]


@dataclass
class Case:
    """One spoilt database and what was found."""

    path: Path
    errors: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    answered: bool = False

    @contextlib.contextmanager
    def promised(self, what: str, *allowed: type[BaseException]) -> Iterator[None]:
        """Note the name of an allowed error, and everything about another one."""
        try:
            yield
        except allowed as error:
            self.errors.add(type(error).__name__)
            text = str(error)
            if len(text) > 5000 or not text.isprintable():
                self.broken.append(f"{what}: {type(error).__name__} says {text[:200]!r} in {len(text)} characters")
        except BaseException:  # noqa: BLE001 - that is what is looked for
            self.broken.append(f"{what}: {traceback.format_exc()[-3000:]}")


def asked() -> list[Problem]:
    """Problems that the sweep measured, that lie between and outside of them, and that are like none of them."""
    first = problems()[0]
    shapes = ((1 << 11,), (3001,), (1 << 16,), (1 << 30,), (0,))
    near = [replace(first, shape=shape) for shape in shapes]
    return [*near, replace(first, dtype="float16", mode="eager"), replace(first, input_kind="symmetric", in_place=True)]


def _decide(case: Case, snapshot: Snapshot, problem: Problem) -> None:
    for max_sms in (None, 8):
        _check(case, snapshot, problem, decide(problem, snapshot, LIMITS, max_sms=max_sms))


def _check(case: Case, snapshot: Snapshot, problem: Problem, decision: Decision) -> None:
    candidate = decision.candidate
    case.answered |= decision.source in ("exact", "interpolated", "pin")
    if candidate == Candidate.of(problem.op, "library", {}):
        return
    if reason := check_candidate(problem, candidate, LIMITS, by_name=False):
        case.broken.append(f"decided for {candidate}, but {reason}")
    rows = [row for row in snapshot.rows if row.candidate == candidate]
    hashes = {row.source_hash for row in rows}
    if decision.source in ("exact", "interpolated") and source_hash_of(problem.op, candidate.variant) not in hashes:
        case.broken.append(f"decided for {candidate} of another source")


def _is_sound(path: Path) -> bool:
    """True if two queries must agree: no page is damaged, every index fits its table, and ids are unique."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            whole = [row[0] for row in connection.execute("PRAGMA integrity_check")] == ["ok"]
            return whole and bool(connection.execute("SELECT count(*) = count(DISTINCT id) FROM trial").fetchone()[0])
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _dispatch(case: Case) -> None:
    layers = [Layer("user", str(case.path))]
    with case.promised("load_snapshot, strict", DatabaseError):
        load_snapshot(H200, WORLD_SIZE, layers=layers, strict=True)
    with case.promised("load_snapshot"):
        snapshot = load_snapshot(H200, WORLD_SIZE, layers=layers)
        _decide(case, load_snapshot(H200, WORLD_SIZE, layers=layers, borrow=["H*", "library"]), asked()[0])
        for problem in asked():
            _decide(case, snapshot, problem)
            narrow = load_snapshot(H200, WORLD_SIZE, layers=layers, like=problem)
            if decide(problem, narrow, LIMITS) != decide(problem, snapshot, LIMITS) and _is_sound(case.path):
                case.broken.append(f"another choice for {problem} where only what is like it was read")
        if pickle.loads(pickle.dumps(snapshot)).digest != snapshot.digest:
            case.broken.append("a snapshot has another digest after its journey")


def _read(case: Case) -> None:
    with case.promised("open", DatabaseError), Database.open(case.path, readonly=True) as database:
        for name in ("trials", "stats", "environments", "problems", "pins", "runs"):
            with case.promised(name, DatabaseError):
                getattr(database, name)()
        with case.promised("filters", DatabaseError):
            database.trials(problem=problems()[0])
            database.environments(op="all_reduce", world_size=WORLD_SIZE)


def _command(case: Case, *arguments: str) -> None:
    """Run a verb of the command line, to see how it ends and what it says."""
    with case.promised(" ".join(arguments)):
        ended = run(*arguments)
        said = ended.out + ended.err
        said.encode()  # a lone surrogate, which no terminal takes, raises an error
        if ended.code not in (0, 1, 2) or "Traceback" in said:
            case.broken.append(f"{arguments} ended with {ended.code} and said {said[-300:]!r}")
        if "\x1b" in said or "\x00" in said:
            case.broken.append(f"{arguments} sent control characters to the terminal")


def _commands(case: Case) -> None:
    one = ("--op", "all_reduce", "--shape", "2048", "--world-size", "4")
    asked = ("--hardware", DIGEST)
    for verb in (("lookup", *one, *asked), ("explain", *one, *asked, "--json"), ("db", "show", *one), ("db", "list")):
        _command(case, *verb, "--db", str(case.path))


def _keep(case: Case) -> None:
    """What keeps databases in order, ships them and takes them in; of what is changed, a copy."""
    folder = case.path.parent / "kept"
    folder.mkdir()
    path, copy = str(case.path), shutil.copy(case.path, folder)
    for form in ("sqlite", "jsonl"):
        _command(case, "db", "export", "--db", path, "--format", form, str(folder / form), "--json")
    for verb in (
        f"stats --db {path}",
        f"check --db {path}",
        f"diff {path} {copy}",
        f"merge {path} --into {folder}/all.db",
        f"import {path} --db {folder}/mine.db",
        f"prune --invalid --superseded --yes --db {copy}",
        f"upgrade --db {copy}",
    ):
        _command(case, "db", *verb.split())


def _write(case: Case) -> None:
    """On a copy with all that lies beside it."""
    folder = case.path.parent / "copy"
    folder.mkdir()
    for file in case.path.parent.glob(f"{case.path.name}*"):
        if file.is_file():
            shutil.copy(file, folder)
    with case.promised("write", DatabaseError), Database.open(folder / case.path.name, busy_timeout_s=1.0) as database:
        added = record(problems()[0], "lamport")
        with case.promised("write a run and a pin", DatabaseError):
            database.finish_run(database.start_run(command="fuzz", seed=0, budget="", host="fuzz"))
            database.pin(added.problem, added.candidate, environment=H200, reason="")
            database.unpin(added.problem, environment=H200)
        (key,) = database.record([added])
        if [trial.id for trial in database.trials(after_id=key - 1)] != [key] and _is_sound(folder / case.path.name):
            case.broken.append("a trial was recorded and cannot be read")


def _fingerprint(path: Path) -> str:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24 or len(list(path.parent.iterdir())) > 1:
        return ""  # with a log or a journal beside it SQLite has something to put in order
    return hashlib.sha256(path.read_bytes()).hexdigest()


def probe(path: Path, *, writing: bool = True) -> Case:
    """Read the database at `path` in every way."""
    case = Case(path)
    before = _fingerprint(path)
    _dispatch(case)
    _read(case)
    _commands(case)
    if before and before != hashlib.sha256(path.read_bytes()).hexdigest():
        case.broken.append("reading changed the file")
    if writing and path.is_file() and path.stat().st_size <= 1 << 24:
        _keep(case)
        _write(case)
    return case


@functools.cache
def _sound() -> list[Base]:
    kernels.discover()
    with tempfile.TemporaryDirectory() as folder:
        return bases(Path(folder))


def run_case(number: int) -> Case:
    """Spoil a database in way `number` and probe it."""
    sound = _sound()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder, patch.object(engine, "QUERY_LIMIT_S", 1.0):
        path = Path(folder) / "tuned.db"
        spoil(number, path, sound)
        case = probe(path, writing=random.Random(number).random() < 0.25)
    seconds = time.perf_counter() - begin
    if seconds > MOST_SECONDS:
        case.broken.append(f"took {seconds:.1f} s")
    return case
