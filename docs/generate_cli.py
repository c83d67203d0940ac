"""Write docs/cli.md from the command line itself: `python docs/generate_cli.py`. A test keeps the page current."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo

from tunedcomm.cli.main import app

PAGE = Path(__file__).with_name("cli.md")

HEAD = """# Command line

Results go to stdout, progress and messages to stderr. Exit codes: 0 done, 1 a check failed or the work could not be
finished, 2 bad usage, input or database. Every verb takes `--json`, which prints the result as JSON, and `--help`.

The library, here, is what every kernel is compared with, the variant `library` of each op: NCCL on GPUs, gloo on CPUs,
with PyTorch's own operators beside it where an op computes more than a collective ([ops.md](ops.md)).

This page is written by `python docs/generate_cli.py`.
"""


def verbs(command: Any, name: str = "tunedcomm") -> Iterator[tuple[str, Callable[..., None]]]:
    """Every verb's full name and its function."""
    context = typer.Context(command, info_name=name)
    for verb in command.list_commands(context):
        found = command.get_command(context, verb)
        if hasattr(found, "list_commands"):
            yield from verbs(found, f"{name} {verb}")
        else:
            yield f"{name} {verb}", found.callback


def option(name: str, annotation: Any, default: object) -> str:
    """A row of the table, from an annotated parameter."""
    kind, info = typing.get_args(annotation)[:2]
    several = typing.get_origin(kind) is list
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
        several = typing.get_origin(kind) is list
    base = typing.get_args(kind)[0] if several else kind
    if isinstance(info, ArgumentInfo):
        names = info.metavar or name.upper()
    else:
        # In an annotation the first name stands where a default would.
        given = [info.default] if isinstance(info.default, str) else []
        names = ", ".join([*given, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]).replace("/", ", ")
    if typing.get_origin(base) is typing.Literal:
        value = ", ".join(f"`{choice}`" for choice in typing.get_args(base))
    else:
        value = {bool: "", str: "text", int: "whole number", float: "number", Path: "path"}[base]
    value += ", several" if several else ""
    is_required = default is inspect.Parameter.empty
    shown = "required" if is_required else "" if default in (None, False, "") else f"`{default}`"
    return f"| {', '.join(f'`{part}`' for part in names.split(', '))} | {value} | {shown} | {cell(info.help or '')} |"


def cell(text: str) -> str:
    """Text that ends no table."""
    return " ".join(text.split()).replace("|", "\\|")


def section(name: str, verb: Callable[..., None]) -> str:
    """One verb."""
    text, *examples = inspect.cleandoc(verb.__doc__ or "").split("Example:")
    paragraphs = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    hints = typing.get_type_hints(verb, include_extras=True)
    rows = [
        option(parameter.name, hints[parameter.name], parameter.default)
        for parameter in inspect.signature(verb).parameters.values()
        if parameter.name not in ("as_json", "context")
    ]
    lines = [f"## {name}", "", *(line for part in paragraphs for line in (part, ""))]
    lines += [
        "<!-- not run: every verb has tests of its own -->",
        "```",
        *(" ".join(part.split()) for part in examples),
        "```",
        "",
    ]
    if rows:
        lines += ["| option | value | default | |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    command = typer.main.get_command(app)
    return "\n".join([HEAD, *(section(name, verb) for name, verb in verbs(command))]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
