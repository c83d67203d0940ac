"""What the links can carry at most, as it was measured: the line that a report draws above or below all others."""

from __future__ import annotations

from tunedcomm import metrics
from tunedcomm.report.measured import Group

__all__ = ["floor_us", "known_link_gb_s", "link_gb_s"]

# GPU and fabric to the most that one GPU has been seen to send to its peers, in 1e9 bytes/s: the largest bus bandwidth
# of bench/results, of all_gather's `push` of 128 MiB on 4 GPUs. A test holds it to that.
_MEASURED = {("NVIDIA H200", "nvswitch-18"): 353.9}


def known_link_gb_s(gpu: str, fabric: str) -> float | None:
    """What one GPU has been seen to send to its peers at most, in 1e9 bytes/s; None where nobody has measured it."""
    return _MEASURED.get((gpu, fabric))


def link_gb_s(group: Group, given: float | None = None) -> float | None:
    """What one GPU can send to its peers, in 1e9 bytes/s; None where nobody has measured it.

    Args:
        group: where.
        given: what the caller says instead.
    """
    if group.is_host_time or group.world_size < 2:
        return None
    return given if given is not None else known_link_gb_s(group.gpu, group.fabric)


def floor_us(group: Group, message_bytes: int, link: float) -> float | None:
    """Least time in µs that the links allow; None where the op's traffic is not a fixed share of its message."""
    try:
        payload = metrics.payload_bytes(group.op, message_bytes, group.world_size)
        return metrics.floor_us(group.op, payload, group.world_size, link)
    except ValueError:
        return None
