"""The `tunedcomm` command: its verbs, and how errors become exit codes.

Exit codes: 0 done, 1 a check failed or the work could not be finished, 2 bad usage, input or database, 130 stopped by
Ctrl-C, 141 nobody reads the output any more.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from tunedcomm import errors
from tunedcomm.cli.output import emit, note
from tunedcomm.version import VERSION

BAD_USAGE = (
    errors.ConfigError,
    errors.DatabaseError,
    errors.SettingError,
    errors.UnknownNameError,
    errors.UnsupportedInputError,
)
# Verbs that launch nothing and leave nothing open: a person or a script waits for little but their start and end.
_QUICK = (("lookup",), ("explain",), ("report",), ("db", "list"), ("db", "show"))
_STYLE: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None}


class LazyGroup(TyperGroup):
    """A group of verbs each of which is imported when it is asked for, after click's documentation."""

    verbs: ClassVar[dict[str, str]]  # to the module in tunedcomm.cli that has a function of the verb's full name
    prefix: ClassVar[str] = ""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.verbs, *super().list_commands(ctx)]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise typer.Exit(141) from None

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.verbs:
            # For the question which verb was meant, click looks at these.
            self.commands = {**dict.fromkeys(self.verbs), **self.commands}  # type: ignore[dict-item]
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"tunedcomm.cli.{self.verbs[cmd_name]}")
        verb = typer.Typer(**_STYLE)
        verb.command(cmd_name)(getattr(module, self.prefix + cmd_name))
        return get_command(verb)


class _Verbs(LazyGroup):
    verbs: ClassVar[dict[str, str]] = {
        "tune": "tune",
        "lookup": "explain",
        **{verb: verb for verb in ("explain", "bench", "report", "doctor", "demo")},
    }


class _DatabaseVerbs(LazyGroup):
    prefix = "db_"
    verbs: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("list", "show", "stats", "pin", "unpin", "check"), "db"),
        "verify": "tune",
        **dict.fromkeys(("prune", "upgrade", "export", "import", "merge", "diff"), "db"),
    }


def _group(verbs: type[LazyGroup], help_text: str, **more: bool) -> typer.Typer:
    style = {**_STYLE, **more}
    return typer.Typer(cls=verbs, help=help_text, no_args_is_help=True, pretty_exceptions_enable=False, **style)


app = _group(
    _Verbs,
    "Tune GPU communication kernels, look up what was chosen and why, and compare it with its peers.",
    add_completion=True,
)
_databases = _group(_DatabaseVerbs, "Look into tuning databases, keep them in order and ship them.")
_databases.callback()(lambda: None)  # without a verb of its own, only a callback makes a group of it
app.add_typer(_databases, name="db")


def _print_version(wanted: bool) -> None:
    if wanted:
        emit(f"tunedcomm {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The options of the command itself."""


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    is_quick = arguments is None and any(tuple(sys.argv[1 : 1 + len(verb)]) == verb for verb in _QUICK)
    if is_quick:
        # Kernels are looked at and not run, so that their interpreter need not be imported where there is no GPU.
        os.environ.setdefault("TRITON_INTERPRET", "0")
    code = code_of(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the rest goes nowhere, or Python would complain about it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    if is_quick:
        sys.stderr.flush()
        os._exit(code)  # to take apart what was imported takes a tenth of a second
    sys.exit(code)


def code_of(arguments: list[str] | None) -> int:
    """Run the command line and return its exit code."""
    try:
        app(args=arguments, prog_name="tunedcomm")
    except errors.TunedCommError as error:
        note(f"tunedcomm: {type(error).__name__}: {error}")
        return 2 if isinstance(error, BAD_USAGE) else 1
    except SystemExit as ended:  # how typer ends
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    run()
