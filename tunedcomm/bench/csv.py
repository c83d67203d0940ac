"""CSV files of benchmarks: columns, appending, and the share of what the links or the GEMM alone allow."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunedcomm import metrics

COLUMNS = (
    "op,shape,message_bytes,dtype,world_size,mode,contender,config,latency_p10_us,latency_p50_us,latency_p90_us,"
    "algbw_gb_s,busbw_gb_s,num_sms,error,gpu,fabric,torch,triton,nccl,driver,tunedcomm,command,run_id,date,"
    "input_kind,in_place,reduction,layout,scaling,ceiling_share"
).split(",")
# A table without these is another program's.
NEEDED = ("op", "shape", "message_bytes", "dtype", "world_size", "mode", "contender", "latency_p50_us")
FUSED_GEMMS = ("ag_gemm", "gemm_ar", "gemm_rs")
CUBLAS = "cublas"  # the contender that is the GEMM of such an op alone
# GPU and fabric to the most that one GPU has been seen to send to its peers, in 1e9 bytes/s: the largest bus bandwidth
# of bench/results, of all_gather's `push` of 128 MiB on 4 GPUs. A test holds it to that.
_LINK_GB_S = {("NVIDIA H200", "nvswitch-18"): 353.9}


def missing_columns(path: Path) -> list[str]:
    """Columns that rows need and a file lacks; none for a file that is new or empty. Makes its folder.

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
    """Append rows; a file of an older version keeps the columns that it has."""
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


def floor_us(op: str, message_bytes: int, world_size: int, link_gb_s: float | None) -> float | None:
    """Least time that the links allow; None if they are not known, or traffic is not a fixed share of the op's message.

    A fused GEMM's message is what leaves a rank.
    """
    if link_gb_s is None:
        return None
    if op in FUSED_GEMMS:
        return message_bytes / link_gb_s / 1e3
    try:
        payload = metrics.payload_bytes(op, message_bytes, world_size)
        return metrics.floor_us(op, payload, world_size, link_gb_s)
    except ValueError:
        return None


def add_ceiling_shares(rows: Sequence[dict[str, Any]], given_gb_s: float | None) -> None:
    """Fill the column `ceiling_share` of one problem's rows: the least time that can be had over the row's.

    That is the links' time, or the GEMM alone of a fused one where it takes longer; None if either is not known.

    Args:
        rows: all of one problem, with everything else in them.
        given_gb_s: what one GPU sends to its peers at most, if not what is known of the hardware.
    """
    alone = [float(row["latency_p50_us"]) for row in rows if row["contender"] == CUBLAS]
    for row in rows:
        link = given_gb_s or known_link_gb_s(row["gpu"], row["fabric"])
        least = floor_us(row["op"], row["message_bytes"], row["world_size"], link)
        known = least is not None and (bool(alone) or row["op"] not in FUSED_GEMMS)
        row["ceiling_share"] = round(max(least or 0.0, *alone, 0.0) / row["latency_p50_us"], 4) if known else None
