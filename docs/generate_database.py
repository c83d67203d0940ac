"""Write docs/database.md from the models: `python docs/generate_database.py`. A test fails where it is out of date."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Table
from sqlalchemy.dialects import postgresql, sqlite

from tunedcomm.db.schema import HEAD as REVISION
from tunedcomm.db.schema import Base, WorkingBase

PAGE = Path(__file__).with_name("database.md")

HEAD = f"""# The database

A tuning database is a SQLite file, or any database that SQLAlchemy opens; PostgreSQL is tested. Everything in it is a
plain column or JSON text. This is revision {REVISION} of the schema; `tunedcomm db upgrade` brings an older one to it.
[layers.md](layers.md) says which databases are read, [maintenance.md](maintenance.md) how to keep one in order.

<!-- runs in the repository -->
```
tunedcomm db list --db tuning_db/h200-nvswitch18-x4.db
tunedcomm db stats --db tuning_db/h200-nvswitch18-x4.db
```

Environments, problems and variants stand once each, and trials refer to them. Tuners add trials and change none.

This page is written by `python docs/generate_database.py` from `tunedcomm/db/schema.py`.
"""


def type_of(column: Column[object]) -> str:
    """As SQLite and PostgreSQL have it."""
    found = dict.fromkeys(str(column.type.compile(dialect())) for dialect in (sqlite.dialect, postgresql.dialect))
    return " / ".join(name.lower() for name in found)


def row(column: Column[object]) -> str:
    """One column."""
    notes = [column.comment or ""]
    if column.name == "id":
        notes = ["the row's number"]
    notes += [f"refers to `{key.target_fullname}`" for key in column.foreign_keys]
    if column.unique:
        notes.append("unique")
    null = "yes" if column.nullable else ""
    return f"| `{column.name}` | {type_of(column)} | {null} | {'; '.join(filter(None, notes))} |"


def section(table: Table, summary: str) -> str:
    """One table."""
    lines = [f"## {table.name}", "", summary, "", "| column | type | may be NULL | |", "|---|---|---|---|"]
    lines += [row(column) for column in table.columns]
    indexes = sorted(", ".join(f"`{column.name}`" for column in index.columns) for index in table.indexes)
    if indexes:
        lines += ["", f"Indexes: {'; '.join(indexes)}."]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    sections = []
    for base in (Base, WorkingBase):
        by_name = {mapper.class_.__tablename__: mapper.class_ for mapper in base.registry.mappers}
        for name in (name for name in base.metadata.tables if name in by_name):
            summary = " ".join((by_name[name].__doc__ or "").split())
            sections.append(section(base.metadata.tables[name], summary))
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
