"""Alembic's entry point; `tunedcomm.db.engine` runs it with an open connection and never from the command line."""

from __future__ import annotations

from alembic import context

from tunedcomm.db.schema import VERSION_TABLE, Base


def run() -> None:
    """Migrate within the caller's transaction, so that a killed upgrade leaves the database as it was."""
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        transactional_ddl=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
