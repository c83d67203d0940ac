"""The share of what can be had: the links' measured bandwidth, or the GEMM alone of a fused one where that is more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunedcomm import metrics
from tunedcomm.cli import _gemm_alone as gemm_alone
from tunedcomm.report.ceiling import known_link_gb_s
from tunedcomm.spec import Problem

__all__ = ["add_ceiling_shares"]


def _links_us(problem: Problem, message_bytes: int, link_gb_s: float) -> float | None:
    """Least time that the links allow; a fused GEMM's message is what leaves a rank."""
    if gemm_alone.suits(problem):
        return message_bytes / link_gb_s / 1e3
    try:
        payload = metrics.payload_bytes(problem.op, message_bytes, problem.world_size)
        return metrics.floor_us(problem.op, payload, problem.world_size, link_gb_s)
    except ValueError:
        return None


def add_ceiling_shares(problem: Problem, rows: Sequence[dict[str, Any]], given_gb_s: float | None) -> None:
    """Fill the column `ceiling_share` of the rows of one problem; None where nobody has measured the links.

    Args:
        problem: what was measured.
        rows: its rows, with everything else in them.
        given_gb_s: what one GPU sends to its peers at most, if not what is known of the hardware.
    """
    alone = [float(row["latency_p50_us"]) for row in rows if row["contender"] == gemm_alone.NAME]
    for row in rows:
        link = given_gb_s or known_link_gb_s(row["gpu"], row["fabric"])
        floor = None if link is None else _links_us(problem, row["message_bytes"], link)
        known = floor is not None and (bool(alone) or not gemm_alone.suits(problem))
        row["ceiling_share"] = round(max(floor or 0.0, *alone, 0.0) / row["latency_p50_us"], 4) if known else None
