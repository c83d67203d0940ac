"""What the all_gather variants share on the host."""

from __future__ import annotations

from dataclasses import replace

from tunedcomm.kernels._data import packets_of
from tunedcomm.kernels._host import grid_rounds, refuse_kernels
from tunedcomm.kernels._move import alignment_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import DTYPES, Limits, Problem

__all__ = ["as_bytes", "constants_of", "message_rounds", "refuse", "refuse_items"]

_MOST_PACKETS = 16  # of a thread at once, its own and the peers': with more, registers spill


def refuse(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    return refuse_kernels(problem, limits, DTYPES, ("",))


def refuse_items(problem: Problem, config: Config) -> str | None:
    """Why a thread cannot hold the packets of all ranks that `config` gives it at once, or None."""
    items = int(config["items"])
    if 32 * int(config["num_warps"]) * items > 1024:
        return "more than 1024 packets a block at once spill registers"
    if items * problem.world_size > _MOST_PACKETS:
        return f"{items} packets of each of {problem.world_size} ranks at once spill registers"
    return None


def message_rounds(problem: Problem, config: Config) -> int:
    """How often a grid goes round whose threads share one rank's input."""
    return grid_rounds(packets_of(problem.nbytes), config)


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
