"""host_one_shot: CPU tensors over a ring of slots in shared memory; every rank copies the root's slots.

All ranks publish and wait, so that no rank runs ahead of the slots that its peers still read.

Numerics: ordered (bits are moved).
"""

from __future__ import annotations

import functools

from tunedcomm.kernels.broadcast.op import addresses
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import HostStage, HostVariant
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import Problem


class HostOneShot(HostVariant, registered=True):
    op = "broadcast"
    name = "host_one_shot"
    summary = "CPU tensors: the root's input goes through shared memory"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config)
        slots, copy, rank = stage.addresses, stage.copy, stage.ring.rank

        @functools.cache
        def launch_of(root: int) -> AddressLaunch:
            def put(slot: int, at_x: int, first: int, size: int) -> None:
                if rank == root:
                    copy(slots[rank][slot], at_x + first, size)

            def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
                if rank != root:
                    copy(at_out + first, slots[root][slot], size)
                elif at_out != at_x:
                    copy(at_out + first, at_x + first, size)

            return stage.one_pass(put, take)

        def run(stream: int, at_x: int, at_out: int, root: int) -> None:
            launch_of(root).by_address(stream, at_x, at_out)

        return AddressLaunch(run, addresses)
