"""This library's own all_reduce of rows of the result where they lie, bias and all; for variants around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.all_reduce.bias import (
    BIAS_LAMPORT,
    BIAS_TWO_SHOT,
    BIAS_TWO_SHOT_LAMPORT,
    bias_lamport_kernel,
    bias_two_shot_kernel,
    bias_two_shot_lamport_kernel,
)
from tunedcomm.kernels.all_reduce.lamport import LAMPORT, lamport_kernel
from tunedcomm.kernels.all_reduce.one_shot import ONE_SHOT, one_shot_kernel
from tunedcomm.kernels.all_reduce.two_shot import TWO_SHOT, two_shot_kernel
from tunedcomm.kernels.all_reduce.two_shot_lamport import TWO_SHOT_LAMPORT, two_shot_lamport_kernel
from tunedcomm.kernels.common.launch import AddressLaunch, ManyLaunch
from tunedcomm.kernels.common.packets import PACKET_BYTES
from tunedcomm.kernels.gemm.problem import out_itemsize, wanted_of
from tunedcomm.space import Config, Value
from tunedcomm.spec import Limits, Problem, Variant

if TYPE_CHECKING:
    from tunedcomm.symm.workspace import Workspace

__all__ = [
    "KERNELS",
    "adds_bias",
    "bind_reduce",
    "refuse_reduce",
    "requests_of",
    "rounds_of",
    "usual_reduce",
    "wish_of",
]

_PLAIN = {"lamport": LAMPORT, "two_shot_lamport": TWO_SHOT_LAMPORT, "two_shot": TWO_SHOT, "one_shot": ONE_SHOT}
_WITH_BIAS = {"lamport": BIAS_LAMPORT, "two_shot_lamport": BIAS_TWO_SHOT_LAMPORT, "two_shot": BIAS_TWO_SHOT}
KERNELS = (
    lamport_kernel,
    two_shot_lamport_kernel,
    two_shot_kernel,
    one_shot_kernel,
    bias_lamport_kernel,
    bias_two_shot_lamport_kernel,
    bias_two_shot_kernel,
)


_LAMPORT_BYTES = 4 << 20


def adds_bias(problem: Problem, algorithm: str) -> bool:
    """True if the kernels of `algorithm` add the problem's bias themselves."""
    whole = problem.shape[1] * out_itemsize(problem) % PACKET_BYTES == 0
    return wanted_of(problem).bias and whole and algorithm in _WITH_BIAS


def _asked(problem: Problem, config: Config, rows: int) -> tuple[Variant, Problem, dict[str, Value]]:
    """The all_reduce of so many rows: variant, problem, config."""
    algorithm, dtype, columns = str(config["algorithm"]), wanted_of(problem).dtype, problem.shape[1]
    inner: dict[str, Value] = {"num_blocks": config["num_blocks"], "num_warps": config["num_warps"]}
    if algorithm in ("lamport", "two_shot_lamport"):
        inner["launch_pdl"] = config["launch_pdl"]
    if algorithm == "two_shot":
        inner["num_chunks"] = config["num_chunks"]
    if adds_bias(problem, algorithm):
        asked = replace(problem, op="all_reduce_bias", shape=(rows, columns), dtype=dtype, layout="", scaling="")
        return _WITH_BIAS[algorithm], asked, inner
    if algorithm in ("two_shot", "one_shot"):
        inner["items"] = 1
    asked = replace(
        problem, op="all_reduce", shape=(rows * columns,), dtype=dtype, layout="", scaling="", in_place=True
    )
    return _PLAIN[algorithm], asked, inner


def refuse_reduce(problem: Problem, config: Config, limits: Limits, rows: int) -> str | None:
    """Why that all_reduce cannot run, or None."""
    if config["launch_pdl"] and config["algorithm"] in ("two_shot", "one_shot"):
        return f"{config['algorithm']} is not launched early: only launch_pdl=False"
    if int(config["num_chunks"]) > 1 and config["algorithm"] != "two_shot":
        return f"{config['algorithm']} has no chunks: only num_chunks=1"
    if problem.numel == 0:
        return "there is nothing to do"
    variant, asked, inner = _asked(problem, config, rows)
    return variant.infeasible(asked, inner, limits)


def wish_of(problem: Problem, limits: Limits, rows: int) -> dict[str, float]:
    """The all_reduce to try first."""
    nbytes = rows * problem.shape[1] * out_itemsize(problem)
    small = nbytes * problem.world_size <= 1 << 20
    algorithm = "lamport" if small else "two_shot_lamport" if nbytes <= 4 << 20 else "two_shot"
    wish: dict[str, Any] = {"algorithm": algorithm, "num_chunks": 1, "launch_pdl": False}
    if limits.backend == "host":
        return {**wish, "num_blocks": 2, "num_warps": 16}
    if algorithm == "two_shot":
        return {**wish, "num_blocks": 128, "num_warps": 16, "num_chunks": 1 if nbytes <= 32 << 20 else 4}
    packets = nbytes // PACKET_BYTES // (1 if small else problem.world_size)
    warps = 2 if packets <= 4096 else 4 if packets <= 16384 else 8
    return {**wish, "num_blocks": min(packets / (32 * warps), 128), "num_warps": warps, "launch_pdl": limits.launch_pdl}


def usual_reduce(problem: Problem, rows: int, *, host: bool = False) -> dict[str, Value]:
    """The config of an all_reduce of so many rows by all SMs, for variants that search others."""
    small = rows * problem.shape[1] * out_itemsize(problem) <= _LAMPORT_BYTES
    algorithm = "two_shot_lamport" if small else "two_shot"
    found: dict[str, Value] = {"algorithm": algorithm, "num_chunks": 1, "launch_pdl": False}
    return {**found, "num_blocks": 1 if host else 128, "num_warps": 16}


def rounds_of(problem: Problem, config: Config, rows: int) -> int:
    """How often the grid of that all_reduce goes round."""
    variant, asked, inner = _asked(problem, config, rows)
    return variant.num_rounds(asked, inner)


def requests_of(problem: Problem, config: Config, rows: int) -> Iterable[Any]:
    """Binaries of that all_reduce."""
    variant, asked, inner = _asked(problem, config, rows)
    return variant.compile_requests(asked, inner)


def bind_reduce(problem: Problem, config: Config, workspace: Workspace, rows: int) -> Callable[[int, int, int], None]:
    """`(stream, address of the rows, address of the bias or 0)` to that all_reduce, in place."""
    variant, asked, inner = _asked(problem, config, rows)
    launch = variant.bind(asked, inner, workspace.reporting_as(problem))
    if isinstance(launch, ManyLaunch):
        with_bias = launch.by_address
        return lambda stream, address, bias: with_bias(stream, address, bias, address)
    assert isinstance(launch, AddressLaunch), "plain inputs are launched by their addresses"
    plain = launch.by_address
    return lambda stream, address, bias: plain(stream, address, address)
