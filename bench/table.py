"""Print a Markdown table of bench/results/all_reduce_h200.csv, as docs/performance.md shows it.

python bench/table.py --world-size 4 --mode graph
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "all_reduce_h200.csv"
COLUMNS = {
    "library": "NCCL",
    "torch_one_shot_symmetric": "torch one-shot",
    "torch_two_shot_symmetric": "torch two-shot",
    "kraken": "Kraken",
    "tuned": "tunedcomm",
}


def size_text(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def table(world_size: int, mode: str) -> str:
    """The medians in µs, one line a message size; the run with most contenders where several measured a size."""
    runs: dict[int, dict[str, dict[str, dict[str, str]]]] = defaultdict(lambda: defaultdict(dict))
    with RESULTS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (int(row["world_size"]), row["mode"]) == (world_size, mode):
                runs[int(row["message_bytes"])][row["run_id"]][row["contender"]] = row
    lines = ["| message | " + " | ".join(COLUMNS.values()) + " | what ran |", "|---|" + "---:|" * len(COLUMNS) + "---|"]
    for size, by_run in sorted(runs.items()):
        best = max(by_run.values(), key=len)
        others = {name: row for run in by_run.values() for name, row in run.items() if name == "kraken"}
        cells = []
        for name in COLUMNS:
            row = best.get(name) or others.get(name)
            cells.append(f"{float(row['latency_p50_us']):.2f}" if row else "–")
        lines.append(f"| {size_text(size)} | " + " | ".join(cells) + f" | `{best['tuned']['config']}` |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--mode", choices=("graph", "eager"), default="graph")
    args = parser.parse_args()
    sys.stdout.write(table(args.world_size, args.mode) + "\n")


if __name__ == "__main__":
    main()
