"""The base class of `unfused` variants: one of all_reduce's ordered kernels, then a kernel of the op's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_reduce.lamport import TwoShotLamport, two_shot_lamport_kernel
from tunedcomm.kernels.all_reduce.two_shot import TwoShot, two_shot_kernel
from tunedcomm.kernels.common.feasibility import refuse_launch_pdl
from tunedcomm.kernels.common.launch import BoundKernel, CompileRequest, bind_kernel
from tunedcomm.kernels.common.variant import PUSH_GRID, Collective, ComposedVariant, Workspace
from tunedcomm.space import Choice, Config, PowerOfTwo, Space, Value
from tunedcomm.spec import Limits, Problem

_SUMS = {"two_shot": TwoShot.variant, "two_shot_lamport": TwoShotLamport.variant}
SUM_KERNELS = (two_shot_kernel, two_shot_lamport_kernel)


def sum_space(second_warps: str) -> Space:
    """The all_reduce's axes, warps of the second kernel under this name, and `launch_pdl` of both."""
    return Space(
        {
            "algorithm": Choice(*_SUMS),
            **PUSH_GRID,
            "num_chunks": PowerOfTwo(1, 16),
            second_warps: PowerOfTwo(1, 16),
            "launch_pdl": Choice(False, True),
        }
    )


class UnfusedVariant(ComposedVariant):
    """An ordered all_reduce kernel, then the last of `kernels`, on sums that lie where the first one put them.

    The second kernel does not touch the lane and has the constant PDL; `space` is of `sum_space(second_warps)`.
    Numerics: ordered. Graph-safe. Lane rules: those of the all_reduce kernel.
    """

    name = "unfused"
    second_warps: str

    def refuse_second(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why the second kernel cannot run, or None."""
        raise NotImplementedError

    def second_blocks(self, problem: Problem, config: Config) -> int:
        """Grid of the second kernel."""
        raise NotImplementedError

    def second_constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        """Constants of the second kernel besides PDL."""
        raise NotImplementedError

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        asked = replace(problem, shape=(problem.numel,), input_kind="plain", layout="", scaling="")
        return (Collective.of(_SUMS[str(config["algorithm"])], asked, config),)

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse_second(problem, config, limits) or refuse_launch_pdl(config, limits):
            return reason
        if config["algorithm"] == "two_shot_lamport" and int(config["num_chunks"]) > 1:
            return "two_shot_lamport has no chunks: only num_chunks=1"
        if int(config["num_warps"]) > 8 and problem.world_size > 4:
            return f"packets from {problem.world_size} ranks do not fit into registers with {config['num_warps']} warps"
        return None

    def wish(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        """The default of `two_shot` for the sum; a subclass adds warps of the second kernel."""
        (sum_,) = self.collectives(problem, {"algorithm": "two_shot", "num_blocks": 1, "num_warps": 4, "num_chunks": 1})
        inner = TwoShot.variant.default(sum_.problem, limits)
        shared = {name: inner[name] for name in ("num_blocks", "num_warps", "num_chunks")}
        return {"algorithm": "two_shot", **shared, "launch_pdl": limits.launch_pdl}

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return max(int(config["num_blocks"]), self.second_blocks(problem, config))

    def _second_request(self, problem: Problem, config: Config) -> CompileRequest:
        warps, pdl = int(config[self.second_warps]), bool(config["launch_pdl"])
        constants = {**self.second_constants(problem, config), "PDL": pdl}
        return CompileRequest.of(self.kernels[-1], constants, num_warps=warps, launch_pdl=pdl)

    def compile_requests(self, problem: Problem, config: Config) -> Iterable[CompileRequest]:
        return (*super().compile_requests(problem, config), self._second_request(problem, config))

    def bind_both(
        self, problem: Problem, config: Config, workspace: Workspace
    ) -> tuple[Callable[[int, int, int], None], BoundKernel]:
        """The all_reduce, called with a stream and the addresses of input and output, and the second kernel."""
        (reducer,) = self.collectives(problem, config)
        blocks = self.second_blocks(problem, config)
        second = bind_kernel(self._second_request(problem, config), blocks, workspace.device)
        return reducer.bind(workspace).by_address, second
