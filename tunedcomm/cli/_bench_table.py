"""The table of `tunedcomm bench` on a terminal, in the manner of nccl-tests: comments, then a line a contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunedcomm.cli._output import emit, format_ratio, format_us

__all__ = ["print_left_out", "print_table"]

# Column to its unit, as nccl-tests has them in two lines.
_COLUMNS = {
    "size": "(B)",
    "shape": "(elements)",
    "type": "",
    "redop": "",
    "mode": "",
    "p10": "(us)",
    "p50": "(us)",
    "p90": "(us)",
    "algbw": "(GB/s)",
    "busbw": "(GB/s)",
    "ceiling": "(share)",
    "library": "(ratio)",
    "SMs": "",
    "error": "",
    "contender": "",
}
_SAME = ("shape", "dtype", "mode", "world_size", "input_kind")


def _library_us(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The library's median on the problem of `row`."""
    for other in rows:
        if other["contender"] == "library" and all(other.get(name) == row.get(name) for name in _SAME):
            return float(other["latency_p50_us"])
    return None


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    config = row["config"]
    name = f"tuned = {config}" if row["contender"] == "tuned" else row["contender"]
    if config.startswith(f"{name}("):  # a variant of ours
        name = config
    elif config and row["contender"] not in ("tuned", "library"):
        name += f" ({config})"
    sms = row.get("num_sms")
    return [
        str(row["message_bytes"]),
        str(row["shape"]),
        row["dtype"],
        row.get("reduction") or "none",
        row["mode"],
        *(format_us(row[f"latency_{quantile}_us"]) for quantile in ("p10", "p50", "p90")),
        *(_optional(row[column], ".2f") for column in ("algbw_gb_s", "busbw_gb_s")),
        _optional(row.get("ceiling_share"), ".1%"),
        format_ratio(_library_us(row, rows), row["latency_p50_us"]),
        "-" if sms is None else str(sms),
        _optional(row["error"], ".1e"),
        name,
    ]


def _heads(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    row = rows[0]
    versions = ", ".join(f"{name} {row[name]}" for name in ("torch", "triton", "nccl") if row.get(name))
    return [
        f"# {row['op']} on {row['world_size']} x {row['gpu']} ({row['fabric']}), {versions}",
        "# times of the slowest rank; bandwidths in 1e9 bytes/s; ceiling: share of what the links can carry, or a GEMM",
        "# alone; library: its time over this one; SMs: blocks that it occupies at most",
        "#",
    ]


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows on stdout."""
    if not rows:
        emit("# nothing ran")
        return
    lines = [list(_COLUMNS), list(_COLUMNS.values()), *(_cells(row, rows) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    for head in _heads(rows):
        emit(head)
    for number, line in enumerate(lines):
        # nccl-tests' way: figures to the right, and the names of the columns are a comment.
        cells = [text.rjust(width) for text, width in zip(line[:-1], widths, strict=False)]
        emit(f"{'#' if number < 2 else ' '} {'  '.join([*cells, line[-1]])}".rstrip())


def print_left_out(left_out: Sequence[Mapping[str, str]], say: Any) -> None:
    """Say which peers did not take part, where, and why; a line for each reason."""
    where: dict[tuple[str, str], dict[str, None]] = {}
    for one in left_out:
        where.setdefault((one["peer"], one["why"]), {})[f"{one['shape']} {one['dtype']} {one['mode']}"] = None
    for (peer, why), problems in where.items():
        first, *others = problems
        more = f" and {len(others)} more" if others else ""
        say(f"left out: {peer} at {first}{more}: {why}")
