"""What to say about a name that nobody knows. A leaf."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: `; did you mean 'x' or 'y'?`, or a full stop if none is near."""
    close = difflib.get_close_matches(name.strip().lower(), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(other) for other in close)}?" if close else "."
