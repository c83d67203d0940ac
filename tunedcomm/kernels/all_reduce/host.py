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
from tunedcomm.kernels.common.host import KIB, LINE, REDUCED, HostComposed, HostVariant, Stage
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import Limits, Problem
from tunedcomm.symm.layout import RING_SLOTS

_LEAST_SLICE = 4 * KIB
_MOST_ONE_SHOT = 256 * KIB  # of the rule of thumb


class _HostAllReduce(HostVariant):
    op = "all_reduce"
    dtypes = REDUCED

    def untuned(self, problem: Problem, limits: Limits) -> bool:
        is_small = problem.nbytes <= _MOST_ONE_SHOT
        return is_small == isinstance(self, HostOneShot) and super().untuned(problem, limits)


class HostOneShot(_HostAllReduce, registered=True):
    name = "host_one_shot"
    summary = "CPU tensors: every rank sums all inputs from shared memory"
    first_chunk_kib = 128

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = Stage(workspace, problem, config)
        mine, copy = stage.mine, stage.copy
        return stage.one_pass(
            lambda slot, at_x, first, size: copy(mine[slot], at_x + first, size),
            stage.take_sums(stage.combiner(problem), 0),
        )


class HostTwoShot(_HostAllReduce, registered=True):
    name = "host_two_shot"
    summary = "CPU tensors: every rank sums its slice in shared memory and copies the others'"
    first_chunk_kib = 1024

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.nbytes < _LEAST_SLICE * problem.world_size:
            return f"slices of {problem.nbytes} bytes are too small for a second step"
        return super().infeasible(problem, config, limits)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        stage = Stage(workspace, problem, config)
        combine, copy = stage.combiner(problem), stage.copy
        ring, spins, op, lock, plan = stage.ring, stage.spins, stage.op, stage.ring.lock, stage.plan()
        claim, publish, wait, release = ring.claim, ring.publish, ring.wait, ring.release
        addresses, mine, me = stage.addresses, stage.mine, ring.rank
        slices = {size: _slices(size, ring.world_size) for size in stage.sizes()}
        own = {size: bounds[ring.rank] for size, bounds in slices.items()}
        parts = {size: stage.parts(first, length) for size, (first, length) in own.items()}
        results = {
            size: [stage.own(ring.rank, slot, first, length) for slot in range(RING_SLOTS)]
            for size, (first, length) in own.items()
        }

        def put(source: int, size: int) -> int:
            step = claim(op)
            for rank, (first, length) in enumerate(slices[size]):
                if rank != me:
                    copy(mine[step % RING_SLOTS] + first, source + first, length)
            publish(step)
            return step

        def reduce(step: int, source: int, size: int) -> int:
            wait(step, spins, op)
            made, (first, length) = claim(op), own[size]
            everyone = parts[size][step % RING_SLOTS].copy()
            everyone[me] = stage.at(source + first, length)
            combine(everyone, results[size][made % RING_SLOTS])
            release(step)
            publish(made)
            return made

        def gather(step: int, target: int, size: int) -> None:
            wait(step, spins, op)
            slot = step % RING_SLOTS
            for rank, (first, length) in enumerate(slices[size]):
                copy(target + first, addresses[rank][slot] + first, length)
            release(step)

        def run(stream: int, at_x: int, at_out: int) -> None:
            # Chunk c is published while chunk c − 1 is reduced and chunk c − 2 gathered: three steps are under way.
            with lock:
                put_steps: list[int] = []
                reduced: list[int] = []
                for c in range(len(plan) + 2):
                    if c < len(plan):
                        put_steps.append(put(at_x + plan[c][0], plan[c][1]))
                    if 1 <= c <= len(plan):
                        reduced.append(reduce(put_steps[c - 1], at_x + plan[c - 1][0], plan[c - 1][1]))
                    if c >= 2:
                        gather(reduced[c - 2], at_out + plan[c - 2][0], plan[c - 2][1])

        return stage.launch(run)


def _slices(size: int, world_size: int) -> list[tuple[int, int]]:
    """First byte and length of every rank's slice of a chunk; slices begin at cache lines."""
    step = (-(-size // world_size) + LINE - 1) // LINE * LINE
    starts = [min(rank * step, size) for rank in range(world_size + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(starts)]


class HostUnfused(HostComposed):
    """An all_reduce of as many elements as the problem has, then something else."""

    algorithms = {"one_shot": HostOneShot.variant, "two_shot": HostTwoShot.variant}  # noqa: RUF012 - never changed
    space = Space({"algorithm": Choice(*algorithms), **dict(HostVariant.space.axes)})

    def asked(self, problem: Problem) -> Problem:
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
