"""Source hashes that were replaced without a change of code: stored rows keep serving under the new ones.

`rekeyed.csv` lists (op, variant, old, new). Readers translate what they read (`current_hash`), so that databases which
cannot be written serve as well; Alembic's data revisions translate writable ones (`rekey_rows`). A later replacement
adds its lines to the file; the next data revision writes the new hashes down.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import sqlalchemy as sa

_FILE = Path(__file__).with_name("rekeyed.csv")


@functools.cache
def _replacements() -> dict[tuple[str, str, str], str]:
    with _FILE.open(encoding="utf-8", newline="") as file:
        return {(line["op"], line["variant"], line["old"]): line["new"] for line in csv.DictReader(file)}


def current_hash(op: str, variant: str, source_hash: str) -> str:
    """The hash that replaced `source_hash` of this variant, or `source_hash` itself."""
    replacements = _replacements()
    for _ in range(len(replacements)):
        newer = replacements.get((op, variant, source_hash))
        if newer is None:
            break
        source_hash = newer
    return source_hash


def rekey_rows(connection: sa.Connection) -> None:
    """Give stored variants their current hashes; trials of a variant that has it already join that one."""
    variant = sa.table("variant", *map(sa.column, ("id", "op", "name", "numerics", "source_hash")))
    trial = sa.table("trial", sa.column("variant_id"))
    stored = {tuple(row)[1:]: row.id for row in connection.execute(sa.select(variant).order_by(variant.c.id))}
    for (op, name, numerics, old), key in list(stored.items()):
        new = current_hash(op, name, old)
        if new == old:
            continue
        if (known := stored.get((op, name, numerics, new))) is None:
            connection.execute(sa.update(variant).where(variant.c.id == key).values(source_hash=new))
            stored[op, name, numerics, new] = key
        else:
            connection.execute(sa.update(trial).where(trial.c.variant_id == key).values(variant_id=known))
            connection.execute(sa.delete(variant).where(variant.c.id == key))
