"""Databases as verbs read them: their layers, environments, trials and pins, and which trial of a problem won."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from tunedcomm.cli.options import known_op
from tunedcomm.cli.output import Table, attributes, named_candidate, note, problem_columns
from tunedcomm.errors import DatabaseError, UnknownNameError
from tunedcomm.selection.snapshot import matches
from tunedcomm.spec import Problem

if TYPE_CHECKING:
    from tunedcomm.db.layers import Layer
    from tunedcomm.db.maintenance import GroupStats
    from tunedcomm.db.records import Pin, Trial
    from tunedcomm.db.store import Database
    from tunedcomm.hardware import Environment
    from tunedcomm.selection.select import Decision

T = TypeVar("T")
R = TypeVar("R", "Trial", "Pin", "GroupStats")
_PIN_COLUMNS: dict[str, Callable[[Pin], object]] = {
    **problem_columns("shape dtype ranks mode input", attrgetter("problem")),
    "pinned": lambda pin: pin.candidate,
    "reason": lambda pin: pin.reason,
    "by": lambda pin: pin.user or "-",
    "since": lambda pin: pin.created_at.date().isoformat(),
    "on": lambda pin: pin.environment,
}


def read_layers(database: str | None) -> Sequence[Layer]:
    """Every layer that exists, or only the named database."""
    from tunedcomm.db.layers import all_layers, is_absent, named_layers

    if database is not None:
        return named_layers(database)
    return [layer for layer in all_layers() if not is_absent(layer)]


def with_every_layer(database: str | None) -> list[Layer]:
    """Every layer that exists, after the named database."""
    return [*([] if database is None else read_layers(database)), *read_layers(None)]


def database_name(layer: str, database: str | None) -> str:
    """`user database`, or `database` where `--db` names it."""
    return f"{layer} database" if database is None else "database"


@contextmanager
def open_to_write(
    database: str | None, *, create: bool = False, patience_s: float = 0.0
) -> Iterator[tuple[Database, str]]:
    """The named database, else the user database, open for writing, and its name."""
    from tunedcomm.db.layers import writable_database
    from tunedcomm.db.store import Database

    with Database.open(writable_database(database), create=create, patience_s=patience_s) as opened:
        yield opened, str(opened.path or opened.url)


def read_each(
    layers: Iterable[Layer], read: Callable[[Database], T], *, is_strict: bool = False, is_quiet: bool = False
) -> Iterator[tuple[Layer, T]]:
    """The result of `read` for each layer; one that cannot be read is skipped with a note, or raises if `is_strict`."""
    for layer in layers:
        try:
            with layer.open() as opened:
                found = read(opened)
        except DatabaseError as error:
            if is_strict:
                raise
            if not is_quiet:
                note(f"skipped the {layer.name} database: {error}")
            continue
        yield layer, found


def environment_here() -> Environment:
    """This machine's environment: of its first GPU, or of the host backend."""
    import torch

    from tunedcomm.hardware import detect

    return detect(0 if torch.cuda.is_available() else None)


def stored_environments(
    layers: Iterable[Layer], serving: Problem | None = None, *, is_quiet: bool = False
) -> dict[Environment, bool]:
    """Environments of all readable layers, nearest layer first, each once.

    Each with True if something has run there that serves the op and world size of the problem `serving`.
    """

    def read(database: Database) -> tuple[list[Environment], list[Environment]]:
        used = [] if serving is None else database.environments(op=serving.op, world_size=serving.world_size)
        return database.environments(), used

    found: dict[Environment, bool] = {}
    for _, (known, used) in read_each(layers, read, is_quiet=is_quiet):
        for environment in known:
            found[environment] = environment in used or found.get(environment, False)
    return found


def named_environments(option: str, name: str, stored: Collection[Environment]) -> list[Environment]:
    """The stored environments that the value of an option means.

    Raises:
        UnknownNameError: it means none.
    """
    if matching := [there for there in stored if matches(name, there)]:
        return matching
    known = ", ".join(sorted({f"{there.gpu} ({there.digest[:8]})" for there in stored})) or "none"
    raise UnknownNameError(f"no stored environment matches --{option} {name!r}; stored are: {known}")


def check_named(op: str | None, hardware: str | None, database: str | None) -> None:
    """Refuse an op that does not exist, and hardware that no database holds, where nothing was found of them.

    Raises:
        UnknownNameError: the op or the hardware is unknown.
    """
    if op is not None:
        known_op(op)
    if hardware is not None:
        named_environments("hardware", hardware, stored_environments(read_layers(database), is_quiet=True))


def environment_for(hardware: str | None, layers: Sequence[Layer], serving: Problem | None = None) -> Environment:
    """This machine's environment, or the one stored in a layer that `--hardware` means.

    Preferred are environments in which something has run that serves the problem `serving`.
    """
    if hardware is None:
        machine = environment_here()
        if machine.is_host:
            note("no GPU here: answering for the host backend; use --hardware for stored GPU environments")
        return machine
    stored = stored_environments(layers, serving)
    matching = named_environments("hardware", hardware, stored)
    preferred = [there for there in matching if stored[there]] or matching
    if len({there.hard_key for there in preferred}) > 1:
        choices = "; ".join(f"{there.digest[:8]} = {there}" for there in preferred)
        raise UnknownNameError(f"--hardware {hardware!r} matches several environments, give a digest: {choices}")
    return preferred[0]


@dataclass(frozen=True, slots=True)
class Contest:
    """All trials of one problem in one environment in one layer.

    Attributes:
        environment, problem: what they were measured in and for.
        trials: at least one, but for a problem that is pinned only.
        winner: dispatch's answer by this layer alone if nothing is pinned; None of an unknown op or without trials.
        pin: the layer's pin of the problem on this hardware.
        command: what measured the winner; empty where nobody knows.
        layer: name of the layer that holds them.
    """

    environment: Environment
    problem: Problem
    trials: tuple[Trial, ...] = ()
    winner: Decision | None = None
    pin: Pin | None = None
    command: str = ""
    layer: str = ""


def read_contests(
    database: str | None,
    is_wanted: Callable[[Environment], bool],
    *,
    op: str | None = None,
    with_winners: bool = False,
) -> tuple[list[Contest], dict[str, list[Pin]]]:
    """The contests of the named database or of every layer that can be read, and each layer's pins.

    Both of environments that `is_wanted` admits.

    A layer's contests are sorted by GPU, world size, op, dtype, mode and size; problems that are only pinned follow.
    """

    def read(opened: Database) -> tuple[list[Contest], list[Pin]]:
        pins = on_hardware(is_wanted, [pin for pin in opened.pins() if op in (None, pin.problem.op)])
        by_problem = {(pin.environment.hard_key, pin.problem): pin for pin in pins}
        groups: dict[tuple[Environment, Problem], list[Trial]] = {}
        for trial in on_hardware(is_wanted, opened.trials(op=op)):
            groups.setdefault((trial.environment, trial.problem), []).append(trial)
        winners = _winners(opened, groups) if with_winners else {}
        commands: dict[int | None, str] = {run.id: run.command for run in opened.runs()} if with_winners else {}
        contests = []
        for (there, problem), trials in groups.items():
            winner, pin = winners.get((there, problem)), by_problem.get((there.hard_key, problem))
            decided = (trial.run_id for trial in trials if winner is not None and trial.id == winner.trial_id)
            command = commands.get(next(decided, None), "")
            contests.append(Contest(there, problem, tuple(trials), winner, pin, command))
        tried = {(there.hard_key, problem) for there, problem in groups}
        alone = [Contest(pin.environment, pin.problem, pin=pin) for key, pin in by_problem.items() if key not in tried]
        return [*sorted(contests, key=_order), *alone], pins

    found: list[Contest] = []
    pinned: dict[str, list[Pin]] = {}
    for layer, (contests, pins) in read_each(read_layers(database), read, is_strict=database is not None):
        found += [replace(contest, layer=layer.name) for contest in contests]
        if pins:
            pinned[layer.name] = pins
    return found, pinned


def _winners(
    database: Database, measured: Iterable[tuple[Environment, Problem]]
) -> dict[tuple[Environment, Problem], Decision]:
    """Dispatch's answers where problems were measured, by this database alone, if nothing is pinned."""
    from tunedcomm import kernels
    from tunedcomm.db.snapshot import winners_of
    from tunedcomm.kernels import source_hash_of
    from tunedcomm.selection.select import Registered
    from tunedcomm.symm.layout import limits_for

    kernels.discover()
    by_group: dict[tuple[Environment, int], list[Problem]] = {}
    for there, problem in measured:
        by_group.setdefault((there, problem.world_size), []).append(problem)
    found: dict[tuple[Environment, Problem], Decision] = {}
    for (there, world_size), problems in by_group.items():
        catalog = Registered(limits_for(there, world_size), source_hash_of)
        read = partial(winners_of, environment=there, problems=problems, catalog=catalog)
        found |= {(there, problem): decision for problem, decision in database.ask(read).items()}
    return found


def wanted_hardware(hardware: str | None, *, everything: bool) -> Callable[[Environment], bool]:
    """A test of environments: of the hardware that is named, else of this machine's unless `everything` is wanted."""
    if hardware is not None:
        return partial(matches, hardware)
    if everything:
        return lambda there: True
    hard_key = environment_here().hard_key
    return lambda there: there.hard_key == hard_key


def on_hardware(is_wanted: Callable[[Environment], bool], records: list[R]) -> list[R]:
    """The records of environments that are wanted."""
    wanted = {there for there in {record.environment for record in records} if is_wanted(there)}
    return [record for record in records if record.environment in wanted]


def _order(contest: Contest) -> tuple[object, ...]:
    environment, p = contest.environment, contest.problem
    return (environment.gpu, environment.digest, p.op, p.world_size, p.dtype, p.mode, p.family, p.numel)


def pin_tables(pins: Mapping[str, Sequence[Pin]], database: str | None) -> list[Table]:
    """A table of each layer's pins, without layers that have none."""
    return [
        Table.of(_PIN_COLUMNS, members, f"pins in the {database_name(layer, database)}")
        for layer, members in pins.items()
        if members
    ]


def pin_to_dict(pin: Pin) -> dict[str, Any]:
    """As JSON has it."""
    return {
        **attributes(pin, "problem environment"),
        **named_candidate(pin.candidate),
        **attributes(pin, "reason user created_at"),
    }
