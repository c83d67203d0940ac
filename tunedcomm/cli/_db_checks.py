"""The doctor's checks of databases: can they be read, do they lie where SQLite is safe, do they know this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tunedcomm.cli._check import Check
from tunedcomm.cli._choice import environment_here, nearest_stored, open_layer, read_layers, stored_environments
from tunedcomm.errors import DatabaseError
from tunedcomm.hardware import advice

if TYPE_CHECKING:
    from tunedcomm.db.layers import Layer
    from tunedcomm.hardware import Environment

__all__ = ["check_borrowing", "check_databases", "check_this_machine"]

_NONE_HERE = "tune it: tunedcomm tune --op all_reduce"


def check_databases() -> Iterator[Check]:
    """Every layer: can it be read, what does it hold, does it lie where SQLite is safe."""
    from tunedcomm.db.layers import is_absent, layers, user_layers

    try:
        user_layers()
    except DatabaseError as error:
        yield Check("user database", "warn", str(error), "set HOME or TUNEDCOMM_DB")
    for layer in layers():
        name = f"{layer.name} database"
        if is_absent(layer):
            if not layer.is_beside:
                yield Check(name, "ok", f"{layer.target} is not there yet; `tunedcomm tune` makes it")
        else:
            yield _readable(name, layer)
        if layer.name == "user" and not layer.is_beside:
            yield from _network(name, layer)


def _readable(name: str, layer: Layer) -> Check:
    from tunedcomm.db.engine import parse_target

    try:
        with open_layer(layer) as database:
            held = f"{len(database.problems())} problems, {len(database.environments())} environments"
            return Check(name, "ok", f"{database.url}: {held}, schema {database.schema_version}")
    except DatabaseError as error:
        path = parse_target(layer.target).path
        gone = path is not None and not path.exists()
        mend = "make it or correct TUNEDCOMM_DB_PATH" if gone else "repair, upgrade or remove it"
        return Check(name, "fail", str(error), f"{mend}; dispatch skips it until then")


def _network(name: str, layer: Layer) -> Iterator[Check]:
    from tunedcomm.db.engine import parse_target
    from tunedcomm.db.netfs import network_of

    path = parse_target(layer.target).path
    kind = "" if path is None else network_of(path)
    if path is not None and kind:
        yield Check(
            name,
            "warn",
            f"{path.parent} is on a network file system ({kind}), where SQLite's locks may not hold: each host writes "
            f"a file of its own there, this one {path.name}",
            f"nothing, if this is meant: all of them are read. `tunedcomm db merge {path.parent} --into FILE` makes "
            "one of them; a local file or PostgreSQL (TUNEDCOMM_DB) needs no merging",
        )


def check_this_machine() -> Iterator[Check]:
    """Does any database hold measurements of hardware like this."""
    here = environment_here()
    stored = stored_environments(read_layers(None), is_quiet=True)
    like = [environment for environment in stored if environment.hard_key == here.hard_key]
    if like:
        drift = here.drift(like[0])
        since = f"; since then: {', '.join(drift)}" if drift and len(like) == 1 else ""
        yield Check("this machine", "ok", f"{here} is tuned{since}")
        return
    found = nearest_stored(here, stored)
    if found is None:
        yield Check("this machine", "warn", f"no database holds anything, so {here} runs the library", _NONE_HERE)
        return
    yield Check("this machine", "warn", f"no database holds anything for {here}; the nearest is {found}", _NONE_HERE)
    different = here.differences(found)
    for name, difference in different.items():
        yield Check("this machine", "warn", difference, advice(name, here, different))


def check_borrowing(names: Sequence[str]) -> Iterator[Check]:
    """May the hardware of these names stand in for this machine."""
    from tunedcomm.selection.snapshot import loans, matches

    here = environment_here()
    stored = stored_environments(read_layers(None), is_quiet=True)
    for name in names:
        if not any(matches(name, environment) for environment in stored):
            known = ", ".join(sorted({environment.gpu for environment in stored})) or "none"
            yield Check("borrowing", "warn", f"no database holds hardware {name!r}", f"stored are: {known}")
    for loan in loans(here, names, stored):
        if loan.objection is None:
            yield Check("borrowing", "ok", f"{_named(loan.environment)} may stand in where this machine is not tuned")
        else:
            yield Check("borrowing", "warn", f"{_named(loan.environment)} cannot: {loan.objection}", _NONE_HERE)


def _named(environment: Environment) -> str:
    return f"{environment} ({environment.digest[:8]})"
