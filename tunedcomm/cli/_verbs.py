"""Groups of verbs, each of which is imported when it is asked for: nobody waits for the imports of the others."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

__all__ = ["lazy_group"]


def lazy_group(
    help_text: str, verbs: tuple[str, ...], *, prefix: str = "", groups: Mapping[str, typer.Typer] | None = None
) -> typer.Typer:
    """A group of verbs in their order.

    Args:
        help_text: what `--help` says of the group.
        verbs: each the function `<prefix><verb>` of the module of that name in `tunedcomm.cli`.
        prefix: see `verbs`.
        groups: groups below this one, by name.
    """
    below = groups or {}

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*verbs, *below]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name in below:
                return _named(get_command(below[cmd_name]), cmd_name)
            if cmd_name not in verbs:
                self.commands = dict.fromkeys(self.list_commands(ctx))  # type: ignore[assignment]  # which of these was meant is asked next
                return None
            module = importlib.import_module(f"tunedcomm.cli.{prefix}{cmd_name}")
            one = typer.Typer(add_completion=False, rich_markup_mode=None)
            one.command(cmd_name)(getattr(module, f"{prefix}{cmd_name}"))
            return get_command(one)

    app = typer.Typer(
        cls=Group,
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    # Without a verb of its own, only a callback makes a group of it.
    app.callback()(lambda: None)
    return app


def _named(command: Any, name: str) -> Any:
    command.name = name
    return command
