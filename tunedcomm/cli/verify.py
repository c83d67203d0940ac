"""`tunedcomm db verify`: time the stored winners again and say which have drifted."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunedcomm.cli.options import (
    BackendOption,
    JsonOption,
    SweptMode,
    backend_or_default,
    check_dtype,
    known_op,
    local_ranks,
    modes_of,
    parse_gangs,
    split,
)
from tunedcomm.cli.output import (
    attributes,
    emit,
    emit_json,
    format_ratio,
    format_us,
    kind_of,
    message_of,
    note,
    table_of,
)
from tunedcomm.cli.progress import say, shown
from tunedcomm.cli.tune import is_spare_copy
from tunedcomm.spec import format_shape

if TYPE_CHECKING:
    from tunedcomm.tuner.verify import Verified, VerifyOutcome, VerifySpec

_COLUMNS: dict[str, Callable[[Verified], object]] = {
    "shape": lambda result: format_shape(result.winner.problem.shape),
    "bytes": lambda result: message_of(result.winner.problem),
    "dtype": lambda result: result.winner.problem.dtype,
    "mode": lambda result: f"{result.winner.problem.mode}, {kind_of(result.winner.problem)}",
    "winner": lambda result: f"{result.winner.candidate}{_asked(result.winner.policies)}",
    "then us": lambda result: format_us(result.winner.measured_us),
    "speed-up": lambda result: format_ratio(result.winner.library_us, result.winner.latency_us),
    "now us": lambda result: format_us(result.latency_us),
    "library us": lambda result: format_us(result.library_us),
    "now": lambda result: format_ratio(result.library_us, result.latency_us),
    "verdict": lambda result: result.verdict,
}
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


def parse_share(text: str) -> float:
    """Read `10%` or `0.1` as a tenth.

    Raises:
        BadParameter: anything else, or more than 100 %.
    """
    match = _SHARE.fullmatch(text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"{text!r} is not a share such as 10% or 0.1, at most 100%", param_hint="--tolerance")
    return share


def db_verify(
    *,
    op: Annotated[list[str] | None, typer.Option(help="Only these ops.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only these dtypes.")] = None,
    mode: Annotated[SweptMode, typer.Option(help="Inside CUDA graphs, outside, or both.")] = "both",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Most problems: first those measured under other software, then the oldest."),
    ] = None,
    tolerance: Annotated[
        str,
        typer.Option(help="How much longer a winner may take, by itself and against the library, besides the noise."),
    ] = "10%",
    world_size: Annotated[int | None, typer.Option(min=2, help="Ranks; by default all GPUs.")] = None,
    backend: BackendOption = None,
    gangs: Annotated[
        str, typer.Option(help="Groups of ranks that measure side by side; auto fills the machine.")
    ] = "auto",
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            help="Database to verify, which takes the new timings too; by default every layer is read and the user "
            "database takes them.",
        ),
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep the new timings to yourself.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time the stored winners for this machine again, beside the library, and say which do not hold any more.

    Winners, runners-up and the library are checked as `tunedcomm tune` checks them, then timed as in its finals. The
    new timings are stored, so that dispatch goes by them: after a new driver or a new torch this is all that is needed.

    Exit code 1 if a winner is slower than the library, takes longer than it did by more than --tolerance, by itself and
    against the library, fails, or could not be measured; or if nothing is stored for this machine. Progress on stderr
    is that of `tunedcomm tune`.

    Example: tunedcomm db verify --tolerance 5% --no-store
    """
    if is_spare_copy():
        note("another copy of this command verifies on this host's GPUs; this one has nothing to do (start one a host)")
        return
    from tunedcomm.db.layers import named_layers
    from tunedcomm.tuner.verify import VerifySpec

    spec = VerifySpec(
        ops=tuple(known_op(name).name for name in split(op)),
        dtypes=tuple(check_dtype(name) for name in split(dtype)),
        modes=modes_of(mode),
        limit=limit,
        tolerance=parse_share(tolerance),
        layers=None if db is None else tuple(named_layers(db)),
        world_size=local_ranks(world_size, backend),
        backend=backend_or_default(backend),
        gangs=parse_gangs(gangs),
        command=shlex.join(["tunedcomm", *sys.argv[1:]]),
    )
    outcome, url = run_verify(spec, db, store=not no_store, as_json=as_json)
    if as_json:
        emit_json(_to_dict(outcome, url))
    else:
        _report(outcome, url)
    if outcome.wrong or not outcome.results:
        raise typer.Exit(1)


def run_verify(
    spec: VerifySpec, database: str | None, *, store: bool = True, as_json: bool = False
) -> tuple[VerifyOutcome, str | None]:
    """Verify with the progress on stderr; returns the outcome and where it was stored.

    Raises:
        DatabaseError: the database cannot be read, or written.
        TuningError: gangs could not be started or carried on.
    """
    from tunedcomm.db.layers import writable_database
    from tunedcomm.db.store import Database
    from tunedcomm.settings import db_patience_s
    from tunedcomm.tuner.verify import verify

    with ExitStack() as stack:
        opened = None
        if store:
            where = writable_database(database)
            opened = Database.open(where, create=database is None, patience_s=db_patience_s())
            stack.enter_context(opened)
        url = None if opened is None else str(opened.path or opened.url)
        if spec.backend == "host":
            say("verifying the host backend, whose timings say nothing about GPUs", as_json=as_json)
        say("timing the stored winners again" + ("" if url is None else f", storing in {url}"), as_json=as_json)
        try:
            with shown(as_json=as_json) as progress:
                return verify(spec, opened, progress), url
        except KeyboardInterrupt:
            say("stopped" + ("" if url is None else "; what was measured is stored"), as_json=as_json)
            raise typer.Exit(1) from None


def _report(outcome: VerifyOutcome, url: str | None) -> None:
    here = outcome.environment
    where = f"{outcome.world_size} ranks" + ("" if here is None else f" on {here}")
    if not outcome.results:
        emit(f"no winner is stored for {where}; `tunedcomm tune` finds some, `tunedcomm db list` prints what there is")
        return
    table_of(_COLUMNS, outcome.results, title=where)
    if here is not None:
        changes = sorted({change for result in outcome.results for change in here.drift(result.winner.environment)})
        if changes:
            emit(f"since they were measured: {', '.join(changes)}")
    for result in outcome.results:
        if result.verdict != "ok":
            emit(f"{result.verdict}: {result.winner.problem}: {result.winner.candidate}: {result.why}")
        if result.faster is not None:
            now = f"{format_us(result.faster_us)} µs against {format_us(result.latency_us)} µs"
            emit(f"overtaken: {result.winner.problem}: {result.faster} is faster now, {now}")
    stored = "nothing was stored" if url is None else f"stored in {url} (run {outcome.run_id})"
    emit(
        f"{len(outcome.wrong)} of {len(outcome.results)} winners do not hold any more; {outcome.num_trials} trials in "
        f"{outcome.seconds:.0f} s, {stored}"
    )


def _asked(policies: Sequence[str]) -> str:
    return "" if "default" in policies else f" [numerics={policies[0]}]"


def _to_dict(outcome: VerifyOutcome, url: str | None) -> dict[str, Any]:
    """As JSON has it."""
    here = outcome.environment
    winners = []
    for result in outcome.results:
        then = result.winner
        winners.append(
            {
                "problem": then.problem,
                "variant": then.candidate.variant,
                "config": then.candidate.config_dict,
                **attributes(then, "policies layer"),
                **attributes(result, "verdict why"),
                "stored": {
                    **attributes(then, "latency_us library_us noise measured_us uncertainty created_at"),
                    "environment": then.environment.digest,
                    "changes": [] if here is None else here.drift(then.environment),
                },
                "measured": attributes(result, "latency_us library_us noise"),
                "faster": result.faster,
                "faster_us": result.faster_us,
            }
        )
    names = "run_id environment world_size num_trials num_gangs seconds"
    return {"database": url, **attributes(outcome, names), "num_wrong": len(outcome.wrong), "winners": winners}
