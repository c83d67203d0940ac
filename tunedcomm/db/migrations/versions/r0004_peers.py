"""Source hashes of kernels that take their peers' addresses as a tuple; see `tunedcomm.db.rekey`."""

from __future__ import annotations

from alembic import op

from tunedcomm.db.rekey import rekey_rows

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Translate the hashes of stored variants."""
    rekey_rows(op.get_bind())
