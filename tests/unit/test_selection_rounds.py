"""Between two sizes: what the way down is worth, and who does in one round what others do in two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from db_samples import H200, candidate, decide, problem, row, trial

from tunedcomm import kernels
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.selection.interpolate import MAX_GAP
from tunedcomm.spec import Candidate, Problem, get_variant
from tunedcomm.symm.layout import limits_for

# A grid of n blocks does n times as much in a round.
PER_BLOCK = 2048


def rounds(of: Problem, which: Candidate) -> int:
    return -(-of.nbytes // (PER_BLOCK * int(which.config_dict.get("num_blocks", 1))))


def two_blocks() -> list[Any]:
    """Goes round twice at 6000 bytes, and is expected to take 5.5 µs there."""
    return [row("lamport", 4.0, 4096, num_blocks=2), row("lamport", 5.5, 8192, num_blocks=2)]


# What the fastest of 4096 and 8192 bytes takes at 6000.
FASTEST_US = 4.0 * (5.5 / 4.0) ** math.log2(6000 / 4096)


def test_what_the_library_saves_by_another_protocol_no_kernel_saves() -> None:
    slow = {"baseline_p50_us": 40.0}
    rows = [row("one_shot", 5.0, 4096), row("one_shot", 8.0, 8192, **slow), row("two_shot", 8.2, 8192, **slow)]
    decision = decide(rows, problem(4200))
    assert decision.candidate == candidate("one_shot")
    way = math.log2(4200 / 4096)
    assert decision.runner_up_us == pytest.approx(8.2 * 5.0 * (8.0 / 5.0) ** way / 8.0)


def test_a_config_measured_further_up_joins_where_it_alone_needs_one_round() -> None:
    rows = [*two_blocks(), row("lamport", 6.0, 16384, num_blocks=4)]
    assert decide(rows, problem(6000)).candidate == candidate("lamport", 2), "rounds that nobody knows change nothing"
    decision = decide(rows, problem(6000), rounds_of=rounds)
    assert (decision.candidate, decision.source) == (candidate("lamport", 4), "interpolated")
    assert decision.latency_us == pytest.approx(1.05 * FASTEST_US), "no less than the fastest, and the noise"
    assert decision.runner_up == candidate("lamport", 2)
    assert decision.runner_up_us == pytest.approx(5.5)


def test_of_those_that_need_one_round_the_one_that_saves_a_round_is_preferred() -> None:
    rows = [*two_blocks(), row("lamport", 6.0, 16384, num_blocks=4), row("lamport", 5.8, 16384, num_blocks=8)]
    assert decide(rows, problem(6000), rounds_of=rounds).candidate == candidate("lamport", 4), "8 blocks save none"
    slow = [*two_blocks(), row("lamport", 9.0, 16384, num_blocks=4), row("lamport", 5.8, 16384, num_blocks=8)]
    assert decide(slow, problem(6000), rounds_of=rounds).candidate == candidate("lamport", 8)


@pytest.mark.parametrize(
    ("more", "size", "reason"),
    [
        ([row("one_shot", 6.0, 16384, num_blocks=4)], 6000, "another variant"),
        ([row("lamport", 6.0, 16384, num_blocks=4, drift=True)], 6000, "other software"),
        ([row("lamport", 6.0, 2 * MAX_GAP * 6000, num_blocks=4)], 6000, "too far away"),
        ([row("lamport", 6.0, 16384, num_blocks=4)], 4090, "nobody needs two rounds there"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_does_not_join(more: list[Any], size: int, reason: str) -> None:
    rows = [row("lamport", 3.9, 2048, num_blocks=2), *two_blocks(), *more]
    assert decide(rows, problem(size), rounds_of=rounds).candidate == candidate("lamport", 2), reason


# What the variants say of themselves


@pytest.mark.parametrize(
    ("variant", "config", "numel", "expected"),
    [
        ("lamport", {"num_blocks": 2, "num_warps": 2}, 1349, 2),  # 169 packets, 128 threads
        ("lamport", {"num_blocks": 2, "num_warps": 4}, 1349, 1),
        ("lamport", {"num_blocks": 2, "num_warps": 4}, 2048, 1),
        ("lamport", {"num_blocks": 2, "num_warps": 4}, 2049, 2),
        ("two_shot_lamport", {"num_blocks": 2, "num_warps": 2}, 2048, 1),  # half of 256 packets
        ("two_shot_lamport", {"num_blocks": 2, "num_warps": 2}, 2049, 2),
        ("one_shot", {"num_blocks": 2, "num_warps": 4, "items": 2}, 4096, 1),
        ("one_shot", {"num_blocks": 2, "num_warps": 4, "items": 2}, 4097, 2),
        ("two_shot", {"num_blocks": 2, "num_warps": 2, "items": 2, "num_chunks": 1}, 4096, 1),
        ("two_shot", {"num_blocks": 2, "num_warps": 2, "items": 2, "num_chunks": 1}, 40960, 10),
        ("library", {}, 4096, 0),
    ],
)
def test_rounds_of_the_variants(variant: str, config: dict[str, Any], numel: int, expected: int) -> None:
    kernels.discover()
    found = get_variant("all_reduce", variant).num_rounds(Problem("all_reduce", (numel,), "bfloat16", 2), config)
    assert found == expected


def test_every_kernel_with_a_grid_says_how_often_it_goes_round() -> None:
    kernels.discover()
    limits, big = limits_for(H200, 4), Problem("all_reduce", (1 << 24,), "bfloat16", 4)
    for name in ("lamport", "one_shot", "two_shot", "two_shot_lamport", "multimem_one_shot", "multimem_two_shot"):
        variant = get_variant("all_reduce", name)
        assert variant.num_rounds(big, variant.default(big, limits)) > 1, name


# Times that no arithmetic survives


@pytest.mark.parametrize("latency_us", [5e-324, 1e-300, 1e300, 1.7e308])
def test_a_time_beyond_reason_is_left_out(latency_us: float, tmp_path: Path) -> None:
    """Of rows from elsewhere; a sum or a ratio of such times would be 0 or infinite."""
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        database.record([trial(final=True, problem=problem(size)) for size in (4096, 16384)])
        with database._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE trial SET latency_p50_us = ? WHERE id = 1", (latency_us,))
    loaded = load_snapshot(H200, 4, layers=[Layer("user", str(tmp_path / "tuned.db"))])
    assert [row.problem for row in loaded.rows] == [problem(16384)]
    assert decide(loaded, problem(8192)).candidate == candidate("one_shot")
