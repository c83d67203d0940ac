"""What the reduce_scatter variants share on the host."""

from __future__ import annotations

from tunedcomm.kernels.common.feasibility import grid_rounds, refuse_kernels
from tunedcomm.kernels.common.packets import alignment_of, packets_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, Problem

__all__ = ["chunk_packets", "chunk_rounds", "constants_of", "refuse"]

KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def chunk_packets(problem: Problem) -> int:
    """Packets of one chunk, which is one rank's result."""
    return packets_of(problem.nbytes)


def chunk_rounds(problem: Problem, config: Config) -> int:
    """How often a grid goes round whose threads share one chunk."""
    return grid_rounds(chunk_packets(problem), config)


def refuse(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    return refuse_kernels(problem, limits, KERNEL_DTYPES, ("sum", "avg"))


def constants_of(problem: Problem, config: Config) -> dict[str, Value]:
    """Constants that every reduce_scatter kernel takes."""
    return {
        "WORLD_SIZE": problem.world_size,
        "DTYPE": problem.dtype,
        "WIDTH": ITEMSIZE[problem.dtype],
        "AVG": problem.reduction == "avg",
        "ALIGN": alignment_of(problem.nbytes),
        "BLOCK": 32 * int(config["num_warps"]) * int(config.get("items", 1)),
    }
