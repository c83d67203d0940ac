"""The first schema: the tables environment, problem, variant, run, trial and pin.

No database is older than this. New ones get their tables from the models, as they are at the head of the revisions.
"""

from __future__ import annotations

revision = "0001"
down_revision = None
