"""What to say about names: one that nobody knows, and ones that come from a file. A leaf."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "printable"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: `; did you mean 'x' or 'y'?`, or a full stop if none is near."""
    close = difflib.get_close_matches(name.strip().lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(other) for other in close)}?" if close else "."


def printable(text: str) -> str:
    """`text` without what a terminal would obey instead of showing: such characters are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
