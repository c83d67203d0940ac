"""The links' ceiling for the figures of a report: what they can carry at most, as it was measured."""

from __future__ import annotations

from tunedcomm.bench import csv
from tunedcomm.report.measured import Group

__all__ = ["floor_us", "link_gb_s"]


def link_gb_s(group: Group, given: float | None = None) -> float | None:
    """What one GPU can send to its peers, in 1e9 bytes/s; None where nobody has measured it.

    Args:
        group: where.
        given: what the caller says instead.
    """
    if group.is_host_time or group.world_size < 2:
        return None
    return given if given is not None else csv.known_link_gb_s(group.gpu, group.fabric)


def floor_us(group: Group, message_bytes: int, link: float) -> float | None:
    """Least time in µs that the links allow; None where the op's traffic is not a fixed share of its message."""
    return csv.floor_us(group.op, message_bytes, group.world_size, link)
