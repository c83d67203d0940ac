"""host_one_shot: CPU tensors over a ring of slots in shared memory; every rank copies its segment of its peers' slots.

all_to_all_v passes as many pieces as the largest chunk that any rank may send has, on every rank; the pieces of shorter
chunks are short or empty.

Numerics: ordered (bits are moved).
"""

from __future__ import annotations

import itertools
from typing import Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import KIB, HostStage, ScatterVariant
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Limits, Problem

# Of a rank's input. Where ranks share cores, gloo is as fast with larger ones (bench/results/collectives_host.csv).
_MAX_SHARING_CORES = 1024 * KIB


class _Chunks(ScatterVariant):
    name = "host_one_shot"
    summary = "CPU tensors: every rank copies its chunks of its peers' inputs from shared memory"

    def default_beats_library(self, problem: Problem, limits: Limits) -> bool:
        is_fast = problem.world_size <= limits.host_cores or self.slot_bytes(problem) <= _MAX_SHARING_CORES
        return is_fast and super().default_beats_library(problem, limits)


class HostOneShot(_Chunks, registered=True):
    op = "all_to_all"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config, segments=problem.world_size)
        nbytes, rank, addresses, copy = problem.nbytes, stage.ring.rank, stage.addresses, stage.copy
        at_own, at_segment = rank * nbytes, rank * stage.chunk
        peers = [peer for peer in range(problem.world_size) if peer != rank]

        def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
            copy(at_out + at_own + first, at_x + at_own + first, size)
            for peer in peers:
                copy(at_out + peer * nbytes + first, addresses[peer][slot] + at_segment, size)

        return stage.one_pass(stage.put_segments(), take)


class HostOneShotV(_Chunks, registered=True):
    op = "all_to_all_v"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config, segments=problem.world_size)
        own_slots, chunk, width, addresses = stage.own_slots, stage.chunk, ITEMSIZE[problem.dtype], stage.addresses
        copy, rank, at_segment = stage.copy, stage.ring.rank, stage.ring.rank * stage.chunk

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            sent, received = (_bounds(counts.tolist(), width) for counts in inputs[1:])

            def put(slot: int, at_x: int, first: int, size: int) -> None:
                for peer, (begin, end) in enumerate(sent):
                    if peer != rank and begin + first < end:
                        copy(own_slots[slot] + peer * chunk, at_x + begin + first, min(size, end - begin - first))

            def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
                for peer, (begin, end) in enumerate(received):
                    source = at_x + sent[rank][0] + first if peer == rank else addresses[peer][slot] + at_segment
                    if begin + first < end:
                        copy(at_out + begin + first, source, min(size, end - begin - first))

            stage.one_pass(put, take)(inputs, outputs, stream)

        return run


def _bounds(counts: list[int], width: int) -> list[tuple[int, int]]:
    """First byte of every rank's chunk, and the first behind it."""
    return list(itertools.pairwise(itertools.accumulate((count * width for count in counts), initial=0)))
