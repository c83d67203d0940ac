"""What the all_gather variants share on the host."""

from __future__ import annotations

from dataclasses import replace

from tunedcomm.kernels.common.feasibility import grid_rounds, refuse_kernels
from tunedcomm.kernels.common.packets import alignment_of, packets_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import DTYPES, Limits, Problem

__all__ = ["as_bytes", "constants_of", "message_rounds", "refuse", "refuse_items"]

# Packets of a thread and of a block at once, the own and the peers': with more, registers spill.
_MOST_PACKETS, _MOST_PACKETS_A_BLOCK = 16, 4096


def refuse(problem: Problem, limits: Limits) -> str | None:
    """Why no kernel of ours can run `problem`, whatever the config; None if one might."""
    return refuse_kernels(problem, limits, DTYPES, ("",))


def refuse_items(problem: Problem, config: Config) -> str | None:
    """Why a thread cannot hold the packets of all ranks that `config` gives it at once, or None."""
    packets = int(config["items"]) * problem.world_size
    if packets > _MOST_PACKETS or packets * 32 * int(config["num_warps"]) > _MOST_PACKETS_A_BLOCK:
        return f"{packets} packets in each of {32 * int(config['num_warps'])} threads at once spill registers"
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
