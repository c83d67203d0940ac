"""host_one_shot, host_two_shot: CPU tensors over a ring of slots in shared memory (`symm.ring`), without Triton.

host_one_shot: every rank publishes its chunk and sums all ranks' chunks itself. Reads world_size × the message.
host_two_shot: every rank publishes the peers' slices of its chunk, reduces its own slice of all chunks, publishes
that, and copies the other slices from their owners. Reads about three times the message, at any world size.

host_unfused of all_reduce_bias: one of these, then PyTorch's addition.

Numerics: ordered.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import KIB, LINE, REDUCED, HostComposed, HostStage, HostVariant
from tunedcomm.kernels.common.reference import WIDE
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import RING_SLOTS

_MIN_SLICE = 4 * KIB
_MAX_ONE_SHOT = 256 * KIB  # of the rule of thumb


class _HostAllReduce(HostVariant):
    op = "all_reduce"
    dtypes = REDUCED

    def default_beats_library(self, problem: Problem, limits: Limits) -> bool:
        is_small = problem.nbytes <= _MAX_ONE_SHOT or problem.layout == WIDE
        return is_small == isinstance(self, HostOneShot) and super().default_beats_library(problem, limits)


class HostOneShot(_HostAllReduce, registered=True):
    name = "host_one_shot"
    summary = "CPU tensors: every rank sums all inputs from shared memory"
    first_chunk_kib = 128

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config)
        own_slots, copy = stage.own_slots, stage.copy
        return stage.one_pass(
            lambda slot, at_x, first, size: copy(own_slots[slot], at_x + first, size),
            stage.take_sums(problem, 0),
        )


class HostTwoShot(_HostAllReduce, registered=True):
    name = "host_two_shot"
    summary = "CPU tensors: every rank sums its slice in shared memory and copies the others'"
    first_chunk_kib = 1024

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.nbytes < _MIN_SLICE * problem.world_size:
            return f"slices of {problem.nbytes} bytes are too small for a second step"
        if problem.layout == WIDE:
            return "its sums are rounded; host_one_shot rounds none"
        return super().infeasible(problem, config, limits)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = HostStage(workspace, problem, config)
        combine, copy = stage.combiner(problem), stage.copy
        ring, call, lock, plan = stage.ring, stage.call_of(), stage.ring.lock, stage.plan()
        begin, claim, publish, wait, release = ring.begin, ring.claim, ring.publish, ring.wait, ring.release
        addresses, own_slots, me = stage.addresses, stage.own_slots, ring.rank
        slices = {size: _slices(size, ring.world_size) for size in stage.sizes()}
        parts = {size: stage.parts(*bounds[me]) for size, bounds in slices.items()}

        def put(epoch: int, source: int, size: int) -> int:
            for rank, (first, length) in enumerate(slices[size]):
                if rank != me:
                    copy(own_slots[epoch % RING_SLOTS] + first, source + first, length)
            publish(epoch, call)
            return epoch

        def reduce(epoch: int, source: int, size: int) -> int:
            wait(epoch, call)
            next_epoch, (first, length) = claim(call), slices[size][me]
            operands = parts[size][epoch % RING_SLOTS].copy()
            operands[me] = stage.at(source + first, length)
            combine(operands, parts[size][next_epoch % RING_SLOTS][me])
            release(epoch)
            publish(next_epoch, call)
            return next_epoch

        def gather(epoch: int, target: int, size: int) -> None:
            wait(epoch, call)
            slot = epoch % RING_SLOTS
            for rank, (first, length) in enumerate(slices[size]):
                copy(target + first, addresses[rank][slot] + first, length)
            release(epoch)

        def run(stream: int, at_x: int, at_out: int) -> None:
            # Chunk c is published while chunk c − 1 is reduced and chunk c − 2 gathered: three epochs are under way.
            with lock:
                pushed: list[int] = []
                reduced: list[int] = []
                for c in range(len(plan) + 2):
                    if c < len(plan):
                        pushed.append(put((claim if c else begin)(call), at_x + plan[c][0], plan[c][1]))
                    if 1 <= c <= len(plan):
                        reduced.append(reduce(pushed[c - 1], at_x + plan[c - 1][0], plan[c - 1][1]))
                    if c >= 2:
                        gather(reduced[c - 2], at_out + plan[c - 2][0], plan[c - 2][1])

        return stage.launch(run)


def _slices(size: int, world_size: int) -> list[tuple[int, int]]:
    """First byte and length of every rank's slice of a chunk; slices begin at cache lines."""
    length = (-(-size // world_size) + LINE - 1) // LINE * LINE
    starts = [min(rank * length, size) for rank in range(world_size + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(starts)]


class HostUnfused(HostComposed):
    """An all_reduce of the problem's elements, then PyTorch operators."""

    algorithms = {"one_shot": HostOneShot.variant, "two_shot": HostTwoShot.variant}  # noqa: RUF012 - never changed
    space = Space({"algorithm": Choice(*algorithms), **dict(HostVariant.space.axes)})

    def collective_problem(self, problem: Problem) -> Problem:
        return replace(problem, shape=(problem.numel,), layout="", scaling="")


class HostBias(HostUnfused, registered=True):
    op = "all_reduce_bias"
    summary = "CPU tensors: all_reduce in shared memory, then an addition"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce = self.collectives(problem, config)[0].bind(workspace)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            reduce(inputs, outputs, stream)
            outputs[0].add_(inputs[1])  # of halves in fp32, rounded once

        return run
