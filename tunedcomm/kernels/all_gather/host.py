"""host_one_shot: CPU tensors over a ring of slots in shared memory; every rank copies what its peers have published.

Numerics: ordered (bits are moved).
"""

from __future__ import annotations

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostStage, HostVariant
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem


class HostOneShot(HostVariant, registered=True):
    op = "all_gather"
    name = "host_one_shot"
    summary = "CPU tensors: every rank copies its peers' inputs from shared memory"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage, nbytes = HostStage(workspace, problem, config), problem.nbytes
        own_slots, addresses, copy, at_own = stage.own_slots, stage.addresses, stage.copy, stage.ring.rank * nbytes
        peers = [rank for rank in range(problem.world_size) if rank != stage.ring.rank]

        def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
            copy(at_out + at_own + first, at_x + first, size)
            for peer in peers:
                copy(at_out + peer * nbytes + first, addresses[peer][slot], size)

        return stage.one_pass(lambda slot, at_x, first, size: copy(own_slots[slot], at_x + first, size), take)
