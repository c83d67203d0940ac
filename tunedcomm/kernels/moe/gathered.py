"""host_unfused: ep_dispatch of CPU tensors by the all_gather over the ring in shared memory.

Numerics: ordered (bits are moved).
"""

from __future__ import annotations

from dataclasses import replace

from tunedcomm.kernels.all_gather.host import HostOneShot
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostComposed
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.kernels.moe.op import dispatch_by, sizes_of
from tunedcomm.space import Config
from tunedcomm.spec import Problem


class DispatchHost(HostComposed, registered=True):
    op = "ep_dispatch"
    summary = "CPU tensors: all_gather in shared memory, then PyTorch operators that sort"
    algorithms = {"one_shot": HostOneShot.variant}  # noqa: RUF012 - never changed

    def asked(self, problem: Problem) -> Problem:
        s = sizes_of(problem)
        return replace(problem, shape=(s.tokens * (s.wire_bytes + 4 * s.topk),), dtype="uint8", layout="", scaling="")

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        launch = self.collectives(problem, config)[0].bind(workspace)
        return dispatch_by(lambda everyone, own: launch((own,), (everyone,), 0), problem, workspace)
