"""Output of the command line: one printer of results as text or JSON, messages on stderr, and how values are written.

On a terminal no line is wider than the terminal and no number is broken. A table that is too wide moves columns of one
value to its title, shortens candidates, and at last becomes a block of names and values for each row, or several tables
where the first column names the rows.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from tunedcomm.errors import printable
from tunedcomm.metrics import format_bytes
from tunedcomm.spec import Candidate, OpSpec, Problem, find_op, format_shape

if TYPE_CHECKING:
    from tunedcomm.hardware import Environment

_NUMBER = re.compile(r"-$|-?\d")
# Columns of candidates, which alone are shortened, but never to less than this.
_SHORTENED = frozenset(("candidate", "winner", "pinned", "contender", "what runs", "A", "B"))
_MIN_CANDIDATE, _MIN_TEXT = 20, 24
_COLOURS = {"ok": 32, "warn": 33, "fail": 31}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells to print.

    Attributes:
        columns: their names.
        rows: a cell for each column.
        title: printed above the names.
        has_heading: False to print no title and no names; the last column is text then, which may be wrapped.
        is_keyed: the first column names its row: a table that is too wide becomes several, each with that column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    has_heading: bool = True
    is_keyed: bool = False

    @classmethod
    def of(cls, columns: Mapping[str, Callable[[T], object]], records: Iterable[T], title: str = "") -> Table:
        """A table of records; each column has a function that makes its cell of a record."""
        return cls(list(columns), [[cell(record) for cell in columns.values()] for record in records], title)


def show(value: Any, text: Iterable[str | Table], *, as_json: bool) -> None:
    """Print a result on stdout: `value` as JSON, or else the lines and tables of `text`."""
    if as_json:
        encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
        dumped = json.dumps(value, indent=2, default=jsonable, ensure_ascii=encoding != "utf8")
        sys.stdout.write(re.sub(r"[^ -~\n]", _escaped, dumped) + "\n")
        return
    for part in text:
        emit(part)


def _escaped(match: re.Match[str]) -> str:
    """The character, as JSON escapes it where a terminal would obey it."""
    if match[0].isprintable():
        return match[0]
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def emit(part: str | Table) -> None:
    """Print a line or a table of the result on stdout."""
    width = _width(sys.stdout)
    lines = [filled(printable(part), width, 2)] if isinstance(part, str) else _table_lines(part, width)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def note(text: str, *, is_whole: bool = False) -> None:
    """Print a message on stderr, in one line if it `is_whole`."""
    sys.stderr.write(filled(printable(text), None if is_whole else _width(sys.stderr), 2) + "\n")
    sys.stderr.flush()


def _width(stream: TextIO) -> int | None:
    """Columns of the terminal, or None where there is no terminal."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def filled(text: str, width: int | None, indent: int = 0) -> str:
    """The text in lines of at most `width`, all but the first indented; of words only longer ones break, behind a `/`.

    A width of None is unlimited.
    """
    if width is None or len(text) <= width:
        return text
    lines = [""]
    for word in re.findall(r"\s*\S+", text):
        for piece in re.findall(r"[^/]*/|[^/]+", word) if len(word) > width - indent else [word]:
            if len(lines[-1] + piece) > width and lines[-1].strip():
                lines.append(" " * indent + piece.lstrip())
            else:
                lines[-1] += piece
    return "\n".join(lines)


def _table_lines(table: Table, width: int | None) -> Iterator[str]:
    """The table, aligned: columns whose cells all look like numbers to the right, the others to the left."""
    names, title = list(table.columns), printable(table.title)
    rows = [[printable(str(cell)) for cell in row] for row in table.rows]
    if width is not None and _total(names, rows, table.has_heading) > width:
        if len(rows) > 1 and table.has_heading:
            names, rows, facts = _without_constants(names, rows)
            title = "; ".join(filter(None, (title, facts)))
        if table.is_keyed:
            for part in _parts(names, rows, width):
                yield filled(title, width, 2)
                yield from _aligned(*part, has_heading=True)
                title = ""  # an empty line between them
            return
        if names and not _fit(names, rows, width, table.has_heading):
            yield from _blocks(names, rows, title, width)
            return
    if title:
        yield filled(title, width, 2)
    is_checkup = names[:1] == ["level"] and width is not None and _has_colour()
    for line in _aligned(names, rows, table.has_heading):
        yield re.sub(r"^(ok|warn|fail)\b", _coloured, line) if is_checkup else line


def _without_constants(names: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]], str]:
    """The names and rows without the columns of one value, and these columns in words."""
    columns = list(zip(*rows, strict=True))
    kept = [index for index, cells in enumerate(columns) if len(set(cells)) > 1]
    facts = [
        f"{name} {cells[0]}"
        for index, (name, cells) in enumerate(zip(names, columns, strict=True))
        if index not in kept and cells[0] not in ("", "-")
    ]
    return [names[index] for index in kept], [[row[index] for index in kept] for row in rows], ", ".join(facts)


def _aligned(names: list[str], rows: list[list[str]], has_heading: bool) -> Iterator[str]:
    """The names and rows as lines of columns of equal width; a cell may have several lines."""
    right = [bool(rows) and has_heading and all(_NUMBER.match(row[i]) for row in rows) for i in range(len(names))]
    lines = [names, *rows] if has_heading else rows
    widths = [max((len(part) for row in lines for part in row[i].split("\n")), default=0) for i in range(len(names))]
    for row in lines:
        for cells in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            aligned = [
                cell.rjust(size) if to_right else cell.ljust(size)
                for cell, size, to_right in zip(cells, widths, right, strict=True)
            ]
            yield "  ".join(aligned).rstrip()


def _coloured(level: re.Match[str]) -> str:
    return f"\033[{_COLOURS[level[0]]}m{level[0]}\033[0m"


def _total(names: Sequence[str], rows: Sequence[Sequence[str]], has_heading: bool) -> int:
    """Columns of the terminal that a table takes."""
    lines = [names, *rows] if has_heading else rows
    return sum(max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)) - 2


def _parts(names: list[str], rows: list[list[str]], width: int) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Tables that fit, each of the first column and of as many of the next ones as there is room for."""
    sizes = [max(map(len, cells)) + 2 for cells in zip(names, *rows, strict=True)]
    start = 1
    while start < len(names):
        end = start + 1
        while end < len(names) and sizes[0] + sum(sizes[start : end + 1]) - 2 <= width:
            end += 1
        yield names[:1] + names[start:end], [row[:1] + row[start:end] for row in rows]
        start = end


def _fit(names: Sequence[str], rows: list[list[str]], width: int, has_heading: bool) -> bool:
    """Shorten candidates, and wrap the last column if it is text, until the table fits; False if it does not."""
    over = _total(names, rows, has_heading) - width
    widths = [max(len(name) * has_heading, *map(len, cells)) for name, *cells in zip(names, *rows, strict=True)]
    last = len(names) - 1
    spare = {index: max(0, widths[index] - _MIN_CANDIDATE) for index, name in enumerate(names) if name in _SHORTENED}
    if last not in spare and any(" " in row[last] for row in rows):
        spare[last] = max(0, widths[last] - max(_MIN_TEXT, len(names[last]) * has_heading))
    if over > sum(spare.values()):
        return False
    for count, index in enumerate(sorted(spare, key=lambda index: spare[index])):  # each an equal part, if it has that
        taken = min(spare[index], -(-over // (len(spare) - count)))
        over -= taken
        for row in rows:
            cell, room = row[index], widths[index] - taken
            row[index] = shortened(cell, room) if names[index] in _SHORTENED else filled(cell, room)
    return True


def shortened(text: str, width: int) -> str:
    """`lamport(num_blocks=…` for a longer candidate: a number is left out whole."""
    if len(text) <= width:
        return text
    head, rest = text[: width - 1], text[width - 1 :]
    return (head.rstrip("0123456789") if rest[0].isdigit() else head) + "…"


def _blocks(names: Sequence[str], rows: Iterable[Sequence[str]], title: str, width: int) -> Iterator[str]:
    """A line of name and value for each cell, and an empty line between rows."""
    if title:
        yield filled(title, width, 2)
    indent = max(map(len, names)) + 4
    for index, row in enumerate(rows):
        if index:
            yield ""
        for name, cell in zip(names, row, strict=True):
            yield filled(f"  {name:<{indent - 2}}{cell}".rstrip(), width, indent)


def _has_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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


def format_ratio(baseline_us: float | None, latency_us: float | None) -> str:
    """Speed-up over the baseline, as `2.10x`; `-` where either is missing."""
    if not baseline_us or not latency_us:
        return "-"
    return f"{baseline_us / latency_us:.2f}x"


def counted(numbers: Mapping[str, int]) -> str:
    """`3 hung, 1 crashed`."""
    return ", ".join(f"{count} {name}" for name, count in numbers.items())


def _spec(problem: Problem) -> OpSpec | None:
    from tunedcomm import kernels  # what reads no problem needs no op

    kernels.discover()
    return find_op(problem.op)


def message_of(problem: Problem) -> str:
    """The bytes by which sizes of the op are compared, as `192 KiB`; `-` of an op that nothing here has registered."""
    spec = _spec(problem)
    return "-" if spec is None else format_bytes(spec.message_bytes(problem))


def kind_of(problem: Problem) -> str:
    """`symmetric, nk+gathered, in place`: where the input lies, and what is not the op's usual."""
    spec, usual = _spec(problem), ("", "", "")
    if spec is not None:
        usual = next(iter(spec.reductions), ""), spec.layouts[0], spec.scalings_of(problem.dtype)[0]
    options = problem.reduction, problem.layout, problem.scaling
    words = [problem.input_kind, *(text for text, norm in zip(options, usual, strict=True) if text != norm)]
    return ", ".join([*filter(None, words), *(["in place"] if problem.in_place else [])])


_PROBLEM_COLUMNS: dict[str, Callable[[Problem], object]] = {
    "shape": lambda problem: format_shape(problem.shape),
    "bytes": message_of,
    "dtype": lambda problem: problem.dtype,
    "ranks": lambda problem: problem.world_size,
    "mode": lambda problem: problem.mode,
    "input": kind_of,
}


def problem_columns(names: str, problem_of: Callable[[T], Problem]) -> dict[str, Callable[[T], object]]:
    """Columns of `Table.of` about the problem of a record; `names` are separated by blanks."""

    def column(cell: Callable[[Problem], object]) -> Callable[[T], object]:
        return lambda record: cell(problem_of(record))

    return {name: column(_PROBLEM_COLUMNS[name]) for name in names.split()}


def title_of(text: str, problems: Iterable[Problem]) -> str:
    """The title of a table that compares with the library's stored times, which may include a copy."""
    copies = any(spec is not None and spec.library_copies(problem) for problem in problems for spec in [_spec(problem)])
    return f"{text}; the library's times out of place include its copy" if copies else text


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


def checkup(lines: Iterable[Line]) -> Table:
    """A check-up: a row for each line, and below it the fix."""
    rows = [
        row
        for line in lines
        for row in [(f"{line.level:<4}", line.name, line.detail), *([("", "", f"-> {line.fix}")] if line.fix else [])]
    ]
    return Table(("level", "name", "detail"), rows, has_heading=False)
