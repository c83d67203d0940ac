"""`tunedcomm db stats`: how much was tried, what wins and by how much, what is out of date."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli._choice import match_environments, open_layer, read_layers
from tunedcomm.cli._options import DatabaseOption, HardwareOption, JsonOption
from tunedcomm.cli._output import emit, emit_json, format_bytes, note, table
from tunedcomm.errors import DatabaseError

if TYPE_CHECKING:
    from tunedcomm.db.stats import DatabaseStats, GroupStats

__all__ = ["db_stats", "format_age"]

COLUMNS = (
    "ranks",
    "dtype",
    "mode",
    "problems",
    "trials",
    "finals",
    "ok",
    "not ok",
    "winners",
    "library wins",
    "speed-up",
    "stale",
    "newest",
)


def db_stats(
    *,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    hardware: HardwareOption = None,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up stored trials by environment, op, world size, dtype and mode.

    `winners` counts the problems that each variant wins under the default numerics policy; `speed-up` is the geometric
    mean over the problems of the library's latency over the winner's; `stale` counts trials of kernels that have
    changed since.

    Example: tunedcomm db stats --db cluster.db
    """
    found = []
    for layer in read_layers(db):
        try:
            with open_layer(layer) as opened:
                found.append((layer.name, _filtered(_collect(opened), op, hardware)))
        except DatabaseError as error:
            if db is not None:
                raise
            note(f"skipped the {layer.name} database: {error}")
    if as_json:
        emit_json([_to_dict(name, stats) for name, stats in found])
        return
    for name, stats in found:
        _report(name, stats)
    if not found:
        emit("no database is there; `tunedcomm tune --op all_reduce` makes one")


def _collect(opened: Any) -> DatabaseStats:
    from tunedcomm import kernels
    from tunedcomm.db.stats import collect_stats
    from tunedcomm.dispatch.dispatcher import source_hash_of

    kernels.discover()
    return collect_stats(opened, source_hash_of)


def _filtered(stats: DatabaseStats, op: str | None, hardware: str | None) -> DatabaseStats:
    groups = [group for group in stats.groups if op in (None, group.op)]
    if hardware is not None:
        wanted = {e.digest for e in match_environments(hardware, [group.environment for group in groups])}
        groups = [group for group in groups if group.environment.digest in wanted]
    return replace(stats, groups=tuple(groups))


def _report(name: str, stats: DatabaseStats) -> None:
    size = "" if stats.num_bytes is None else f"{format_bytes(stats.num_bytes)}, "
    held = ", ".join(f"{stats.rows[key]} {key}" for key in ("trials", "problems", "environments", "runs", "pins"))
    emit(f"{name} database {stats.target}: {size}schema {stats.schema}, {held}")
    titles: dict[str, list[GroupStats]] = {}
    for group in stats.groups:
        there = group.environment
        software = f"torch {there.torch}, triton {there.triton}" + (f", driver {there.driver}" if there.driver else "")
        titles.setdefault(f"{group.op} on {there} [{there.digest[:8]}], {software}", []).append(group)
    for title, groups in titles.items():
        table(COLUMNS, [_cells(group) for group in groups], title=title)
    if unknown := sum(group.unknown for group in stats.groups):
        emit(f"{unknown} trials are of variants that this tunedcomm does not have")


def _cells(group: GroupStats) -> list[str]:
    share = group.library_share
    not_ok = ", ".join(f"{count} {status}" for status, count in sorted(group.trials.items()) if status != "ok")
    return [
        str(group.world_size),
        group.dtype,
        group.mode,
        str(group.problems),
        str(sum(group.trials.values())),
        str(group.finals),
        str(group.trials.get("ok", 0)),
        not_ok or "-",
        ", ".join(f"{count} {variant}" for variant, count in group.winners.items()) or "-",
        "-" if share is None else f"{share:.0%}",
        "-" if group.speedup is None else f"{group.speedup:.2f}x",
        str(group.stale),
        format_age(group.newest),
    ]


def format_age(then: datetime | None) -> str:
    """`3 d ago`, in the largest unit of which one has passed; `-` where there is no time."""
    if then is None:
        return "-"
    seconds = max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def _to_dict(name: str, stats: DatabaseStats) -> dict[str, Any]:
    return {
        "layer": name,
        "database": stats.target,
        "num_bytes": stats.num_bytes,
        "schema": stats.schema,
        "rows": stats.rows,
        "groups": [
            {
                "environment": {"digest": group.environment.digest, **group.environment.to_dict()},
                "op": group.op,
                "world_size": group.world_size,
                "dtype": group.dtype,
                "mode": group.mode,
                "problems": group.problems,
                "trials": group.trials,
                "finals": group.finals,
                "winners": group.winners,
                "library_share": group.library_share,
                "speedup": group.speedup,
                "stale": group.stale,
                "unknown": group.unknown,
                "oldest": None if group.oldest is None else group.oldest.isoformat(),
                "newest": None if group.newest is None else group.newest.isoformat(),
            }
            for group in stats.groups
        ],
    }
