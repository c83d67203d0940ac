"""host_unfused, copy_engine: ep_dispatch by an all_gather of all tokens, of which PyTorch takes those that are due.

In the layouts `tokens` and `rank` CPU tensors come back by an all_to_all of the sums for each rank's tokens.

Every token goes to every rank, also where it has no expert: with 8 experts a token one in ten on 4 ranks. No rank needs
to know sizes before it sends, so copy engines can move large shards beside the experts' GEMMs and take no SMs; CPU
tensors go through the ring in shared memory.

Numerics: ordered (bits are moved). Graph-safe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tunedcomm.kernels.all_gather.copy_engine import CopyEngine
from tunedcomm.kernels.all_gather.op import HostOneShot
from tunedcomm.kernels.all_to_all.host import HostOneShot as HostAllToAll
from tunedcomm.kernels.common.feasibility import Launch, refuse_result
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.variant import Collective, ComposedVariant, Workspace
from tunedcomm.kernels.moe.op import BY_RANK, BY_TOKEN, bytes_of_wire_row, combine_by_token, dispatch_by
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Limits, Problem

_LEAST_SHARD = 1 << 20  # bytes: below it PyTorch's operators take longer than any push


class _Gathered(ComposedVariant):
    op = "ep_dispatch"

    def collective_problem(self, problem: Problem) -> Problem:
        """The gather of the tokens as they are sent, with their ids."""
        shape = (problem.shape[0] * bytes_of_wire_row(problem),)
        return replace(problem, shape=shape, dtype="uint8", layout="", scaling="", input_kind="plain")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        launch = self.collectives(problem, config)[0].bind(workspace)
        return dispatch_by(lambda everyone, own, stream: launch((own,), (everyone,), stream), problem, workspace)


class DispatchHost(_Gathered, HostComposed, registered=True):
    summary = "CPU tensors: all_gather in shared memory, then PyTorch operators that sort"
    algorithms = {"one_shot": HostOneShot.variant}  # noqa: RUF012 - never changed


class CombineHost(HostComposed, registered=True):
    op = "ep_combine"
    summary = "CPU tensors: all_to_all in shared memory, then PyTorch operators that sum; layouts tokens, rank"
    algorithms = {"one_shot": HostAllToAll.variant}  # noqa: RUF012 - never changed
    on_wire = False

    def collective_problem(self, problem: Problem) -> Problem:
        """The exchange of all rows, also of those that hold no token."""
        tokens, hidden = problem.shape[:2]
        shape = (tokens * hidden * ITEMSIZE["float32" if self.on_wire else problem.dtype],)
        return replace(problem, shape=shape, dtype="uint8", layout="", scaling="", input_kind="plain")

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.layout not in (BY_TOKEN, BY_RANK):
            return "rows of each expert go to the library on CPUs"
        return refuse_result(problem, quantized=self.on_wire)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        launch, on_wire = self.collectives(problem, config)[0].bind(workspace), self.on_wire
        return combine_by_token(lambda come, sent, stream: launch((sent,), (come,), stream), problem, on_wire=on_wire)


class CombineHostQuantized(CombineHost, registered=True):
    name = "host_quantized"
    summary = "CPU tensors: quantised rows, widened, through shared memory, then PyTorch operators that sum"
    numerics = "quantized"
    on_wire = True


class DispatchCopyEngine(_Gathered, registered=True):
    name = "copy_engine"
    summary = "copy engines move all tokens to all ranks, then PyTorch operators sort; for large shards"
    kernels = CopyEngine.kernels
    space = CopyEngine.space

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        return (Collective.of(CopyEngine.variant, self.collective_problem(problem), config),)

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if limits.backend == "cuda" and (nbytes := self.collective_problem(problem).nbytes) < _LEAST_SHARD:
            return f"a shard of {nbytes} bytes is too small for copy engines to pay"
        return None

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        return {**CopyEngine.variant.default(self.collective_problem(problem), limits)}
