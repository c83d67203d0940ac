"""host_one_shot, host_two_shot: CPU tensors over a ring of slots in shared memory (`symm.ring`), without Triton.

host_one_shot: every rank publishes its chunk and sums all ranks' chunks itself. Reads world_size × the message.
host_two_shot: every rank publishes its chunk, reduces its own slice of all ranks' chunks, publishes that, and copies
the other slices from their owners. Reads about three times the message, at any world size.

Both cut the message into chunks that stay in the cache, and publish the next chunk before they wait for this one. So
messages of any size pass through slots of 1 MiB.

Copies are `memmove`, sums are NumPy's, and PyTorch's for 16-bit floats. Those are cut into pieces that are too small
for PyTorch's thread pool, whose threads would wait for cores that the peers have.

Numerics: ordered; sums in rank order, of fp64 and integers in their own dtype and of all others in fp32, rounded once.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.variant import VariantBase, Workspace
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import RING_SLOTS

if TYPE_CHECKING:
    from tunedcomm.symm.ring import HostRing

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64")
_KIB = 1024
_SMALLEST = 16 * _KIB  # chunk
_LEAST_SLICE = 4 * _KIB
_LINE = 64  # slices begin at cache lines
_PIECE = 32704  # elements; PyTorch shares out the work on 32768 and more among threads
_MOST_ONE_SHOT = 256 * _KIB  # of the rule of thumb

# (bytes of every rank's part in rank order, bytes of the result): fills in the result.
Combine = Callable[[Sequence[Any], Any], None]


def combiner(problem: Problem) -> Combine:
    """A function that reduces parts in rank order."""
    return _combine_halves(problem) if ITEMSIZE[problem.dtype] == 2 else _combine_natively(problem)


def _combine_natively(problem: Problem) -> Combine:
    import numpy as np

    ufuncs: Mapping[str, np.ufunc] = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum}
    ufunc, dtype = ufuncs[problem.reduction], np.dtype(problem.dtype)
    is_mean, is_float = problem.reduction == "avg", dtype.kind == "f"
    count, zero = dtype.type(problem.world_size), dtype.type(0)

    def combine(parts: Sequence[Any], out: Any) -> None:
        ufunc(parts[0], parts[1], out)
        for part in parts[2:]:
            ufunc(out, part, out)
        if is_mean:
            np.divide(out, count, out)
        if is_float:  # −0.0 becomes +0.0, as in all ordered variants
            np.add(out, zero, out)

    return combine


def _combine_halves(problem: Problem) -> Combine:
    import numpy as np
    import torch

    name = problem.reduction
    pick = {"max": torch.maximum, "min": torch.minimum}.get(name)
    total, widened = torch.empty(_PIECE), torch.empty(_PIECE)
    mask = np.empty(_PIECE, np.bool_)
    negative_zero = np.uint16(0x8000)

    def combine_piece(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if pick is not None:
            pick(parts[0], parts[1], out=out)
            for part in parts[2:]:
                pick(out, part, out=out)
            return
        if len(parts) == 2 and name == "sum":  # sums in fp32 and rounds once
            torch.add(parts[0], parts[1], out=out)
            return
        whole, wide = total[: len(out)], widened[: len(out)]
        whole.copy_(parts[0])
        for part in parts[1:]:
            wide.copy_(part)
            whole.add_(wide)
        if name == "avg":
            whole.div_(len(parts))
        out.copy_(whole)

    def combine(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        for first in range(0, len(out), _PIECE):
            here = slice(first, first + _PIECE)
            piece = out[here]
            combine_piece([part[here] for part in parts], piece)
            words = piece.view(torch.uint16).numpy()
            found = np.equal(words, negative_zero, mask[: len(words)])
            if found.any():
                words[found] = 0

    return combine


def _typed(dtype: str) -> Callable[[Any], Any]:
    """A function that views bytes as elements that a `Combine` takes."""
    if ITEMSIZE[dtype] == 2:
        import torch

        kind = getattr(torch, dtype)
        return lambda view: torch.from_numpy(view).view(kind) if len(view) else torch.empty(0, dtype=kind)
    return lambda view: view.view(dtype)


class _Stage:
    """The memory of a bound problem: its chunks in the slots of all ranks, and room for a reduced chunk.

    Args:
        chunk: bytes of a chunk; the last may be shorter.
    """

    def __init__(self, ring: HostRing, problem: Problem, chunk: int) -> None:
        import numpy as np

        self._ring = ring
        self._typed = _typed(problem.dtype)
        self.nbytes, self.chunk = problem.nbytes, chunk
        self.addresses = [[ring.address(rank, slot) for slot in range(RING_SLOTS)] for rank in range(ring.world_size)]
        self._room = np.empty(chunk, np.uint8)
        self.room_at = int(self._room.ctypes.data)

    def sizes(self) -> set[int]:
        """Bytes that chunks of the message have."""
        return {min(self.chunk, self.nbytes), self.nbytes % self.chunk or self.chunk}

    def room(self, size: int) -> Any:
        """`size` bytes for a reduced chunk, typed."""
        return self._typed(self._room[:size])

    def parts(self, first: int, size: int) -> list[list[Any]]:
        """By slot, every rank's bytes from `first` on, typed."""
        ranks = range(self._ring.world_size)
        return [[self.own(rank, slot, first, size) for rank in ranks] for slot in range(RING_SLOTS)]

    def own(self, rank: int, slot: int, first: int, size: int) -> Any:
        """A rank's bytes in a slot, typed."""
        return self._typed(self._ring.view(rank, slot, first, size))


class HostAllReduce(VariantBase):
    """The part that both variants share."""

    op = "all_reduce"
    space = Space({"chunk_kib": Choice(16, 32, 64, 128, 256, 512, 1024), "spins": Choice(1, 64, 1024)})
    first_chunk_kib: int

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if limits.host_cores == 0:
            return "only CPU tensors of ranks on one host go through its shared memory"
        if problem.dtype not in DTYPES:
            return f"it reduces {', '.join(DTYPES)}, not {problem.dtype}"
        if problem.numel == 0:
            return "there is nothing to do"
        chunk = int(config["chunk_kib"]) * _KIB
        if chunk > _SMALLEST and chunk >= 2 * problem.nbytes:
            return f"chunks of half the size hold all of {problem.nbytes} bytes, too"
        return None

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return 0

    def wish(self, problem: Problem, limits: Limits) -> Mapping[str, float]:
        spins = 1 if problem.world_size > limits.host_cores else 1024
        return {"chunk_kib": min(self.first_chunk_kib, max(problem.nbytes // _KIB, 1)), "spins": spins}

    def untuned(self, problem: Problem, limits: Limits) -> bool:
        is_small = problem.nbytes <= _MOST_ONE_SHOT
        return is_small == isinstance(self, HostOneShot) and self._is_feasible(problem, limits)

    def _is_feasible(self, problem: Problem, limits: Limits) -> bool:
        return self.infeasible(problem, self.default(problem, limits), limits) is None


class HostOneShot(HostAllReduce):
    name = "host_one_shot"
    summary = "CPU tensors: every rank sums all inputs from shared memory"
    first_chunk_kib = 128

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        """Launch by address; what calls share is bound here, for at 1 KiB Python is what takes the time."""
        ring = workspace.ring
        assert ring is not None, "limits.host_cores says that there is one"
        nbytes, spins, op, lock = problem.nbytes, int(config["spins"]), f"{problem.op} (called eagerly)", ring.lock
        chunk = min(int(config["chunk_kib"]) * _KIB, nbytes)
        stage, combine, memmove = _Stage(ring, problem, chunk), combiner(problem), ctypes.memmove
        claim, publish, wait, release = ring.claim, ring.publish, ring.wait, ring.release
        mine, room_at = stage.addresses[ring.rank], stage.room_at
        parts = {size: stage.parts(0, size) for size in stage.sizes()}
        rooms = {size: stage.room(size) for size in stage.sizes()}
        whole, room = parts[chunk], rooms[chunk]

        def run_at_once(stream: int, at_x: int, at_out: int) -> None:
            with lock:
                step = claim(op)
                slot = step % RING_SLOTS
                memmove(mine[slot], at_x, nbytes)
                publish(step)
                wait(step, spins, op)
                combine(whole[slot], room)
                release(step)
                memmove(at_out, room_at, nbytes)

        def put(source: int, size: int) -> int:
            step = claim(op)
            memmove(mine[step % RING_SLOTS], source, size)
            publish(step)
            return step

        def run(stream: int, at_x: int, at_out: int) -> None:
            with lock:
                step = put(at_x, chunk)
                for first in range(0, nbytes, chunk):
                    size, following = min(chunk, nbytes - first), first + chunk
                    ahead = put(at_x + following, min(chunk, nbytes - following)) if following < nbytes else 0
                    wait(step, spins, op)
                    combine(parts[size][step % RING_SLOTS], rooms[size])
                    release(step)
                    memmove(at_out + first, room_at, size)
                    step = ahead

        return AddressLaunch(run_at_once if chunk == nbytes else run)


class HostTwoShot(HostAllReduce):
    name = "host_two_shot"
    summary = "CPU tensors: every rank sums its slice in shared memory and copies the others'"
    first_chunk_kib = 1024

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.nbytes < _LEAST_SLICE * problem.world_size:
            return f"slices of {problem.nbytes} bytes are too small for a second step"
        return super().infeasible(problem, config, limits)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        ring = workspace.ring
        assert ring is not None, "limits.host_cores says that there is one"
        nbytes, spins, op, lock = problem.nbytes, int(config["spins"]), f"{problem.op} (called eagerly)", ring.lock
        chunk = min(int(config["chunk_kib"]) * _KIB, nbytes)
        stage, combine, memmove = _Stage(ring, problem, chunk), combiner(problem), ctypes.memmove
        claim, publish, wait, release = ring.claim, ring.publish, ring.wait, ring.release
        addresses, mine = stage.addresses, stage.addresses[ring.rank]
        slices = {size: _slices(size, ring.world_size) for size in stage.sizes()}
        own = {size: bounds[ring.rank] for size, bounds in slices.items()}
        parts = {size: stage.parts(first, length) for size, (first, length) in own.items()}
        results = {
            size: [stage.own(ring.rank, slot, first, length) for slot in range(RING_SLOTS)]
            for size, (first, length) in own.items()
        }
        firsts = range(0, nbytes, chunk)
        plan = [(first, min(chunk, nbytes - first)) for first in firsts]

        def put(source: int, size: int) -> int:
            step = claim(op)
            memmove(mine[step % RING_SLOTS], source, size)
            publish(step)
            return step

        def reduce(step: int, size: int) -> int:
            wait(step, spins, op)
            made = claim(op)
            combine(parts[size][step % RING_SLOTS], results[size][made % RING_SLOTS])
            release(step)
            publish(made)
            return made

        def gather(step: int, target: int, size: int) -> None:
            wait(step, spins, op)
            slot = step % RING_SLOTS
            for rank, (first, length) in enumerate(slices[size]):
                memmove(target + first, addresses[rank][slot] + first, length)
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
                        reduced.append(reduce(put_steps[c - 1], plan[c - 1][1]))
                    if c >= 2:
                        gather(reduced[c - 2], at_out + plan[c - 2][0], plan[c - 2][1])

        return AddressLaunch(run)


def _slices(size: int, world_size: int) -> list[tuple[int, int]]:
    """First byte and length of every rank's slice of a chunk; slices begin at cache lines."""
    step = (-(-size // world_size) + _LINE - 1) // _LINE * _LINE
    starts = [min(rank * step, size) for rank in range(world_size + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(starts)]


HOST_ONE_SHOT = HostOneShot().register()
HOST_TWO_SHOT = HostTwoShot().register()
