"""Writes `docs/environment.md` from the table of settings."""

from __future__ import annotations

from pathlib import Path

from tunedcomm.settings import SETTINGS, Setting

PAGE = Path(__file__).with_name("environment.md")
HEAD = """\
# Environment variables

A variable is read when a group or database is opened, not at import. A value that a variable does not take raises
`SettingError`. All ranks of a group should see the same values; `tunedcomm doctor` prints those that are set and names
the ones that it does not know.

This page is written by `python docs/generate_environment.py` from `tunedcomm/settings.py`.
"""


def section(setting: Setting[object]) -> str:
    """One variable."""
    text = f"- Allowed: {setting.allowed}\n- Default: {setting.default_text}"
    return f"## `{setting.name}`\n\n{setting.meaning}\n\n{text}\n"


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(section, SETTINGS)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
