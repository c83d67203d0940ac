"""Source hashes that do not contain the names of modules and functions; see `tunedcomm.db.rekey`."""

from __future__ import annotations

from alembic import op

from tunedcomm.db.rekey import rekey_rows

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Translate the hashes of stored variants."""
    rekey_rows(op.get_bind())
