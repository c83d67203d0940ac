"""CSV files of benchmarks: columns, appending, and each row's share of the least possible time."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunedcomm.fp8 import GROUP, SCALE_BYTES, WIRES
from tunedcomm.spec import ITEMSIZE, OpSpec, ops

COLUMNS = (
    "op,shape,message_bytes,dtype,world_size,mode,contender,config,latency_p10_us,latency_p50_us,latency_p90_us,"
    "algbw_gb_s,busbw_gb_s,num_sms,error,gpu,fabric,torch,triton,nccl,driver,tunedcomm,command,run_id,date,"
    "input_kind,in_place,reduction,layout,scaling,ceiling_share"
).split(",")
# A table without these is another program's.
NEEDED = ("op", "shape", "message_bytes", "dtype", "world_size", "mode", "contender", "latency_p50_us")
CUBLAS = "cublas"  # the contender that is the GEMM of a fused op alone
# GPU and fabric to the most that one GPU has been measured to send to its peers, in 1e9 bytes/s: the largest bus
# bandwidth in bench/results (all_gather's `push` of 128 MiB on 4 GPUs). A test compares the two.
_LINK_GB_S = {("NVIDIA H200", "nvswitch-18"): 353.9}


def missing_columns(path: Path) -> list[str]:
    """Columns that rows need and a file lacks; none for a new or empty file. Makes the file's folder.

    Raises:
        OSError, UnicodeDecodeError, csv.Error: the file cannot be read and appended to.
    """
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        columns = next(csv.reader(file), [])
    if is_new:
        path.unlink()
    return [name for name in NEEDED if name not in columns] if columns else []


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]], columns: Collection[str] = COLUMNS) -> None:
    """Append rows; a file of an older version keeps its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        there = next(csv.reader(file), [])
        writer = csv.DictWriter(file, there or columns, extrasaction="ignore", lineterminator="\n")
        if not there:
            writer.writeheader()
        writer.writerows(rows)


def known_link_gb_s(gpu: str, fabric: str) -> float | None:
    """The most that one GPU has been measured to send to its peers, in 1e9 bytes/s; None if never measured."""
    return _LINK_GB_S.get((gpu, fabric))


def floor_us(op: OpSpec | None, message_bytes: int, world_size: int, link_gb_s: float | None) -> float | None:
    """Least time in µs that the links allow; None if the link speed or the op's traffic is not known."""
    if op is None or link_gb_s is None:
        return None
    if op.is_gemm:
        return message_bytes / link_gb_s / 1e3
    if op.busbw_factor is None:
        return None
    return op.payload_bytes(message_bytes, world_size) * op.busbw_factor(world_size) / link_gb_s / 1e3


def sent_bytes(message_bytes: int, dtype: str, scaling: str) -> int:
    """Bytes that stand for a message on the links: fewer on a quantised wire."""
    groups = message_bytes // ITEMSIZE[dtype] // GROUP
    return groups * (GROUP + SCALE_BYTES) if scaling in WIRES else message_bytes


def add_ceiling_shares(rows: Sequence[dict[str, Any]], given_gb_s: float | None) -> None:
    """Fill the column `ceiling_share` of one problem's rows: its least possible time over the row's time.

    The least time is the time of the links. For a fused GEMM it is the time of the GEMM alone where that is longer. The
    column is None where one of them is not known.

    Args:
        rows: all rows of one problem, every other column filled.
        given_gb_s: the most that one GPU sends to its peers; None takes the stored value of this hardware.
    """
    alone = [float(row["latency_p50_us"]) for row in rows if row["contender"] == CUBLAS]
    for row in rows:
        op = ops()[row["op"]]
        link = given_gb_s or known_link_gb_s(row["gpu"], row["fabric"])
        least = floor_us(op, sent_bytes(row["message_bytes"], row["dtype"], row["scaling"]), row["world_size"], link)
        known = least is not None and (bool(alone) or not op.is_gemm)
        row["ceiling_share"] = round(max(least or 0.0, *alone, 0.0) / row["latency_p50_us"], 4) if known else None
