"""The `tunedcomm` command: its verbs, and how errors become exit codes.

Exit codes: 0 done, 1 a check failed or the work could not be finished, 2 bad usage, input or database.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from tunedcomm import errors
from tunedcomm.cli._output import note
from tunedcomm.cli._verbs import lazy_group

__all__ = ["app", "code_of", "run"]

BAD_USAGE = (
    errors.ConfigError,
    errors.DatabaseError,
    errors.SettingError,
    errors.UnknownNameError,
    errors.UnsupportedInputError,
)

# Verb `v` is the function `v` of the module `v` here, and `db v` the function `db_v` of the module `db_v`.
db_app = lazy_group(
    "Look into tuning databases, keep them in order and ship them.",
    (
        "list",
        "show",
        "stats",
        "pin",
        "unpin",
        "check",
        "verify",
        "prune",
        "upgrade",
        "export",
        "import",
        "merge",
        "diff",
    ),
    prefix="db_",
)
app = lazy_group(
    "Tune GPU communication kernels, look up what was chosen and why, and compare it with its peers.",
    ("tune", "lookup", "explain", "bench", "report", "doctor", "demo"),
    groups={"db": db_app},
)


# Verbs that launch nothing and leave nothing open: a person or a script waits for little but their start and end.
_QUICK = (("lookup",), ("explain",), ("report",), ("db", "list"), ("db", "show"))


def run(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    is_quick = arguments is None and any(tuple(sys.argv[1 : 1 + len(verb)]) == verb for verb in _QUICK)
    if is_quick:
        # Kernels are looked at and not run, so that their interpreter need not be imported where there is no GPU.
        os.environ.setdefault("TRITON_INTERPRET", "0")
    code = code_of(arguments)
    if is_quick:
        _leave(code)
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


def _leave(code: int) -> None:
    """End the process at once: to take apart what was imported takes a tenth of a second."""
    with contextlib.suppress(OSError):  # of a closed pipe or a full disk Python tells as it always does
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run()
