"""Ways to spoil a database, by its bytes, its rows, its schema, or what lies at its path. Every case has a number."""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import struct
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from fuzz_base import Base
from fuzz_values import CONFIGS, SCHEMAS, VALUES, VERSIONS

__all__ = ["KINDS", "spoil"]

INTERESTING = (0, 1, 2, 3, 4, 7, 8, 0x0D, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
# Page size, format versions, reserved bytes, fractions, counters, freelist, schema format, encoding and so on.
HEADER = (16, 18, 19, 20, 21, 22, 23, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 92, 96)
TABLES = ("environment", "problem", "variant", "trial", "run", "pin", "tunedcomm_version")


# Bytes. Each takes the content and returns another one.


def flip_bits(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def set_numbers(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    """Big-endian numbers of one to eight bytes that are at the edge of something."""
    for _ in range(rng.choice((1, 2, 5, 20))):
        size = rng.choice((1, 2, 4, 8))
        at = rng.randrange(max(1, len(data) - size))
        data[at : at + size] = (rng.choice(INTERESTING) & ((1 << 8 * size) - 1)).to_bytes(size, "big")
    return data


def set_header(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    at = rng.choice(HEADER)
    size = 2 if at == 16 else 1 if at < 24 else 4
    value = rng.choice((*INTERESTING, base.page_size, len(data) // base.page_size))
    data[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "big")
    return data


def set_page_headers(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    """Kind of page, first free block, number and place of cells, right-most child, pointers to cells and children."""
    for _ in range(rng.choice((1, 1, 3, 10))):
        page = rng.randrange(max(1, len(data) // base.page_size))
        at = page * base.page_size + (100 if page == 0 else 0) + rng.randrange(24)
        if at + 4 <= len(data):
            data[at : at + rng.choice((1, 2))] = struct.pack(">I", rng.choice(INTERESTING))[-1:]
    return data


def shorten(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    pages = len(data) // base.page_size
    whole = rng.randrange(pages + 1) * base.page_size
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


def move_bytes(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    size = rng.randrange(1, 2 * base.page_size)
    one, other = rng.randrange(len(data)), rng.randrange(len(data))
    return data[:one] + data[other : other + size] + data[one + rng.choice((0, size)) :]


def spoil_texts(rng: random.Random, data: bytearray, base: Base) -> bytearray:
    """What lies where texts do, so that SQLite finds nothing wrong."""
    for word in rng.sample((b"num_blocks", b"all_reduce", b"bfloat16", b"lamport", b"CREATE", b"trial", b'":'), 3):
        at = data.find(word, rng.randrange(len(data)))
        if at >= 0:
            size = len(word)
            noise = (rng.randbytes(size), b"\xff" * size, bytes(size), b"'; DROP TABLE trial;--"[:size], b"[" * size)
            data[at : at + size] = rng.choice(noise).ljust(size)
    return data


BYTES: tuple[Callable[[random.Random, bytearray, Base], bytearray], ...] = (
    flip_bits,
    set_numbers,
    set_header,
    set_page_headers,
    shorten,
    lengthen,
    spoil_pages,
    move_bytes,
    spoil_texts,
)


def _write(path: Path, files: Mapping[str, bytes | bytearray]) -> None:
    for side, content in files.items():
        path.with_name(path.name + side).write_bytes(content)


def _by_bytes(rng: random.Random, path: Path, bases: list[Base]) -> None:
    base = rng.choice(bases)
    files: dict[str, bytes | bytearray] = dict(base.files)
    for mutate in rng.sample(BYTES, rng.choice((1, 1, 1, 2, 3))):
        if len(files[""]) > base.page_size:
            files[""] = mutate(rng, bytearray(files[""]), base)
    _write(path, files)


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
            for mutate in rng.sample((flip_bits, set_numbers, shorten, lengthen, move_bytes), 2):
                if len(files[side]) > 64:
                    files[side] = mutate(rng, bytearray(files[side]), base)
    _write(path, files)


def _by_foreign_pages(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Pages of another program's database, or of another state of this one."""
    base = rng.choice(bases)
    data = bytearray(base.files[""])
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA page_size={base.page_size}")
        connection.execute("CREATE TABLE bookmarks (id INTEGER PRIMARY KEY, url TEXT, visits BLOB)")
        rows = [(f"https://example.org/{i}" * 5, rng.randbytes(50)) for i in range(200)]
        connection.executemany("INSERT INTO bookmarks (url, visits) VALUES (?, ?)", rows)
        connection.commit()
        foreign = connection.serialize() if hasattr(connection, "serialize") else rng.choice(bases).files[""]
    size = base.page_size
    for _ in range(rng.choice((1, 2, 5, 20))):
        to, of = rng.randrange(len(data) // size) * size, rng.randrange(len(foreign) // size) * size
        data[to : to + size] = foreign[of : of + size]
    _write(path, {"": data})


# Rows and schemas, by SQL on a copy that takes whatever it is given.


def _open(path: Path, bases: list[Base]) -> sqlite3.Connection:
    _write(path, {"": next(base for base in bases if base.name == "rollback").files[""]})
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
            where = rng.choice(("1", "rowid = 1", "rowid % 3 = 0", f"rowid = (SELECT max(rowid) FROM {table})"))
            with suppress(sqlite3.IntegrityError):
                connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE {where}', (rng.choice(VALUES),))


def _by_configs(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Configs outside the space of their variant, of current source and faster than anything else."""
    with closing(_open(path, bases)) as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM trial WHERE status = 'ok'")]
        for chosen in rng.sample(ids, rng.choice((1, 5, len(ids)))):
            values = (rng.choice(CONFIGS), rng.choice((0.001, 1e-300, 2.0)), chosen)
            with suppress(sqlite3.IntegrityError):
                connection.execute("UPDATE trial SET config = ?, latency_p50_us = ? WHERE id = ?", values)
            connection.execute("UPDATE trial SET config_digest = hex(randomblob(8)) WHERE id = ?", (chosen,))
        if rng.random() < 0.5:
            with suppress(sqlite3.IntegrityError):
                connection.execute("UPDATE pin SET variant = ?, config = ?", (rng.choice(NAMES), rng.choice(CONFIGS)))
        if rng.random() < 0.3:
            values = (rng.choice(NAMES), rng.randrange(12))
            with suppress(sqlite3.IntegrityError):
                connection.execute("UPDATE variant SET name = ? WHERE id = ?", values)


def _by_rows(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Rows that refer to nothing, to each other's, that are there twice or not at all."""
    with closing(_open(path, bases)) as connection:
        table = rng.choice(TABLES[:-1])
        names = _columns(connection, table)
        ids = [name for name in names if name.endswith("_id")]
        match rng.randrange(4):
            case 0:
                connection.execute(f"DELETE FROM {table} WHERE rowid % ? = 0", (rng.choice((1, 2, 5)),))
            case 1 if ids:
                wrong = rng.choice((0, -1, 99, 2**63 - 1, -(2**63), None, "one", b"\x00", 1.5))
                with suppress(sqlite3.IntegrityError):
                    connection.execute(f"UPDATE {table} SET {rng.choice(ids)} = ?", (wrong,))
            case 2 if ids:
                connection.execute(f"UPDATE OR IGNORE {table} SET {rng.choice(ids)} = rowid % 3 + 1")
            case _:
                _untype(connection, table)
                for _ in range(rng.choice((1, 5))):
                    connection.execute(f"INSERT INTO {table} SELECT * FROM {table}")


def _by_version(rng: random.Random, path: Path, bases: list[Base]) -> None:
    with closing(_open(path, bases)) as connection:
        _untype(connection, "tunedcomm_version")
        connection.execute("UPDATE tunedcomm_version SET version_num = ?", (rng.choice(VERSIONS),))
        if rng.random() < 0.3:
            connection.execute("INSERT INTO tunedcomm_version VALUES (?)", (rng.choice(VERSIONS),))


def _by_schema(rng: random.Random, path: Path, bases: list[Base]) -> None:
    """Views, triggers, virtual tables, computed columns, indexes and tables that are not as they should be."""
    with closing(_open(path, bases)) as connection:
        table = rng.choice(TABLES)
        column = rng.choice(_columns(connection, table))
        names = {"table": table, "column": column, "columns": ", ".join(f'"{n}"' for n in _columns(connection, table))}
        with suppress(sqlite3.Error):
            connection.executescript(rng.choice(SCHEMAS).format(**names))


# What lies at the path is no database at all.


def _by_path(rng: random.Random, path: Path, bases: list[Base]) -> None:
    content = rng.choice(bases).files[""]
    match rng.randrange(14):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to(path.with_name("nothing"))
        case 4:
            path.touch()
        case 5:
            path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem")))
        case 6:
            with closing(socket.socket(socket.AF_UNIX)) as server, suppress(OSError):  # its path may be too long
                server.bind(str(path))
        case 7:
            path.write_bytes(rng.choice((b"\x1f\x8b\x08", b"gpu,latency\n", b"{}", b"SQLite format 3", b"\x00" * 4096)))
        case 8:
            path.write_bytes(content[:100])
            os.truncate(path, 1 << 40)
        case 9:
            path.write_bytes(content)
            os.truncate(path, 1 << 33)
        case 10 | 11:
            path.write_bytes(content)
            os.mkfifo(path.with_name(path.name + rng.choice(("-wal", "-journal", "-shm"))))
        case 12:
            path.write_bytes(content)
            path.with_name(path.name + rng.choice(("-wal", "-journal", "-shm"))).mkdir()
        case _:
            path.write_bytes(content)
            side = path.with_name(path.name + rng.choice(("-wal", "-journal", "-shm")))
            side.symlink_to(rng.choice((side, path, Path("/dev/zero"), path.with_name("nothing"))))


NAMES = (
    "lamport",
    "library",
    "one_shot",
    "two_shot",
    "torch_one_shot",
    "nothing",
    "",
    "../../x",
    "lamport\x00",
    "🦀" * 99,
)
# How often each kind is drawn: most of what can be wrong is in the bytes.
KINDS: Mapping[str, tuple[int, Callable[[random.Random, Path, list[Base]], None]]] = {
    "bytes": (44, _by_bytes),
    "side file": (8, _by_side_file),
    "foreign pages": (5, _by_foreign_pages),
    "values": (18, _by_values),
    "configs": (10, _by_configs),
    "rows": (5, _by_rows),
    "version": (2, _by_version),
    "schema": (6, _by_schema),
    "path": (2, _by_path),
}


def spoil(seed: int, path: Path, bases: list[Base]) -> str:
    """Make case `seed` at `path`, which is not there yet; returns its kind."""
    rng = random.Random(seed)
    (kind,) = rng.choices(list(KINDS), [share for share, _ in KINDS.values()])
    KINDS[kind][1](rng, path, bases)
    return kind
