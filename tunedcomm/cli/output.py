"""Output of the command line: results on stdout, progress and messages on stderr, and how values are written."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tunedcomm.errors import UnknownNameError, printable
from tunedcomm.metrics import format_bytes
from tunedcomm.spec import Candidate, OpSpec, Problem, get_op

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment

_NUMBER = re.compile(r"-$|-?\d")
T = TypeVar("T")


def emit(text: str) -> None:
    """Print one result line on stdout."""
    sys.stdout.write(printable(text) + "\n")


def emit_json(value: Any) -> None:
    """Print the result as JSON on stdout."""
    emit(json.dumps(value, indent=2, default=jsonable))


def jsonable(value: Any) -> Any:
    """JSON values of what is none itself: records by their fields, an environment with its digest."""
    if hasattr(value, "to_dict"):
        return {"digest": value.digest, **value.to_dict()} if hasattr(value, "hard_key") else value.to_dict()
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value.isoformat() if isinstance(value, datetime) else str(value)


def attributes(value: object, names: str) -> dict[str, Any]:
    """Some attributes of a record by name, for JSON; `names` are separated by blanks."""
    return {name: getattr(value, name) for name in names.split()}


def note(text: str) -> None:
    """Print one line about the progress on stderr."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def format_ratio(baseline_us: float | None, latency_us: float | None) -> str:
    """Speed-up over the baseline, as `2.10x`; `-` where either is missing."""
    if not baseline_us or not latency_us:
        return "-"
    return f"{baseline_us / latency_us:.2f}x"


def counted(numbers: Mapping[str, int]) -> str:
    """`3 hung, 1 crashed`."""
    return ", ".join(f"{number} {name}" for name, number in numbers.items())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Print a table on stdout: boxed on a terminal, aligned columns of plain text otherwise.

    Columns whose cells all look like numbers are aligned to the right.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    right = [bool(cells) and all(_NUMBER.match(row[i]) for row in cells) for i in range(len(columns))]
    if not sys.stdout.isatty():
        if title:
            emit(title)
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        form = "  ".join(
            f"{{:{'>' if to_right else '<'}{width}}}" for width, to_right in zip(widths, right, strict=True)
        )
        for row in (columns, *cells):
            emit(form.format(*row).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text  # brackets in a cell are no markup

    view = Table(title=Text(printable(title)) if title else None, title_justify="left")
    for name, to_right in zip(columns, right, strict=True):
        view.add_column(name, justify="right" if to_right else "left", overflow="fold")
    for row in cells:
        view.add_row(*map(Text, row))
    Console().print(view)


def table_of(columns: Mapping[str, Callable[[T], object]], rows: Iterable[T], *, title: str = "") -> None:
    """Print a table of records on stdout; each column has a function that makes its cell of a record."""
    table(list(columns), [[cell(row) for cell in columns.values()] for row in rows], title=title)


def _spec(problem: Problem) -> OpSpec | None:
    from tunedcomm import kernels  # what reads no problem needs no op

    kernels.discover()
    try:
        return get_op(problem.op)
    except UnknownNameError:
        return None


def message_of(problem: Problem) -> str:
    """The bytes by which sizes of the op are compared, as `192 KiB`; `-` of an op that nothing here has registered."""
    spec = _spec(problem)
    return "-" if spec is None else format_bytes(spec.message_bytes(problem))


def kind_of(problem: Problem) -> str:
    """`symmetric, nk+gathered, in place`: where the input lies, and what is not the op's usual."""
    spec, usual = _spec(problem), ("", "", "")
    if spec is not None:
        usual = next(iter(spec.reductions), ""), spec.layouts[0], spec.scalings_of(problem.dtype)[0]
    asked = problem.reduction, problem.layout, problem.scaling
    words = [problem.input_kind, *(text for text, norm in zip(asked, usual, strict=True) if text != norm)]
    return ", ".join([*filter(None, words), *(["in place"] if problem.in_place else [])])


def named_candidate(candidate: Candidate) -> dict[str, Any]:
    """A candidate's variant and config, for JSON."""
    return {"variant": candidate.variant, "config": candidate.config_dict}


def named(environment: Environment) -> str:
    """`4 x NVIDIA H200 [1a2b3c4d]`: in words, with the digits that `--hardware` takes."""
    return f"{environment} [{environment.digest[:8]}]"


class Line(NamedTuple):
    """One line of a check-up: what was looked at, `ok`, `warn` or `fail`, what was found, and what to do."""

    name: str
    level: str
    detail: str
    fix: str = ""


def print_lines(lines: Sequence[Line]) -> None:
    """Print a check-up on stdout, aligned."""
    width = max(len(line.name) for line in lines)
    for line in lines:
        emit(f"{line.level:<4}  {line.name:<{width}}  {line.detail}")
        if line.fix:
            emit(f"{'':4}  {'':{width}}  -> {line.fix}")
