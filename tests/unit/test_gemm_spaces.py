"""Search spaces of the fused GEMMs: what they hold, how long they take to go through, what they must leave out."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from compile_corners import LIMITS

from tunedcomm.errors import ConfigError
from tunedcomm.kernels import discover
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.gemm.op import out_itemsize
from tunedcomm.kernels.gemm.tiles import tile_space
from tunedcomm.space import Choice, Space
from tunedcomm.spec import Candidate, Problem, candidates, check_candidate, get_op, get_variant, variants

discover()
GPU = replace(LIMITS, backend="cuda", multicast=False)
SHAPES = ((4096, 8192, 3584), (2048, 7168, 8192), (16, 8192, 2048), (256, 2560, 8192))
KINDS = (("bfloat16", ""), ("float8_e4m3fn", "rowwise"))


def problems(op: str) -> list[Problem]:
    reduction = next(iter(get_op(op).reductions), "")
    return [
        Problem(op, shape, dtype, 4, reduction, layout="nk", scaling=scaling)
        for shape in SHAPES
        for dtype, scaling in KINDS
    ]


def feasible(problem: Problem) -> list[Candidate]:
    return candidates(problem, GPU, "any")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_a_problem_needs_few_binaries_and_little_time(op: str) -> None:
    """Each is seconds of the compiler's time, and a catalogue has a thousand problems."""
    for problem in problems(op):
        feasible(problem)  # whatever is imported first
        begin = time.process_time()
        found = feasible(problem)
        assert time.process_time() - begin < 3, problem
        assert {"library", "library_tuned"} <= {candidate.variant for candidate in found}
        requests = {
            request
            for candidate in found
            for request in get_variant(op, candidate.variant).compile_requests(problem, candidate.config_dict)
        }
        assert len(requests) <= 400, (problem, len(requests))


def test_accumulators_fit_into_registers() -> None:
    """Sums of fp8 take a second one on sm_90; a spilled one would go through memory in every step."""
    tiles: dict[str, set[tuple[int, int]]] = {dtype: set() for dtype, _ in KINDS}
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        for problem in problems(op):
            for candidate in feasible(problem):
                config = candidate.config_dict
                if "block_m" in config:
                    tiles[problem.dtype].add((int(config["block_m"]), int(config["block_n"])))
    wide = {(128, 256), (64, 256)}
    assert tiles["bfloat16"] - tiles["float8_e4m3fn"] == wide
    assert {(256, 128), (128, 128), (64, 128), (16, 64)} <= tiles["float8_e4m3fn"]


@pytest.mark.parametrize("variant", ["push_reduce", "copy_engine"])
def test_large_products_begin_with_large_tiles(variant: str) -> None:
    for (dtype, scaling), tile in zip(KINDS, ((128, 256), (256, 128)), strict=True):
        problem = Problem("gemm_rs", (8192, 8192, 8192), dtype, 4, "sum", layout="nk", scaling=scaling)
        config = get_variant("gemm_rs", variant).default(problem, GPU)
        assert (config["block_m"], config["block_n"]) == tile


def test_lamport_pushes_no_packet_twice() -> None:
    """Threads that hold the same packet all store it; the second store would be the next call's data."""
    for problem in problems("gemm_ar"):
        for candidate in feasible(problem):
            if candidate.variant == "lamport":
                config = candidate.config_dict
                packets = int(config["block_m"]) * int(config["block_n"]) * out_itemsize(problem) // PACKET_BYTES
                assert packets >= 32 * int(config["num_warps"]), candidate


def test_values_that_go_together() -> None:
    space = Space({"a": Choice(1, 2), "b": Choice(3, 4), "c": Choice(5, 6)}, leading={(1, 3), (2, 4)})
    points = [{"a": a, "b": b, "c": c} for a, b in ((1, 3), (2, 4)) for c in (5, 6)]
    assert list(space.enumerate()) == points
    assert space.size == len(points)
    assert [space.validate(point) for point in points] == points
    with pytest.raises(ConfigError, match=r"a, b = \(1, 4\) are no values that go together"):
        space.validate({"a": 1, "b": 4, "c": 5})


def test_tiles_are_points_of_their_space() -> None:
    assert tile_space().size == len(list(tile_space().enumerate()))


@pytest.mark.parametrize(("shape", "fits"), [((512, 256, 64), True), ((384, 256, 64), False), ((512, 260, 64), False)])
def test_the_native_operator_takes_whole_tiles(shape: tuple[int, ...], *, fits: bool) -> None:
    """Two ranks; the operator's tile has 128 rows and 16-byte rows of operands."""
    variant = get_variant("ag_gemm", "torch_fused")
    problem = Problem("ag_gemm", shape, "bfloat16", 2, layout="nk")
    refused = variant.infeasible(problem, {"native": True}, GPU) or ""
    assert ("whole 128 rows" not in refused) is fits
    assert variant.infeasible(problem, {"native": False}, GPU) is None


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_of_an_empty_product_every_variant_says_whether_it_can_run(op: str, shape: tuple[int, int, int]) -> None:
    problem = Problem(op, shape, "bfloat16", 4, next(iter(get_op(op).reductions), ""), layout="nk")
    for name, variant in variants(op).items():
        reason = check_candidate(problem, Candidate.of(op, name, variant.default(problem, GPU)), GPU)
        assert variant.is_library or shape[2] == 0 or reason, name
