"""The tables, as SQLAlchemy 2 typed models.

Everything stored is a plain typed column or JSON text. A new field is one mapped column here and one Alembic revision
in `migrations/versions`; exports, tables and docs read the columns and their comments from these models.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy import BigInteger, ForeignKey, Index, Integer, MetaData, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# Every schema revision, oldest first: an up-to-date database opens without importing Alembic.
REVISIONS: tuple[str, ...] = ("0001", "0002", "0003", "0004")
HEAD = REVISIONS[-1]
# Revisions with the stored tables of HEAD: readers take them as they are.
READABLE = frozenset({"0001", "0002", "0003", HEAD})
# Readable revisions whose rows are the same as in HEAD.
SOUND = frozenset({HEAD})
# Not Alembic's default name: a shared server may hold other applications' tables, each with its own version.
VERSION_TABLE = "tunedcomm_version"

# SQLite gives only INTEGER primary keys its row ids.
_Id = BigInteger().with_variant(Integer, "sqlite")


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A point in time, aware and in UTC in Python; SQLite, which knows no zones, stores it naive."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"timestamp {value!r} has no time zone; pass an aware datetime, e.g. in timezone.utc")
        utc = value.astimezone(timezone.utc)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class Base(DeclarativeBase):
    """Holds the metadata; constraint names are fixed so that revisions can refer to them."""

    type_annotation_map: ClassVar[dict[type, Any]] = {float: sa.Float, str: sa.Text, datetime: UtcDateTime}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class EnvironmentRow(Base):
    """Hardware, fabric and software under which trials were measured."""

    __tablename__ = "environment"
    __table_args__ = (
        Index("ix_environment_hard", "gpu", "num_sms", "compute_capability", "fabric", "multicast", "nodes"),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    digest: Mapped[str] = mapped_column(String(32), unique=True, comment="SHA-256 over every field, 32 hex digits")
    gpu: Mapped[str] = mapped_column(comment="product name; hard field")
    num_sms: Mapped[int] = mapped_column(comment="streaming multiprocessors; hard field")
    compute_capability: Mapped[int] = mapped_column(comment="major * 10 + minor; hard field")
    memory_gib: Mapped[int] = mapped_column(comment="device memory in GiB, rounded")
    fabric: Mapped[str] = mapped_column(comment="link class, e.g. nvswitch-18; hard field")
    num_links: Mapped[int] = mapped_column(comment="active NVLinks a GPU")
    multicast: Mapped[bool] = mapped_column(comment="NVLink multicast there and on; hard field")
    nodes: Mapped[int] = mapped_column(comment="hosts the group spans; hard field")
    driver: Mapped[str] = mapped_column(comment="GPU driver version; soft field")
    cuda: Mapped[str] = mapped_column(comment="CUDA version of torch; soft field")
    torch: Mapped[str] = mapped_column(comment="torch version; soft field")
    triton: Mapped[str] = mapped_column(comment="triton version; soft field")
    nccl: Mapped[str] = mapped_column(comment="NCCL version; soft field")
    tunedcomm: Mapped[str] = mapped_column(comment="tunedcomm version; soft field")


class ProblemRow(Base):
    """A problem: op, canonical shape and every option that changes which kernels may run."""

    __tablename__ = "problem"
    __table_args__ = (Index("ix_problem_op_dtype_world_size", "op", "dtype", "world_size"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    digest: Mapped[str] = mapped_column(String(32), unique=True, comment="SHA-256 over every field, 32 hex digits")
    op: Mapped[str] = mapped_column(comment="name of the op")
    shape: Mapped[str] = mapped_column(comment="canonical shape, e.g. 98304 or 4096x8192x3584")
    dtype: Mapped[str] = mapped_column(comment="dtype of the payload")
    world_size: Mapped[int] = mapped_column(index=True, comment="ranks of the group")
    reduction: Mapped[str] = mapped_column(comment="sum, avg, max, min; empty where nothing is reduced")
    input_kind: Mapped[str] = mapped_column(comment="plain or symmetric")
    in_place: Mapped[bool] = mapped_column(comment="the result overwrites the input")
    layout: Mapped[str] = mapped_column(comment="op-specific memory layout")
    scaling: Mapped[str] = mapped_column(comment="op-specific scaling")
    mode: Mapped[str] = mapped_column(comment="graph or eager")


class VariantRow(Base):
    """One algorithm at one state of its source."""

    __tablename__ = "variant"
    __table_args__ = (UniqueConstraint("op", "name", "numerics", "source_hash"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    op: Mapped[str] = mapped_column(comment="name of the op")
    name: Mapped[str] = mapped_column(comment="name of the variant, unique within its op")
    numerics: Mapped[str] = mapped_column(comment="ordered, library or unordered")
    source_hash: Mapped[str] = mapped_column(comment="hash of the kernel and all it calls, normalised")


class RunRow(Base):
    """One command that recorded trials: provenance."""

    __tablename__ = "run"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    command: Mapped[str] = mapped_column(comment="command line")
    seed: Mapped[int | None] = mapped_column(BigInteger, comment="seed of the search; NULL if none was given")
    budget: Mapped[str] = mapped_column(comment="limits of the search in words")
    host: Mapped[str] = mapped_column(comment="host name")
    user: Mapped[str] = mapped_column(comment="login name; empty where unknown")
    version: Mapped[str] = mapped_column(comment="tunedcomm version that ran")
    started_at: Mapped[datetime] = mapped_column(comment="UTC")
    finished_at: Mapped[datetime | None] = mapped_column(comment="UTC; NULL while running or if killed")


class TrialRow(Base):
    """One candidate tried on one problem in one environment. Tuners only ever add rows; `db.prune` alone removes."""

    __tablename__ = "trial"
    __table_args__ = (
        # Serves snapshots: equality on the first three, then grouped by candidate without sorting.
        Index("ix_trial_snapshot", "environment_id", "status", "final", "problem_id", "variant_id", "config_digest"),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), index=True, comment="what was asked")
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"), comment="where it was measured")
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"), comment="which algorithm")
    config: Mapped[str] = mapped_column(comment="JSON object: axis to value")
    config_digest: Mapped[str] = mapped_column(String(16), comment="SHA-256 over config, 16 hex digits")
    status: Mapped[str] = mapped_column(comment="ok, infeasible, compile_error, incorrect, crashed, hung or pruned")
    reason: Mapped[str] = mapped_column(comment="why it is not ok, as a sentence; empty if it is")
    latency_p10_us: Mapped[float | None] = mapped_column(comment="10th percentile of the slowest rank")
    latency_p50_us: Mapped[float | None] = mapped_column(
        comment="median over iterations of the slowest rank; NULL if not measured"
    )
    latency_p90_us: Mapped[float | None] = mapped_column(comment="90th percentile of the slowest rank")
    samples: Mapped[int] = mapped_column(comment="iterations behind the percentiles")
    baseline_p50_us: Mapped[float | None] = mapped_column(
        comment="median of the library in the same interleaved run; NULL if not measured"
    )
    error: Mapped[float | None] = mapped_column(comment="||out - ref|| / ||ref||; NULL if not checked")
    final: Mapped[bool] = mapped_column(comment="measured in the finals over the whole sweep")
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"), comment="which command recorded it")
    created_at: Mapped[datetime] = mapped_column(comment="UTC")


class PinRow(Base):
    """A person's override of what is dispatched for one problem on one kind of machine."""

    __tablename__ = "pin"
    __table_args__ = (UniqueConstraint("problem_id", "environment_id"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), comment="what it overrides")
    environment_id: Mapped[int] = mapped_column(
        ForeignKey("environment.id"), comment="where: every environment with the same hard fields"
    )
    variant: Mapped[str] = mapped_column(comment="name of the variant to use")
    config: Mapped[str] = mapped_column(comment="JSON object: axis to value")
    reason: Mapped[str] = mapped_column(comment="why, in the person's words")
    user: Mapped[str] = mapped_column(comment="login name; empty where unknown")
    created_at: Mapped[datetime] = mapped_column(comment="UTC")


class WorkingBase(Base):
    """Tables that only running commands use: never exported, merged, counted or compared."""

    __abstract__ = True
    metadata = MetaData(naming_convention=Base.metadata.naming_convention)


class ClaimRow(WorkingBase):
    """A candidate that a supervisor runs now; deleted once its trial is stored."""

    __tablename__ = "claim"

    key: Mapped[str] = mapped_column(
        String(32), primary_key=True, comment="SHA-256 over search and candidate, 32 hex digits"
    )
    search: Mapped[str] = mapped_column(
        String(32), index=True, comment="SHA-256 over problem, environment, sources and stage, 32 hex digits"
    )
    candidate: Mapped[str] = mapped_column(comment="JSON list: variant, config")
    owner: Mapped[str] = mapped_column(comment="JSON list: host, kernel, pid, start, nonce of the supervisor")
    heartbeat_at: Mapped[datetime] = mapped_column(comment="UTC by the clock of the database")
