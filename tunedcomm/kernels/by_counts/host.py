"""host_one_shot: CPU tensors over the ring of slots in shared memory; every rank copies or sums its peers' rows.

As many pieces pass as max_count rows have, on every rank; pieces of ranks with fewer rows are short or empty. Where
ranks do not know each other's counts, an all_gather of the counts comes first.

Numerics: ordered.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

from tunedcomm.kernels.all_gather.op import HostOneShot as GatherCounts
from tunedcomm.kernels.by_counts.op import DEVICE, GATHER, PADDED, SCATTER, note_clamped
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import REDUCED, HostStage, HostVariant, ScatterVariant
from tunedcomm.kernels.common.variant import Collective, Workspace
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, Problem


def _bytes_of(counts: list[int], problem: Problem) -> tuple[list[int], list[int]]:
    """First byte and number of bytes of every rank's rows."""
    row = problem.shape[1] * ITEMSIZE[problem.dtype]
    sizes = [count * row for count in counts]
    if problem.layout == PADDED:
        return [rank * problem.nbytes for rank in range(len(counts))], sizes
    return list(accumulate(sizes[:-1], initial=0)), sizes


def _counts_of(given: Any, problem: Problem, workspace: Workspace) -> list[int]:
    counts: list[int] = (note_clamped(problem, given, workspace) if problem.layout == DEVICE else given).tolist()
    return counts


class HostGather(HostVariant, registered=True):
    op = GATHER
    name = "host_one_shot"
    summary = "CPU tensors: every rank copies its peers' rows from shared memory"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        stage = HostStage(workspace, problem, config)
        copy, own_slots, addresses, rank = stage.copy, stage.own_slots, stage.addresses, stage.ring.rank
        one_count = replace(problem, shape=(1,), dtype="int32", layout="")
        gather = Collective.of(GatherCounts.variant, one_count, {**config, "chunk_kib": 16, "threads": 1})
        exchange = gather.bind(workspace)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, (out, all_counts) = inputs[0], outputs
            if problem.layout == PADDED:
                exchange((torch.full((1,), len(x), dtype=torch.int32, device="cpu"),), (all_counts,), stream)
                counts = all_counts.tolist()
            else:
                counts = _counts_of(inputs[1], problem, workspace)
                all_counts.copy_(torch.tensor(counts, dtype=torch.int32, device="cpu"))
            firsts, sizes = _bytes_of(counts, problem)

            def put(slot: int, at_x: int, first: int, size: int) -> None:
                copy(own_slots[slot], at_x + first, max(min(size, sizes[rank] - first), 0))

            def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
                for peer, length in enumerate(sizes):
                    source = at_x + first if peer == rank else addresses[peer][slot]
                    copy(at_out + firsts[peer] + first, source, max(min(size, length - first), 0))

            stage.one_pass(put, take)((x,), (out,), stream)

        return run


class HostScatter(ScatterVariant, registered=True):
    op = SCATTER
    name = "host_one_shot"
    summary = "CPU tensors: every rank sums its rows of all ranks from shared memory"
    dtypes = REDUCED

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config, segments=problem.world_size)
        combine, copy, own_slots, chunk = stage.combiner(problem), stage.copy, stage.own_slots, stage.chunk
        rank = stage.ring.rank

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            counts = _counts_of(inputs[1], problem, workspace)
            firsts, sizes = _bytes_of(counts, problem)

            def put(slot: int, at_x: int, first: int, size: int) -> None:
                for owner, length in enumerate(sizes):
                    there = max(min(size, length - first), 0)
                    copy(own_slots[slot] + owner * chunk, at_x + firsts[owner] + first, there)

            def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
                there = min(size, sizes[rank] - first)
                if there > 0:
                    combine(stage.parts(rank * chunk, there)[slot], stage.room(there))
                    copy(at_out + first, stage.room_at, there)

            stage.one_pass(put, take)(inputs[:1], outputs, stream)
            outputs[0].view(-1, problem.shape[1])[counts[rank] :].zero_()

        return run
