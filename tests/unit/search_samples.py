"""An op of made-up variants on a made-up machine, for tests of what is searched in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tunedcomm import spec
from tunedcomm.db.records import Trial
from tunedcomm.hardware import Environment
from tunedcomm.space import Choice, Config, PowerOfTwo, Space
from tunedcomm.spec import Candidate, Limits, OpSpec, Problem, Variant, register_op, register_variant
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search.knowledge import Knowledge

OP = "search_op"
LIMITS = Limits("host", 1, False, 64, 1 << 20, 1 << 20, 1 << 20)
HERE = Environment("gpu", 1, 0, 0, "host", 0, False, 1, "", "", "2.9", "", "", "1")
SETTINGS = Settings(backend="host", world_size=2, trials=6)
WIDE = Space({"num_blocks": PowerOfTwo(1, 64), "num_warps": PowerOfTwo(1, 16), "pdl": Choice(False, True)})
SMALL = Space({"chunks": Choice(1, 2, 4)})


def refuse_large(problem: Problem, config: Config, limits: Limits) -> str | None:
    return "too many blocks" if int(config["num_blocks"]) * 64 > problem.numel else None


def never(problem: Problem, config: Config, limits: Limits) -> str | None:
    return "not here"


def may(problem: Problem, config: Config, limits: Limits) -> str | None:
    return None


@contextmanager
def registered() -> Iterator[None]:
    """The op and its variants, for as long as the context lasts."""

    def unused(*_: Any) -> Any:
        raise AssertionError("no tensor is needed to plan a search")

    register_op(
        OpSpec(
            name=OP,
            summary="",
            reductions=("sum",),
            dtypes=("float32",),
            shape_help="",
            rank_of_shape=1,
            make_inputs=unused,
            make_outputs=unused,
            reference=unused,
            tolerance={},
            message_bytes=lambda problem: problem.nbytes,
            busbw_factor=None,
            default_shapes=lambda backend, itemsize: [(256,), (4096,)],
        )
    )
    spaces: list[tuple[str, Space, spec.Numerics, Callable[[Problem, Config, Limits], str | None]]] = [
        ("library", Space(), "library", may),
        ("small", SMALL, "ordered", may),
        ("wide", WIDE, "ordered", refuse_large),
        ("loose", Space(), "unordered", may),
        ("absent", Space(), "ordered", never),
    ]
    for name, space, numerics, infeasible in spaces:
        register_variant(
            Variant(
                op=OP,
                name=name,
                numerics=numerics,
                summary="",
                space=space,
                infeasible=infeasible,
                default=lambda problem, limits, space=space: next(space.enumerate()),  # type: ignore[misc]
                bind=unused,
                num_blocks=lambda problem, config: int(config.get("num_blocks", 1)),
            )
        )
    try:
        yield
    finally:
        spec._ops.pop(OP)
        for key in [key for key in spec._variants if key[0] == OP]:
            spec._variants.pop(key)


def problem_of(numel: int = 4096, **changes: Any) -> Problem:
    return Problem(op=OP, shape=(numel,), dtype="float32", world_size=2, **changes)


def wide(num_blocks: int, num_warps: int, *, pdl: bool = False) -> Candidate:
    return Candidate.of(OP, "wide", {"num_blocks": num_blocks, "num_warps": num_warps, "pdl": pdl})


def cost_us(candidate: Candidate) -> float:
    """A made-up machine: best at wide(16, 4, pdl)."""
    config = candidate.config_dict
    if candidate.variant != "wide":
        return {"library": 20.0, "small": 15.0, "loose": 8.0}[candidate.variant] + len(str(candidate)) * 1e-3
    off = abs(math.log2(int(config["num_blocks"]) / 16)) + abs(math.log2(int(config["num_warps"]) / 4))
    return 5.0 + off - bool(config["pdl"]) * 0.5


def stored(problem: Problem, candidate: Candidate, status: str = "ok", **changes: Any) -> Trial:
    values: dict[str, Any] = {
        "source_hash": "v1",
        "environment": HERE,
        "variant": candidate.variant,
        "config": candidate.config_dict,
        "numerics": spec.get_variant(candidate.op, candidate.variant).numerics,
        "latency_p50_us": cost_us(candidate) if status in ("ok", "pruned") else None,
    }
    return Trial(problem=problem, status=status, **{**values, **changes})


@dataclass(frozen=True)
class Job:
    """What a coordinator is made of."""

    problems: tuple[Problem, ...]
    settings: Settings
    stored: tuple[Trial, ...] = ()
    seconds_left: float | None = None

    def known(self) -> dict[str, Any]:
        return {"stored": self.stored}


def job_of(*problems: Problem, known: tuple[Trial, ...] = (), **changes: Any) -> Job:
    return Job(problems, replace(SETTINGS, **changes), known)


def knowledge_of(job: Job) -> Knowledge:
    retry = job.settings.retry
    return Knowledge(job.problems, HERE, LIMITS, lambda op, variant: "v1", retry=retry, **job.known())
