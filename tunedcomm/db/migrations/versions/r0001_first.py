"""The first schema: environment, problem, variant, run, trial and pin.

A revision never changes once it is released, so everything is spelled out here and nothing comes from the models.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TIME = sa.DateTime(timezone=True)


def _id() -> sa.Column[int]:
    return sa.Column("id", _ID, primary_key=True)


def _text(name: str, comment: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False, comment=comment)


def _integer(name: str, comment: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=False, comment=comment)


def _boolean(name: str, comment: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean(), nullable=False, comment=comment)


def _float(name: str, comment: str) -> sa.Column[float]:
    return sa.Column(name, sa.Float(), nullable=True, comment=comment)


def _digest() -> sa.Column[str]:
    return sa.Column("digest", sa.String(32), nullable=False, comment="SHA-256 over every field, 32 hex digits")


def _reference(owner: str, table: str, comment: str, *, nullable: bool = False) -> sa.Column[int]:
    key = sa.ForeignKey(f"{table}.id", name=f"fk_{owner}_{table}_id_{table}")
    return sa.Column(f"{table}_id", _ID, key, nullable=nullable, comment=comment)


def upgrade() -> None:
    """Make every table."""
    _environment_and_problem()
    _variant_and_run()
    _trial()
    _pin()


def _environment_and_problem() -> None:
    op.create_table(
        "environment",
        _id(),
        _digest(),
        _text("gpu", "product name; hard field"),
        _integer("num_sms", "streaming multiprocessors; hard field"),
        _integer("compute_capability", "major * 10 + minor; hard field"),
        _integer("memory_gib", "device memory in GiB, rounded"),
        _text("fabric", "link class, e.g. nvswitch-18; hard field"),
        _integer("num_links", "active NVLinks a GPU"),
        _boolean("multicast", "NVLink multicast there and on; hard field"),
        _integer("nodes", "hosts the group spans; hard field"),
        _text("driver", "GPU driver version; soft field"),
        _text("cuda", "CUDA version of torch; soft field"),
        _text("torch", "torch version; soft field"),
        _text("triton", "triton version; soft field"),
        _text("nccl", "NCCL version; soft field"),
        _text("tunedcomm", "tunedcomm version; soft field"),
        sa.PrimaryKeyConstraint("id", name="pk_environment"),
        sa.UniqueConstraint("digest", name="uq_environment_digest"),
    )
    hard = ["gpu", "num_sms", "compute_capability", "fabric", "multicast", "nodes"]
    op.create_index("ix_environment_hard", "environment", hard)
    op.create_table(
        "problem",
        _id(),
        _digest(),
        _text("op", "name of the op"),
        _text("shape", "canonical shape, e.g. 98304 or 4096x8192x3584"),
        _text("dtype", "dtype of the payload"),
        _integer("world_size", "ranks of the group"),
        _text("reduction", "sum, avg, max, min; empty where nothing is reduced"),
        _text("input_kind", "plain or symmetric"),
        _boolean("in_place", "the result overwrites the input"),
        _text("layout", "op-specific memory layout"),
        _text("scaling", "op-specific scaling"),
        _text("mode", "graph or eager"),
        sa.PrimaryKeyConstraint("id", name="pk_problem"),
        sa.UniqueConstraint("digest", name="uq_problem_digest"),
    )
    op.create_index("ix_problem_world_size", "problem", ["world_size"])
    op.create_index("ix_problem_op_dtype_world_size", "problem", ["op", "dtype", "world_size"])


def _variant_and_run() -> None:
    op.create_table(
        "variant",
        _id(),
        _text("op", "name of the op"),
        _text("name", "name of the variant, unique within its op"),
        _text("numerics", "ordered, library or unordered"),
        _text("source_hash", "hash of the kernel and all it calls, normalised"),
        sa.PrimaryKeyConstraint("id", name="pk_variant"),
        sa.UniqueConstraint("op", "name", "numerics", "source_hash", name="uq_variant_op_name_numerics_source_hash"),
    )
    op.create_table(
        "run",
        _id(),
        _text("command", "command line"),
        sa.Column("seed", sa.BigInteger(), nullable=True, comment="seed of the search; NULL if none was given"),
        _text("budget", "limits of the search in words"),
        _text("host", "host name"),
        _text("user", "login name; empty where unknown"),
        _text("version", "tunedcomm version that ran"),
        sa.Column("started_at", _TIME, nullable=False, comment="UTC"),
        sa.Column("finished_at", _TIME, nullable=True, comment="UTC; NULL while running or if killed"),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
    )


def _trial() -> None:
    op.create_table(
        "trial",
        _id(),
        _reference("trial", "problem", "what was asked"),
        _reference("trial", "environment", "where it was measured"),
        _reference("trial", "variant", "which algorithm"),
        _text("config", "JSON object: axis to value"),
        sa.Column("config_digest", sa.String(16), nullable=False, comment="SHA-256 over config, 16 hex digits"),
        _text("status", "ok, infeasible, compile_error, incorrect, crashed, hung or pruned"),
        _text("reason", "why it is not ok, as a sentence; empty if it is"),
        _float("latency_p10_us", "10th percentile of the slowest rank"),
        _float("latency_p50_us", "median over iterations of the slowest rank; NULL if not measured"),
        _float("latency_p90_us", "90th percentile of the slowest rank"),
        _integer("samples", "iterations behind the percentiles"),
        _float("baseline_p50_us", "median of the library in the same interleaved run; NULL if not measured"),
        _float("error", "||out - ref|| / ||ref||; NULL if not checked"),
        _boolean("final", "measured in the finals over the whole sweep"),
        _reference("trial", "run", "which command recorded it", nullable=True),
        sa.Column("created_at", _TIME, nullable=False, comment="UTC"),
        sa.PrimaryKeyConstraint("id", name="pk_trial"),
    )
    op.create_index("ix_trial_problem_id", "trial", ["problem_id"])
    snapshot = ["environment_id", "status", "final", "problem_id", "variant_id", "config_digest"]
    op.create_index("ix_trial_snapshot", "trial", snapshot)


def _pin() -> None:
    op.create_table(
        "pin",
        _id(),
        _reference("pin", "problem", "what it overrides"),
        _reference("pin", "environment", "where: every environment with the same hard fields"),
        _text("variant", "name of the variant to use"),
        _text("config", "JSON object: axis to value"),
        _text("reason", "why, in the person's words"),
        _text("user", "login name; empty where unknown"),
        sa.Column("created_at", _TIME, nullable=False, comment="UTC"),
        sa.PrimaryKeyConstraint("id", name="pk_pin"),
        sa.UniqueConstraint("problem_id", "environment_id", name="uq_pin_problem_id_environment_id"),
    )


def downgrade() -> None:
    """Drop every table."""
    for table in ("pin", "trial", "run", "variant", "problem", "environment"):
        op.drop_table(table)
