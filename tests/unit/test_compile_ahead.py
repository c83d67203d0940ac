"""What a plan binds is what `compile_requests` named, and is compiled ahead: nothing is compiled at first use."""

from __future__ import annotations

import itertools
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import compile_corners
import pytest
import torch

from tunedcomm.space import Config
from tunedcomm.spec import Candidate, Problem, Variant, candidates, check_candidate, get_op, get_variant, ops, variants
from tunedcomm.symm.layout import MAX_WORLD_SIZE, LaneLayout
from tunedcomm.symm.workspace import Lane, Panels

NUM_CONFIGS = 6


def room(nbytes: int) -> torch.Tensor:
    """Memory that no kernel may touch."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


class StandIn(SimpleNamespace):
    """A workspace that launches of further forms of kernels are kept for, so it can be referred to weakly."""

    __hash__ = object.__hash__


def spanning(problem: Problem) -> Any:
    """What `bind` reads of a workspace, also where the group spans nodes."""

    def status_argument(asked: Problem) -> int:
        assert (asked.op, asked.mode) == (problem.op, problem.mode), "a lost peer is reported with the call's op"
        return 1

    def panels(mode: str, nbytes: int) -> Panels:
        buffer: Any = SimpleNamespace(local=room(compile_corners.LIMITS.panel_bytes), nbytes=nbytes)
        return Panels(0, peers, 16, buffer)

    peers = (0,) * (MAX_WORLD_SIZE - 1)
    layout = LaneLayout.for_messages(64 << 20)
    found = StandIn(
        lanes={problem.mode: Lane(local=0, peers=peers, multicast=0)},
        layout=layout,
        device=torch.device("cpu"),
        group=status_argument,  # anything that can be referred to weakly
        rank=0,
        world_size=problem.world_size,
        timeout_ns=1,
        status_argument=status_argument,
        peers_of=lambda x: peers,
        panels=panels,
        scratch=lambda mode, nbytes: room(nbytes),
        buffers={problem.mode: SimpleNamespace(local=room(layout.total_bytes))},
    )
    found.nodes = SimpleNamespace(workspace=found, across=None)
    return found


def feasible_configs(variant: Variant, problem: Problem) -> Iterator[Config]:
    """The config to try first, and others from all over the space, always the same ones."""
    first = variant.default(problem, compile_corners.LIMITS)
    every, seed = list(itertools.islice(variant.space.enumerate(), 100_000)), zlib.crc32(variant.name.encode())
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed)).tolist()
    candidates = itertools.chain([first], (every[at] for at in order))
    feasible = (c for c in candidates if variant.infeasible(problem, c, compile_corners.LIMITS) is None)
    yield from itertools.islice(feasible, NUM_CONFIGS)


def products_of(variant: Variant) -> Iterator[tuple[Problem, Config]]:
    """Fused GEMMs and their configs."""
    reduction = get_op(variant.op).reductions[0]
    for (dtype, layout, scaling), shape in itertools.product(
        compile_corners.GEMM_EXTRAS, ((16, 8192, 2048), (4096, 8192, 3584))
    ):
        problem = Problem(variant.op, shape, dtype, 4, reduction=reduction, layout=layout, scaling=scaling)
        for config in feasible_configs(variant, problem):
            yield problem, config


def messages_of(variant: Variant) -> Iterator[tuple[Problem, Config]]:
    """Collectives and their configs."""
    total, mean = ("sum", "avg") if ops()[variant.op].reductions else ("", "")
    layout = ops()[variant.op].layouts[0]
    for like, tail in (
        (Problem(variant.op, (1,), "bfloat16", 4, reduction=total), False),
        (Problem(variant.op, (1,), "float32", 3, reduction=mean, input_kind="symmetric"), True),
        (Problem(variant.op, (1,), "float16", 8, reduction=total, input_kind="symmetric", in_place=True), False),
    ):
        problems = compile_corners.problems_like(replace(like, layout=layout), tail=tail)
        for config in compile_corners.end_points(variant):
            problem = compile_corners.feasible_problem(variant, config, problems)
            if problem is not None:
                yield problem, config


@pytest.mark.parametrize(("is_gemm", "cases"), [(False, messages_of), (True, products_of)])
def test_bind_uses_the_binaries_that_were_compiled_ahead(
    is_gemm: bool, cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = compile_corners.variants_with_kernels()
    from tunedcomm.kernels.common.launch import BoundKernel

    bound: list[Any] = []

    def spy(request: Any, grid: int, device: torch.device) -> BoundKernel:
        assert grid >= 1
        bound.append(request)
        return BoundKernel(lambda *arguments: lambda *varying: None)

    for name, module in list(sys.modules.items()):
        if name.startswith("tunedcomm.kernels.") and hasattr(module, "bind_kernel"):
            monkeypatch.setattr(module, "bind_kernel", spy)
    compared: Counter[str] = Counter()
    for variant in every:
        if get_op(variant.op).is_gemm != is_gemm:
            continue
        for problem, config in cases(variant):
            bound.clear()
            variant.bind(problem, config, spanning(problem))
            asked = list(variant.compile_requests(problem, config))
            assert set(bound) == set(asked), (variant.name, str(problem), config)
            assert len(asked) == len(set(asked)) > 0
            compared[f"{variant.op}.{variant.name}"] += 1
    assert len(compared) >= 15
    assert min(compared.values()) >= 2, compared


# Spaces of the fused GEMMs

compile_corners.variants_with_kernels()  # imports them
GPU = replace(compile_corners.LIMITS, backend="cuda", multicast=False)
SHAPES = ((4096, 8192, 3584), (2048, 7168, 8192), (16, 8192, 2048), (256, 2560, 8192))


@pytest.mark.slow
def test_a_problem_needs_few_binaries_and_little_time_and_accumulators_fit_into_registers() -> None:
    """Each binary is seconds of the compiler's time, and a catalogue has a thousand problems.

    Sums of fp8 take a second accumulator on sm_90; a spilled one would go through memory in every step.
    """
    tiles: dict[str, set[tuple[Any, Any]]] = {"bfloat16": set(), "float8_e4m3fn": set()}
    for op, shape, dtype in itertools.product(("ag_gemm", "gemm_rs", "gemm_ar"), SHAPES, tiles):
        reduction, scaling = next(iter(get_op(op).reductions), ""), "rowwise" if dtype.startswith("float8") else ""
        problem = Problem(op, shape, dtype, 4, reduction, layout="nk", scaling=scaling)
        candidates(problem, GPU, "any")  # whatever is imported first
        begin = time.process_time()
        found = candidates(problem, GPU, "any")
        assert time.process_time() - begin < 3, problem
        assert {"library", "library_tuned"} <= {candidate.variant for candidate in found}
        configs = [(get_variant(op, candidate.variant), candidate.config_dict) for candidate in found]
        requests = {request for v, config in configs for request in v.compile_requests(problem, config)}
        assert len(requests) <= 400, (problem, len(requests))
        tiles[dtype] |= {(config["block_m"], config["block_n"]) for _, config in configs if "block_m" in config}
    assert tiles["bfloat16"] - tiles["float8_e4m3fn"] == {(128, 256), (64, 256)}
    assert {(256, 128), (128, 128), (64, 128), (16, 64)} <= tiles["float8_e4m3fn"]


@pytest.mark.parametrize(
    ("op", "shape"), [("ag_gemm", (0, 64, 64)), ("gemm_rs", (64, 0, 64)), ("gemm_ar", (64, 64, 0))]
)
def test_of_an_empty_product_every_variant_says_whether_it_can_run(op: str, shape: tuple[int, int, int]) -> None:
    problem = Problem(op, shape, "bfloat16", 4, next(iter(get_op(op).reductions), ""), layout="nk")
    for name, variant in variants(op).items():
        reason = check_candidate(problem, Candidate.of(op, name, variant.default(problem, GPU)), GPU)
        assert variant.is_library or shape[2] == 0 or reason, name
