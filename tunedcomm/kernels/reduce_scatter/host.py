"""host_one_shot: CPU tensors over a ring of slots in shared memory; every rank sums its segment of all ranks' slots.

Numerics: ordered.
"""

from __future__ import annotations

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import REDUCED, HostStage, ScatterVariant
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem


class HostOneShot(ScatterVariant, registered=True):
    op = "reduce_scatter"
    name = "host_one_shot"
    summary = "CPU tensors: every rank sums its chunks of all inputs from shared memory"
    dtypes = REDUCED

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config, segments=problem.world_size)
        sums = stage.take_sums(problem, stage.ring.rank * stage.chunk)
        return stage.one_pass(stage.put_segments(), sums)
