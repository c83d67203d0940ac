"""Verbs of `tunedcomm db`: look into databases, keep them in order, carry rows between them and compare them."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from tunedcomm.cli.options import (
    DatabaseOption,
    EverywhereOption,
    HardwareOption,
    JsonOption,
    ProblemOptions,
    StoredOptions,
    WrittenOption,
    bad_usage,
    changed_options,
    complete_variant,
    split,
    takes,
)
from tunedcomm.cli.output import (
    Line,
    Table,
    attributes,
    checkup,
    counted,
    format_ratio,
    jsonable,
    named,
    named_candidate,
    note,
    problem_columns,
    show,
    title_of,
)
from tunedcomm.cli.progress import Now
from tunedcomm.cli.stored import (
    Contest,
    check_named,
    database_name,
    environment_for,
    named_environments,
    on_hardware,
    open_to_write,
    pin_tables,
    pin_to_dict,
    read_contests,
    read_each,
    read_layers,
    stored_environments,
    wanted_hardware,
    with_every_layer,
)
from tunedcomm.errors import ConfigError
from tunedcomm.metrics import format_bytes, format_us, plural
from tunedcomm.spec import Candidate, Mode, Problem, admits, check_candidate, format_shape, get_variant

if TYPE_CHECKING:
    from tunedcomm.db.diff import Change, Comparison, Difference
    from tunedcomm.db.layers import Layer
    from tunedcomm.db.maintenance import DatabaseStats, GroupStats, Pruned
    from tunedcomm.db.records import Pin, Trial
    from tunedcomm.db.transfer import Export, Transfer
    from tunedcomm.hardware import Environment
    from tunedcomm.spec import Limits, Variant


_LIST_COLUMNS: dict[str, Callable[[Contest], object]] = {
    **problem_columns("shape bytes dtype ranks mode input", attrgetter("problem")),
    "winner": lambda one: "(unknown op)" if one.winner is None else one.winner.candidate,
    "p50 µs": lambda one: format_us(None if one.winner is None else one.winner.latency_us),
    "library µs": lambda one: format_us(None if one.winner is None else one.winner.library_us),
    "speed-up": lambda one: "-" if one.winner is None else format_ratio(one.winner.library_us, one.winner.latency_us),
    "trials": lambda one: len(one.trials),
}


_NOTHING = "no trials of this hardware are stored; `tunedcomm tune` makes some, --all prints other hardware's"


def _made_by(contest: Contest) -> str:
    return "autotune" if contest.command.startswith("tunedcomm.autotune(") else ""


@takes(StoredOptions)
def db_list(options: StoredOptions) -> None:
    """List this machine's problems with what dispatch answers by each database alone, and pins.

    Example: tunedcomm db list --op all_reduce --hardware H200
    """
    is_wanted = wanted_hardware(options.hardware, everything=options.everything or options.db is not None)
    found, pins = read_contests(options.db, is_wanted, op=options.op, with_winners=True)
    headings: dict[str, list[Contest]] = {}
    for contest in found:
        if contest.trials:
            where = database_name(contest.layer, options.db)
            heading = f"{contest.problem.op} on {named(contest.environment)} in the {where}"
            headings.setdefault(heading, []).append(contest)
    if not found:
        check_named(options.op, options.hardware, options.db)
    text: list[str | Table] = [] if found else [_NOTHING]
    for heading, members in headings.items():
        by: dict[str, Callable[[Contest], object]] = {"by": _made_by} if any(map(_made_by, members)) else {}
        title = title_of(heading, (contest.problem for contest in members))
        text.append(Table.of(_LIST_COLUMNS | by, members, title))
    text += pin_tables(pins, options.db)
    show([_contest_to_dict(contest) for contest in found], text, as_json=options.as_json)


def _contest_to_dict(contest: Contest) -> dict[str, Any]:
    winner, won = contest.winner, None
    if winner is not None:
        won = named_candidate(winner.candidate) | {"latency_p50_us": winner.latency_us}
        won |= attributes(winner, "library_us trial_id")
    return {
        **attributes(contest, "layer environment problem"),
        "trials": len(contest.trials),
        "winner": won,
        "pin": None if contest.pin is None else pin_to_dict(contest.pin),
    }


_SHOW_COLUMNS: dict[str, Callable[[Trial], object]] = {
    "trial": lambda trial: "-" if trial.id is None else trial.id,
    "status": lambda trial: trial.status + (" (final)" if trial.final else ""),
    "candidate": lambda trial: trial.candidate,
    "p10 µs": lambda trial: format_us(trial.latency_p10_us),
    "p50 µs": lambda trial: format_us(trial.latency_p50_us),
    "p90 µs": lambda trial: format_us(trial.latency_p90_us),
    "library µs": lambda trial: format_us(trial.library_us),
    "speed-up": lambda trial: format_ratio(trial.library_us, trial.latency_p50_us),
    "error": lambda trial: "-" if trial.error is None else f"{trial.error:.1e}",
    "reason": lambda trial: trial.reason,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownOptions(ProblemOptions):
    mode: Annotated[Mode | None, typer.Option(help="Inside CUDA graphs or not; by default either.")] = None


@takes(_ShownOptions)
def db_show(
    options: _ShownOptions,
    *,
    hardware: HardwareOption = None,
    everything: EverywhereOption = False,
    limit: Annotated[int, typer.Option(min=1, help="Most trials to print for one environment.")] = 50,
    db: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print this machine's trials of one problem, fastest first, and its pins. Exit code 1 if there is no trial.

    Example: tunedcomm db show --op all_reduce --shape 131072 --world-size 4 --hardware H200
    """
    op, problem = options.op, options.problem()
    wanted = {problem} if options.mode is not None else {replace(problem, mode="graph"), replace(problem, mode="eager")}
    is_everything = everything or db is not None
    stored, pins = read_contests(db, wanted_hardware(hardware, everything=is_everything), op=op)
    stored = [contest for contest in stored if contest.trials]
    found = [contest for contest in stored if contest.problem in wanted]
    trials = [_trial_to_dict(contest.layer, trial) for contest in found for trial in _by_speed(contest)]
    show(trials, _shown(found, limit, pins, wanted, db), as_json=as_json)
    if not found:
        hint = _hint(wanted, stored)
        where = "" if is_everything or hardware else " for this machine"
        more = ", --all other hardware's" if where else ""
        note(f"no trial of {_in_words(wanted)} is stored{where}{hint}; `tunedcomm db list` prints what is{more}")
        raise typer.Exit(1)


def _shown(
    found: Sequence[Contest], limit: int, pins: Mapping[str, Sequence[Pin]], wanted: set[Problem], database: str | None
) -> Iterator[str | Table]:
    for contest in found:
        where = database_name(contest.layer, database)
        title = f"{contest.problem} on {named(contest.environment)} in the {where}"
        title = title_of(title, [contest.problem])
        yield Table.of(_SHOW_COLUMNS, _by_speed(contest)[:limit], title)
        if (more := len(contest.trials) - limit) > 0:
            note(f"{plural(more, 'more trial')}; --limit {len(contest.trials)} prints them all")
    wanted_pins = {layer: [pin for pin in members if pin.problem in wanted] for layer, members in pins.items()}
    yield from pin_tables(wanted_pins, database)


def _in_words(wanted: set[Problem]) -> str:
    """One problem, or one that was asked for in either mode."""
    first = min(wanted)
    return str(first) if len(wanted) == 1 else str(first).replace(f" {first.mode}", " in either mode", 1)


def _hint(wanted: set[Problem], stored: Sequence[Contest]) -> str:
    """The options under which this very shape is stored, else the nearest shapes that are."""
    problem = min(wanted)
    if same := [contest for contest in stored if contest.problem.shape == problem.shape]:
        nearest = same[0].layer
        ways = {_change_to(contest.problem, wanted) for contest in same if contest.layer == nearest}
        fewest = sorted(ways, key=lambda way: (way.count("--"), way))[:3]
        return f"; {format_shape(problem.shape)} is stored in the {nearest} database: {' or '.join(fewest)}"
    families = {one.family for one in wanted}
    others = {contest.problem for contest in stored if contest.problem.family in families}
    by_distance = sorted(others, key=lambda one: (abs(math.log((one.numel + 1) / (problem.numel + 1))), one))
    near = list(dict.fromkeys(format_shape(other.shape) for other in by_distance))[:3]
    return f"; the nearest shapes stored are {', '.join(near)}" if near else ""


def _change_to(other: Problem, wanted: set[Problem]) -> str:
    """The options to change in a command so that it asks for the other problem."""
    problem = next((one for one in wanted if one.mode == other.mode), min(wanted))
    changed = changed_options(problem, other)
    leave = problem.in_place and not other.in_place
    return " and ".join([f"pass {' '.join(changed)}"] * bool(changed) + ["leave out --in-place"] * leave)


def _by_speed(contest: Contest) -> list[Trial]:
    """Ok trials by their median, then the others by status."""
    return sorted(contest.trials, key=lambda t: (t.status != "ok", t.status, t.latency_p50_us or 0.0, t.id or 0))


def _trial_to_dict(layer: str, trial: Trial) -> dict[str, Any]:
    names = (
        "problem variant config numerics source_hash status reason final latency_p10_us latency_p50_us latency_p90_us "
        "samples baseline_p50_us error run_id created_at"
    )
    there = trial.environment
    head = {"layer": layer, "trial_id": trial.id, "environment": there.digest, "gpu": there.gpu}
    return {**head, **attributes(trial, names)}


@takes(ProblemOptions)
def db_pin(
    options: ProblemOptions,
    *,
    variant: Annotated[str, typer.Option(help="Variant to run.", autocompletion=complete_variant)],
    reason: Annotated[str, typer.Option(help="Why, for whoever finds the pin later.")],
    config: Annotated[
        list[str] | None, typer.Option(help="As num_blocks=8,num_warps=4; by default the variant's for this problem.")
    ] = None,
    hardware: HardwareOption = None,
    db: WrittenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have dispatch run one variant for one problem on this hardware. It replaces an earlier pin.

    Groups created from now on use it. `tunedcomm explain` names the pin and its reason. A candidate that failed its
    check, crashed or hung there is refused, and an earlier pin of one is ignored.

    Example: tunedcomm db pin --op all_reduce --shape 98304 --world-size 4 --variant library --reason "until ticket 12"
    """
    if not reason.strip():
        raise bad_usage("--reason", "say why, for whoever finds the pin later")
    chosen = get_variant(options.problem().op, variant)
    from tunedcomm.symm.layout import limits_for

    layers = with_every_layer(db)
    environment = environment_for(hardware, layers)
    problem = options.problem_in(environment)
    limits = limits_for(environment, problem.world_size)
    parts = split(config)
    values = parse_config(parts, chosen) if parts else chosen.default_config(problem, limits)
    candidate = Candidate.of(problem.op, variant, chosen.space.validate(values))
    infeasible = None if chosen.is_library else check_candidate(problem, candidate, limits, by_name=False)
    if infeasible is not None:
        why = f"{candidate} cannot run {problem} there: {infeasible}; pin another one, `tunedcomm explain` lists them"
        raise bad_usage("--variant", why)
    _check_measured(problem, candidate, environment, limits, layers)
    if not admits("default", chosen.numerics):
        note(f"{variant} is {chosen.numerics}: only calls with numerics='any' run it, others go on as before")
    with open_to_write(db, create=db is None) as (opened, where):
        id_ = opened.pin(problem, candidate, environment=environment, reason=reason.strip())
        (pin,) = [pin for pin in opened.pins() if pin.id == id_]
    pinned = f"{problem} runs {candidate} on {environment}: pinned in {where}"
    show({"database": where, **pin_to_dict(pin)}, [pinned], as_json=as_json)


def _check_measured(
    problem: Problem, candidate: Candidate, environment: Environment, limits: Limits, layers: Sequence[Layer]
) -> None:
    """Refuse what dispatch would not run though it were pinned, and say if nothing is known of it."""
    from tunedcomm.db.layers import load_snapshot
    from tunedcomm.dispatch.decide import decide
    from tunedcomm.selection.snapshot import Pinned

    snapshot = load_snapshot(environment, problem.world_size, layers=layers, like=problem)
    pin = Pinned(problem=problem, candidate=candidate, reason="", layer="")
    decision = decide(problem, replace(snapshot, pins=(pin,)), limits, policy="any")
    if decision.source != "pin":
        reason = dict(decision.passed_over)[str(candidate)].removeprefix("pinned, but ")
        raise bad_usage(
            "--variant", f"{candidate} {reason}; fix it and have `tunedcomm tune --retry` measure it, or pin another"
        )
    if candidate.variant != "library" and decision.latency_us is None:
        note(f"no good trial of {candidate} is stored for this problem: it runs unchecked; `tunedcomm tune` checks it")


def parse_config(parts: list[str], variant: Variant) -> dict[str, Any]:
    """Read `num_blocks=8` and so on; a value that its axis does not have stays for the space to refuse."""
    axes = dict(variant.space.axes)
    values: dict[str, Any] = {}
    for part in parts:
        name, separator, text = (piece.strip() for piece in part.partition("="))
        if not separator or name in values:
            wrong = "is given twice" if name in values else "is not of the form AXIS=VALUE"
            raise ConfigError(f"config {part!r} {wrong}; e.g. --config num_blocks=8,num_warps=4")
        known = {str(value).lower(): value for value in axes[name].values()} if name in axes else {}
        values[name] = known.get(text.lower(), int(text) if text.isdecimal() else text)
    return values


@takes(ProblemOptions)
def db_unpin(
    options: ProblemOptions, *, hardware: HardwareOption = None, db: WrittenOption = None, as_json: JsonOption = False
) -> None:
    """Remove the pin of one problem on this hardware. Exit code 1 if there is none.

    Example: tunedcomm db unpin --op all_reduce --shape 98304 --world-size 4
    """
    environment = environment_for(hardware, with_every_layer(db))
    problem = options.problem_in(environment)
    with open_to_write(db) as (opened, where):
        removed = opened.unpin(problem, environment=environment)
    gone = [f"{problem} is not pinned any more on {environment} in {where}"] if removed else []
    found = {"database": where, "problem": problem, "removed": removed, "still_pinned_in": []}
    show(found, gone, as_json=as_json)
    if not removed:
        note(f"no pin of {problem} on {environment} is in {where}; `tunedcomm db list` prints the pins of every layer")
        raise typer.Exit(1)


_STATS_COLUMNS: dict[str, Callable[[GroupStats], object]] = {
    "ranks": lambda group: group.world_size,
    "dtype": lambda group: group.dtype,
    "mode": lambda group: group.mode,
    "problems": lambda group: group.problems,
    "trials": lambda group: group.num_tried,
    "finals": lambda group: group.finals,
    "ok": lambda group: group.trials.get("ok", 0),
    "not ok": lambda group: counted({status: n for status, n in sorted(group.trials.items()) if status != "ok"}) or "-",
    "winners": lambda group: counted(dict(group.winners.most_common())) or "-",
    "library wins": lambda group: "-" if group.library_share is None else f"{group.library_share:.0%}",
    "speed-up": lambda group: "-" if group.speedup is None else f"{group.speedup:.2f}x",
    "stale": lambda group: group.stale,
    "newest": lambda group: format_age(group.newest),
}


@takes(StoredOptions)
def db_stats(options: StoredOptions) -> None:
    """Sum up this machine's trials by environment, op, world size, dtype and mode.

    `winners` counts the problems that each variant wins under the default numerics policy; `speed-up` is the geometric
    mean over the problems of the library's latency over the winner's; `stale` counts trials of kernels that have
    changed since.

    Example: tunedcomm db stats --db cluster.db
    """
    from tunedcomm import kernels
    from tunedcomm.db.maintenance import collect_stats

    kernels.discover()
    is_wanted = wanted_hardware(options.hardware, everything=options.everything or options.db is not None)
    value, text = list[dict[str, Any]](), list[str | Table]()
    read = partial(collect_stats, source_hash=kernels.source_hash_of)
    for layer, stats in read_each(read_layers(options.db), read, is_strict=options.db is not None):
        groups = on_hardware(is_wanted, [group for group in stats.groups if options.op in (None, group.op)])
        plain = [{**jsonable(group), "library_share": group.library_share} for group in groups]
        head = {"layer": layer.name, "database": stats.target, **attributes(stats, "num_bytes schema rows")}
        value.append({**head, "groups": plain})
        text += _stats_text(database_name(layer.name, options.db), replace(stats, groups=tuple(groups)))
    if not any(one["groups"] for one in value):
        check_named(options.op, options.hardware, options.db)
    show(value, text or ["no database is there; `tunedcomm tune --op all_reduce` makes one"], as_json=options.as_json)


def _stats_text(name: str, stats: DatabaseStats) -> Iterator[str | Table]:
    size = "" if stats.num_bytes is None else f"{format_bytes(stats.num_bytes)}, "
    held = ", ".join(plural(stats.rows[f"{noun}s"], noun) for noun in ("problem", "environment", "run", "pin"))
    trials = plural(stats.num_tried, "trial")
    yield f"{name} {stats.target}: {size}schema {stats.schema}, {trials}, {held}"
    titles: dict[str, list[GroupStats]] = {}
    for group in stats.groups:
        there = group.environment
        software = f"torch {there.torch}, triton {there.triton}" + (f", driver {there.driver}" if there.driver else "")
        sample = [Problem(group.op, (), group.dtype, group.world_size)]
        titles.setdefault(title_of(f"{group.op} on {named(there)}, {software}", sample), []).append(group)
    for title, groups in titles.items():
        yield Table.of(_STATS_COLUMNS, groups, title)
    if unknown := sum(group.unknown for group in stats.groups):
        yield f"of variants that this tunedcomm does not have: {plural(unknown, 'trial')}"


def format_age(then: datetime | None) -> str:
    """`3 d ago`, in the largest unit of which one has passed; `-` where there is no time."""
    if then is None:
        return "-"
    seconds = max(0.0, (datetime.now(timezone.utc) - then).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


def db_check(*, db: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Check a file, its schema and all its rows. Exit code 1 if something is not sound.

    Each finding is ok, warn (it works, but you should know) or fail, with what to do. Nothing is changed.

    Example: tunedcomm db check --db cluster.db
    """
    from tunedcomm import kernels
    from tunedcomm.db.maintenance import check_database
    from tunedcomm.db.targets import parse_target

    kernels.discover()
    found, text, is_sound = list[dict[str, Any]](), list[str | Table](), True
    for layer in read_layers(db):
        database, findings = str(parse_target(layer.target)), check_database(layer.target, kernels.source_hash_of)
        found.append({"layer": layer.name, "database": database, "findings": findings})
        text += [
            f"{database_name(layer.name, db)} {database}",
            checkup(Line(*astuple(finding)) for finding in findings),
        ]
        is_sound = is_sound and all(finding.level != "fail" for finding in findings)
    show(found, text, as_json=as_json)
    if not is_sound:
        raise typer.Exit(1)


_AGE = re.compile(r"(\d{1,7})\s*([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 168}
# A longer time ago no calendar reaches.
_MAX_HOURS = 1000 * 365 * 24


def parse_age(text: str) -> timedelta:
    """Read `36h`, `90d`, `12w`."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None or (hours := int(match[1]) * _HOURS[match[2]]) > _MAX_HOURS:
        raise bad_usage("--older-than", f"{text!r} is not an age such as 36h, 90d or 12w, at most 1000 years")
    return timedelta(hours=hours)


def db_prune(
    *,
    stale: Annotated[bool, typer.Option("--stale", help="Trials of kernels that have changed since.")] = False,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Trials that neither dispatch nor explain needs.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Candidates that failed, to try them again.")] = False,
    invalid: Annotated[bool, typer.Option("--invalid", help="Trials that `db check` reports as invalid.")] = False,
    environment: Annotated[
        str | None, typer.Option(help="Trials of this hardware: part of the GPU's name, or of an environment's digest.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="Trials stored longer ago than, e.g., 36h, 90d, 12w.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only counted.")] = False,
    db: WrittenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the trials that all given options select. With --yes, remove them.

    Rows that nothing else refers to are removed too, and the file is compacted. Pins are kept. A later `tunedcomm tune`
    of the same problems measures again what was removed. --failed also removes good trials of the same candidate, which
    its failures keep from being used, and keeps failures that hide good trials of another database.

    Example: tunedcomm db prune --superseded --older-than 30d --yes
    """
    from tunedcomm import kernels
    from tunedcomm.db.layers import layers_beside, writable_database
    from tunedcomm.db.maintenance import Selection, prune
    from tunedcomm.db.store import Database

    kernels.discover()
    if not any((stale, superseded, failed, invalid, environment, older_than)):
        raise typer.BadParameter(
            "say which trials: --stale, --superseded, --failed, --invalid, --environment or --older-than, or several"
        )
    before = None if older_than is None else datetime.now(timezone.utc) - parse_age(older_than)
    with Database.open(writable_database(db), readonly=not yes) as opened:
        matching = [] if environment is None else named_environments("environment", environment, opened.environments())
        selection = Selection(
            stale=stale,
            superseded=superseded,
            failed=failed,
            invalid=invalid,
            environments=tuple(there.digest for there in matching),
            before=before,
        )
        elsewhere = layers_beside(db) if failed else []
        done = prune(opened, selection, kernels.source_hash_of, dry_run=not yes, elsewhere=elsewhere)
    show({**asdict(done), "trials": done.trials}, _pruned_text(done), as_json=as_json)


def _pruned_text(done: Pruned) -> Iterator[str | Table]:
    if done.groups:
        names = ("environment", "gpu", "op", "variant", "status", "trials", "finals")
        yield Table(names, [(str(g["environment"])[:8], *(g[name] for name in names[1:])) for g in done.groups])
    unused = ", ".join(plural(count, name) for name, count in done.unused.items())
    also = f", with {unused} that nothing else refers to" if unused else ""
    if done.along:
        note(f"good trials among them, of candidates that failed since or at another size: {done.along}")
    if done.kept:
        note(
            f"failures kept, because they keep good trials of other databases from being used: {done.kept}; "
            "`tunedcomm tune --retry` tries those candidates again"
        )
    what = f"{done.trials} of {plural(done.held, 'trial')}{also}"
    yield f"{'would be removed' if done.dry_run else 'removed'} from {done.target}: {what}"
    if done.dry_run and (done.trials or done.unused):
        note("nothing was removed; the same command with --yes does it")
    if done.bytes_before is not None and done.bytes_after is not None:
        yield f"{format_bytes(done.bytes_before)} before, {format_bytes(done.bytes_after)} now"
        if not done.compacted:
            note("the file was not compacted, for another process uses it or the disk is full; prune it again later")


def db_upgrade(
    *,
    db: WrittenOption = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 if an upgrade is due.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upgrade a database of an older tunedcomm, all or nothing. A file is first copied to NAME.bak-REVISION.

    Example: tunedcomm db upgrade --db cluster.db
    """
    from tunedcomm.db.engine import upgrade_database
    from tunedcomm.db.layers import writable_database

    done = upgrade_database(writable_database(db), check=check)
    text = [f"{done.target} was upgraded from schema {done.before} to {done.after}"]
    text += [f"as it was: {done.copy}" if done.copy else "no copy was made: of a server, make dumps with its own tools"]
    if not done.is_needed:
        text = [f"{done.target} has schema {done.after} already"]
    elif check:
        mend = f"`tunedcomm db upgrade --db {done.target}` makes it {done.after}"
        text = [f"{done.target} has schema {done.before}; {mend}"]
    show({**asdict(done), "is_needed": done.is_needed}, text, as_json=as_json)
    if check and done.is_needed:
        raise typer.Exit(1)


FileFormat: TypeAlias = Literal["sqlite", "jsonl"]
_KINDS = {
    "winner": "another winner",
    "latency": "the same winner, another latency",
    "only before": "only in A",
    "only after": "only in B",
}


def db_export(
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="[OUT]",
            help="File to write; - for stdout, except for SQLite. With --cluster the folder, by default this one.",
            show_default=False,
        ),
    ] = None,
    *,
    db: Annotated[
        list[str] | None, typer.Option(help="Databases to read, merged if several; by default the user's.")
    ] = None,
    form: Annotated[
        FileFormat, typer.Option("--format", help="sqlite for dispatch, jsonl for other programs.")
    ] = "sqlite",
    everything: Annotated[
        bool, typer.Option("--all", help="All rows, not only what dispatch and explain need.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write NAME.db and print the setting that its users need.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT if it was exported, or holds nothing else.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export the rows that dispatch and explain need to one file.

    A manifest is written beside it.

    Example: tunedcomm db export --db tuned.db --db other-node.db cluster.db
    """
    from tunedcomm.db.layers import user_database
    from tunedcomm.db.transfer import export_database, path_setting

    path = _file_named(out, form, as_json=as_json) if cluster is None else _cluster_file(cluster, out, form)
    into = sys.stdout if path is None else path
    export = export_database(db or [user_database()], into, form=form, everything=everything, force=force)
    setting = None if cluster is None or export.path is None else path_setting(export.path)
    value = {
        "path": str(export.path),
        "format": export.form,
        **attributes(export, "sha256 num_bytes manifest rows left_out"),
        "skipped": export.skipped.count,
        "sources": export.sources,
        "setting": setting,
    }
    show(value, _export_text(export, setting), as_json=as_json)


def _export_text(export: Export, setting: str | None) -> Iterator[str | Table]:
    if export.skipped.count:
        first = f"the first: {export.skipped.first}; `tunedcomm db check` lists them"
        note(f"left out {plural(export.skipped.count, 'invalid row')}, {first}")
    if export.path is None:  # the rows are on stdout: whoever pipes or compares them wants nothing else there
        return
    read, known = (sum(getattr(source, name) for source in export.sources) for name in ("trials", "known"))
    yield Table(("table", "rows"), [(name, count) for name, count in export.rows.items() if count])
    twice = f", {known} of them in an earlier one too" if known else ""
    databases = plural(len(export.sources), "database")
    yield f"{plural(read, 'trial')} in {databases}{twice}; {export.left_out} left out as not needed"
    yield f"{export.path}: {format_bytes(export.num_bytes)}, SHA-256 {export.sha256}"
    if setting is not None:
        yield f"export {setting}"


def _file_named(out: str | None, form: FileFormat, *, as_json: bool) -> Path | None:
    """The file to write, or None for stdout."""
    if out is None:
        raise bad_usage("OUT", "name the file to write, or a cluster with --cluster")
    if out != "-":
        return Path(out)
    if form == "sqlite":
        raise bad_usage("OUT", "a SQLite file cannot go to stdout; name a file, or another --format")
    if as_json:
        raise bad_usage("--json", "stdout takes the rows or the JSON, not both; name a file")
    return None


def _cluster_file(cluster: str, out: str | None, form: FileFormat) -> Path:
    from tunedcomm.db.transfer import cluster_file

    if form != "sqlite":
        raise bad_usage("--format", "dispatch reads SQLite files only")
    folder = Path(out or ".").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"the folder {folder} cannot be made: {error.strerror}; with --cluster the file is named for you"
        raise bad_usage("OUT", why) from None
    try:
        return cluster_file(cluster, folder)
    except ValueError as error:
        raise bad_usage("--cluster", str(error)) from None


def db_compile(
    *,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="File or URL of a cluster's database; by default every layer.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="SM", help="GPUs to compile for, e.g. sm_90; by default all in the databases.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the winners' binaries into Triton's cache, which TRITON_CACHE_DIR names; needs no GPU.

    A start that finds them there compiles nothing but C launchers, which Triton 3.6 builds for each kernel. Exit code
    1: a kernel did not compile, or the databases hold no winners for the GPUs.

    Example: TRITON_CACHE_DIR=/shared/tunedcomm/triton tunedcomm db compile --cluster /shared/tunedcomm/h200-prod.db
    """
    from tunedcomm.kernels.common import binaries
    from tunedcomm.tuner.binaries import compile_winners

    capability = None if target is None else re.fullmatch(r"(?:sm_?)?(\d{2,3})a?", target)
    if target is not None and capability is None:
        raise bad_usage("--target", f"{target!r} is not a GPU generation such as sm_90")

    layers, now = read_layers(cluster), Now()
    try:
        done = compile_winners(layers, int(capability[1]) if capability else None, now.show)
    except OSError as error:
        raise bad_usage("TRITON_CACHE_DIR", f"{error}; name a directory that can be written") from None
    finally:
        now.show("")
    folder = str(binaries.folder())
    text = [
        f"sm_{one.compute_capability}: {one.num_binaries - len(one.errors)} of {one.num_binaries} binaries "
        f"of {plural(one.num_winners, 'winner')}"
        for one in done
    ]
    for said in [said for one in done for said in one.errors]:
        note(said)
    if done:
        text.append(f"export TRITON_CACHE_DIR={folder}")
    else:
        stored = {there.compute_capability for there in stored_environments(layers, is_quiet=True) if not there.is_host}
        known = ", ".join(f"sm_{one}" for one in sorted(stored)) or "none"
        text = [f"no winners for {target or 'GPUs'} are stored; GPUs in the databases: {known}"]
    show({"folder": folder, "targets": done}, text, as_json=as_json)
    if not done or any(one.errors for one in done):
        raise typer.Exit(1)


def db_import(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Files of JSON lines, SQLite files or URLs.")],
    *,
    db: WrittenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add trials and pins of other files to a database. All of them, each once, or none.

    Every value is checked, and a manifest beside a file is compared with it.

    Example: tunedcomm db import from-a-colleague.jsonl --db tuned.db
    """
    from tunedcomm.db.layers import writable_database
    from tunedcomm.db.transfer import import_databases

    done = import_databases(sources, writable_database(db))
    show(_transfer_to_dict(done), _transfer_text(done), as_json=as_json)


def _transfer_text(done: Transfer) -> Iterator[str | Table]:
    """A table of the sources, and the sum of them."""
    verified = {True: "as its manifest says", False: "-"}
    rows = [(s.source, s.trials, s.known, verified[s.source in done.verified]) for s in done.sources]
    yield Table(("source", "trials", "in an earlier one", "manifest"), rows)
    known = sum(s.trials - s.known for s in done.sources) - done.added
    yield f"{plural(done.added, 'trial')} added to {done.target}, which had {known} of them"


def _transfer_to_dict(done: Transfer) -> dict[str, Any]:
    sources = [{**attributes(s, "source trials known"), "verified": s.source in done.verified} for s in done.sources]
    return {**attributes(done, "target added"), "sources": sources}


def db_merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="Files or URLs; a directory stands for its *.db files.")
    ],
    *,
    into: Annotated[str, typer.Option(metavar="TARGET", help="File or URL that takes all.")],
    as_json: JsonOption = False,
) -> None:
    """Add all rows of databases to another one. It is created if needed; no row is lost or added twice.

    Rows of different environments are never compared: each keeps its own. The output says for how many problems of each
    environment the choice has changed.

    Example: tunedcomm db merge per-host/ --into cluster.db
    """
    from tunedcomm.db.transfer import merge_databases

    done = merge_databases(sources, into)
    # Counts by the names that JSON has for them; the table shows the first three.
    kinds = {"new": "only after", "winner_changed": "winner", "latency_changed": "latency", "gone": "only before"}
    environments: list[dict[str, Any]] = []
    for comparison in done.comparisons:
        found = Counter[str](change.kind for change in comparison.changes)
        head = {"environment": comparison.after, **attributes(comparison, "world_size problems")}
        environments.append({**head, **{name: found[kind] for name, kind in kinds.items()}})
    names = ("environment", "ranks", "problems", "new", "another winner", "another latency")
    rows = [(named(each["environment"]), *list(each.values())[1:6]) for each in environments]
    text = [*_transfer_text(done), "The database now answers:", Table(names, rows)]
    show({**_transfer_to_dict(done), "environments": environments}, text, as_json=as_json)


def db_diff(
    before: Annotated[str, typer.Argument(metavar="A", help="File or URL: the older one.", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help="File or URL: the newer one.", show_default=False)],
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most problems to print of each kind.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Print where two databases differ. Exit code 1 if answers or pins differ, 0 if at most other rows do.

    Answers are compared as dispatch would choose if all kernels could run and were current. Latencies differ if they
    are further apart than the noise of both measurements.

    Example: tunedcomm db diff before.db after.db
    """
    from tunedcomm.db.diff import diff_databases

    found = diff_databases(before, after)
    show(_difference_to_dict(found), _difference_text(found, limit), as_json=as_json)
    raise typer.Exit(0 if found.answers_alike else 1)


def _difference_text(found: Difference, limit: int) -> Iterator[str | Table]:
    for index, (letter, name) in enumerate((("A", found.before), ("B", found.after))):
        held, only = found.trials[index], found.trials_only[index]
        yield f"{letter}: {name}, schema {found.schemas[index]}, {plural(held, 'trial')}, {only} of them in it alone"
    if found.is_empty:
        yield "no difference"
        return
    for letter, environments in zip("AB", found.environments_only, strict=True):
        for environment in environments:
            yield f"measured only in {letter}: {named(environment)}"
    for (op, variant), one in found.retired.items():
        what = f"its source changed, {one.before} -> {one.after}, which retires {plural(one.finals, 'final')} of A"
        if one.before is None or one.after is None:
            what = f"only {'A' if one.after is None else 'B'} knows it"
        yield f"{op} {variant}: {what}"
    for (problem, environment), pins in found.pins.items():
        was, now = ("none" if pin is None else f"{pin[0]} ({pin[1]})" for pin in pins)
        yield f"pin of {problem} on {named(environment)}: {was} -> {now}"
    for comparison in found.comparisons:
        yield from _comparison_text(comparison, limit)


def _comparison_text(comparison: Comparison, limit: int) -> Iterator[str | Table]:
    drift = f"; software: {', '.join(comparison.drift)}" if comparison.drift else ""
    changed = f"{len(comparison.changes)} of {plural(comparison.problems, 'problem')} differ"
    yield ""
    yield f"{named(comparison.after)}, {comparison.world_size} ranks: {changed}{drift}"
    for kind, title in _KINDS.items():
        rows = [_change_cells(change) for change in comparison.changes if change.kind == kind]
        if rows:
            yield f"{title}: {len(rows)}"
            yield Table(("problem", "A", "µs", "B", "µs", "B is"), rows[:limit])
        if len(rows) > limit:
            yield f"... and {len(rows) - limit} more; --limit {len(rows)} prints them all"


def _change_cells(change: Change) -> tuple[object, ...]:
    """The problem, what each database answers, and in words how much faster or slower B is."""
    answers = (change.before, change.after)
    cells = [cell for a in answers for cell in (("-", "-") if a is None else (a.candidate, format_us(a.latency_us)))]
    ratio, text = change.ratio, "-"
    if ratio is not None:
        text = f"{ratio:.2f}x as fast" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
    return (change.problem, *cells, text)


def _difference_to_dict(found: Difference) -> dict[str, Any]:
    sides = {
        side: {
            "database": getattr(found, side),
            "schema": found.schemas[index],
            **{name: getattr(found, name)[index] for name in ("trials", "trials_only", "environments_only")},
        }
        for index, side in enumerate(("before", "after"))
    }
    pins = [
        {"problem": problem, "environment": environment, "before": _pinned_in(before), "after": _pinned_in(after)}
        for (problem, environment), (before, after) in found.pins.items()
    ]
    comparisons = [
        {
            "environments": attributes(comparison, "before after"),
            **attributes(comparison, "drift world_size problems"),
            "changes": [attributes(change, "kind problem before after ratio") for change in comparison.changes],
        }
        for comparison in found.comparisons
    ]
    sources = [
        {"op": op, "variant": variant, **attributes(one, "before after"), "retired_finals": one.finals}
        for (op, variant), one in found.retired.items()
    ]
    return {"differ": not found.answers_alike, **sides, "sources": sources, "pins": pins, "comparisons": comparisons}


def _pinned_in(pin: tuple[Candidate, str] | None) -> dict[str, Any] | None:
    return None if pin is None else named_candidate(pin[0]) | {"reason": pin[1]}
