"""Where a database is."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL

__all__ = ["Target"]


class Target:
    """Where a database is: a SQLAlchemy URL and, for a SQLite file, its path."""

    def __init__(self, url: URL, path: Path | None) -> None:
        self.url = url
        self.path = path

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url.render_as_string(hide_password=True)
