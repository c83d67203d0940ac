"""How the scripts that measure all_reduce of bf16 by themselves write rows of bench/results."""

from __future__ import annotations

import csv
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from tunedcomm.bench.csv import COLUMNS
from tunedcomm.hardware import Environment

__all__ = ["Line", "append"]


@dataclass(frozen=True, slots=True)
class Line:
    """One contender at one size; latencies in µs."""

    numel: int
    contender: str
    config: str
    p10_us: float
    p50_us: float
    p90_us: float


def append(
    path: Path, lines: Iterable[Line], environment: Environment, *, world_size: int, mode: Literal["graph", "eager"]
) -> None:
    """Append rows of one run to a CSV, which is made if it is not there."""
    run_id, date = secrets.token_hex(6), datetime.now(timezone.utc).isoformat(timespec="seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for line in lines:
            writer.writerow(
                {
                    "op": "all_reduce", "shape": line.numel, "message_bytes": 2 * line.numel, "dtype": "bfloat16",
                    "world_size": world_size, "mode": mode, "contender": line.contender, "config": line.config,
                    "latency_p10_us": round(line.p10_us, 4), "latency_p50_us": round(line.p50_us, 4),
                    "latency_p90_us": round(line.p90_us, 4), "gpu": environment.gpu, "fabric": environment.fabric,
                    "torch": environment.torch, "triton": environment.triton, "nccl": environment.nccl,
                    "driver": environment.driver, "tunedcomm": environment.tunedcomm, "command": " ".join(sys.argv),
                    "run_id": run_id, "date": date, "input_kind": "plain", "in_place": False, "reduction": "sum",
                }
            )  # fmt: skip
