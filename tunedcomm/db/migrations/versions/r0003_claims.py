"""Claims of running supervisors; see `tunedcomm.tuner.search.claims`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the table. Supervisors that share work in another way do not know this revision and refuse the database."""
    op.create_table(
        "claim",
        sa.Column("key", sa.String(32), nullable=False, comment="SHA-256 over search and candidate, 32 hex digits"),
        sa.Column(
            "search",
            sa.String(32),
            nullable=False,
            comment="SHA-256 over problem, environment, sources and stage, 32 hex digits",
        ),
        sa.Column("candidate", sa.Text(), nullable=False, comment="JSON list: variant, config"),
        sa.Column(
            "owner", sa.Text(), nullable=False, comment="JSON list: host, kernel, pid, start, nonce of the supervisor"
        ),
        sa.Column(
            "heartbeat_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="UTC by the clock of the database",
        ),
        sa.PrimaryKeyConstraint("key", name="pk_claim"),
    )
    op.create_index("ix_claim_search", "claim", ["search"])
