"""Selection for shapes (M, N, K): other M of the same matrices, then the nearest shape within a factor of 2 in each."""

from __future__ import annotations

from typing import Any

import pytest
from db_samples import candidate, decide, problem, row

from tunedcomm.selection.snapshot import Row
from tunedcomm.spec import Problem

SHAPE = (1024, 8192, 2048)


def gemm(m: int, n: int = SHAPE[1], k: int = SHAPE[2], **changes: Any) -> Problem:
    return problem(**{"shape": (m, n, k), "layout": "nk", **changes})


def at(variant: str, latency_us: float, shape: tuple[int, int, int], library_us: float = 100.0, **like: Any) -> Row:
    same = {"shape": shape, "layout": "nk", **like}
    return row(variant, latency_us, baseline_p50_us=library_us, like=same)


def test_another_m_of_the_same_matrices_is_predicted_between_its_neighbours() -> None:
    rows = [at("one_shot", 40.0, (512, 8192, 2048)), at("one_shot", 90.0, (2048, 8192, 2048), 200.0)]
    rows += [at("two_shot", 60.0, (512, 8192, 2048)), at("two_shot", 70.0, (2048, 8192, 2048), 200.0)]
    small, large = decide(rows, gemm(576)), decide(rows, gemm(1920))
    assert (small.source, small.candidate) == ("interpolated", candidate("one_shot"))
    assert (large.source, large.candidate) == ("interpolated", candidate("two_shot"))
    assert "predicted between" in small.why
    assert decide(rows, gemm(512)).source == "exact"


@pytest.mark.parametrize("m", [256, 1000])
def test_beyond_the_measured_m_the_nearest_serves_within_a_factor_of_two(m: int) -> None:
    decision = decide([at("one_shot", 40.0, (512, 8192, 2048))], gemm(m))
    assert (decision.source, decision.candidate, decision.latency_us) == ("interpolated", candidate("one_shot"), None)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((1024, 8192, 3072), True),
        ((2048, 4096, 4096), True),
        ((512, 16384, 1024), True),
        ((2049, 8192, 3072), False),
        ((1024, 4095, 2048), False),
        ((1024, 8192, 4097), False),
        ((1024, 8192, 0), False),
    ],
)
def test_other_matrices_within_a_factor_of_two_in_each_extent(shape: tuple[int, int, int], found: bool) -> None:
    decision = decide([at("one_shot", 40.0, SHAPE)], gemm(*shape))
    assert decision.source == ("interpolated" if found else "library")
    if found:
        assert decision.candidate == candidate("one_shot")
        assert decision.latency_us is None, "what it takes there is not known"
        assert "as at the nearest measured shape, 1024x8192x2048: " in decision.why


def test_the_nearest_shape_is_that_which_is_off_by_the_least_factor_in_all() -> None:
    rows = [
        at("one_shot", 40.0, (1024, 8192, 2048)),  # 1.4 in K
        at("two_shot", 40.0, (1024, 7168, 2816)),  # 1.14 in N, 1.03 in K
        at("lamport", 40.0, (2048, 8192, 2880)),  # 2 in M
    ]
    asked = gemm(1024, 8192, 2888)
    assert decide(rows, asked).candidate == candidate("two_shot")
    without = decide(rows, asked, feasible=lambda c: "no" if c.variant == "two_shot" else None)
    assert without.candidate == candidate("one_shot")
    # Another M of the very matrices is asked before other matrices, within the same factor.
    assert decide(rows, gemm(1024, 8192, 2880)).candidate == candidate("lamport")


@pytest.mark.parametrize(
    ("op", "stored", "asked", "said"),
    [
        ("ag_gemm", {}, {"layout": "nk+gathered"}, "layout=nk"),
        ("ag_gemm", {"layout": "nk+gathered"}, {}, "layout=nk+gathered"),
        ("gemm_ar", {}, {"layout": "nk+bias"}, "layout=nk"),
        ("gemm_rs", {}, {"layout": "kn"}, "layout=nk"),
        ("gemm_rs", {"layout": "nk+float32"}, {"layout": "kn+float32"}, "layout=nk+float32"),
        ("gemm_rs", {"scaling": "rowwise"}, {"scaling": "tensorwise"}, "scaling=rowwise"),
        ("gemm_rs", {}, {"reduction": "avg", "dtype": "float16"}, "reduction=sum, dtype=bfloat16"),
    ],
)
def test_relatives(op: str, stored: dict[str, Any], asked: dict[str, Any], said: str) -> None:
    rows = [at("one_shot", 40.0, SHAPE, op=op, **stored)]
    for shape in (SHAPE, (1024, 8192, 2560)):
        decision = decide(rows, gemm(*shape, op=op, **asked))
        assert (decision.source, decision.candidate.variant) == ("interpolated", "one_shot"), shape
        assert f"1024x8192x2048 with {said}: " in decision.why
