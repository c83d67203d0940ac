"""Bandwidth by nccl-tests' definitions, and the floors that a measured link speed implies.

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md (definitions of algbw and busbw).
"""

from __future__ import annotations

_BY_RANK = frozenset({"all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "ep_combine", "ep_dispatch"})


def busbw_factor(op: str, world_size: int) -> float:
    """Bytes that cross a rank's link per byte of message: 2(n-1)/n for all_reduce, (n-1)/n for its two halves.

    Raises:
        ValueError: `op` has no such factor or `world_size` < 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    share = (world_size - 1) / world_size
    if op.startswith("all_reduce"):
        return 2 * share
    if op in _BY_RANK:
        return share
    raise ValueError(f"no bus bandwidth is defined for op {op!r}")


def payload_bytes(op: str, message_bytes: int, world_size: int) -> int:
    """Bytes S that algbw counts: of the whole tensor, where `message_bytes` may be one rank's part of it."""
    return message_bytes * world_size if op in _BY_RANK else message_bytes


def algbw_gb_s(size_bytes: int, latency_us: float) -> float:
    """Message size over time, in 1e9 bytes/s."""
    if latency_us <= 0:
        raise ValueError(f"latency_us must be > 0, got {latency_us}")
    return size_bytes / latency_us / 1e3


def busbw_gb_s(op: str, size_bytes: int, latency_us: float, world_size: int) -> float:
    """Algorithm bandwidth times the op's bus factor, in 1e9 bytes/s."""
    return algbw_gb_s(size_bytes, latency_us) * busbw_factor(op, world_size)


def floor_us(op: str, size_bytes: int, world_size: int, link_gb_s: float) -> float:
    """Least time in µs that a link of `link_gb_s` out of each rank allows."""
    if link_gb_s <= 0:
        raise ValueError(f"link_gb_s must be > 0, got {link_gb_s}")
    return size_bytes * busbw_factor(op, world_size) / link_gb_s / 1e3


def format_bytes(num_bytes: int) -> str:
    """`96 KiB`, `1.5 MiB`: at most two decimals, binary units."""
    power = min(max(num_bytes, 1).bit_length() - 1, 39) // 10
    size = num_bytes / 1024**power
    return f"{size:.2f}".rstrip("0").rstrip(".") + f" {('B', 'KiB', 'MiB', 'GiB')[power]}"


def format_us(latency_us: float | None) -> str:
    """A latency in µs with three significant digits or more, as `4.30`, `12.5` and `1,284`; `-` for None."""
    if latency_us is None:
        return "-"
    digits = 2 if latency_us < 9.995 else int(latency_us < 99.95)
    return f"{latency_us:,.{digits}f}"
