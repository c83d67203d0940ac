"""Fast calls: a function written for the calls that look like one that was served.

A call costs a few microseconds on the host, most of them in the driver. What Python adds is paid for each question
asked of a tensor, so one guard (type, dtype, device, strides, sizes, gradients, lazy bits) answers most of them, and
the function is `_FAST_CALL`, filled in for the tensors that are there: a loop over them would cost as much as it saves.
The function for `tunedcomm.all_reduce(x)` where there are GPUs; without them no stream is asked for. It returns None
for a call that it does not serve:

    def call(x, out, op, numerics, max_sms):
        try:
            if x.is_nested:
                return None
        except AttributeError:
            return None
        if (
            out is not None
            or not looks_alike(x)
            or (op is not want_op and op != want_op)
            or numerics is not want_numerics
            or max_sms is not want_max_sms
            or forward_ad._current_level >= 0
            or num_modes()
        ):
            return None
        stream = stream_of(device)
        if (stream != 0 and captures()) is not capturing or device_now() != device:
            return None
        at_x = x.data_ptr()
        if (at_x) & 15:
            return None
        out = make_empty(shape_out, stride_out, dtype_out)
        at_out = out.data_ptr()
        if status[0]:
            communicator.check_peers()
        if stream != last_streams[lane]:
            communicator.order_streams(capturing, stream)
        try:
            launch(stream, at_x, at_out)
        except RuntimeError as error:
            if device_now() == device or "Triton Error" not in str(error):
                raise
            return None
        return out
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.plans import Plan
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.ops.adapter import CallSignature, Group, OpAdapter, Tensors
from tunedcomm.ops.arguments import num_modes
from tunedcomm.symm.buffer import with_huge_pages

# (inputs…, outputs…, options…, numerics, max_sms) to the result, or None where the call differs from the one before.
FastCall: TypeAlias = Callable[..., Any]
_MISALIGNED = 15  # kernels move 16-byte packets

# What the hot path asks torch, by the cheapest call that this torch has. All act on the current device.


class _PublicWorld:
    """The default group as torch's public interface has it."""

    @property
    def _default_pg(self) -> Group:
        return dist.group.WORLD


# Where torch keeps the default group: a sixth of what asking the public interface costs.
world: Any = getattr(dist.distributed_c10d, "_world", None)
world = world if hasattr(world, "_default_pg") else _PublicWorld()


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=_device_type)


# The C library keeps smaller blocks that were freed, with their pages; larger blocks get new pages for each call.
_MIN_ON_HUGE_PAGES = 32 << 20


def _empty_on_huge_pages(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return with_huge_pages(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"))


def new_result(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a result."""
    made = torch.empty(shape, dtype=dtype, device=device)
    return with_huge_pages(made) if made.nbytes > _MIN_ON_HUGE_PAGES and device.type == "cpu" else made


_device_type = "cpu"
raw_stream: Callable[[int], int] = lambda device: 0  # noqa: E731
is_capturing: Callable[[], bool] = bool
current_device: Callable[[], int] = lambda: -1  # noqa: E731
empty: Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] = _empty
_guards: Any = getattr(torch._C._dynamo, "guards", None)
if torch.cuda.is_available():
    _device_type = "cuda"
    raw_stream = torch._C._cuda_getCurrentRawStream
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    current_device = torch._C._cuda_getDevice
    # Inductor's allocation: a third of torch.empty's cost.
    empty = getattr(_guards, "_empty_strided_cuda", _empty)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory holds its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def is_usable(tensor: torch.Tensor) -> bool:
    """True if kernels take the tensor as it is."""
    return is_plain(tensor) and not tensor.data_ptr() & _MISALIGNED


def stride_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return tuple(reversed(strides))


def make_guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A predicate for tensors like these (PyTorch's compiler has it), or None where this torch has none."""
    try:
        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        made = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return made.check if made.check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return None


FAST_CALL_NAME = "<tunedcomm fast call>"
_FAST_CALL = """
def make({values}):
    def call({arguments}, numerics, max_sms):
        try:
            if {nested}:
                return None
        except AttributeError:
            return None
        if (
            {differs}
        ):
            return None
        stream = {stream}
        if {elsewhere}:
            return None
        {addresses}
        if {unfit}:
            return None
        {made}
        if status[0]:
            communicator.check_peers()
        if {moved}:
            communicator.order_streams(capturing, stream)
        try:
            {launch}
        except RuntimeError as error:
            if device_now() == device or "Triton Error" not in str(error):
                raise
            return None
        return {results}
    return call
"""


def make_fast_call(call: ServedCall) -> FastCall | None:
    """A function that serves calls like this one and returns None for others, or None where this torch has no guards.

    A graph that captured the call keeps its plan.
    """
    written = write_fast_call(call)
    return None if written is None else _compiled(written[0])(**written[1])


def write_fast_call(call: ServedCall) -> tuple[str, dict[str, Any]] | None:
    """The source of a function `make`, and its arguments, with which it returns the fast call.

    Where nothing is allocated, which device is current need not be asked: a kernel of one device's context goes to a
    stream of its own whatever is current, and the driver refuses to launch it on the default stream of another. No
    other RuntimeError has the call made again: it may be a signal handler's, after the launch.
    """
    communicator, adapter, signature = call.communicator, call.adapter, call.signature
    given, guarded = call.given, call.guarded
    if any(given[name].requires_grad for name in guarded):  # a guard does not see whether gradients are recorded now
        return None
    looks_alike = make_guard(*(given[name] for name in guarded))
    if looks_alike is None:
        return None
    options, device = [declared.split()[-1] for declared in adapter.options], communicator.device_index
    call.values |= {
        "looks_alike": looks_alike, "want_numerics": signature.numerics, "want_max_sms": signature.max_sms,
        "forward_ad": forward_ad, "num_modes": num_modes,
        "communicator": communicator, "device": device, "status": communicator.status_view,
        "last_streams": communicator.last_streams, "lane": int(signature.capturing), "capturing": signature.capturing,
        "stream_of": raw_stream, "captures": is_capturing, "make_empty": empty, "device_now": current_device,
        **dict(zip([f"want_{name}" for name in options], signature.options, strict=True)),
    }  # fmt: skip
    results = dict(zip(adapter.outputs, call.results, strict=True))
    made = call.allocations(results)
    has_streams, line = _device_type == "cuda", "\n        "
    parts = {
        "differs": f"{line}    or ".join(call.differences(options)),
        "elsewhere": " or ".join(call.wrong_places(has_streams, allocates=bool(made))) or "False",
        "unfit": " or ".join(call.unfit_addresses()) or "False",
        "made": line.join(made) or "pass",
        "launch": call.launch({**given, **results}),
    }
    source = _FAST_CALL.format(
        **parts, values=", ".join(call.values), arguments=", ".join((*call.names, *options)),
        nested=" or ".join(f"{name}.is_nested" for name in guarded),  # PyTorch's guard ends the process with these
        stream="stream_of(device)" if has_streams else "0",
        moved="stream != last_streams[lane]" if has_streams else "False",
        addresses=line.join(f"at_{name} = {name}.data_ptr()" for name in guarded), results=", ".join(adapter.outputs),
    )  # fmt: skip
    return source, call.values


@dataclass(eq=False)
class ServedCall:
    """A call that was served, whose parts become lines of source.

    Attributes:
        communicator, adapter, plan, signature: of the call.
        tensors: its inputs and outputs, which kernels took as they are.
        results: its results.
        values: the things that the lines name.
        given: the tensors that the caller passed, by name.
        alias: names of tensors that are another one, to the other's name: outputs that are an input, and inputs that
            are an earlier one.
        guarded: the names in `given` that are no alias: a guard takes no tensor twice.
        by_address: the launch by addresses, or None where it takes tensors.
    """

    communicator: Communicator
    adapter: OpAdapter
    plan: Plan
    tensors: Tensors
    results: tuple[torch.Tensor, ...]
    signature: CallSignature
    values: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        adapter, launch = self.adapter, self.plan.launch
        self.names = (*adapter.inputs, *adapter.outputs)
        given = {name: x for name, x in zip(self.names, self.tensors, strict=True) if x is not None}
        aliases = zip(adapter.outputs, self.signature.aliases, strict=True)
        inputs = [name for name in adapter.inputs if name in given]
        first = {id(given[name]): name for name in reversed(inputs)}
        self.alias = {output: adapter.inputs[index] for output, index in aliases if index >= 0}
        self.alias |= {name: first[id(given[name])] for name in inputs if first[id(given[name])] != name}
        self.given, self.guarded = given, [name for name in given if name not in self.alias]
        self.by_address = launch.by_address if isinstance(launch, AddressLaunch) else None

    def differences(self, options: Sequence[str]) -> list[str]:
        """Conditions under which another call is not like this one."""
        found = [f"{name} is not None" for name in self.names if name not in self.guarded and name not in self.alias]
        found += [f"{name} is not {other}" for name, other in self.alias.items()]
        found += [f"not looks_alike({', '.join(self.guarded)})"]
        if self.adapter.depends_on_memory and self.communicator.any_symmetric:
            self.values["is_symmetric"] = self.communicator.is_symmetric
            found += [f"is_symmetric({self.adapter.inputs[0]}) is not {self.plan.problem.input_kind == 'symmetric'}"]
        found += [f"({name} is not want_{name} and {name} != want_{name})" for name in options]
        return [
            *found,
            "numerics is not want_numerics",
            "max_sms is not want_max_sms",
            "forward_ad._current_level >= 0",
            "num_modes()",  # the guard does not see all modes, make_fx's over real tensors for one
        ]

    def wrong_places(self, has_streams: bool, *, allocates: bool) -> list[str]:
        """Conditions on the current stream and device under which the call is not served."""
        if not has_streams:
            return []
        found = ["(stream != 0 and captures()) is not capturing"]  # the default stream cannot be captured
        return [*found, "device_now() != device"] if allocates or self.by_address is None else found

    def unfit_addresses(self) -> list[str]:
        """Conditions on addresses under which kernels do not take the tensors as they are."""
        found = []
        if self.by_address is not None or self.plan.wants_aligned or self.adapter.wants_aligned:
            found += [f"({' | '.join(f'at_{name}' for name in self.guarded)}) & {_MISALIGNED}"]
        for index, name in enumerate(self.guarded):
            for other in self.guarded[:index] if name in self.adapter.outputs else ():  # they share no memory
                below, above = f"below_{name}_{other}", f"above_{name}_{other}"
                distance = self.given[name].data_ptr() - self.given[other].data_ptr()
                if -self.given[name].nbytes < distance < self.given[other].nbytes:  # the output holds the input
                    self.values |= {below: distance}
                    found += [f"at_{name} - at_{other} != {below}"]
                    continue
                self.values |= {below: -self.given[name].nbytes, above: self.given[other].nbytes}
                found += [f"{below} < at_{name} - at_{other} < {above}"]
        return found

    def allocations(self, results: dict[str, torch.Tensor]) -> list[str]:
        """Lines that make the outputs that the caller did not pass."""
        lines = []
        for name, result in results.items():
            if name in self.given:
                continue
            self.values |= {f"shape_{name}": tuple(result.shape), f"stride_{name}": stride_of(result.shape)}
            self.values[f"dtype_{name}"] = result.dtype
            if result.nbytes > _MIN_ON_HUGE_PAGES and self.communicator.device.type == "cpu":
                self.values["make_empty"] = _empty_on_huge_pages
            lines += [f"{name} = make_empty(shape_{name}, stride_{name}, dtype_{name})"]
            if self.by_address is not None:
                lines += [f"at_{name} = {name}.data_ptr()"]
        return lines

    def launch(self, tensors: dict[str, torch.Tensor]) -> str:
        """The launch, by addresses or by tensors, with the op's scalars."""
        adapter, options, alias = self.adapter, self.signature.options, self.alias
        inputs = tuple(tensors.get(name) for name in adapter.inputs)
        by_address = self.by_address is not None
        scalars = adapter.scalar_args(options) if by_address else adapter.scalars(inputs, options)
        self.values |= {"launch": self.by_address or self.plan.launch}
        self.values |= {f"scalar_{i}": value for i, value in enumerate(scalars)}
        arguments = [f"scalar_{i}" for i in range(len(scalars))]
        if by_address:
            addresses = [f"at_{alias.get(name, name)}" if name in tensors else "0" for name in self.names]
            return f"launch({', '.join(['stream', *addresses, *arguments])})"
        if all(map(operator.is_, adapter.operands(inputs, options), inputs)):
            sources = [name for name in adapter.inputs if name in tensors]
        else:
            self.values |= {"operands": adapter.operands, "options": options}
            sources = [f"*[t for t in operands(({', '.join(adapter.inputs)},), options) if t is not None]"]
        self.values["written"] = adapter.launch_output
        sinks = [
            name if adapter.launch_output(tensors[name]) is tensors[name] else f"written({name})"
            for name in adapter.outputs
        ]
        return f"launch(({', '.join([*sources, *arguments])},), ({', '.join(sinks)},), stream)"


@functools.cache
def _compiled(source: str) -> Callable[..., FastCall]:
    """The function `make` of such a source; calls of one kind share it."""
    space: dict[str, Any] = {}
    exec(compile(source, FAST_CALL_NAME, "exec"), space)  # noqa: S102 - source of our own
    made: Callable[..., FastCall] = space["make"]
    return made
