"""The `tunedcomm` command: its verbs, and how errors become exit codes.

Exit codes: 0 done, 1 a check failed or the work could not be finished, 2 bad usage, input or database.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from tunedcomm import errors
from tunedcomm.cli import (
    bench,
    db_check,
    db_diff,
    db_export,
    db_import,
    db_list,
    db_merge,
    db_pin,
    db_prune,
    db_show,
    db_stats,
    db_unpin,
    db_upgrade,
    db_verify,
    demo,
    doctor,
    explain,
    lookup,
    tune,
)
from tunedcomm.cli._output import note

__all__ = ["app", "run"]

BAD_USAGE = (
    errors.ConfigError,
    errors.DatabaseError,
    errors.SettingError,
    errors.UnknownNameError,
    errors.UnsupportedInputError,
)

app = typer.Typer(
    name="tunedcomm",
    help="Tune GPU communication kernels, look up what was chosen and why, and compare it with its peers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
db_app = typer.Typer(
    help="Look into tuning databases, keep them in order and ship them.", no_args_is_help=True, rich_markup_mode=None
)

app.command("tune")(tune.tune)
app.command("lookup")(lookup.lookup)
app.command("explain")(explain.explain)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
db_app.command("list")(db_list.db_list)
db_app.command("show")(db_show.db_show)
db_app.command("stats")(db_stats.db_stats)
db_app.command("pin")(db_pin.db_pin)
db_app.command("unpin")(db_unpin.db_unpin)
db_app.command("check")(db_check.db_check)
db_app.command("verify")(db_verify.db_verify)
db_app.command("prune")(db_prune.db_prune)
db_app.command("upgrade")(db_upgrade.db_upgrade)
db_app.command("export")(db_export.db_export)
db_app.command("import")(db_import.db_import)
db_app.command("merge")(db_merge.db_merge)
db_app.command("diff")(db_diff.db_diff)
app.add_typer(db_app, name="db")


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    try:
        app(args=arguments, prog_name="tunedcomm")
    except errors.TunedCommError as error:
        note(f"tunedcomm: {type(error).__name__}: {error}")
        sys.exit(2 if isinstance(error, BAD_USAGE) else 1)
    sys.exit(0)


if __name__ == "__main__":
    run()
