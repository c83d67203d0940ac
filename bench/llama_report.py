"""The rows of `bench/llama_tp.py`: the CSV, and whether they clear the bars.

    python bench/llama_report.py bench/results/model/llama_tp_h200.csv --check

A row is a configuration of a workload: percentiles over rounds, of the slowest rank, of a step's time in µs, and its
results' distance from those of `library_eager` (‖out − ref‖ / ‖ref‖, of the worst tensor on the worst rank). Where a
file holds several runs, each workload's last one counts.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]

COLUMNS = (
    "workload,configuration,status,mode,layers,batch,tokens,context,dtype,world_size,latency_p10_us,latency_p50_us,"
    "latency_p90_us,us_per_layer,tokens_per_s,error,bit_equal,num_served,num_passed_on,served_by,collectives,reason,"
    "gpu,fabric,torch,triton,nccl,driver,tunedcomm,command,run_id,date"
).split(",")
PYTORCH = ("library_eager", "library_compiled", "async_tp_compiled")
# Ours, and the same model without us.
RIVALS = {
    "intercept_eager": "library_eager",
    "intercept_compiled": "library_compiled",
    "fusion_compiled": "library_compiled",
}
# Least time of the best of PyTorch's own over the best of ours.
BARS = {"prefill": 1.10, "decode_1": 1.2, "decode_8": 1.2, "decode_64": 1.2, "train": 1.0}
NOISE = 0.01  # by how much medians of the same thing differ


class Verdict(NamedTuple):
    """A bar, and if it is cleared."""

    passed: bool
    text: str

    def __str__(self) -> str:
        return f"{'cleared' if self.passed else 'MISSED '}  {self.text}"


def line(row: Row) -> str:
    """A row for the terminal."""
    head = f"{row['workload']:10} {row['configuration']:19}"
    if row["status"] not in ("ok", "wrong"):
        return f"{head} {row['status']}: {row['reason']}"
    text = f"{head} {float(row['us_per_layer']):10.2f} us a layer  {float(row['tokens_per_s']):12.1f} tokens/s"
    text += f"  {row['mode']:5}  error {float(row['error']):.1e}"
    for what in ("served_by", "collectives", "reason"):
        text += f"  [{row[what]}]" if row[what] else ""
    return text


def last_runs(rows: Sequence[Row]) -> list[Row]:
    """Of each workload the rows of the last run that has it."""
    last = {row["workload"]: row["run_id"] for row in rows}
    return [row for row in rows if row["run_id"] == last[row["workload"]]]


def verdicts(rows: Sequence[Row], wanted: Collection[str] = tuple(BARS)) -> list[Verdict]:
    """Every bar of the workloads that are wanted; one without figures is missed."""
    found = []
    for workload in wanted:
        here = [row for row in rows if row["workload"] == workload]
        times = {row["configuration"]: float(row["latency_p50_us"]) for row in here if row["status"] == "ok"}
        theirs = {name: times[name] for name in PYTORCH if name in times}
        ours = {name: times[name] for name in RIVALS if name in times}
        if theirs and ours:
            best, peer = min(ours, key=ours.__getitem__), min(theirs, key=theirs.__getitem__)
            ratio, bar = theirs[peer] / ours[best], BARS.get(workload, 1.0)
            wanted = "more than 1" if bar == 1 else f"at least {bar:.2f}"
            text = f"{workload}: {best} is {ratio:.3f} times as fast as {peer}; wanted is {wanted}"
            found.append(Verdict(ratio > bar if bar == 1 else ratio >= bar, text))
        else:
            found.append(Verdict(passed=False, text=f"{workload}: not measured on both sides"))
        for name, rival in RIVALS.items():
            if name in ours and rival in times:
                ratio = times[rival] / ours[name]
                text = f"{workload}: {name} is {ratio:.3f} times as fast as {rival}; wanted is no slower"
                found.append(Verdict(ratio >= 1 - NOISE, text))
        found += [
            Verdict(passed=False, text=f"{workload}: {row['configuration']} {row['status']}: {row['reason']}")
            for row in here
            if row["status"] in ("wrong", "failed", "stalled")
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()
    with arguments.csv.open(newline="", encoding="utf-8") as file:
        rows = last_runs(list(csv.DictReader(file)))
    for row in rows:
        print(line(row))
    found = verdicts(rows)
    for verdict in found:
        print(verdict)
    return int(arguments.check and not all(verdict.passed for verdict in found))


if __name__ == "__main__":
    sys.exit(main())
