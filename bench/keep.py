"""Append the rows of one CSV to another of bench/results, folders cut from the column `command`.

    python bench/keep.py NEW.csv bench/results/TARGET.csv [OP…]

Only rows of these ops, if any are named. A target that was begun with fewer columns gets the others, empty in its rows.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path


def rows_of(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, restval="")
        return list(reader.fieldnames or []), list(reader)


def keep(source: Path, target: Path, ops: set[str]) -> int:
    """The number of rows appended; those that are there already are not."""
    heads, new = rows_of(source)
    old_heads, old = rows_of(target) if target.exists() else ([], [])
    known = {(row["run_id"], row["contender"], row["shape"], row["mode"]) for row in old}
    fresh = [row for row in new if not ops or row["op"] in ops]
    fresh = [row for row in fresh if (row["run_id"], row["contender"], row["shape"], row["mode"]) not in known]
    for row in fresh:
        row["command"] = re.sub(r"(^|\s)/\S*/", r"\1", row["command"])
    columns = [*old_heads, *(head for head in heads if head not in old_heads)]
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *fresh])
    return len(fresh)


if __name__ == "__main__":
    count = keep(Path(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:]))
    sys.stdout.write(f"{count} rows appended to {sys.argv[2]}\n")
