"""The `tunedcomm` command: its verbs, and how errors become exit codes.

Exit codes: 0 done, 1 a check failed or the work could not be finished, 2 bad usage, input or database, 130 stopped by
Ctrl-C, 141 nobody reads the output any more.
"""

from __future__ import annotations

import codecs
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
from collections import Counter
from typing import Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
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
_UsageError: Any = typer.BadParameter.__mro__[1]  # of click, or of typer's copy of it
# Verbs that launch nothing and leave nothing open: a person or a script waits for little but their start and end.
_QUICK = (("lookup",), ("explain",), ("report",), ("db", "list"), ("db", "show"))
_STYLE: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None}


class _Verb(TyperCommand):
    """A verb that refuses an option of one value given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        *_, order = self.make_parser(ctx).parse_args(list(args))
        for option, count in Counter[Any](order).items():
            if count > 1 and not getattr(option, "multiple", True) and not getattr(option, "is_flag", True):
                raise typer.BadParameter(f"it takes one value and is given {count} times", ctx, option)
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the help; an example that is too long for a line is broken before an option, to be copied as it is."""

        def broken(example: re.Match[str]) -> str:
            whole = re.sub(" (?!--)", "\N{NO-BREAK SPACE}", example[0])
            lines = textwrap.wrap(whole, formatter.width - 4, subsequent_indent="    ", break_on_hyphens=False)
            return "\b\n" + " \\\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")

        self.help = re.sub("^Example: .+$", broken, inspect.cleandoc(self.help or ""), flags=re.MULTILINE)
        super().format_help_text(ctx, formatter)


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
        verb.command(cmd_name, cls=_Verb)(getattr(module, self.prefix + cmd_name))
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
        **dict.fromkeys(("prune", "upgrade", "export", "compile", "import", "merge", "diff"), "db"),
    }


def _group(verbs: type[LazyGroup], help_text: str, **more: bool) -> typer.Typer:
    style = {**_STYLE, **more, "context_settings": {"help_option_names": ["-h", "--help"]}}
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
    is_quick = "_TUNEDCOMM_COMPLETE" in os.environ or any(tuple(sys.argv[1 : 1 + len(verb)]) == verb for verb in _QUICK)
    is_quick = is_quick and arguments is None
    if is_quick:
        # Kernels are looked at and not run, so that their interpreter need not be imported where there is no GPU.
        os.environ.setdefault("TRITON_INTERPRET", "0")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("tunedcomm", _plain)
        sys.stdout.reconfigure(errors="tunedcomm")
    try:
        code = code_of(arguments)
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # of a file, not of the output
            raise
        if (code := 141 if isinstance(error, BrokenPipeError) else 1) == 1:
            note(f"tunedcomm: cannot write the output: {error.strerror or error}")
        # The rest goes nowhere, or Python would complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_quick:
        sys.stderr.flush()
        os._exit(code)  # to take apart what was imported takes a tenth of a second
    sys.exit(code)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that the output's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate({ord("µ"): "u", ord("…"): "~", ord("→"): ">"})
    return text.encode("ascii", "backslashreplace").decode(), error.end


def _usage_message(error: Any) -> str:
    """Word a usage error; messages that typer passes on from pydantic are replaced."""
    if hasattr(error.__cause__, "errors"):
        (first, *_) = error.__cause__.errors()
        value, limits = first["input"], first.get("ctx", {})
        error.message = {
            "value_error": str(limits.get("error")),
            "greater_than_equal": f"{value} is less than {limits.get('ge')}, the least that is allowed",
            "less_than_equal": f"{value} is more than {limits.get('le')}, the most that is allowed",
            "int_parsing": f"{value!r} is not a whole number",
            "float_parsing": f"{value!r} is not a number",
        }.get(first["type"], error.message)
    return str(error.format_message())


def code_of(arguments: list[str] | None) -> int:
    """Run the command line and return its exit code."""
    try:
        return int(app(args=arguments, prog_name="tunedcomm", standalone_mode=False) or 0)
    except _UsageError as error:
        said, context = _usage_message(error), error.ctx
        if context is not None and said.startswith(context.get_usage()):  # the help, for no verb was named
            note(said, is_whole=True)
            return 2
        verb = "tunedcomm" if context is None else context.command_path
        end = "" if said.endswith((".", "?")) else ";"
        note(f"tunedcomm: UsageError: {said}{end} `{verb} --help` lists its options")
        return 2
    except errors.TunedCommError as error:
        note(f"tunedcomm: {type(error).__name__}: {error}")
        return 2 if isinstance(error, BAD_USAGE) else 1
    except SystemExit as ended:  # how completion ends
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


if __name__ == "__main__":
    run()
