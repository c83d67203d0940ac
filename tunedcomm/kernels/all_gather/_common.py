"""What the all_gather variants share on the host."""

from __future__ import annotations

from dataclasses import replace

from tunedcomm.kernels._host import refuse_kernels
from tunedcomm.kernels._move import alignment_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import DTYPES, Limits, Problem

__all__ = ["as_bytes", "constants_of", "refuse"]


def refuse(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    return refuse_kernels(problem, limits, DTYPES, ("",))


def as_bytes(problem: Problem) -> Problem:
    """The same problem on bytes: kernels that move take their number as `numel`."""
    return replace(problem, shape=(problem.nbytes,), dtype="uint8")


def constants_of(problem: Problem, config: Config) -> dict[str, Value]:
    """Constants that every all_gather kernel takes."""
    return {
        "WORLD_SIZE": problem.world_size,
        "ALIGN": alignment_of(problem.nbytes),
        "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
    }
