"""What ops share that run one of all_reduce's ordered kernels and then a kernel of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tunedcomm.kernels.all_reduce.two_shot import TWO_SHOT, two_shot_kernel
from tunedcomm.kernels.all_reduce.two_shot_lamport import TWO_SHOT_LAMPORT, two_shot_lamport_kernel
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.space import Choice, Config, PowerOfTwo, Value
from tunedcomm.spec import Limits, Problem, Variant

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunedcomm.symm.workspace import Workspace

__all__ = ["AXES", "KERNELS", "bind_sum", "refuse_sum", "sum_asked", "sum_default", "sum_rounds"]

KERNELS = (two_shot_kernel, two_shot_lamport_kernel)
# The all_reduce's part of a space; `launch_pdl`, the last axis of both spaces, is of the second kernel, too.
AXES: dict[str, Choice | PowerOfTwo] = {
    "algorithm": Choice("two_shot", "two_shot_lamport"),
    "num_blocks": Choice(1, 2, 8, 32, 64, 132, 264),
    "num_warps": PowerOfTwo(4, 16),
    "num_chunks": PowerOfTwo(1, 16),
}


def sum_asked(problem: Problem, config: Config) -> tuple[Variant, Problem, dict[str, Value]]:
    """The all_reduce that a config asks for: variant, problem, config."""
    shared = {"num_blocks": config["num_blocks"], "num_warps": config["num_warps"]}
    asked = replace(problem, op="all_reduce", shape=(problem.numel,), input_kind="plain", layout="", scaling="")
    if config["algorithm"] == "two_shot":
        return TWO_SHOT, asked, {**shared, "items": 1, "num_chunks": config["num_chunks"]}
    return TWO_SHOT_LAMPORT, asked, {**shared, "launch_pdl": config["launch_pdl"]}


def sum_rounds(problem: Problem, config: Config) -> int:
    """How often the all_reduce's grid goes round."""
    variant, asked, inner = sum_asked(problem, config)
    return variant.num_rounds(asked, inner)


def refuse_sum(problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why the all_reduce cannot run, or None."""
    if config["algorithm"] == "two_shot_lamport" and int(config["num_chunks"]) > 1:
        return "two_shot_lamport has no chunks: only num_chunks=1"
    if int(config["num_warps"]) > 8 and problem.world_size > 4:
        return f"packets from {problem.world_size} ranks do not fit into registers with {config['num_warps']} warps"
    variant, asked, inner = sum_asked(problem, config)
    return variant.infeasible(asked, inner, limits)


def sum_default(problem: Problem, limits: Limits) -> dict[str, Value]:
    """What to try first of the all_reduce's axes."""
    _, asked, _ = sum_asked(problem, {"algorithm": "two_shot", "num_blocks": 1, "num_warps": 4, "num_chunks": 1})
    inner = TWO_SHOT.default(asked, limits)
    return {"algorithm": "two_shot", **{name: inner[name] for name in ("num_blocks", "num_warps", "num_chunks")}}


def bind_sum(problem: Problem, config: Config, workspace: Workspace) -> Callable[[int, int, int], None]:
    """The all_reduce, called with a stream and the addresses of input and output."""
    variant, asked, inner = sum_asked(problem, config)
    reducer = variant.bind(asked, inner, workspace.reporting_as(problem))
    assert isinstance(reducer, AddressLaunch), "plain inputs are launched by their addresses"
    return reducer.by_address
