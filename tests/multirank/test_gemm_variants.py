"""Every variant of the fused GEMMs on the host backend, against products in float64."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, bits_of
from quick import some
from variant_checks import check_variant, inputs_of_all, limits_of

from tunedcomm import kernels
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.kernels.gemm.tiles import TILE_AXES
from tunedcomm.spec import Limits, Problem, get_op, get_variant, variants

kernels.discover()
RANKS = Ranks(timeout=500)
KERNELS = {
    op: sorted(name for name, variant in variants(op).items() if variant.kernels)
    for op in ("ag_gemm", "gemm_rs", "gemm_ar")
}
# (op, name, number of ranks).
EVERY = [(op, name, size) for op, names in KERNELS.items() for name in names for size in (2, 3)]
# Rows (of a rank, but for gemm_ar), N, K: the last rows and columns of tiles hang over, and so does the depth.
SHAPES = ((33, 40, 56), (5, 72, 40), (40, 24, 24), (7, 136, 72), (21, 56, 72))
# Dtype, layout, reduction of gemm_rs; all of them, for each op as far as it has them.
KINDS = (
    ("bfloat16", "nk", "sum"),
    ("bfloat16", "nk+bias", "sum"),
    ("bfloat16", "kn+gathered", "sum"),
    ("float16", "kn+bias+gathered", "avg"),
    ("float16", "nk", "sum"),
    ("bfloat16", "nk", "sum"),
    ("bfloat16", "nk+bias+float32", "sum"),
)
SCALED = (("tensorwise", "nk+float32"), ("rowwise", "kn+bias"), ("rowwise", "nk+gathered"), ("rowwise", "kn+float16"))


def problem_of(
    op: str, shape: tuple[int, ...], world_size: int, layout: str, dtype: str = "bfloat16", **more: Any
) -> Problem:
    """Without what the op does not have of the layout."""
    rows, n, k = shape
    known = get_op(op).layouts
    parts = [part for part in layout.split("+") if any(part in other.split("+") for other in known)]
    reduction = more.pop("reduction", "sum")
    if reduction not in get_op(op).reductions:
        reduction = next(iter(get_op(op).reductions), "")
    m = rows if op == "gemm_ar" else rows * world_size
    return Problem(op, (m, n, k), dtype, world_size, reduction, layout="+".join(parts), mode="eager", **more)


def drawn(problem: Problem, variant: str, seed: int) -> dict[str, Any]:
    """A feasible config of the variant, drawn at random, its algorithms in turn; the same on every rank."""
    found, limits = get_variant(problem.op, variant), limits_of(get_communicator())
    feasible = [c for c in found.space.enumerate() if found.infeasible(problem, c, limits) is None]
    algorithms = sorted({str(config.get("algorithm")) for config in feasible})
    chosen = algorithms[seed % len(algorithms)]
    return random.Random(seed).choice([config for config in feasible if str(config.get("algorithm")) == chosen])


def check(problem: Problem, variant: str, seed: int, *, default: bool) -> None:
    """Random inputs within the tolerance, sums of small integers exactly, and what was gathered bit for bit."""
    communicator, kind = get_communicator(), "integers" if seed % 2 else "random"
    config = None if default else drawn(problem, variant, seed)
    outputs = check_variant(communicator, problem, variant, seed=seed, kind=kind, config=config)
    everyone = inputs_of_all(problem, seed, kind)
    if problem.op == "gemm_ar" and kind == "integers" and not problem.scaling:
        (reference,) = get_op("gemm_ar").reference(problem, everyone, communicator.rank)
        assert torch.equal(outputs[0].double(), reference), (variant, problem, config)
    if "gathered" in problem.layout:
        assert torch.equal(bits_of(outputs[1]), bits_of(torch.cat([given[0] for given in everyone])))


@pytest.mark.parametrize(("op", "variant", "world_size"), EVERY)
def test_sizes_layouts_and_dtypes(rank: int, op: str, variant: str, world_size: int) -> None:
    """Up and down on one lane, other ops' calls in between: every call leaves panels and arena fit for any other."""
    communicator = get_communicator()
    for seed, (dtype, layout, reduction) in some(enumerate(KINDS), 3):
        shape = SHAPES[seed % len(SHAPES)]
        problem = problem_of(op, shape, world_size, layout, dtype, reduction=reduction)
        check(problem, variant, seed, default=op != "gemm_ar" or seed < 2)
        between = Problem("all_reduce", (257,), "bfloat16", world_size, mode="eager")
        check_variant(communicator, between, ("lamport", "two_shot")[seed % 2], seed=seed)
    dist.barrier()
    assert communicator.workspace is not None
    assert communicator.workspace.rearm("eager") == 0
    dist.barrier()


@pytest.mark.parametrize(("op", "variant", "world_size"), EVERY)
def test_fp8(rank: int, op: str, variant: str, world_size: int) -> None:
    for seed, (scaling, layout) in some(enumerate(SCALED), 2):
        problem = problem_of(op, (18, 48, 80), world_size, layout, "float8_e4m3fn", scaling=scaling)
        check(problem, variant, seed, default=op != "gemm_ar")


@pytest.mark.parametrize("variant", some(KERNELS["ag_gemm"]))
def test_same_bits_again_and_again(rank: int, world_size: int, variant: str) -> None:
    """With calls of other ops and other values in between."""
    communicator = get_communicator()
    problem = problem_of("ag_gemm", SHAPES[-1], world_size, "nk")
    first = check_variant(communicator, problem, variant, seed=3)[0]
    delays = random.Random(rank)
    for seed in range(2):
        time.sleep(delays.random() / 20)
        check_variant(communicator, problem, variant, seed=seed)
        for other in ("lamport", "push", "copy_engine"):
            between = Problem("all_gather", (200,), "bfloat16", world_size, reduction="", mode="eager")
            check_variant(communicator, between, other, seed=seed)
        again = check_variant(communicator, problem, variant, seed=3)[0]
        assert torch.equal(bits_of(first), bits_of(again))


@pytest.mark.parametrize("variant", KERNELS["gemm_rs"])
def test_every_choice_of_gemm_rs(rank: int, world_size: int, variant: str) -> None:
    """Each value of each axis that is not about tiles, where it is feasible."""
    communicator, chosen, num_run = get_communicator(), get_variant("gemm_rs", variant), 0
    limits = limits_of(communicator)
    for seed, shape in enumerate(((70, 24, 40), (21, 23, 40))):  # rows of the second's result are no whole packets
        problem = problem_of("gemm_rs", shape, world_size, "nk")
        default = chosen.default(problem, limits)
        if chosen.infeasible(problem, default, limits) is not None:
            continue
        axes = [(name, axis) for name, axis in chosen.space.axes if name not in TILE_AXES]
        others = [{**default, name: value} for name, axis in axes for value in axis.values() if value != default[name]]
        for config in some([c for c in others if chosen.infeasible(problem, c, limits) is None], 4):
            check_variant(communicator, problem, variant, seed=seed, config=config)
            num_run += 1
    assert num_run > 0


LIMITS = Limits(
    backend="cuda", num_sms=132, multicast=False, max_blocks=512, staging_bytes=1 << 26, one_shot_bytes=1 << 22,
    stage_bytes=1 << 24, panel_bytes=1 << 30,
)  # fmt: skip


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_what_cannot_run_is_refused_in_words(op: str) -> None:
    """Rows that do not divide, depths that descriptors cannot read, ranks that do not reach each other."""
    good = Problem(op, (4096, 8192, 3584), "bfloat16", 4, "" if op == "ag_gemm" else "sum", layout="nk")
    cases = {
        "same number": replace(good, world_size=3),
        "float32 goes to the library": replace(good, dtype="float32"),
        "panels hold": replace(good, shape=(1 << 20, 8192, 3584)),
    }
    if op == "gemm_rs":
        cases["as tensor descriptors want"] = replace(good, shape=(4096, 8192, 3585))
        cases["max goes to the library"] = replace(good, reduction="max")
    else:
        cases["nothing to do"] = replace(good, shape=(0, 8192, 3584))
    for name in ("push_reduce", "copy_engine") if op == "gemm_rs" else KERNELS[op][:2]:
        variant = get_variant(op, name)
        config = variant.default(good, LIMITS)
        assert variant.infeasible(good, config, LIMITS) is None
        for said, problem in cases.items():
            assert re.search(said, variant.infeasible(problem, config, LIMITS) or ""), (name, said)
        assert "address" in (variant.infeasible(good, config, replace(LIMITS, symmetric=False)) or "")
    multimem = get_variant("gemm_rs", "multimem")
    scattered = replace(good, op="gemm_rs", reduction="sum")
    assert "multicast" in (multimem.infeasible(scattered, multimem.default(scattered, LIMITS), LIMITS) or "")
