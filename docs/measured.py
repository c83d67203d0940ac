"""Numbers on the pages: `python docs/measured.py` writes the tables, tests/unit/test_doc_numbers.py checks them all.

A comment above a paragraph, list or table says where its numbers come from:

    <!-- table: NAME -->             the table below is written by TABLES[NAME], from bench/results
    <!-- measured: NAME -->          the numbers below are those of FIGURES[NAME], in their order
    <!-- not measured: 64, 20 s (a limit); 512 (a shape) -->    these are no results, and why

The functions are in docs/measured_tables.py and docs/measured_figures.py. A number is what has digits outside of code,
links and comments. It needs no comment if it is a whole number up to 16 without a unit, or the size of a message: a
power of two in KiB or MiB.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Not those that a program writes from the code, as test_docs.py and test_settings.py check.
_WRITTEN = {path.stem.removeprefix("generate_") for path in Path(__file__).parent.glob("generate_*.py")} | {
    "environment"
}
PAGES = [
    ROOT / "README.md",
    ROOT / "tuning_db" / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem not in _WRITTEN),
]
LARGEST_PLAIN = 16

_UNIT = (
    r"%|×|x(?!\w)|times\b|[µu]s\b|ms\b|s\b|seconds?\b|minutes?\b|min\b|hours?\b|h\b|days?\b|million\b|"
    r"G[Bb]/s|G[Bb]\b|[TG]FLOP\S*|[KMG]iB\b|bytes/s|TB/s"
)
_NUMBER = re.compile(
    r"(?<![\w.#/=:+-])(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)*)"
    rf"(?:(?P<unit>\s?(?:{_UNIT}))|(?![\w-]))"
)
_MARK = re.compile(r"<!--\s*(table|measured|not measured):\s*(.+?)\s*-->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_REASONED = re.compile(r"(.+?)\s+\(([^()]*\w[^()]*)\)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Lines between blank ones, with the marks above them.

    Attributes:
        start: offset in the page of what follows the marks.
        line: its first line, from 1.
        text: without the marks.
        marks: kind to text.
    """

    start: int
    line: int
    text: str
    marks: Mapping[str, str]


def _blank(match: re.Match[str]) -> str:
    """As long as it was, so that offsets stay."""
    return re.sub(r"\S", " ", match.group())


def blocks(page: str) -> list[Block]:
    """The blocks of a page; code is none."""
    found = []
    for match in re.finditer(r"(?:^(?!\s*$).*\n?)+", _FENCE.sub(_blank, page), re.MULTILINE):
        text, start, marks = page[match.start() : match.end()], 0, {}
        while (mark := _MARK.match(text, start)) is not None:
            marks[mark[1]] = " ".join(mark[2].split())
            start = mark.end() + len(text[mark.end() :]) - len(text[mark.end() :].lstrip())
        at = match.start() + start
        found.append(Block(at, page[:at].count("\n") + 1, text[start:], marks))
    return found


def figures(text: str) -> list[str]:
    """The numbers of a block that somebody has to vouch for, with their units."""
    plain = _COMMENT.sub(" ", text)
    plain = re.sub(r"`[^`]*`", " ", plain)
    plain = re.sub(r"\]\([^)]*\)|<https?:[^>]*>|^\s*\d+\. ", " ", plain, flags=re.MULTILINE)
    found = []
    for match in _NUMBER.finditer(plain):
        number, unit = match["number"], (match["unit"] or "").strip()
        if number.isdigit():
            value = int(number)
            counted = not unit or match["unit"] == " ×"  # 4 × H200 are four of them
            if (counted and value <= LARGEST_PLAIN) or (unit in ("KiB", "MiB") and value & (value - 1) == 0):
                continue
        found.append(" ".join(match.group().split()))
    return found


def _not_measured(text: str) -> list[str]:
    """Numbers that a mark excuses.

    Raises:
        ValueError: one has no reason.
    """
    found = []
    for part in text.split(";"):
        match = _REASONED.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"`not measured: {part.strip()}` lacks a reason in brackets")
        found += match[1].split(", ")
    return found


def faults(
    page: str, tables: Mapping[str, Callable[[], str]], values: Mapping[str, Callable[[], list[str]]]
) -> list[str]:
    """What is wrong with the numbers of a page, each with its line."""
    found = []
    for block in blocks(page):
        where = f"line {block.line}"
        if (table := block.marks.get("table")) is not None:
            if table not in tables:
                found.append(f"{where}: there is no table {table!r}")
            elif block.text.strip() != tables[table]():
                found.append(f"{where}: the table {table!r} is not what the results say; run `python docs/measured.py`")
            continue
        left = figures(block.text)
        for number in _not_measured(block.marks["not measured"]) if "not measured" in block.marks else []:
            if number not in left:
                found.append(f"{where}: `not measured` names {number!r}, which is not there")
            left = [other for other in left if other != number]
        name = block.marks.get("measured")
        if name is not None and name not in values:
            found.append(f"{where}: there are no figures {name!r}")
        elif (due := values[name]() if name is not None else []) != left:
            found.append(f"{where}: numbers are {left}, but {f'{name!r} says {due}' if name else 'no mark says why'}")
    return found


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with its tables as the results have them."""
    for block in reversed(blocks(page)):
        name = block.marks.get("table")
        if name in tables:
            end = block.start + len(block.text)
            page = page[: block.start] + tables[name]() + "\n" + page[end:]
    return page


def main() -> int:
    """Write the tables; 1 if there are numbers in the text that do not agree."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    from measured_figures import FIGURES
    from measured_tables import TABLES

    wrong = 0
    for path in PAGES:
        page = written(path.read_text(encoding="utf-8"), TABLES)
        path.write_text(page, encoding="utf-8")
        for fault in faults(page, TABLES, FIGURES):
            wrong += 1
            sys.stderr.write(f"{path.relative_to(ROOT)}: {fault}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
