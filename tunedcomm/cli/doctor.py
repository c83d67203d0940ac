"""`tunedcomm doctor`: is this machine ready, and what to do where it is not."""

from __future__ import annotations

from dataclasses import asdict

import typer

from tunedcomm.cli._checks import run_checks
from tunedcomm.cli._options import BorrowOption, JsonOption, borrowed
from tunedcomm.cli._output import emit, emit_json

__all__ = ["doctor"]


def doctor(*, borrow: BorrowOption = None, as_json: JsonOption = False) -> None:
    """Check versions, GPUs, links, symmetric memory, databases and settings; exit code 1 if something must be fixed.

    Example: tunedcomm doctor

    Example: tunedcomm doctor --borrow H100
    """
    checks = run_checks(borrow=borrowed(borrow))
    if as_json:
        emit_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            emit(f"{check.level:<4}  {check.name:<{width}}  {check.detail}")
            if check.fix:
                emit(f"{'':4}  {'':{width}}  -> {check.fix}")
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)
