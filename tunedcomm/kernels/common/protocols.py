"""Spaces, rules and first guesses of protocols that several ops have a variant of."""

from __future__ import annotations

from collections.abc import Callable

from tunedcomm.kernels.common.feasibility import closest
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem

Infeasible = Callable[[Problem, Config, Limits], str | None]

LAMPORT_SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128, 256),
        "num_warps": PowerOfTwo(1, 16),
        "launch_pdl": Choice(False, True),
    }
)


READING_SPACE = Space(
    {
        "num_blocks": Choice(1, 2, 4, 8, 16, 32, 64, 128),
        "num_warps": PowerOfTwo(2, 16),
        "items": Choice(1, 2),
    }
)


def refuse_one_shot(problem: Problem, limits: Limits) -> str | None:
    """Why the message does not fit into a one-shot area, or None."""
    if packets_of(problem.nbytes) * PACKET_BYTES > limits.one_shot_bytes:
        return f"{problem.nbytes} bytes exceed the one-shot area of {limits.one_shot_bytes} bytes"
    return None


def refuse_launch_pdl(config: Config, limits: Limits) -> str | None:
    """Why `launch_pdl` may not be set here, or None."""
    if config["launch_pdl"] and not limits.launch_pdl:
        return "programmatic dependent launch is not available here"
    return None


def refuse_stage(problem: Problem, limits: Limits, bytes_of_rank: int) -> str | None:
    """Why `bytes_of_rank` from every rank do not fit into a stage, or None."""
    if bytes_of_rank * problem.world_size > limits.stage_bytes:
        return f"{problem.nbytes} bytes from {problem.world_size} ranks exceed a stage of {limits.stage_bytes} bytes"
    return None


def lamport_wish(packets: int, limits: Limits) -> dict[str, float]:
    """First guess in LAMPORT_SPACE where each thread pushes some of `packets` packets and polls for those of peers."""
    if limits.backend == "host":
        return {"num_blocks": 2, "num_warps": 16, "launch_pdl": False}
    warps = 2 if packets <= 4096 else 4 if packets <= 16384 else 8
    return {"num_blocks": min(packets / (32 * warps), 128), "num_warps": warps, "launch_pdl": limits.launch_pdl}


def lamport_default(packets: int, problem: Problem, limits: Limits, infeasible: Infeasible) -> dict[str, Value]:
    return closest(lamport_wish(packets, limits), LAMPORT_SPACE, problem, limits, infeasible)


def two_shot_lamport_wish(share: int, limits: Limits) -> dict[str, float]:
    """First guess where a rank sums `share` packets, with the axes of LAMPORT_SPACE."""
    if limits.backend == "host":
        return {"num_blocks": 2, "num_warps": 16, "launch_pdl": False}
    warps = 4 if share <= 132 * 128 else 8
    return {"num_blocks": min(share / (32 * warps), 132), "num_warps": warps, "launch_pdl": limits.launch_pdl}


def two_shot_lamport_default(
    share: int, space: Space, problem: Problem, limits: Limits, infeasible: Infeasible
) -> dict[str, Value]:
    return closest(two_shot_lamport_wish(share, limits), space, problem, limits, infeasible)


def reading_wish(packets: int, most_blocks: int, limits: Limits) -> dict[str, float]:
    """First guess where each thread reads some of `packets` packets of every peer, several at once by `items`."""
    if limits.backend == "host":
        return {"num_blocks": 2, "num_warps": 16, "items": 2}
    warps = 4 if packets <= 2048 else 16
    return {"num_blocks": min(packets / (32 * warps), most_blocks), "num_warps": warps, "items": 1}


def reading_default(
    packets: int, most_blocks: int, space: Space, problem: Problem, limits: Limits, infeasible: Infeasible
) -> dict[str, Value]:
    return closest(reading_wish(packets, most_blocks, limits), space, problem, limits, infeasible)


def refuse_chunks(
    problem: Problem, limits: Limits, *, rounds: int, chunks: int, blocks: int, per_block: int, slots: int, ring: int
) -> str | None:
    """Why `rounds` rounds of the grid cannot be cut into `chunks` of which the staging holds `ring`, or None.

    Args:
        problem, limits: what is asked, and where.
        rounds, chunks: how often the grid goes round, and into how many chunks that is cut.
        blocks, per_block: blocks that work on a chunk, and packets that each takes in a round.
        slots: ranks whose packets the staging holds.
        ring: chunks that have a place in the staging at once.
    """
    if rounds < chunks and chunks > 1:
        return f"{rounds} rounds cannot be split into {chunks} chunks"
    needed = slots * min(chunks, ring) * -(-rounds // chunks) * blocks * per_block * PACKET_BYTES
    if needed > limits.staging_bytes:
        return (
            f"{min(chunks, ring)} of the {chunks} chunks of {problem.nbytes} bytes need {needed} bytes of staging; "
            f"there are {limits.staging_bytes} (TUNEDCOMM_WORKSPACE_MIB)"
        )
    return None
