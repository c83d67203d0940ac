"""Symmetric memory, which peers address: `symmetric_empty`, `register_symmetric` and `all_gather_with_progress`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import AgreementError, NotInitializedError, UnsupportedInputError, WorkspaceError
from tunedcomm.kernels.all_gather.progress import AREA_BYTES, MAX_CHUNKS, Sender
from tunedcomm.ops.arguments import check_differentiable, check_input, check_plain
from tunedcomm.ops.fast_call import is_capturing, is_usable, raw_stream
from tunedcomm.spec import Mode, Problem
from tunedcomm.symm.layout import LANES
from tunedcomm.symm.workspace import allocate


def symmetric_empty(
    size: Sequence[int] | int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A zero-filled tensor in symmetric memory of `group`; collective over the group, never inside a graph capture.

    Pass it, or views of it at the same offset on every rank, to ops of the same group. The memory stays allocated until
    `tunedcomm.release_communicators()`, for peers may read it at any time: make it once and reuse it.

    Args:
        size: the shape, the same on every rank.
        dtype: any dtype.
        device: by default the group's `device_id`, else the current CUDA device, or the CPU where there is none.
        group: by default the default group.

    Raises:
        UnsupportedInputError: a negative extent.
        GroupError: the group does not serve the device.
        WorkspaceError: the ranks cannot address each other's memory, there is too little of it, they asked for
            different sizes, or a graph is being captured.
    """
    shape = torch.Size((size,) if isinstance(size, int) else size)
    if any(extent < 0 for extent in shape):
        raise UnsupportedInputError(f"size={size!r} has a negative extent; give a shape such as (4096, 8192)")
    communicator = get_communicator(group, None if device is None else torch.device(device))
    numel = shape.numel()
    if communicator.workspace is None:
        raise WorkspaceError(
            "the ranks of this group cannot address each other's memory; use an ordinary tensor (`tunedcomm doctor` "
            "says why)"
        )
    _refuse_capture(communicator.device)
    with communicator.whole("symmetric_empty"):
        buffer = allocate(communicator.group, communicator.device, max(numel * dtype.itemsize, 16))
        tensor = buffer.local[: numel * dtype.itemsize].view(dtype).view(shape)
        communicator.register_symmetric(tensor, buffer)
    return tensor


def reserve(nbytes: int, *, group: dist.ProcessGroup | None = None) -> None:
    """Allocate device memory for calls on messages of up to `nbytes` now; collective, never inside a graph capture.

    A group on GPUs takes memory as its calls need it. An engine that gives all free memory to a cache calls this
    before, for the largest message that it will send. The group then has what a TUNEDCOMM_WORKSPACE_MIB of that size
    allows, for eager and for captured calls; that variable is the upper limit. Panels of fused GEMMs are not part of
    it. Where NVLink multicast is used, and on CPUs, all memory is there from the start, and nothing happens.

    Args:
        nbytes: bytes of a message, the same on every rank.
        group: by default the default group.

    Raises:
        UnsupportedInputError: `nbytes` is not a positive whole number.
        AgreementError: on every rank, where `nbytes` differs between ranks.
        WorkspaceError: too little memory on some rank, or a graph is being captured.
    """
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise UnsupportedInputError(f"nbytes={nbytes!r} is not a number of bytes; give one above 0, such as 16 << 20")
    communicator = get_communicator(group)
    _refuse_capture(communicator.device)
    with communicator.whole("reserve"):
        if len(set(sizes := communicator.exchange(nbytes))) > 1:
            raise AgreementError(f"the ranks reserve different numbers of bytes, by rank: {sizes}")
        if communicator.workspace is not None:
            communicator.workspace.reserve(nbytes)


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise WorkspaceError("symmetric memory cannot be made during a graph capture; make it before the capture")


def register_symmetric(x: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Tell the group about a tensor allocated with `torch.distributed._symmetric_memory.empty`; collective.

    Returns:
        `x`.

    Raises:
        UnsupportedInputError: not a CUDA tensor.
        WorkspaceError: not symmetric memory, or a graph is being captured.
    """
    check_input("register_symmetric", x)
    if not x.is_cuda:
        raise UnsupportedInputError(
            f"only CUDA tensors come from PyTorch's symmetric memory, not {x.device}; tunedcomm.symmetric_empty() "
            "makes one on any device"
        )
    from tunedcomm.symm.cuda import map_tensor

    communicator = get_communicator(group, x.device)
    _refuse_capture(communicator.device)
    with communicator.whole("register_symmetric"):
        communicator.register_symmetric(x, map_tensor(x, communicator.group))
    return x


_OP = "all_gather_with_progress"


@dataclass(slots=True, eq=False)
class GatherProgress:
    """A gather under way.

    Attributes:
        out: the output; chunk c of rank r begins at its row r × num_rows + c × chunk_rows. See `rows_of`.
        num_rows: rows of one rank's shard.
        chunk_rows: rows of a chunk.
        num_chunks: chunks of a shard.
        kernel_arguments: `flags`, `timeout_ns` and `status` for `wait_chunk`, as 64-bit integers; the same at every
            call of a group on one lane, so they may be captured in a graph.
    """

    out: torch.Tensor
    num_rows: int
    chunk_rows: int
    num_chunks: int
    kernel_arguments: tuple[int, int, int]
    _gathers: _Gathers = field(repr=False)
    _mode: Mode = field(repr=False)
    _aside: bool = field(repr=False)
    _num_blocks: int = field(repr=False)
    _stream: int = field(repr=False)  # that it was begun on
    _x: torch.Tensor | None = field(repr=False)  # None once it has ended

    def rows_of(self, source: int, chunk: int) -> slice:
        """Rows of the output that chunk `chunk` of rank `source` fills."""
        first = source * self.num_rows + chunk * self.chunk_rows
        return slice(first, min(first + self.chunk_rows, (source + 1) * self.num_rows))

    @property
    def _problem(self) -> Problem:
        world_size = self._gathers.communicator.world_size
        shape = (self.out.nbytes // world_size,)
        return Problem("all_gather", shape, "uint8", world_size, reduction="", mode=self._mode)

    def _begin(self, x: torch.Tensor, peers: tuple[int, ...]) -> None:
        gathers, mode = self._gathers, self._mode
        before = gathers.under_way.pop(mode, None)
        if before is not None:
            before.finish()
        extents = (x.nbytes, self.chunk_rows * (x.nbytes // self.num_rows), self.num_chunks)
        places = (x.data_ptr(), self.out.data_ptr(), peers)

        def launch(inputs: object, outputs: object, stream: int) -> None:
            gathers.sender.send(mode, stream, extents, *places, num_blocks=self._num_blocks, aside=self._aside)

        gathers.communicator.wrap(self._problem, launch)((x,), (self.out,), self._stream)
        gathers.under_way[mode] = self

    def finish(self) -> torch.Tensor:
        """Make the current stream wait until everything is sent and received; return the complete output.

        To be called after the kernels that read the output, in a capture if the gather began in it. Until then the
        input must be left as it is. The group's next such gather does it where the caller has not.

        Raises:
            UnsupportedInputError: begun in a capture and ended outside of it, or the other way round.
        """
        if self._x is None:
            return self.out
        gathers, mode, capturing = self._gathers, self._mode, self._mode == "graph"
        if is_capturing() is not capturing:
            raise UnsupportedInputError(f"a gather of {_OP} must end in the capture that it began in, if in any")
        with gathers.communicator.whole(_OP):
            now = gathers.stream()
            gathers.communicator.order_streams(capturing, now)

            def launch(inputs: object, outputs: object, stream: int) -> None:
                begun_on = stream if capturing else self._stream  # a capture may not leave it unjoined
                gathers.sender.end(
                    mode, stream, self.num_chunks, num_blocks=self._num_blocks, aside=self._aside, begun_on=begun_on
                )

            gathers.communicator.wrap(self._problem, launch, has_input=False)((), (), now)
            if gathers.under_way.get(mode) is self:
                del gathers.under_way[mode]
        self._x = None
        return self.out


class _Gathers:
    """State that the gathers of one group share."""

    def __init__(self, communicator: Communicator) -> None:
        assert communicator.workspace is not None
        self.communicator: Communicator = weakref.proxy(communicator)
        areas = allocate(communicator.group, communicator.device, AREA_BYTES * len(LANES))
        self.sender = Sender(communicator.workspace, areas)
        self.under_way: dict[Mode, GatherProgress] = {}

    def stream(self) -> int:
        return raw_stream(self.communicator.device_index) if self.communicator.device.type == "cuda" else 0


_gathers: weakref.WeakKeyDictionary[Communicator, _Gathers] = weakref.WeakKeyDictionary()


def _check(x: torch.Tensor, out: torch.Tensor, communicator: Communicator) -> None:
    shape = (x.shape[0] * communicator.world_size, *x.shape[1:]) if x.dim() else ()
    if not x.dim() or tuple(out.shape) != shape or out.dtype != x.dtype:
        raise UnsupportedInputError(
            f"out of {_OP} has shape {tuple(out.shape)}, {out.dtype}; the result of gathering {tuple(x.shape)}, "
            f"{x.dtype} has shape {shape}"
        )
    if not communicator.is_symmetric(out) or not is_usable(out):
        raise UnsupportedInputError(
            f"out of {_OP} must be symmetric memory that is contiguous and begins at a multiple of 16 bytes, for peers "
            "write it; make it with tunedcomm.symmetric_empty()"
        )
    row = x.nbytes // max(x.shape[0], 1)
    if x.numel() == 0 or row % 16:
        raise UnsupportedInputError(
            f"x of {_OP} has {x.shape[0]} rows of {row} bytes; chunks are whole rows and move by 16 bytes, so a row "
            "must have a multiple of 16; use all_gather for others"
        )
    begin, shares = x.data_ptr() - out.data_ptr(), out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    elsewhere = -x.nbytes < begin < out.nbytes and begin != communicator.rank * x.nbytes
    if shares and (elsewhere or not is_usable(x)):
        raise UnsupportedInputError(f"x of {_OP} lies in out; only the rank's own rows may, as they are")


def _prepared(communicator: Communicator, num_blocks: int, capturing: bool) -> _Gathers:
    """The group's gathers, ready for so many blocks, and kept where a graph is to replay one."""
    gathers = _gathers.get(communicator)
    if gathers is None or not gathers.sender.is_prepared(num_blocks):
        if capturing:
            raise NotInitializedError(
                f"the first {_OP} of a group, or with num_blocks={num_blocks}, cannot be captured"
            )
        gathers = gathers or _gathers.setdefault(communicator, _Gathers(communicator))
        gathers.sender.prepare(num_blocks)
    if capturing:
        communicator.captured(gathers)
    return gathers


def all_gather_with_progress(
    x: torch.Tensor,
    *,
    out: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    num_chunks: int = 4,
    num_blocks: int = 16,
    aside: bool = True,
) -> GatherProgress:
    """Gather along the first dimension into symmetric memory, with a flag for each chunk that has arrived.

    A kernel that reads `out` calls `tunedcomm.kernels.all_gather.progress.wait_chunk` before it reads a chunk, so it
    may begin before all chunks have arrived; the rank's own shard arrives first. Then call `finish()`.

    Args:
        x: a rank's shard, whose rows have a multiple of 16 bytes; any dtype; the same shape and dtype on every rank.
            May be the rank's own rows of `out`, which are not copied then.
        out: symmetric memory of the group (`tunedcomm.symmetric_empty`) of the result's shape, contiguous, at the same
            offset on every rank. Peers write to it from this call on, so launch earlier reads of it on the current
            stream before the call.
        group: process group, by default the default group. The group's first such call is collective set-up, and the
            first with a `num_blocks` compiles: neither can be captured.
        num_chunks: chunks of a shard, 1 to 64; fewer where it has fewer rows.
        num_blocks: SMs that send, 1 to 512.
        aside: send on a stream beside the current one. A kernel that waits for chunks must then leave `num_blocks` SMs
            free: if it took all of them on every rank, nobody could send, and the waits would run into their bound.

    Returns:
        A handle: what `wait_chunk` takes, which rows a chunk fills, and `finish()`.

    Raises:
        UnsupportedInputError: a tensor or count that cannot be served; says what to do.
        WorkspaceError: the ranks cannot address each other's memory.
        NotInitializedError: no default process group, or a first call inside a graph capture.
        PeerTimeoutError: an earlier call on the group timed out waiting for a peer.

    Can be captured in CUDA graphs, with its `finish()`. One such gather of a group is under way at a time.
    """
    check_input(_OP, x)
    check_input(_OP, out, "out")
    check_differentiable(_OP, (x, out))
    check_plain(_OP, (x, out))
    for name, value, most in (("num_chunks", num_chunks, MAX_CHUNKS), ("num_blocks", num_blocks, 512)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UnsupportedInputError(f"{name}={value!r} of {_OP} must be a number from 1 to {most}")
    communicator = get_communicator(group, x.device)
    if communicator.workspace is None:
        raise WorkspaceError("the ranks of this group cannot address each other's memory; use tunedcomm.all_gather()")
    with communicator.whole(_OP):
        _check(x, out, communicator)
        communicator.check_peers()
        capturing = is_capturing()
        gathers = _prepared(communicator, num_blocks, capturing)
        mode: Mode = "graph" if capturing else "eager"
        communicator.order_streams(capturing, gathers.stream())
        rows = x.shape[0]
        chunk_rows = -(-rows // num_chunks)
        taken = x.detach() if is_usable(x) else x.detach().clone(memory_format=torch.contiguous_format)
        gather = GatherProgress(
            out=out,
            num_rows=rows,
            chunk_rows=chunk_rows,
            num_chunks=-(-rows // chunk_rows),
            kernel_arguments=(
                gathers.sender.flags(mode),
                communicator.workspace.timeout_ns,
                gathers.sender.status(mode),
            ),
            _gathers=gathers,
            _mode=mode,
            _aside=aside,
            _num_blocks=num_blocks,
            _stream=gathers.stream(),
            _x=taken,
        )
        gather._begin(taken, communicator.workspace.peers_of(out))
        if communicator.device.type == "cpu":
            communicator.check_peers()
        return gather
