"""Compiles a Triton function with its constants into a launch that takes a few microseconds.

Kernels take their addresses and sizes as 64-bit integers, so that one binary serves every rank, every tensor and every
size. A binary is named by a `CompileRequest`, which pickles: the compile pool builds it on a CPU into Triton's cache,
and `bind` finds it there. On the host backend the same function runs in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from tunedcomm import cache
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.common import sync
from tunedcomm.space import Value
from tunedcomm.symm.layout import MAX_WORLD_SIZE

if TYPE_CHECKING:
    import torch

# Kernel arguments that are tuples of so many int64, by name; every other runtime argument is one int64.
_TUPLES = {
    **dict.fromkeys(("peers", "input_peers", "panel_peers", "out_peers", "flag_peers"), MAX_WORLD_SIZE - 1),
    **dict.fromkeys(("ids_peers", "weights_peers"), MAX_WORLD_SIZE - 1),
    **dict.fromkeys(("send_from", "send_bytes", "recv_to", "recv_bytes"), MAX_WORLD_SIZE - 1),
    **dict.fromkeys(("shape", "scale_strides"), 2),
    **dict.fromkeys(("row_counts", "tensors_from", "tensors_to", "tensor_bytes"), MAX_WORLD_SIZE),
}
_MAX_THREADS_PER_SM = 2048
_MAX_BLOCKS_PER_SM = 32
_REGISTERS_PER_SM = 65536
# Share of the GPU that an eager kernel may take beside a graph's: two kernels that take no more fit side by side.
SHARE_OF_EAGER = 0.5


Argument = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """Names one binary.

    Attributes:
        module, function: where the Triton function is.
        constants: its constexpr arguments, sorted by name.
        num_warps: warps a block.
        launch_pdl: built for programmatic dependent launch.
        num_stages: loads in flight in loops over operands of matrix products.
        max_registers: that a thread may take; 0 for as many as there are.
    """

    module: str
    function: str
    constants: tuple[tuple[str, Value], ...]
    num_warps: int
    launch_pdl: bool = False
    num_stages: int = 1
    max_registers: int = 0

    @classmethod
    def of(
        cls, kernel: Any, constants: dict[str, Value], *, num_warps: int, launch_pdl: bool = False, num_stages: int = 1
    ) -> CompileRequest:
        """Name a Triton function by where it was defined."""
        named = (kernel.fn.__module__, kernel.fn.__name__, tuple(sorted(constants.items())))
        return cls(*named, num_warps, launch_pdl, num_stages)

    def resolve(self) -> Any:
        """The Triton function."""
        return getattr(importlib.import_module(self.module), self.function)


def current_target() -> Any:
    """Triton's target of the current CUDA device."""
    import triton

    return triton.runtime.driver.active.get_current_target()


_settled: set[int] = set()  # ids of Triton functions; they live as long as their modules


def _settle_key(function: Any) -> None:
    """Compute the cache key of a Triton function after the keys of all functions that it calls.

    Up to Triton 3.6 the key depends on which callees already have a key. Without a fixed order, a process does not find
    binaries that another process compiled.
    """
    if id(function) in _settled:
        return
    _settled.add(id(function))
    for name in function.fn.__code__.co_names:
        if hasattr(called := function.fn.__globals__.get(name), "cache_key"):
            _settle_key(called)
    function.hash = None
    _ = function.cache_key


@functools.cache
def keep_triton_key() -> None:
    """Give Triton the hash of its own installation that an earlier process made, or keep the one that it makes now.

    It is part of every key of Triton's cache. Triton reads some hundred MB for it at the first compilation of every
    process, in half a second. The kept one serves while each of these files has its size and time of change.
    """
    import triton.runtime.cache

    theirs, place = triton.runtime.cache, Path(triton.__file__).parent
    with contextlib.suppress(Exception):  # then Triton does without
        folders = ("runtime", "compiler", "backends", "language")
        files = [*(path for name in folders for path in (place / name).rglob("*.py")), *place.glob("_C/libtriton*")]
        state = cache.state_of(files)
        held = cache.read("triton", state)
        if isinstance(held, str):
            theirs.triton_key = lambda: held
        else:
            cache.keep("triton", state, theirs.triton_key())


def _source_and_options(request: CompileRequest) -> tuple[Any, dict[str, Any]]:
    """Triton's source and options of a binary."""
    from triton.compiler import ASTSource

    keep_triton_key()
    kernel = request.resolve()
    _settle_key(kernel)
    constants = dict(request.constants)
    signature = {name: ("i64",) * _TUPLES[name] if name in _TUPLES else "i64" for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    return source, {
        "num_warps": request.num_warps,
        "num_stages": request.num_stages,
        "enable_fp_fusion": False,  # bits are promised: no contraction behind our back
        "launch_pdl": request.launch_pdl,
        **({"maxnreg": request.max_registers} if request.max_registers else {}),
    }


def is_compiled(request: CompileRequest, target: Any) -> bool:
    """True if Triton's cache holds the binary; compiles nothing. False if it cannot be told."""
    import triton

    def refuse(*_: object, **__: object) -> None:
        raise LookupError

    with contextlib.suppress(Exception):
        source, options = _source_and_options(request)
        source.make_ir = refuse  # the first step after the look into the cache
        triton.compile(source, target=target, options=options)
        return True
    return False


@functools.lru_cache(maxsize=4096)
def compile_request(request: CompileRequest, target: Any) -> Any:
    """Compile into Triton's cache, or find it there; needs no GPU.

    Returns:
        Triton's compiled kernel.

    Raises:
        Exception: whatever Triton raises; the tuner records it as `compile_error`.
    """
    import triton

    source, options = _source_and_options(request)
    return triton.compile(source, target=target, options=options)


def resident_blocks(
    num_registers: int, shared_bytes: int, threads: int, num_sms: int, shared_of_sm: int = 200 * 1024
) -> int:
    """Blocks of a kernel that fit on the GPU at once, from below: registers are allotted in steps of 8 a thread."""
    registers = max(-(-max(num_registers, 1) // 8) * 8, 8)
    by_registers = _REGISTERS_PER_SM // (registers * threads)
    by_threads = _MAX_THREADS_PER_SM // threads
    by_shared = shared_of_sm // (shared_bytes + 1024)
    return max(num_sms * min(by_registers, by_threads, by_shared, _MAX_BLOCKS_PER_SM), 0)


@dataclass(slots=True)
class Residency:
    """The share of the GPU that kernels occupy that are bound inside `within`.

    Attributes:
        limit: share that each may take if fewer registers a thread make it fit.
        share: the largest that one takes.
    """

    limit: float
    share: float = 0.0


_residency: ContextVar[Residency | None] = ContextVar("residency", default=None)


@contextlib.contextmanager
def within(limit: float) -> Iterator[Residency]:
    """Bind kernels so that they occupy at most `limit` of the GPU, if fewer registers a thread achieve that."""
    found = Residency(limit)
    token = _residency.set(found)
    try:
        yield found
    finally:
        _residency.reset(token)


def residency() -> Residency | None:
    """The share that kernels occupy that are bound now."""
    return _residency.get()


def fewer_registers(grid: int, threads: int, num_sms: int, limit: float) -> int:
    """Registers a thread with which a grid occupies at most `limit` of the GPU."""
    blocks_of_sm = -(-grid // max(int(num_sms * limit), 1))
    return max(_REGISTERS_PER_SM // (blocks_of_sm * threads) // 8 * 8, 24)


def input_and_output(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
    """Addresses of the one input and the one output."""
    return inputs[0].data_ptr(), outputs[0].data_ptr()


@dataclass(frozen=True, slots=True)
class AddressLaunch:
    """A launch that needs only the addresses of its inputs and outputs.

    Attributes:
        by_address: `(stream, address of every input and output that the op may have, further numbers)`, in an order
            that the op fixes, 0 for what a problem does not have.
        addresses: `(inputs, outputs)` to what `by_address` takes after the stream.
    """

    by_address: Callable[..., None]
    addresses: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[int, ...]] = input_and_output

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        self.by_address(stream, *self.addresses(inputs, outputs))


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel ready to launch.

    Attributes:
        fix: takes the runtime arguments, None for those that vary, and returns a launch `(stream, *varying)`.
    """

    fix: Callable[[Sequence[Argument | None]], Callable[..., None]]


def _as_int64(value: Argument) -> Any:
    """An int64 argument for the interpreter, or a tuple of them, as compiled kernels get it.

    The interpreter stores a number below 2^31 in 32 bits, and cannot make a pointer of those. If Python is not a
    position-independent executable (as on Debian), the heap and many tensors lie below 2 GiB.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if isinstance(value, tuple):
        return tuple(map(_as_int64, value))

    return tl.tensor(TensorHandle(np.array([value], dtype=np.int64), tl.int64), tl.int64)


def _dot_in_order(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """The interpreter's dot, summed in the order of the depth.

    NumPy's products add in an order that depends on the element's place in the block, so a row's bits would too.
    """
    import numpy as np

    x, y, found = a.data, b.data, total.data
    if not x.dtype.kind == y.dtype.kind == "f" or x.ndim != 2:  # other types are raw bits there
        return type(builder).create_dot(builder, a, b, total, *options)
    terms = np.empty((x.shape[1] + 1, *found.shape), dtype=found.dtype)
    terms[0] = found
    np.multiply(x.T[:, :, None], y[:, None, :], out=terms[1:], dtype=found.dtype)
    return type(total)(np.add.reduce(terms, axis=0), total.dtype.scalar)


# Triton's interpreter keeps the running program in globals. Kernels of one process follow each other.
_interpreter = threading.RLock()
_running: list[str] = []  # kernels, under that lock


def _interpreted(request: CompileRequest, grid: int) -> BoundKernel:
    import numpy as np
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import interpreter_builder as builder

    from tunedcomm.symm.control import refuse_nested

    kernel, constants = request.resolve(), dict(request.constants)

    def launch(stream: int, *args: Argument) -> None:
        del stream
        with _interpreter, np.errstate(all="ignore"):  # the program's state may raise where a sum overflows
            if _running:
                refuse_nested(request.function)
            _running.append(request.function)
            builder.create_dot = functools.partial(_dot_in_order, builder)
            try:
                kernel[(grid,)](*(_as_int64(value) for value in args), **constants)
            except InterpreterError as error:
                cause: BaseException = error
                while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
                    cause = cause.__cause__
                raise cause from None  # what a signal handler raised, for one, is the program's
            finally:
                del builder.create_dot
                _running.clear()

    return BoundKernel(functools.partial(_fill_in, launch))


def _fill_in(launch: Callable[..., None], arguments: Sequence[Argument | None]) -> Callable[..., None]:
    """Wrap `launch(stream, *arguments)` so that only the arguments that are None are given at each call."""

    def run(stream: int, *varying: Argument) -> None:
        given = iter(varying)
        launch(stream, *(next(given) if value is None else value for value in arguments))

    return run


def _through_triton(
    compiled: Any, grid: int, tail: tuple[Any, ...], scratch: Any, arguments: Sequence[Argument | None]
) -> Callable[..., None]:
    """Launch with as little Python as this Triton allows: one function if the varying arguments come first.

    `CompiledKernel.run` is a Python object around Triton's C function; where its layout is one of the known two, the C
    function is called directly, else `run` is. `scratch` is where the kernel keeps its tensor descriptors; the calls of
    one plan follow each other, so it has one for good.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    count = next((i for i, value in enumerate(arguments) if value is not None), len(arguments))
    mixed = None in arguments[count:]
    rest = tail if mixed else (*arguments[count:], *tail)
    unknown = not hasattr(run, "global_scratch_size") or getattr(run, "profile_scratch_size", 1) > 0
    if unknown or getattr(run, "gsan_enabled", False) or not hasattr(run, "launch"):

        def launch(stream: int, *args: Argument) -> None:
            run(grid, 1, 1, stream, function, packed, None, None, None, *args, *rest)

        return _fill_in(launch, arguments) if mixed else launch
    entry, cooperative, pdl = run.launch, run.launch_cooperative_grid, run.launch_pdl
    shared = hasattr(run, "kernel_signature")  # a Triton whose kernels share one C launcher
    described = (run.arg_annotations, run.kernel_signature) if shared else ()

    def launch_shared(stream: int, *args: Argument) -> None:
        entry(
            grid, 1, 1, stream, function, cooperative, pdl, packed, None, None, None, scratch, None, *described,
            (*args, *rest),
        )  # fmt: skip

    def launch_own(stream: int, *args: Argument) -> None:
        entry(grid, 1, 1, stream, function, cooperative, pdl, scratch, None, packed, None, None, None, *args, *rest)

    known = launch_shared if shared else launch_own
    return _fill_in(known, arguments) if mixed else known


def _resident(num_registers: int, compiled: Any, request: CompileRequest, properties: Any) -> int:
    """Blocks of a binary that would fit at once if its threads took so many registers."""
    return resident_blocks(
        num_registers,
        compiled.metadata.shared,
        request.num_warps * 32,
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
    )


class Loaded(NamedTuple):
    """A binary on a device.

    Attributes:
        compiled: Triton's compiled kernel.
        fits: how many of its blocks fit there at once.
        constants: values of its constexpr arguments, in order.
        properties: of the device.
    """

    compiled: Any
    fits: int
    constants: tuple[Value, ...]
    properties: Any


@functools.lru_cache(maxsize=4096)
def load(request: CompileRequest, device: torch.device) -> Loaded:
    """Compile (or find) a binary and load it; a size never seen before asks for what others asked for."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):
        compiled = compile_request(request, current_target())
        compiled._init_handles()
    constants = dict(request.constants)
    in_order = tuple(constants[name] for name in request.resolve().arg_names if name in constants)
    return Loaded(compiled, _resident(compiled.n_regs, compiled, request, properties), in_order, properties)


def _with_fewer_registers(
    compiled: Any, request: CompileRequest, grid: int, limit: float, properties: Any
) -> CompileRequest | None:
    """The binary by which a grid that takes more than `limit` of the GPU takes no more; None if none does."""
    few = fewer_registers(grid, request.num_warps * 32, properties.multi_processor_count, limit)
    return (
        replace(request, max_registers=few) if grid <= limit * _resident(few, compiled, request, properties) else None
    )


# KiB of shared memory of an SM, by compute capability.
_SHARED_KIB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
_REGISTER_COUNT = re.compile(rb"\x04\x2f\x08\x00.{4}(.{4})", re.DOTALL)  # EIATTR_REGCOUNT: a function, its registers


def registers_of(cubin: bytes) -> int:
    """Registers a thread of a binary's kernel."""
    return max(int.from_bytes(count, "little") for count in _REGISTER_COUNT.findall(cubin))


class SharedGrid(NamedTuple):
    """A binary whose grid may take at most `limit` of a GPU with `num_sms`, which need not be here."""

    request: CompileRequest
    grid: int
    num_sms: int
    limit: float

    def compile(self, target: Any) -> None:
        """Compile what `bind_kernel` would, with fewer registers too where the grid takes more than its share.

        Raises:
            Exception: whatever Triton raises.
        """
        compiled, shared = compile_request(self.request, target), _SHARED_KIB.get(target.arch, 100) << 10
        gpu = SimpleNamespace(multi_processor_count=self.num_sms, shared_memory_per_multiprocessor=shared)
        fits = _resident(registers_of(compiled.asm["cubin"]), compiled, self.request, gpu)
        if self.grid > self.limit * fits and (
            smaller := _with_fewer_registers(compiled, self.request, self.grid, self.limit, gpu)
        ):
            compile_request(smaller, target)


def bind_kernel(request: CompileRequest, grid: int, device: torch.device) -> BoundKernel:
    """Compile (or find) the binary, load it on `device` and fix its grid.

    Runtime arguments are all of the kernel's arguments that are not constants, in order; constants must come last in
    the kernel's argument list.

    Raises:
        InfeasibleError: not all blocks of the grid fit on the GPU at once, which kernels that wait for peers need.
        Exception: whatever Triton raises while compiling.
    """
    if sync.INTERPRET:
        return _interpreted(request, grid)
    loaded = load(request, device)
    if grid > loaded.fits:
        raise InfeasibleError(
            f"{grid} blocks of {request.num_warps} warps with {loaded.compiled.n_regs} registers a thread do not fit "
            f"on {loaded.properties.multi_processor_count} SMs at once (at most {loaded.fits} do); blocks that wait "
            "for peers must all be resident"
        )
    if (found := residency()) is not None:
        if grid > found.limit * loaded.fits and (
            smaller := _with_fewer_registers(loaded.compiled, request, grid, found.limit, loaded.properties)
        ):
            loaded = load(smaller, device)
        found.share = max(found.share, grid / loaded.fits)
    compiled, scratch = loaded.compiled, None
    if needed := compiled.metadata.global_scratch_size * grid:
        import torch

        scratch = torch.empty(needed, dtype=torch.uint8, device=device)
    return BoundKernel(functools.partial(_through_triton, compiled, grid, loaded.constants, scratch))
