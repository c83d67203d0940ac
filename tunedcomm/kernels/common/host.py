"""The parts that variants for CPU tensors share: their space, passes through the ring of slots, and sums.

They cut messages into chunks that stay in the cache and fit into slots of 1 MiB (`symm.ring`), so messages of any size
pass. In `HostStage.one_pass` every rank puts a chunk into its slot and takes its parts from the slots of all ranks. The
next chunk is published before this one is waited for, so copies and sums overlap the peers'.

On one thread copies are `memmove`, and sums are NumPy's, or PyTorch's for 16-bit floats. Those are cut into pieces that
are too small for PyTorch's thread pool, whose threads would wait for cores that the peers have. Where every rank has
cores of its own to spare, PyTorch's operators copy and sum large chunks on several threads.

Numerics: ordered; sums in rank order, of fp64 and integers in their own dtype and of all others in fp32, rounded once.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import refuse_result
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.common.reference import WIDE
from tunedcomm.kernels.common.variant import Collective, ComposedVariant, VariantBase, Workspace
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import DTYPES, ITEMSIZE, Limits, Problem, Variant
from tunedcomm.symm.layout import RING_SLOT_BYTES, RING_SLOTS

if TYPE_CHECKING:
    from tunedcomm.symm.ring import HostRing

REDUCED = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64")  # dtypes of sums
KIB = 1024
LINE = 64  # pieces and slices begin at cache lines
_SMALLEST = 16 * KIB  # chunk
_PIECE = 32704  # elements; PyTorch shares out the work on 32768 and more among threads
_MIN_OF_THREAD = 128 * KIB  # of a chunk, for each thread: 32768 elements of fp32

# (bytes of every rank's part in rank order, bytes of the result): fills in the result.
Combine = Callable[[Sequence[Any], Any], None]
# (slot, address of the input, first byte and length of the piece): fills in this rank's slot.
Put = Callable[[int, int, int, int], object]
# (slot, addresses of the input and the output, first byte and length of the piece): reads all ranks' slots.
Take = Callable[[int, int, int, int, int], object]


class _CpuVariant(VariantBase):
    """A variant for CPU tensors; its default config is taken for faster than the library where it can run."""

    # 2: rows of 1 may call a right candidate incorrect, where the program's state entered the check.
    version = 2

    def num_blocks(self, problem: Problem, config: Config) -> int:
        return 0

    def default_beats_library(self, problem: Problem, limits: Limits) -> bool:
        # Without such a host no config is feasible, and looking for one walks the space.
        return limits.host_cores > 0 and self.infeasible(problem, self.default(problem, limits), limits) is None


class HostVariant(_CpuVariant):
    """A variant for CPU tensors of ranks on one host.

    Attributes:
        dtypes: payloads that it takes.
        first_chunk_kib: chunk to try first.
    """

    space = Space(
        {
            "chunk_kib": Choice(16, 32, 64, 128, 256, 512, 1024),
            "spins": Choice(1, 64, 1024),
            "threads": Choice(1, 2, 4, 8),
        }
    )
    dtypes: tuple[str, ...] = DTYPES
    first_chunk_kib = 256

    def slot_bytes(self, problem: Problem) -> int:
        """Bytes that a rank puts into its slots, which are cut into chunks."""
        return problem.nbytes

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        """Return why it cannot run `problem`, whatever the config; None if it might."""
        if limits.host_cores == 0:
            return "only CPU tensors of ranks on one host go through its shared memory"
        if problem.dtype not in self.dtypes:
            return f"it takes {', '.join(self.dtypes)}, not {problem.dtype}"
        is_quantized = self.numerics == "quantized"
        if reason := refuse_result(problem, wide=problem.layout == WIDE, quantized=is_quantized):
            return reason
        return "there is nothing to do" if problem.numel == 0 else None

    def default_beats_library(self, problem: Problem, limits: Limits) -> bool:
        return self.refuse(problem, limits) is None and super().default_beats_library(problem, limits)

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if reason := self.refuse(problem, limits):
            return reason
        chunk, whole = int(config["chunk_kib"]) * KIB, self.slot_bytes(problem)
        if chunk > _SMALLEST and chunk >= 2 * whole:
            return f"chunks of half the size hold all of {whole} bytes, too"
        threads = int(config["threads"])
        if threads > 1 and threads * problem.world_size > limits.host_cores:
            return f"{threads} threads of {problem.world_size} ranks are more than the {limits.host_cores} cores"
        if threads > 1 and min(chunk, whole) < threads * _MIN_OF_THREAD:
            return f"a chunk of {min(chunk, whole)} bytes is too little work for {threads} threads"
        return None

    def preferred_config(self, problem: Problem, limits: Limits) -> Mapping[str, float]:
        spins = 1 if problem.world_size > limits.host_cores else 1024
        chunk_kib = min(self.first_chunk_kib, max(self.slot_bytes(problem) // KIB, 1))
        return {"chunk_kib": chunk_kib, "spins": spins, "threads": 1}


class ScatterVariant(HostVariant):
    """A variant whose slots hold a segment for each rank; `Problem.nbytes` counts one segment of the message."""

    def slot_bytes(self, problem: Problem) -> int:
        return problem.nbytes * problem.world_size


class HostComposed(_CpuVariant, ComposedVariant):
    """A collective of CPU tensors, with something before or after it in PyTorch.

    Attributes:
        algorithms: variants of the collective by the value of the axis `algorithm`, which may be left out for one.
    """

    name = "host_unfused"
    space = HostVariant.space
    algorithms: Mapping[str, Variant]

    def collective_problem(self, problem: Problem) -> Problem:
        """The collective's problem, with the call's op."""
        raise NotImplementedError

    def collectives(self, problem: Problem, config: Config) -> tuple[Collective, ...]:
        algorithm = str(config.get("algorithm", next(iter(self.algorithms))))
        return (Collective.of(self.algorithms[algorithm], self.collective_problem(problem), config),)

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        return None

    def preferred_config(self, problem: Problem, limits: Limits) -> dict[str, Any]:
        inner, known = self.collective_problem(problem), self.algorithms
        faster = (name for name, variant in known.items() if variant.default_beats_library(inner, limits))
        best = next(faster, next(iter(known)))
        return {"algorithm": best, **known[best].default(inner, limits)}


class HostStage:
    """The ring as a bound problem sees it: its bytes in the slots of all ranks, and room for a reduced chunk.

    Args:
        workspace: it has a ring wherever `infeasible` says nothing.
        problem: what is bound.
        config: a point of `HostVariant.space`.
        segments: parts of equal size that a slot is cut into.

    Attributes:
        ring: of the group.
        chunk: bytes of a chunk, or of its segment; the last may be shorter.
        call_of: the call as the ring sees it, from an option that the problem lacks.
        threads: that copy and sum.
        copy: (target, source, bytes): copies from address to address.
        addresses: of the slots, by rank.
        own_slots: of this rank's slots.
        room_at: address of room for a chunk.
    """

    def __init__(self, workspace: Workspace, problem: Problem, config: Config, *, segments: int = 1) -> None:
        from tunedcomm.symm.ring import Call

        assert workspace.ring is not None, "limits.host_cores says that there is one"
        self.ring: HostRing = workspace.ring
        self.call_of, self.nbytes = functools.partial(Call.of, problem, int(config["spins"])), problem.nbytes
        self.chunk = min(max(int(config["chunk_kib"]) * KIB // segments // LINE * LINE, LINE), problem.nbytes)
        ranks = range(self.ring.world_size)
        self.addresses = [[self.ring.address(rank, slot) for slot in range(RING_SLOTS)] for rank in ranks]
        self.own_slots = self.addresses[self.ring.rank]
        self.threads = int(config["threads"])
        self.copy: Callable[[int, int, int], object] = ctypes.memmove if self.threads == 1 else _copy_on_threads
        self._typed = _typed(problem.dtype, by_torch=self.threads > 1)
        self._room = self.ring.scratch[: self.chunk]
        self.room_at = int(self._room.ctypes.data)

    def sizes(self) -> set[int]:
        """Bytes that chunks of the message have."""
        return {self.chunk, self.nbytes % self.chunk or self.chunk}

    def plan(self) -> list[tuple[int, int]]:
        """First byte and length of every chunk."""
        return [(first, min(self.chunk, self.nbytes - first)) for first in range(0, self.nbytes, self.chunk)]

    def room(self, size: int) -> Any:
        """`size` bytes for a reduced chunk, typed."""
        return self._typed(self._room[:size])

    def parts(self, first: int, size: int) -> Mapping[int, list[Any]]:
        """By slot, every rank's bytes from `first` on, typed."""
        view, ranks, typed = self.ring.view, range(self.ring.world_size), self._typed
        return _FromUse(lambda slot: [typed(view(rank, slot, first, size)) for rank in ranks])

    def at(self, address: int, size: int) -> Any:
        """The caller's memory from an address on, typed."""
        import numpy as np

        memory = (ctypes.c_char * size).from_address(address)
        return self._typed(np.frombuffer(memory, np.uint8))  # type: ignore[call-overload]

    def put_segments(self) -> Put:
        """Puts every rank's segment of a piece into the own slot."""
        own_slots, chunk, nbytes, copy = self.own_slots, self.chunk, self.nbytes, self.copy
        ranks = range(self.ring.world_size)
        if chunk == nbytes:
            whole = nbytes * len(ranks)
            return lambda slot, at_x, first, size: copy(own_slots[slot], at_x, whole)

        def put(slot: int, at_x: int, first: int, size: int) -> None:
            for rank in ranks:
                copy(own_slots[slot] + rank * chunk, at_x + rank * nbytes + first, size)

        return put

    def take_sums(self, problem: Problem, at: int) -> Take:
        """Reduces all ranks' bytes from `at` on of a slot into the output."""
        parts = {size: self.parts(at, size) for size in self.sizes()}
        if problem.layout == WIDE:
            return _take_wide_sums(parts, is_mean=problem.reduction == "avg")
        combine = self.combiner(problem)
        rooms = _FromUse(self.room)
        room_at, copy = self.room_at, self.copy

        def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
            combine(parts[size][slot], rooms[size])
            copy(at_out + first, room_at, size)

        return take

    def launch(self, run: Callable[[int, int, int], None]) -> AddressLaunch:
        """Launch of `run`, with as many of PyTorch's threads as the config has."""
        if self.threads == 1:
            return AddressLaunch(run)
        import torch

        def run_on_threads(stream: int, at_x: int, at_out: int) -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)  # 0.1 us
            try:
                run(stream, at_x, at_out)
            finally:
                torch.set_num_threads(before)

        return AddressLaunch(run_on_threads)

    def one_pass(self, put: Put, take: Take, option: str = "") -> AddressLaunch:
        """Launch by address. All that calls share is bound here, because at 1 KiB Python takes most of the time.

        `option`: of the call, the same on every rank, that the problem lacks.
        """
        call, lock, plan = self.call_of(option), self.ring.lock, self.plan()
        begin, claim, publish, wait = self.ring.begin, self.ring.claim, self.ring.publish, self.ring.wait
        exchange, release = self.ring.exchange, self.ring.release
        first_size, code = plan[0][1], call.code

        def run_at_once(stream: int, at_x: int, at_out: int) -> None:
            with lock:
                epoch = begin(call)
                slot = epoch % RING_SLOTS
                put(slot, at_x, 0, first_size)
                exchange(slot, code + epoch, call)
                take(slot, at_x, at_out, 0, first_size)
                release(epoch)

        def put_next(epoch: int, at_x: int, piece: tuple[int, int]) -> int:
            put(epoch % RING_SLOTS, at_x, *piece)
            publish(epoch, call)
            return epoch

        def run(stream: int, at_x: int, at_out: int) -> None:
            with lock:
                epoch = put_next(begin(call), at_x, plan[0])
                for index, piece in enumerate(plan, 1):
                    ahead = put_next(claim(call), at_x, plan[index]) if index < len(plan) else 0
                    wait(epoch, call)
                    take(epoch % RING_SLOTS, at_x, at_out, *piece)
                    release(epoch)
                    epoch = ahead

        return self.launch(run_at_once if len(plan) == 1 else run)

    def combiner(self, problem: Problem) -> Combine:
        """A function that reduces parts in rank order."""
        if ITEMSIZE[problem.dtype] == 2:
            size = _PIECE if self.threads == 1 else max(self.chunk // 2, 1)
            return _combine_halves(problem, size, self.ring.scratch[RING_SLOT_BYTES:])
        combine = _combine_natively(problem, by_torch=self.threads > 1)
        return combine if self.threads > 1 else _quiet(combine)


class _FromUse(dict[int, Any]):
    """Views of memory, each made at its use and kept from the plan's third use on.

    A call at a size that does not come again leaves none. PyTorch's tensors lie in the C library's heap, where those
    that stay keep the memory of large messages between them from being used again.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make, self._num_made = make, 0

    def __missing__(self, key: int) -> Any:
        from tunedcomm.state import clean_thread

        with clean_thread():
            made = self._make(key)
        self._num_made += 1
        if self._num_made > _NOT_KEPT:
            self[key] = made
        return made


_NOT_KEPT = 2


def _quiet(combine: Combine) -> Combine:
    """`combine` under NumPy's error state `ignore`: the program's may raise or warn where a sum overflows.

    The state is entered by a context of its own, which costs 0.06 us where `np.errstate` costs 1 us.
    """
    import numpy as np

    if np.__version__.startswith("1."):  # keeps the error state by thread, not by context
        return np.errstate(all="ignore")(combine)
    context = contextvars.Context()
    run: Callable[..., Any] = context.run
    run(np.seterr, all="ignore")
    return functools.partial(run, combine)


def _combine_natively(problem: Problem, *, by_torch: bool) -> Combine:
    import numpy as np
    import torch

    library: Any = torch if by_torch else np
    names = {"sum": "add", "avg": "add", "max": "maximum", "min": "minimum"}
    reduce, divide, add = (getattr(library, name) for name in (names[problem.reduction], "divide", "add"))
    dtype = np.dtype(problem.dtype)
    is_mean, is_float = problem.reduction == "avg", dtype.kind == "f"
    # As arrays: NumPy takes 0.2 us to make one of a scalar.
    count = problem.world_size if by_torch or not is_mean else np.array(problem.world_size, dtype)
    zero = 0 if by_torch else np.array(0, dtype)
    others = range(2, problem.world_size)

    def combine(parts: Sequence[Any], out: Any) -> None:
        reduce(parts[0], parts[1], out=out)
        for rank in others:
            reduce(out, parts[rank], out=out)
        if is_mean:
            divide(out, count, out=out)
        if is_float:  # −0.0 becomes +0.0, as in all ordered variants
            add(out, zero, out=out)

    return combine


def _combine_halves(problem: Problem, piece_size: int, scratch: Any) -> Combine:
    """Sums of 16-bit floats in pieces; `scratch` holds two fp32 and a byte for each element of a piece."""
    import numpy as np
    import torch

    name = problem.reduction
    pick = {"max": torch.maximum, "min": torch.minimum}.get(name)
    wide_bytes = 4 * piece_size
    wide = _FromUse(lambda half: torch.from_numpy(scratch[half * wide_bytes :][:wide_bytes].view(np.float32)))
    mask = scratch[2 * wide_bytes :][:piece_size].view(np.bool_)
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
        whole, widened = wide[0][: len(out)], wide[1][: len(out)]
        whole.copy_(parts[0])
        for part in parts[1:]:
            widened.copy_(part)
            whole.add_(widened)
        if name == "avg":
            whole.div_(len(parts))
        out.copy_(whole)

    def combine(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        for first in range(0, len(out), piece_size):
            span = slice(first, first + piece_size)
            piece = out[span]
            combine_piece([part[span] for part in parts], piece)
            words = piece.view(torch.uint16).numpy()
            found = np.equal(words, negative_zero, mask[: len(words)])
            if found.any():
                words[found] = 0

    return combine


def _take_wide_sums(parts: Mapping[int, Mapping[int, list[Any]]], *, is_mean: bool) -> Take:
    """Sums 16-bit floats in fp32, straight into the output, in pieces as `_combine_halves` does."""
    import torch

    def take(slot: int, at_x: int, at_out: int, first: int, size: int) -> None:
        every = parts[size][slot]
        memory = (ctypes.c_char * (2 * size)).from_address(at_out + 2 * first)
        whole = torch.frombuffer(memory, dtype=torch.float32)
        for start in range(0, len(whole), _PIECE):
            piece, span = whole[start : start + _PIECE], slice(start, start + _PIECE)
            piece.zero_()
            for part in every:
                piece.add_(part[span])
            if is_mean:
                piece.div_(len(every)).add_(0.0)  # −0.0 becomes +0.0

    return take


def _copy_on_threads(target: int, source: int, nbytes: int) -> None:
    """`memmove` by PyTorch's threads."""
    import torch

    if nbytes:
        to, come_from = (
            torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
            for address in (target, source)
        )
        to.copy_(come_from)


def _typed(dtype: str, *, by_torch: bool) -> Callable[[Any], Any]:
    """Return a function that views bytes as the elements that a `Combine` takes."""
    if by_torch or ITEMSIZE[dtype] == 2:
        import torch

        kind = getattr(torch, dtype)

        def typed(view: Any) -> torch.Tensor:
            return torch.from_numpy(view).view(kind) if len(view) else torch.empty(0, dtype=kind, device="cpu")

        return typed
    return lambda view: view.view(dtype)
