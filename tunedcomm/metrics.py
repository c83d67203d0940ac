"""Bandwidth by nccl-tests' definitions, and how sizes and times are written.

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md (definitions of algbw and busbw).
"""

from __future__ import annotations


def shard_factor(world_size: int) -> float:
    """`OpSpec.busbw_factor` of ops that send each rank its part: (n-1)/n.

    Raises:
        ValueError: `world_size` < 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be >= 1, got {world_size}")
    return (world_size - 1) / world_size


def all_reduce_factor(world_size: int) -> float:
    """`OpSpec.busbw_factor` of ops that scatter sums and gather them: 2(n-1)/n."""
    return 2 * shard_factor(world_size)


def algbw_gb_s(size_bytes: int, latency_us: float) -> float:
    """Payload over time, in 1e9 bytes/s."""
    if latency_us <= 0:
        raise ValueError(f"latency_us must be > 0, got {latency_us}")
    return size_bytes / latency_us / 1e3


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


def plural(count: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
