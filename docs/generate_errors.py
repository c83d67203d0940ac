"""Write docs/errors.md from the errors' docstrings: `python docs/generate_errors.py`. A test keeps it current."""

from __future__ import annotations

import inspect
from pathlib import Path

from tunedcomm import errors

PAGE = Path(__file__).with_name("errors.md")

HEAD = """# Troubleshooting

Every error that tunedcomm raises on purpose is a `tunedcomm.errors.TunedCommError` and says what was wrong, the value,
what is allowed and what to do next. On the command line it is one line on stderr and the exit code 1 or 2.

Start with `tunedcomm doctor`, which checks the machine, its GPUs and the databases, and
`tunedcomm explain --op OP --shape SHAPE --world-size N`, which says what would run and on what evidence.

This page is written by `python docs/generate_errors.py` from `tunedcomm/errors.py`.
"""


def bases(error: type[BaseException]) -> str:
    """The other types by which it can be caught."""
    names = [base.__name__ for base in error.__mro__[1:] if base not in (object, BaseException, Exception)]
    return ", ".join(f"`{name}`" for name in names)


def section(error: type[errors.TunedCommError]) -> str:
    """One error."""
    text = inspect.cleandoc(error.__doc__ or "")
    depth = "###" if issubclass(error, errors.DatabaseError) and error is not errors.DatabaseError else "##"
    return f"{depth} {error.__name__}\n\n{text}\n\nCaught as {bases(error)}.\n"


def named() -> list[type[errors.TunedCommError]]:
    """Every error but the base, as they are written."""
    found = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in found if issubclass(value, errors.TunedCommError) and value is not errors.TunedCommError]


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(section, named())])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
