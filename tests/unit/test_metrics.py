from __future__ import annotations

import pytest

from tunedcomm import metrics


@pytest.mark.parametrize(
    ("op", "world_size", "factor"),
    [
        ("all_reduce", 1, 0.0),
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 3, 2 / 3),
    ],
)
def test_bus_factors_of_nccl_tests(op: str, world_size: int, factor: float) -> None:
    assert metrics.busbw_factor(op, world_size) == pytest.approx(factor)


def test_bandwidths() -> None:
    assert metrics.algbw_gb_s(1_000_000, 10.0) == pytest.approx(100.0)
    assert metrics.busbw_gb_s("all_reduce", 1_000_000, 10.0, 4) == pytest.approx(150.0)


def test_floor_is_the_time_of_the_links() -> None:
    assert metrics.floor_us("all_reduce", 128 << 20, 4, 351.0) == pytest.approx(573.6, abs=0.1)
    at_floor = metrics.floor_us("all_gather", 1 << 20, 4, 300.0)
    assert metrics.busbw_gb_s("all_gather", 1 << 20, at_floor, 4) == pytest.approx(300.0)


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="gemm_rs"):
        metrics.busbw_factor("gemm_rs", 4)
    with pytest.raises(ValueError, match=r"world_size.*0"):
        metrics.busbw_factor("all_reduce", 0)
    with pytest.raises(ValueError, match=r"latency_us.*0"):
        metrics.algbw_gb_s(8, 0)
    with pytest.raises(ValueError, match=r"link_gb_s.*-1"):
        metrics.floor_us("all_reduce", 8, 2, -1)
