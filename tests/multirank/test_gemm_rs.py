"""Every gemm_rs variant on the host backend: layouts, dtypes, scalings, odd sizes, calls in a row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cases import Case, report, run_cases
from harness import run_ranks
from quick import some
from variant_checks import check_variant, limits_of

from tunedcomm import kernels
from tunedcomm.dispatch.communicator import get_communicator
from tunedcomm.kernels.gemm.tiles import TILE_AXES
from tunedcomm.spec import Limits, Problem, get_variant, variants

kernels.discover()
# Not those for CPU tensors, which `test_host_collectives.py` is for.
HERE = sorted(n for n, v in variants("gemm_rs").items() if v.bounded and not v.is_library and not n.startswith("host_"))


def problem_of(rows: int, n: int, k: int, world_size: int, dtype: str = "bfloat16", **fields: Any) -> Problem:
    """Of `rows` rows a rank."""
    fields = {"layout": "nk", "mode": "eager", **fields}
    return Problem("gemm_rs", (rows * world_size, n, k), dtype, world_size, **fields)


def sizes(variant: str, rank: int) -> None:
    """Sizes, dtypes and layouts up and down on one lane: every call leaves panels fit for any other."""
    communicator = get_communicator()
    world_size = communicator.world_size
    calls = (
        problem_of(33, 40, 56, world_size),
        problem_of(5, 72, 40, world_size, "float16", layout="kn", reduction="avg"),
        problem_of(40, 24, 24, world_size, layout="kn"),
        problem_of(40, 24, 24, world_size, layout="nk+float32"),
    )
    for seed, problem in some(enumerate((*calls, calls[0])), 2):
        check_variant(communicator, problem, variant, seed=seed, kind="integers" if seed % 3 == 0 else "random")


def scaled(variant: str, rank: int) -> None:
    """fp8, its scales for the whole tensor or row by row."""
    communicator = get_communicator()
    for scaling, layout in (("tensorwise", "nk"), ("rowwise", "nk"), ("rowwise", "kn+float32")):
        problem = problem_of(18, 48, 80, communicator.world_size, "float8_e4m3fn", layout=layout, scaling=scaling)
        check_variant(communicator, problem, variant, seed=len(layout))


def every_choice(variant: str, rank: int) -> None:
    """Each value of each axis that is not about tiles, where it is feasible."""
    communicator = get_communicator()
    limits = limits_of(communicator)
    chosen, num_run = get_variant("gemm_rs", variant), 0
    problems = [
        problem_of(70, 24, 40, communicator.world_size),
        problem_of(21, 23, 40, communicator.world_size),  # rows of the result are no whole packets
    ]
    for seed, problem in enumerate(problems):
        default = chosen.default(problem, limits)
        if chosen.infeasible(problem, default, limits) is not None:
            continue
        for name, axis in chosen.space.axes:
            if name in TILE_AXES:
                continue
            others = [{**default, name: value} for value in axis.values() if value != default[name]]
            for config in some(c for c in others if chosen.infeasible(problem, c, limits) is None):
                check_variant(communicator, problem, variant, seed=seed, config=config)
                num_run += 1
    assert num_run > 0


CHECKS: tuple[tuple[Callable[[str, int], None], int], ...] = ((sizes, 2), (sizes, 3), (scaled, 2), (every_choice, 2))


def cases_body(rank: int, world_size: int, check: str) -> dict[str, str]:
    body: Callable[[str, int], None] = globals()[check]
    cases: dict[str, Case] = {variant: functools.partial(body, variant) for variant in HERE}
    return run_cases(cases, rank)


@functools.cache
def outcomes(check: str, world_size: int) -> list[dict[str, str]]:
    """Of all variants, run one after another by the same processes."""
    return run_ranks(world_size, cases_body, check, timeout=400)


@pytest.mark.parametrize("variant", HERE)
@pytest.mark.parametrize(("check", "world_size"), [(check.__name__, world_size) for check, world_size in CHECKS])
def test_variant(check: str, world_size: int, variant: str) -> None:
    report(outcomes(check, world_size), variant)


def test_what_cannot_run_is_refused_in_words() -> None:
    """Rows that do not divide, depths that descriptors cannot read, ranks that do not reach each other."""
    limits = Limits(
        backend="cuda", num_sms=132, multicast=False, max_blocks=512, staging_bytes=1 << 26, one_shot_bytes=1 << 22,
        stage_bytes=1 << 24, panel_bytes=1 << 30,
    )  # fmt: skip
    good = Problem("gemm_rs", (4096, 8192, 3584), "bfloat16", 4, layout="nk")
    cases = {
        "same number for each of 3": replace(good, world_size=3),
        "as tensor descriptors want": replace(good, shape=(4096, 8192, 3585)),
        "float32 goes to the library": replace(good, dtype="float32"),
        "panels hold": replace(good, shape=(1 << 18, 8192, 64)),
        "max goes to the library": replace(good, reduction="max"),
    }
    for name in ("push_reduce", "copy_engine", "reduce_add"):
        variant = get_variant("gemm_rs", name)
        config = variant.default(good, limits)
        assert variant.infeasible(good, config, limits) is None
        for said, problem in cases.items():
            assert said in (variant.infeasible(problem, config, limits) or ""), (name, said)
        assert "address" in (variant.infeasible(good, config, replace(limits, symmetric=False)) or "")
    multimem = get_variant("gemm_rs", "multimem")
    assert "multicast" in (multimem.infeasible(good, multimem.default(good, limits), limits) or "")
