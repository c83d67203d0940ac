"""`tunedcomm db prune`: remove trials that are no longer of use."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from tunedcomm.cli._choice import match_environments
from tunedcomm.cli._options import JsonOption
from tunedcomm.cli._output import emit, emit_json, format_bytes, note, table
from tunedcomm.errors import UnknownNameError

if TYPE_CHECKING:
    from tunedcomm.db.prune import Pruned
    from tunedcomm.db.store import Database

__all__ = ["db_prune", "parse_age"]

COLUMNS = ("environment", "gpu", "op", "variant", "status", "trials", "finals")
_AGE = re.compile(r"(\d{1,7})\s*([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 168}
# A longer time ago no calendar reaches.
_MAX_HOURS = 1000 * 365 * 24


def parse_age(text: str) -> timedelta:
    """Read `36h`, `90d`, `12w`.

    Raises:
        BadParameter: anything else.
    """
    match = _AGE.fullmatch(text.strip().lower())
    if match is None or (hours := int(match[1]) * _HOURS[match[2]]) > _MAX_HOURS:
        raise typer.BadParameter(
            f"{text!r} is not an age such as 36h, 90d or 12w, at most 1000 years", param_hint="--older-than"
        )
    return timedelta(hours=hours)


def db_prune(
    *,
    stale: Annotated[bool, typer.Option("--stale", help="Trials of kernels that have changed since.")] = False,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Trials that neither dispatch nor explain needs.")
    ] = False,
    failed: Annotated[
        bool,
        typer.Option(
            "--failed", help="Trials that failed, and good ones of the same candidates, to have them tried again."
        ),
    ] = False,
    invalid: Annotated[bool, typer.Option("--invalid", help="Trials that `db check` finds to make no sense.")] = False,
    environment: Annotated[
        str | None, typer.Option(help="Trials of this hardware: part of the GPU's name, or of an environment's digest.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="Trials stored longer ago than, e.g., 36h, 90d, 12w.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only counted.")] = False,
    db: Annotated[
        str | None, typer.Option("--db", help="File or SQLAlchemy URL to prune; by default the user database.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count the trials that all of the options given apply to, and with --yes remove them.

    With them goes what nothing refers to any more, and the file is compacted. Pins stay. A later `tunedcomm tune` of
    the same problems tries again what was removed. With the failures of a candidate go its good trials, which they keep
    from being used; a failure that hides good trials of another database stays.

    Example: tunedcomm db prune --superseded --older-than 30d --yes
    """
    from tunedcomm import kernels
    from tunedcomm.db.layers import layers_beside, writable_database
    from tunedcomm.db.prune import Selection, prune
    from tunedcomm.db.store import Database
    from tunedcomm.dispatch.dispatcher import source_hash_of

    kernels.discover()
    if not any((stale, superseded, failed, invalid, environment, older_than)):
        raise typer.BadParameter(
            "say which trials: --stale, --superseded, --failed, --invalid, --environment or --older-than, or several"
        )
    before = None if older_than is None else datetime.now(timezone.utc) - parse_age(older_than)
    with Database.open(writable_database(db), readonly=not yes) as opened:
        selection = Selection(
            stale=stale,
            superseded=superseded,
            failed=failed,
            invalid=invalid,
            environments=() if environment is None else _matching(environment, opened),
            before=before,
        )
        elsewhere = layers_beside(db) if failed else []
        done = prune(opened, selection, source_hash_of, dry_run=not yes, elsewhere=elsewhere)
    if as_json:
        emit_json({**asdict(done), "trials": done.trials})
    else:
        _report(done)


def _matching(text: str, database: Database) -> tuple[str, ...]:
    stored = database.environments()
    if found := match_environments(text, stored):
        return tuple(there.digest for there in found)
    known = ", ".join(f"{there.gpu} ({there.digest[:8]})" for there in stored) or "none"
    raise UnknownNameError(f"no stored environment matches --environment {text!r}; stored are: {known}")


def _report(done: Pruned) -> None:
    if done.groups:
        cells = [(g.environment[:8], g.gpu, g.op, g.variant, g.status, g.trials, g.finals) for g in done.groups]
        table(COLUMNS, cells)
    unused = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in done.unused.items())
    what = f"{done.trials} of {done.held} trials" + (f", with {unused} that nothing else refers to" if unused else "")
    if done.along:
        note(f"good trials among them, of candidates that failed since or at another size: {done.along}")
    if done.kept:
        note(
            f"failures that stay, for they keep good trials of other databases from being used: {done.kept}; "
            "`tunedcomm tune --retry` tries those candidates again"
        )
    if done.dry_run:
        emit(f"would be removed from {done.target}: {what}")
        if done.trials or done.unused:
            note("nothing was removed; the same command with --yes does it")
        return
    emit(f"removed from {done.target}: {what}")
    if done.bytes_before is None or done.bytes_after is None:
        return
    emit(f"{format_bytes(done.bytes_before)} before, {format_bytes(done.bytes_after)} now")
    if not done.compacted:
        note("the file was not compacted, for another process uses it or the disk is full; prune it again later")
