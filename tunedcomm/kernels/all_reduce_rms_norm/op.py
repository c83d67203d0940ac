"""all_reduce_rms_norm: the sum over the ranks plus a bias and a residual, and the RMS norm of that; its base class.

Inputs are x, weight, then bias, residual and scale as far as the problem has them, then eps if it is not the default;
outputs are y and residual_out. Kernels take the addresses of all these, in this order, and eps as the bits of an fp32.
The residual is read and residual_out written by the same thread, packet by packet, so they may be the same tensor.

**Forms** that need more (`Form.is_basic` is false) have two more outputs, scales and the norm in the payload's dtype,
which are empty where the form has none, and one more number behind eps, the weight's offset. Their kernels are variants
of their own, in `quantized`: an edit of either kind does not retire what was measured of the other.

Scales that a form makes follow from y as it is rounded to the payload's dtype, as if a kernel of its own quantised it:

    scale = max(max |y|, 1e-10) / 448       over a row or 128 of its columns; rounded up to a power of two if asked for
    out = y · (1 / scale)                   saturated, rounded once to e4m3

A row (group) of zeros has the scale 1e-10 / 448. One with an infinity has the scale infinity and one with a NaN the
scale NaN, so all its elements are NaN once they are multiplied by it.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tunedcomm.fp8 import E4M3_MAX, GROUP, to_e4m3
from tunedcomm.kernels.all_reduce.host import HostUnfused
from tunedcomm.kernels.all_reduce.op import library_reduction, refuse_rows
from tunedcomm.kernels.all_reduce_rms_norm.rows import MAX_ROW_PACKETS, row_block
from tunedcomm.kernels.common.feasibility import Launch, refuse_residence
from tunedcomm.kernels.common.in_order import InOrderVariant, reduce_in_order
from tunedcomm.kernels.common.launch import Argument
from tunedcomm.kernels.common.packets import PACKET_BYTES, packets_of
from tunedcomm.kernels.common.reference import (
    SUM_DTYPES,
    draw,
    generator_of,
    hidden_rows,
    ordered_sum,
    row_shapes,
    with_extras,
)
from tunedcomm.kernels.common.variant import KernelVariant, LibraryVariant, Workspace
from tunedcomm.metrics import all_reduce_factor
from tunedcomm.space import Config, Value
from tunedcomm.spec import ITEMSIZE, Limits, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

EPS = 1e-6  # of launches without an eps of their own
OFFSET = 1.0  # of launches without one of their own
MIN_AMAX = 1e-10
_INFINITY = 0x7F800000  # bits of fp32
_SCALES = 2  # among the outputs
_SCALE_ROWS = 4  # columns of scales begin at multiples of 16 bytes, as TMA descriptors want
_FORMS = [
    *("fp8+norm", "token", "token+norm"),
    *(
        "+".join(filter(None, ("group128", *parts)))
        for parts in itertools.product(("", "columns"), ("", "pow2"), ("", "norm"))
    ),
]
_ELEMENTS, _HOST_ELEMENTS = 1 << 22, 32767  # of the rows that `in_order` and `host_unfused` normalise together
_MIN_SHARE = 4  # grids below a quarter of the rows that could run side by side never win


class Form(NamedTuple):
    """The parts of a problem's layout and scaling that say what is computed.

    Attributes:
        quantize: `fp8` with a given scale, `token` with a scale a row, `group128` with one for every 128 columns of a
            row, or "".
        columns: the scales of a group of columns lie one after another.
        pow2: scales are rounded up to powers of two.
        norm: the norm in the payload's dtype is an output, too.
        offset: a number is added to the weight.
        full_bias: the bias has x's shape.
    """

    quantize: str
    columns: bool
    pow2: bool
    norm: bool
    offset: bool
    full_bias: bool

    @property
    def is_basic(self) -> bool:
        """True for forms without an output or argument of their own."""
        return self.quantize in ("", "fp8") and not any(self[1:])

    def num_scales(self, hidden: int) -> int:
        """Scales that are made for a row."""
        return {"token": 1, "group128": hidden // GROUP}.get(self.quantize, 0)

    def scales_shape(self, rows: Any, hidden: int) -> tuple[Any, ...]:
        """Shape of the memory of all scales: (rows, scales), or (scales, rows) with columns padded to 16 bytes."""
        count = self.num_scales(hidden)
        padded = -(-rows // _SCALE_ROWS) * _SCALE_ROWS
        return (0,) if not count else (count, padded) if self.columns else (rows, count)

    def scale_strides(self, rows: int, hidden: int) -> tuple[int, int]:
        """Distance of the scales of one row and the next, and of one row's scales."""
        shape = self.scales_shape(rows, hidden)
        return (1, int(shape[-1])) if self.columns else (int(shape[-1]), 1)


@functools.lru_cache(maxsize=256)
def form_named(layout: str, scaling: str) -> Form:
    """The form of a layout and a scaling."""
    quantize, *rest = scaling.split("+")
    parts = layout.split("+")
    return Form(quantize, "columns" in rest, "pow2" in rest, "norm" in rest, "offset" in parts, "full_bias" in parts)


def form_of(problem: Problem) -> Form:
    """The problem's form."""
    return form_named(problem.layout, problem.scaling)


def scales_view(problem: Problem, scales: torch.Tensor) -> torch.Tensor:
    """The scales in their memory, of whatever shape, as (rows, scales)."""
    form, (rows, hidden) = form_of(problem), problem.shape
    if not (count := form.num_scales(hidden)):
        return scales
    return scales.as_strided((rows, count), form.scale_strides(rows, hidden))


class Given(NamedTuple):
    """Inputs by name; None for what the problem does not have."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    scale: Any
    eps: float
    offset: float

    def as_rows(self, problem: Problem, rows: slice = slice(None)) -> Given:
        """Rows of the bias and the residual as matrices."""
        bias, residual = self.bias, self.residual
        if bias is not None and form_of(problem).full_bias:
            bias = bias.reshape(problem.shape)[rows]
        residual = None if residual is None else residual.reshape(problem.shape)[rows]
        return self._replace(bias=bias, residual=residual)


def write(problem: Problem, outputs: tuple[Any, ...], found: tuple[Any, ...], rows: slice = slice(None)) -> None:
    """Write (y, h, scales, norm) of some rows to a launch's outputs."""
    for index, (output, rows_of_it) in enumerate(zip(outputs, found, strict=True)):
        if rows_of_it.numel():
            whole = scales_view(problem, output) if index == _SCALES else output.view(problem.shape)
            whole[rows] = rows_of_it


def given_of(problem: Problem, inputs: tuple[Any, ...]) -> Given:
    """A launch's inputs by name."""
    rest = list(inputs[2:])
    bias = rest.pop(0) if "bias" in problem.layout else None
    residual = rest.pop(0) if "residual" in problem.layout else None
    form = form_of(problem)
    scale = rest.pop(0) if form.quantize == "fp8" else None
    eps, offset = (float(value) for value in (*rest, *(EPS, OFFSET)[len(rest) :])[:2])
    return Given(inputs[0], inputs[1], bias, residual, scale, eps, offset if form.offset else 0.0)


def _make_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """(x, weight, bias and residual as the layout has them, scale); only x differs from rank to rank."""
    import torch

    shape, hidden = problem.shape, problem.shape[1:]
    shared = generator_of(problem.world_size, seed, device)
    found = [draw(shape, problem.dtype, generator_of(rank, seed, device), kind)]
    found.append(draw(hidden, problem.dtype, shared, kind))
    if "bias" in problem.layout:
        found.append(draw(shape if form_of(problem).full_bias else hidden, problem.dtype, shared, kind))
    if "residual" in problem.layout:
        found.append(draw(shape, problem.dtype, shared, kind))
    if form_of(problem).quantize == "fp8":
        found.append(torch.full((1,), 0.03, dtype=torch.float32, device=device))
    return tuple(found)


def _make_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    form, dtype = form_of(problem), getattr(torch, problem.dtype)
    y = torch.empty(problem.shape, dtype=torch.float8_e4m3fn if form.quantize else dtype, device=device)
    h = torch.empty(problem.shape, dtype=dtype, device=device)
    if form.is_basic:
        return y, h
    scales = torch.empty(form.scales_shape(*problem.shape), dtype=torch.float32, device=device)
    norm = torch.empty(problem.shape if form.norm else (0,), dtype=dtype, device=device)
    return y, h, scales_view(problem, scales), norm


def _reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    """In float64; what is quantised with scales of its own is first rounded as it must be."""
    given, form = given_of(problem, inputs[rank]), form_of(problem)
    h = sum(ranks[0].double() for ranks in inputs)
    for extra in (given.bias, given.residual):
        if extra is not None:
            h = h + extra.double()
    held = h if form.is_basic else _ordered_h(problem, inputs, rank).double()
    y = held / (held.square().mean(-1, keepdim=True) + EPS).sqrt() * (given.weight.double() + given.offset)
    found, *more = finish(form, y, given.x.dtype, given.scale)
    if more and form.norm:
        more[1] = y
    return found.double() if form.quantize else y, h, *(tensor.double() for tensor in more)


def _ordered_h(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> torch.Tensor:
    given = given_of(problem, inputs[rank])
    return with_extras(ordered_sum([ranks[0] for ranks in inputs], "sum"), given.bias, given.residual)


def _ordered_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    """The rounding rule of `rows` in PyTorch, operation by operation."""
    given, h = given_of(problem, inputs[rank]), _ordered_h(problem, inputs, rank)
    y, *more = finish(form_of(problem), ordered_norm(h, given), h.dtype, given.scale)
    return y, h, *more


def ordered_norm(h: torch.Tensor, given: Given) -> torch.Tensor:
    """Y of the stored h in fp32, or of fp64 in that, before it is rounded.

    Divisors are tensors on purpose: PyTorch divides by numbers by multiplying with their reciprocals on GPUs. Its fp32
    root on CPUs may be a bit off, the root of fp64 rounded to fp32 is not.
    """
    import torch

    total = _square_sum(h)
    mean = total / torch.full_like(total, h.shape[-1])
    root = (mean + torch.full_like(total, given.eps)).double().sqrt().to(total.dtype)
    factor = (torch.ones_like(root) / root).unsqueeze(-1)
    return h.to(total.dtype) * factor * _weight(given, total.dtype)


def norm_rows(problem: Problem, given: Given, s: torch.Tensor, outputs: tuple[Any, ...], max_rows: int) -> None:
    """Fill in a launch's outputs from the sum s, `max_rows` rows at a time; s may be residual_out."""
    form = form_of(problem)
    for first in range(0, len(s), max_rows):
        rows = slice(first, first + max_rows)
        extras = given.as_rows(problem, rows)
        held = with_extras(s[rows], extras.bias, extras.residual)
        y, *more = finish(form, ordered_norm(held, given), held.dtype, given.scale)
        write(problem, outputs, (y, held, *more), rows)


def _weight(given: Given, dtype: torch.dtype) -> torch.Tensor:
    weight: torch.Tensor = given.weight.to(dtype)
    return weight + given.offset if given.offset else weight


def finish(form: Form, y: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The output for y in fp32 or fp64; for a form that is not basic, scales and norm, too.

    Scales that are not rounded to powers of two have the dtype of y.
    """
    import torch

    rounded, scales = y.to(dtype), y.new_empty((0,), dtype=torch.float32)
    found = rounded
    if scale is not None:
        found = to_e4m3(y * (torch.ones_like(scale) / scale))
    elif count := form.num_scales(y.shape[-1]):
        groups = rounded.to(y.dtype).unflatten(-1, (count, -1))
        amax = groups.abs().amax(-1).clamp_min(MIN_AMAX)
        scales = amax / torch.full_like(amax, E4M3_MAX)
        if form.pow2:
            bits = scales.float().view(torch.int32)
            scales = torch.where(bits > _INFINITY, bits, (bits + 0x7FFFFF) & _INFINITY).view(torch.float32)
        found = to_e4m3(groups * (torch.ones_like(scales) / scales).unsqueeze(-1)).flatten(-2)
    if form.is_basic:
        return (found,)
    return found, scales, rounded if form.norm else y.new_empty((0,), dtype=dtype)


def _square_sum(h: torch.Tensor) -> torch.Tensor:
    """Σ h² over the last extent in the order of `rows`."""
    import torch

    def by_32(values: torch.Tensor) -> torch.Tensor:
        """The last extent cut into pieces of 32, with zeros behind its end."""
        padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 32))
        return padded.reshape(*padded.shape[:-1], -1, 32)

    def butterfly(values: torch.Tensor) -> torch.Tensor:
        """Sum over the last extent, 32."""
        for half in (16, 8, 4, 2, 1):
            values = values[..., :half] + values[..., half:]
        return values[..., 0]

    squares = h.to(torch.promote_types(h.dtype, torch.float32)).square()
    if h.element_size() == 2:
        pairs = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % 2)).unflatten(-1, (-1, 2))
        squares = pairs[..., 0] + pairs[..., 1]
    squares = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % 4))
    words = squares.unflatten(-1, (-1, 4))
    packets = (words[..., 0] + words[..., 1]) + (words[..., 2] + words[..., 3])
    groups = by_32(butterfly(by_32(packets)))
    total = groups[..., 0, :]
    for index in range(1, groups.shape[-2]):
        total = total + groups[..., index, :]
    return butterfly(total)


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    narrower = [(tokens, hidden) for hidden in (4096, 5120) for tokens in (1, 16, 128, 1024)]
    return [*row_shapes(backend, itemsize), *(narrower if backend == "cuda" else ())]


def _related_forms(problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    base, *more = problem.scaling.split("+")
    # Forms that quantise with computed scales have kernels of their own.
    has_own = more or base not in ("", "fp8") or "offset" in problem.layout or "full_bias" in problem.layout
    return ("residual", "bias+residual", "", "bias"), (base, *(("token", "group128") if has_own else ("",)))


_LAYOUTS = (
    *("residual", "bias+residual", "", "bias", "full_bias+residual", "residual+offset", "bias+residual+offset"),
    *("offset", "bias+offset", "full_bias+residual+offset"),
)
ALL_REDUCE_RMS_NORM = register_op(
    OpSpec(
        name="all_reduce_rms_norm",
        summary="the ranks' sum plus bias and residual, and the RMS norm of that",
        reductions=("sum",),
        dtypes=SUM_DTYPES,
        shape_help="tokens x hidden, e.g. 64x8192",
        rank_of_shape=2,
        make_inputs=_make_inputs,
        make_outputs=_make_outputs,
        reference=_reference,
        # ‖out − ref‖ / ‖ref‖ of three roundings in the payload's dtype, or of one in e4m3 of what is a little off.
        tolerance={
            "bfloat16": 1.2e-2,
            "float16": 1.6e-3,
            "float32": 2e-6,
            "float64": 1e-13,
            "fp8": 5e-2,
            "token": 5e-2,
            "group128": 5e-2,
        },
        message_bytes=lambda problem: problem.nbytes,
        busbw_factor=all_reduce_factor,
        default_shapes=_default_shapes,
        ordered_reference=_ordered_reference,
        layouts=_LAYOUTS,
        scalings=("", "fp8", *_FORMS),
        related_forms=_related_forms,
        model_shapes=hidden_rows,
    )
)


@functools.lru_cache(maxsize=64)
def eps_bits(eps: float) -> int:
    """Bits of `eps` in fp32."""
    return int(struct.unpack("<i", struct.pack("<f", eps))[0])


def row_packets(problem: Problem) -> int:
    """Packets of a row, which are full wherever kernels run."""
    return problem.shape[-1] * ITEMSIZE[problem.dtype] // PACKET_BYTES


def row_warps(problem: Problem) -> int:
    """Warps to try first: a packet of a row for each thread, with 512 threads at most."""
    return max(1, min(row_block(row_packets(problem)) // 32, 16))


def refuse_row_warps(problem: Problem, limits: Limits, num_warps: int, *, slots: int) -> str | None:
    """Return why blocks of so many warps cannot hold rows of `problem`, or None.

    Args:
        problem, limits, num_warps: what is asked, where, and with what.
        slots: ranks from which a thread holds packets of a row at once. What fits is what compiles without spills.
    """
    if reason := refuse_rows(problem, limits):
        return reason
    packets, threads = row_packets(problem), 32 * num_warps
    if packets > MAX_ROW_PACKETS:
        return f"a row of {packets} packets; a block holds at most {MAX_ROW_PACKETS}"
    block = row_block(packets)
    if block < threads:
        return f"{threads} threads for the {packets} packets of a row: some would repeat what others do"
    share = -(-block // threads)
    if limits.backend == "cuda" and (share * slots > (8 if slots == 1 else 16) or block * slots > 2048 * min(slots, 2)):
        return f"{share} packets of a row from {slots} ranks for each of {threads} threads do not fit into registers"
    if limits.backend == "cuda" and threads > 512 and problem.world_size > 4:
        return f"packets from {problem.world_size} ranks do not fit into the 64 registers of each of {threads} threads"
    return None


class RmsNormVariant(KernelVariant):
    """A variant for the basic forms, which works row by row; variants of the other forms are in `quantized`.

    Attributes:
        num_varying: arguments that vary: x, weight, bias, residual, scale, out, residual_out, eps.
        slots: ranks from which a thread holds packets of a row at once; 0 for all of them.
        mixed: blocks wait for what other blocks than their counterparts send.
    """

    op = "all_reduce_rms_norm"
    num_varying = 8
    slots = 0
    mixed = False

    def refuse_form(self, problem: Problem) -> str | None:
        """Return why the kernel does not serve the problem's form, or None."""
        return None if form_of(problem).is_basic else "its form asks for more than the norm; see the variants quantized"

    def refuse(self, problem: Problem, limits: Limits) -> str | None:
        return self.refuse_form(problem) or refuse_rows(problem, limits)

    def refuse_config(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        slots = self.slots or problem.world_size
        return refuse_row_warps(problem, limits, int(config["num_warps"]), slots=slots)

    def refuse_grid(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        """Return why a grid that must be resident does not suit the rows and packets of a problem, or None."""
        if reason := refuse_residence(config, limits):
            return reason
        blocks, threads = int(config["num_blocks"]), 32 * int(config["num_warps"])
        tokens, packets = problem.shape[0], packets_of(problem.nbytes)
        if limits.backend == "host" and self.mixed and blocks > 1:
            return "interpreted blocks run one after another, so none may wait for a later one: only num_blocks=1"
        if blocks >= 2 * max(tokens, -(-packets // threads)):
            return f"{tokens} rows of {packets} packets in all leave half of {blocks} blocks without work"
        if limits.backend == "cuda" and _MIN_SHARE * blocks < min(tokens, limits.num_sms):
            return f"{blocks} blocks leave most SMs idle at {tokens} rows"
        return None

    def first_arguments(self, problem: Problem) -> tuple[Argument | None, ...]:
        """None for each argument that varies, then the shape: (tokens, packets of a row)."""
        return (*(None,) * self.num_varying, (problem.shape[0], row_packets(problem)))

    def addresses(self, problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
        """Arguments that vary from launch to launch: addresses, 0 for absent tensors, and the bits of eps."""
        given = given_of(problem, inputs)
        tensors = (*given[:5], *outputs)
        return (*(0 if tensor is None else int(tensor.data_ptr()) for tensor in tensors), eps_bits(given.eps))

    def constants(self, problem: Problem, config: Config) -> dict[str, Value]:
        constants: dict[str, Value] = {
            "WORLD_SIZE": problem.world_size,
            "DTYPE": problem.dtype,
            "BIAS": "bias" in problem.layout,
            "RESIDUAL": "residual" in problem.layout,
            "FP8": problem.scaling == "fp8",
            "BLOCK": row_block(row_packets(problem)),
        }
        if "THREADS" in self.kernel(problem).arg_names:
            constants["THREADS"] = 32 * int(config["num_warps"])
        return constants

    def num_rounds(self, problem: Problem, config: Config) -> int:
        """Rounds of the grid, in which each block takes a row."""
        return -(-problem.shape[0] // int(config["num_blocks"]))


def add_and_norm(s: torch.Tensor, given: Given, form: Form) -> tuple[torch.Tensor, ...]:
    """Compute (y, h) from a sum as a model would; for a form that is not basic, scales and norm, too."""
    import torch

    wide = torch.promote_types(s.dtype, torch.float32)
    h = s
    if given.bias is not None or given.residual is not None:
        h = with_extras(s, given.bias, given.residual)
    held = h.to(wide)
    y = held * (held.square().mean(-1, keepdim=True) + given.eps).rsqrt() * _weight(given, wide)
    y, *more = finish(form, y, s.dtype, given.scale)
    return y, h, *more


class Library(LibraryVariant, registered=True):
    """NCCL (gloo on CPUs), then PyTorch operators one by one; fp64 is computed in fp64. Graph-safe on NCCL.

    h and y have the rounding points of the kernels, with the norm's sum in PyTorch's order.
    """

    op = "all_reduce_rms_norm"
    summary = "NCCL on GPUs, gloo on CPUs, then PyTorch operators"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        reduce = library_reduction("sum", workspace.group)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            given = given_of(problem, inputs)
            s = given.x.clone()
            reduce(s)
            found = add_and_norm(s.reshape(problem.shape), given.as_rows(problem), form_of(problem))
            write(problem, outputs, found)

        return run


class InOrder(InOrderVariant, registered=True):
    """Norms row by row; the norm of fp64 follows the rule of `rows` in fp64."""

    op = "all_reduce_rms_norm"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            given = given_of(problem, inputs)
            s = torch.empty(problem.shape, dtype=given.x.dtype, device=given.x.device)
            reduce_in_order(given.x.view(-1), s.view(-1), "sum", workspace.group)
            norm_rows(problem, given, s, outputs, max(_ELEMENTS // problem.shape[1], 1))

        return run


class HostRmsNorm(HostUnfused, registered=True):
    """all_reduce's host variants, then PyTorch on a few rows at a time. Numerics: ordered.

    As many rows go together as stay in the cache with their intermediate results, too few for PyTorch's threads.
    """

    op = "all_reduce_rms_norm"
    summary = "CPU tensors: all_reduce in shared memory, then PyTorch operators row by row"

    def refuse(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if problem.dtype not in SUM_DTYPES:
            return f"sums of squares are made in fp32, which is too narrow for {problem.dtype}"
        return None

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        reduce, (tokens, hidden) = self.collectives(problem, config)[0].bind(workspace), problem.shape
        max_rows = max(_HOST_ELEMENTS // hidden, 1)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            given, h = given_of(problem, inputs), outputs[1].view(tokens, hidden)
            shared = given.residual is not None and given.residual.data_ptr() == h.data_ptr()
            s = torch.empty_like(h) if shared else h
            reduce((given.x,), (s,), stream)
            norm_rows(problem, given, s, outputs, max_rows)

        return run
