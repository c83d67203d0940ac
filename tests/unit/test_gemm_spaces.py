"""Search spaces of the fused GEMMs: what they hold, how long they take to go through, what they must leave out."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from compile_corners import LIMITS

from tunedcomm.kernels import discover
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("shape", "fits"), [((512, 256, 64), True), ((384, 256, 64), False), ((512, 260, 64), False)])
def test_the_native_operator_takes_whole_tiles(shape: tuple[int, ...], *, fits: bool) -> None:
    """Two ranks; the operator's tile has 128 rows and 16-byte rows of operands."""
    variant = get_variant("ag_gemm", "torch_fused")
    problem = Problem("ag_gemm", shape, "bfloat16", 2, layout="nk")
    refused = variant.infeasible(problem, {"native": True}, GPU) or ""
    assert ("whole 128 rows" not in refused) is fits
    assert variant.infeasible(problem, {"native": False}, GPU) is None


@pytest.mark.parametrize(
    ("op", "shape"), [("ag_gemm", (0, 64, 64)), ("gemm_rs", (64, 0, 64)), ("gemm_ar", (64, 64, 0))]
)
def test_of_an_empty_product_every_variant_says_whether_it_can_run(op: str, shape: tuple[int, int, int]) -> None:
    problem = Problem(op, shape, "bfloat16", 4, next(iter(get_op(op).reductions), ""), layout="nk")
    for name, variant in variants(op).items():
        reason = check_candidate(problem, Candidate.of(op, name, variant.default(problem, GPU)), GPU)
        assert variant.is_library or shape[2] == 0 or reason, name
