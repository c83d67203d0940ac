"""The fused GEMMs: `ag_gemm`, `gemm_rs` and `gemm_ar`.

`b` is [K, N] in any strides. The transposed view of a contiguous [N, K] matrix, as linear layers store their weights,
is served as it lies (layout `nk`), and so is a contiguous [K, N] one (`kn`); others are copied into the nearer of the
two. So which problem a call is depends on how `b` is stored, which must be alike on every rank.

An `AddressLaunch` takes the addresses of the op's `inputs` in order, then of out and, of ag_gemm, of the gathered a; 0
for what there is not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.errors import TunedCommError, UnsupportedInputError
from tunedcomm.kernels.gemm.op import GemmLayout, gemm_layout, layout_name, operands_of, product
from tunedcomm.ops import autograd
from tunedcomm.ops.adapter import CallArguments, CallSignature, Formula, Group, OpAdapter, Results, Tensors, problem_of
from tunedcomm.ops.arguments import (
    FLOATS,
    check_differentiable,
    check_fits,
    check_reduction,
    goes_by_operator,
    is_nk,
    reduction_name,
)
from tunedcomm.ops.call import CallPath, call_operator, group_arguments
from tunedcomm.ops.collectives import all_gather
from tunedcomm.ops.fast_call import world
from tunedcomm.spec import NumericsPolicy, Problem

_FP8 = torch.float8_e4m3fn
_LEAST_K = 64  # of a product that stands for one without columns
Product: TypeAlias = "torch.Tensor | list[torch.Tensor]"
_NAMED = {**FLOATS, _FP8: "float8_e4m3fn"}
# Dtype of the operands to those that the result may have, the usual one first.
OUT_DTYPES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.float16: (torch.float16, torch.float32),
    torch.float32: (torch.float32,),
    torch.float64: (torch.float64,),
    _FP8: (torch.bfloat16, torch.float16, torch.float32),
}


def out_dtype_of(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The result's dtype."""
    return out_dtype or OUT_DTYPES[a.dtype][0]


def _names(dtypes: Any) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


class GemmAdapter(OpAdapter):
    """A fused GEMM; the first option is the result's dtype, None for the usual one."""

    inputs: tuple[str, ...] = ("a", "b", "scale_a", "scale_b")
    outputs: tuple[str, ...] = ("out",)
    least_dims = 2
    optional: tuple[str, ...] = ("scale_a", "scale_b")
    options: tuple[str, ...] = ("ScalarType? out_dtype",)
    reduction = ""
    wants_aligned = True

    def leading(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        """The result's dimensions before N."""
        return tuple(a.shape[:-1])

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        given = dict(zip(self.inputs, inputs, strict=True))
        a, b = given["a"], given["b"]
        self._check_shapes(a, b)
        if b.dtype != a.dtype or a.dtype not in OUT_DTYPES:
            raise UnsupportedInputError(
                f"{self.op} does not take a of {a.dtype} with b of {b.dtype}; both must be one of {_names(OUT_DTYPES)}"
            )
        if options[0] is not None and options[0] not in OUT_DTYPES[a.dtype]:
            raise UnsupportedInputError(
                f"out_dtype={options[0]!r} of {self.op} with operands of {a.dtype}; allowed: None, "
                f"{_names(OUT_DTYPES[a.dtype])}"
            )
        self.scaling(a, b, given["scale_a"], given["scale_b"])
        bias, dtype = given.get("bias"), out_dtype_of(a, options[0])
        if bias is not None and (tuple(bias.shape) != (b.shape[1],) or bias.dtype != dtype):
            raise UnsupportedInputError(
                f"bias of {self.op} has shape {tuple(bias.shape)} and {bias.dtype}; it must have the result's columns "
                f"and dtype, ({b.shape[1]},) and {dtype}"
            )

    def _check_shapes(self, a: torch.Tensor, b: torch.Tensor | None) -> None:
        if b is None:
            raise UnsupportedInputError(f"{self.op} wants b [K, N], got None")
        if a.dim() < self.least_dims:
            dims = "..., K" if self.least_dims == 1 else "M, ..., K"
            raise UnsupportedInputError(
                f"a of {self.op} has shape {tuple(a.shape)}; it must have at least {self.least_dims} dimensions: "
                f"pass [{dims}]"
            )
        if b.dim() != 2:
            raise UnsupportedInputError(
                f"b of {self.op} has shape {tuple(b.shape)}; it must be a matrix [K, N], e.g. weight.t() of a weight "
                "[N, K]"
            )
        if a.shape[-1] != b.shape[0]:
            advice = "; pass b.t()" if a.shape[-1] == b.shape[1] else ""
            raise UnsupportedInputError(
                f"a of {self.op} has K = {a.shape[-1]} columns and b has {b.shape[0]} rows (shapes {tuple(a.shape)} "
                f"and {tuple(b.shape)}); they must be equal{advice}"
            )

    def scaling(self, a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any) -> str:
        """The value of `Problem.scaling` for these scales.

        Raises:
            UnsupportedInputError: they do not fit the operands or each other.
        """
        if a.dtype != _FP8:
            if scale_a is not None or scale_b is not None:
                raise UnsupportedInputError(f"scale_a and scale_b of {self.op} are for {_FP8}, not for {a.dtype}")
            return ""
        if scale_a is None or scale_b is None:
            raise UnsupportedInputError(
                f"{self.op} of {_FP8} wants scale_a and scale_b; pass both, torch.ones(1) where nothing is to be scaled"
            )
        rowwise = (*a.shape[:-1], 1), (1, b.shape[1])
        shapes = tuple(scale_a.shape), tuple(scale_b.shape)
        wrong = [scale.dtype for scale in (scale_a, scale_b) if scale.dtype != torch.float32]
        if wrong:
            raise UnsupportedInputError(f"scales of {self.op} must be torch.float32, got {wrong[0]}")
        if shapes == rowwise:
            return "rowwise"
        if scale_a.numel() == scale_b.numel() == 1:
            return "tensorwise"
        raise UnsupportedInputError(
            f"scale_a of {self.op} has shape {shapes[0]} and scale_b {shapes[1]}; they must have one element each, or "
            f"{rowwise[0]} and {rowwise[1]}: one for every row of a and every column of b"
        )

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        given = dict(zip(self.inputs, inputs, strict=True))
        a, b = given["a"], given["b"]
        shape = (math.prod(self.problem_rows(a, world_size)), b.shape[1], b.shape[0])
        dtype, out = _NAMED[a.dtype], _NAMED[out_dtype_of(a, options[0])]
        wanted = GemmLayout(is_nk(b), given.get("bias") is not None, "gathered" in self.outputs, out)
        scaling = self.scaling(a, b, given["scale_a"], given["scale_b"])
        layout = layout_name(wanted, dtype)
        reduction = options[1] if len(options) > 1 else self.reduction
        return problem_of(self.op, shape, dtype, world_size, reduction, layout=layout, scaling=scaling, mode="eager")

    def refusal(self, inputs: Tensors, options: Any) -> str:
        return f"{self.op} of {_FP8}" if inputs[0].dtype == _FP8 else ""

    def asks_for(self, problem: Problem) -> bool:
        return gemm_layout(problem).gathered is (len(self.outputs) > 1)

    def problem_rows(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        """Dimensions whose product is M."""
        return tuple(a.shape[:-1])

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        a, b = inputs[:2]
        leading = self.leading(a, world_size)
        found = [((*leading, b.shape[1]), out_dtype_of(a, options[0])), ((*leading, a.shape[-1]), a.dtype)]
        return found[: len(self.outputs)]

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        given = operands_of(problem, inputs)._asdict()
        given["b"] = given["b"].t() if gemm_layout(problem).nk else given["b"]
        options = (outputs[0].dtype, problem.reduction)[: len(self.options)]
        return (*(given[name] for name in self.inputs), *outputs), options

    def key(self, tensors: Tensors) -> Hashable:
        a, b = tensors[:2]
        return tuple(a.shape), tuple(b.shape) if isinstance(b, torch.Tensor) else None

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """There are no results where M or N is 0; a K of 0 is this rank's own matter where products are summed."""
        return all(result.numel() == 0 for result in results)

    def launch_inputs(self, inputs: Tensors) -> Tensors:
        """Operands without columns as some of zeros: the sum over ranks is taken all the same."""
        if inputs[0].shape[-1]:
            return inputs
        a, b = inputs[:2]
        columns = b.new_zeros((b.shape[1], _LEAST_K)).t() if is_nk(b) else b.new_zeros((_LEAST_K, b.shape[1]))
        return (a.new_zeros((*a.shape[:-1], _LEAST_K)), columns, *inputs[2:])

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        given = dict(zip(self.inputs, inputs, strict=True))
        a, b, scale_a, scale_b = (given[name] for name in ("a", "b", "scale_a", "scale_b"))
        given["a"] = a.reshape(-1, a.shape[-1])
        given["b"] = b.t() if is_nk(b) else b
        if scale_a is not None:
            rowwise = self.scaling(a, b, scale_a, scale_b) == "rowwise"
            given["scale_a"] = scale_a.reshape((-1, 1) if rowwise else (1,))
            given["scale_b"] = scale_b.reshape((1, -1) if rowwise else (1,))
        return tuple(given.values())

    def launch_output(self, output: torch.Tensor) -> torch.Tensor:
        return output.view(math.prod(output.shape[:-1]), output.shape[-1])

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        problem = self.problem(inputs, options, 1)
        operands = operands_of(problem, tuple(t for t in self.operands(inputs, options) if t is not None))
        m, n, _ = problem.shape
        dtype = out_dtype_of(inputs[0], options[0])
        out = product(problem, operands, torch.empty((m, n), dtype=dtype, device=inputs[0].device))
        if operands.bias is not None:
            out += operands.bias
        shapes = [shape for shape, _ in self.results(inputs, options, 1)]
        return tuple(found.view(shape) for found, shape in zip((out, operands.a), shapes, strict=False))


class _AgGemm(GemmAdapter):
    op = "ag_gemm"
    gradient: Formula | None = autograd.keep_operands, autograd.ag_gemm

    def leading(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        return (a.shape[0] * world_size, *a.shape[1:-1])

    def problem_rows(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        return self.leading(a, world_size)

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return (0,)  # in place of the gathered a

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """Nothing is gathered where K is 0, on every rank alike; where N is, A may still be."""
        if inputs[0].shape[-1]:
            return super().needs_no_peers(inputs, results, options)
        results[0].zero_()
        return True


class _AgGemmGathered(_AgGemm):
    suffix = "_gathered"
    outputs = ("out", "gathered")
    gradient = autograd.keep_gathered, autograd.ag_gemm_gathered

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        return ()


_ag_gemm: CallPath[torch.Tensor] = CallPath(_AgGemm())
_gathered: CallPath[tuple[torch.Tensor, torch.Tensor]] = CallPath(_AgGemmGathered())


def ag_gemm_gathered(
    tensors: Tensors, out_dtype: Any, group: Group, numerics: NumericsPolicy | None, max_sms: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product and the gathered a; tensors are a, b, the scales and the outputs."""
    if not is_dynamo_compiling():
        fast = _gathered.last_fast_calls[world._default_pg if group is None else group]
        if (results := fast(*tensors, out_dtype, numerics, max_sms)) is not None:
            return results
    return _gathered.call(tensors, (out_dtype,), group, numerics, max_sms)


class _AgGemmList(_AgGemm):
    """`ag_gemm` with a list of b, for lists of one length: every b, its scale and its out is a tensor of its own."""

    suffix = "_list"
    has_operator = False  # the operator for lists of any length is `torch_ops.ListOperator`
    repeats = False

    def __init__(self, length: int) -> None:
        self.length = length
        scales = [f"scale_b[{index}]" for index in range(length)]
        self.inputs = ("a", "scale_a", *(f"b[{index}]" for index in range(length)), *scales)
        self.outputs = (*(f"out[{index}]" for index in range(length)), "gathered")
        self.optional = ("scale_a", *scales)

    def asks_for(self, problem: Problem) -> bool:
        return False

    def each(self, inputs: Tensors) -> list[Tensors]:
        """The inputs of `ag_gemm` with each b."""
        a, scale_a, *rest = inputs
        return [(a, b, scale_a, scale_b) for b, scale_b in zip(rest[: self.length], rest[self.length :], strict=True)]

    def widest(self, inputs: Tensors) -> int:
        """The index of the b that the fused op multiplies, the first of the widest."""
        return max(range(self.length), key=lambda index: (inputs[2 + index].shape[1], -index))

    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        return _gathered.adapter.problem(self.each(inputs)[self.widest(inputs)], options, world_size)

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        each = self.each(inputs)
        first = each[0][1]
        for index, (_, b, _, _) in enumerate(each):
            if b is not None and first is not None and b.dtype != first.dtype:
                raise UnsupportedInputError(
                    f"b[{index}] of {self.op} is of {b.dtype}, b[0] of {first.dtype}; all must be of a's dtype, "
                    f"{inputs[0].dtype}"
                )
            _ag_gemm.adapter.check(each[index], options, world_size)
        kinds = [self.scaling(*one) for one in each]
        if len(set(kinds)) > 1:
            raise UnsupportedInputError(f"scales of {self.op} are {kinds}; they must be of one kind for all b")

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        each = [_gathered.adapter.results(one, options, world_size) for one in self.each(inputs)]
        return [*(product for product, _ in each), each[0][1]]


class _ListPath(CallPath[tuple[torch.Tensor, ...]]):
    """The widest b by the fused op, the others by the library from the gathered matrix."""

    adapter: _AgGemmList

    def fill_results(
        self, communicator: Communicator, inputs: Tensors, targets: Tensors, signature: CallSignature
    ) -> None:
        each, (*outs, gathered) = self.adapter.each(inputs), targets
        widest = self.adapter.widest(inputs)
        _, _, scale_a, scale_b = each[widest]
        fused = (*each[widest], outs[widest], gathered)
        ag_gemm_gathered(fused, signature.options[0], communicator.group, signature.numerics, signature.max_sms)
        if len(each) > 1 and self.adapter.scaling(*each[widest]) == "rowwise":
            scale_a = all_gather(scale_a, group=communicator.group)
        for index, (_, b, _, scale_b) in enumerate(each):
            if index != widest:
                _multiply((gathered, b, scale_a, scale_b), outs[index], signature.options)


def _multiply(inputs: Tensors, out: torch.Tensor, options: Any) -> None:
    """The product of the gathered a and b, by the library."""
    adapter = _ag_gemm.adapter
    sink = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if not adapter.needs_no_peers(inputs, (sink,), options):
        problem = adapter.problem(inputs, options, 1)
        taken = tuple(tensor for tensor in adapter.operands(inputs, options) if tensor is not None)
        product(problem, operands_of(problem, taken), adapter.launch_output(sink))
    if sink is not out:
        out.copy_(sink)


# One for every length: programs have lists of two or three.
list_path = functools.cache(lambda length: _ListPath(_AgGemmList(length)))


def as_list(given: Any, name: str, length: int) -> list[Any]:
    """An optional argument beside a list of b, as a list with one entry for every b."""
    if length == 0:
        raise UnsupportedInputError("b of ag_gemm is an empty list; pass at least one matrix [K, N]")
    if given is None:
        return [None] * length
    if not isinstance(given, (list, tuple)) or len(given) != length:
        what = f"{len(given)} elements" if isinstance(given, (list, tuple)) else f"type {type(given).__name__}"
        raise UnsupportedInputError(
            f"{name} of ag_gemm has {what}; b is a list of {length}, so it must be a list as long"
        )
    return list(given)


def _ag_gemm_list(
    inputs: tuple[Any, Sequence[Any], Any, Any],
    outs: Any,
    out_dtype: Any,
    group: Group,
    numerics: NumericsPolicy | None,
    max_sms: int | None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The products and the gathered a; inputs are a, the list of b, scale_a and the list of scale_b."""
    a, several, scale_a, scales = inputs
    scales = as_list(scales, "scale_b", len(several))
    try:
        targets = as_list(outs, "out", len(several))
        if outs is not None and not is_dynamo_compiling():
            check_differentiable("ag_gemm into a given tensor", (a, scale_a, *several, *scales, *targets))
    except UnsupportedInputError:  # of this rank alone: it takes part
        with torch.no_grad(), contextlib.suppress(TunedCommError):
            _ag_gemm_list(inputs, None, out_dtype, group, numerics, max_sms)
        raise
    tensors = (a, scale_a, *several, *scales, *targets, None)
    if not is_dynamo_compiling():
        group = world._default_pg if group is None else group
        if not (isinstance(group, dist.ProcessGroup) and goes_by_operator(tensors)):
            path = list_path(len(several))
            *made, gathered = path.serve(CallArguments(tensors, (out_dtype,), group, numerics, max_sms))
            return made, gathered
    refusal = _ag_gemm.adapter.refusal((a,), None) if outs is None else "ag_gemm into a given tensor"
    if refusal:
        check_differentiable(refusal, tensors)
    given = [scale for scale in scales if scale is not None]
    settings = (out_dtype, *group_arguments(group), numerics, max_sms)
    *made, gathered = call_operator("ag_gemm_list", (a, list(several), scale_a, given), settings, "")
    made = list(made)  # Dynamo of torch 2.11 takes it for a tuple
    for index, out in enumerate(targets):
        if out is not None:
            check_fits(a, out, made[index].shape, made[index].dtype, name=f"out[{index}]", input_name="a")
            made[index] = out.copy_(made[index])
    return made, gathered


def ag_gemm(
    a_shard: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    return_gathered: bool = False,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> Product | tuple[Product, torch.Tensor]:
    """Gather the ranks' `a_shard` along the first dimension and multiply: `all_gather(a_shard) @ b`.

    Args:
        a_shard: [m, ..., K], any strides: this rank's rows of A. Kernels take bf16, fp16 and fp8 e4m3; fp32 and fp64
            run the variant `library` on GPUs. The same shape and dtype on every rank.
        b: [K, N] of `a_shard`'s dtype. A contiguous matrix and the transposed view of a contiguous [N, K] weight are
            taken as they lie, anything else is copied; which of the two it is must be alike on every rank, as all
            shapes must. A list or tuple of them is multiplied one by one by what was gathered once: the first of the
            widest as one `b` would be, the others by cuBLAS (PyTorch's product on CPUs).
        scale_a, scale_b: fp32 on the device, with fp8 operands and only then. Either one element each, `scale_a` the
            same on every rank, for it scales the whole gathered matrix; or [m, ..., 1], gathered with `a_shard`,
            and [1, N]. They multiply the product. With a list of b `scale_b` is a list as long.
        out_dtype: of the result. With bf16 and fp16 operands theirs (as None) or fp32; with fp8 operands bf16 (as
            None), fp16 or fp32; fp32 and fp64 operands keep their own.
        return_gathered: also return the gathered `a_shard`.
        out: where to write: [m · world_size, ..., N] of the result's dtype, any strides, memory of its own. With a list
            of b a list as long. None allocates it.
        group: as in `all_reduce`.
        numerics: as in `all_reduce`. Ordered: multiplied in fp32 with one accumulator, rounded once.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor, or a list of them; with `return_gathered` that and the gathered `a_shard`, [m
        · world_size, ..., K].

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    try:
        if isinstance(b, (list, tuple)):
            found, gathered = _ag_gemm_list((a_shard, b, scale_a, scale_b), out, out_dtype, group, numerics, max_sms)
            return (found, gathered) if return_gathered else found
        if return_gathered:
            both = (a_shard, b, scale_a, scale_b, out, None)
            return ag_gemm_gathered(both, out_dtype, group, numerics, max_sms)
        if not is_dynamo_compiling():
            fast = _ag_gemm.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(a_shard, b, scale_a, scale_b, out, out_dtype, numerics, max_sms)) is not None:
                return result
        return _ag_gemm.call((a_shard, b, scale_a, scale_b, out), (out_dtype,), group, numerics, max_sms)
    except BaseException as error:
        _ag_gemm.on_error(error, a_shard, group)
        raise


class _GemmRs(GemmAdapter):
    op = "gemm_rs"
    options = ("ScalarType? out_dtype", "str op")
    gradient = autograd.keep_operands, autograd.gemm_rs

    def leading(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        return (a.shape[0] // world_size, *a.shape[1:-1])

    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        super().check(inputs, options, world_size)
        a = inputs[0]
        check_reduction(options[1], a, ("sum", "avg"))
        if a.shape[0] % world_size:
            raise UnsupportedInputError(
                f"{self.op} splits dimension 0 of a, {a.shape[0]} long, into {world_size} equal parts; it must be a "
                f"multiple of {world_size} (shape {tuple(a.shape)}): pad a with rows of zeros"
            )


_gemm_rs: CallPath[torch.Tensor] = CallPath(_GemmRs())


def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    op: str | dist.ReduceOp.RedOpType = "sum",
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Multiply `a @ b` on every rank and sum the products over the ranks of `group`; each gets its rows of the sum.

    Args:
        a: [M, ..., K], any strides: this rank's columns of A. Kernels take bf16, fp16 and fp8 e4m3; fp32 and fp64
            run the variant `library` on GPUs. M must be a multiple of the group's size: pad it with rows of zeros where
            it is not. The same shape and dtype on every rank.
        b: [K, N] of `a`'s dtype. A contiguous matrix and the transposed view of a contiguous [N, K] weight are taken as
            they lie, anything else is copied; which of the two it is must be alike on every rank, as all shapes must.
        op: `sum` or `avg`.
        scale_a, scale_b: fp32 on the device, with fp8 operands and only then: one element each, or [M, ..., 1] and [1,
            N] for every row of `a` and every column of `b`. They multiply the product before it is rounded and summed.
        out_dtype: as in `ag_gemm`.
        out: where to write: [M / world_size, ..., N] of the result's dtype, any strides, memory of its own. None
            allocates it.
        group: as in `all_reduce`.
        numerics: as in `all_reduce`. Ordered: multiplied in fp32 with one accumulator, each rank's product rounded
            once, summed in rank order with one rounding at the end.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor [M / world_size, ..., N]: rank r has the r-th of as many equal parts of the
        rows.

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    try:
        if not is_dynamo_compiling():
            fast = _gemm_rs.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(a, b, scale_a, scale_b, out, out_dtype, op, numerics, max_sms)) is not None:
                return result
        return _gemm_rs.call((a, b, scale_a, scale_b, out), (out_dtype, reduction_name(op)), group, numerics, max_sms)
    except BaseException as error:
        _gemm_rs.on_error(error, a, group)
        raise


class _GemmAr(GemmAdapter):
    op = "gemm_ar"
    inputs = ("a", "b", "bias", "scale_a", "scale_b")
    optional = ("bias", "scale_a", "scale_b")
    reduction = "sum"
    least_dims = 1
    gradient = autograd.keep_operands, autograd.gemm_ar


_gemm_ar: CallPath[torch.Tensor] = CallPath(_GemmAr())


def gemm_ar(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
) -> torch.Tensor:
    """Multiply `a @ b` on every rank and sum the products over all ranks of `group`; every rank gets the whole sum.

    Args:
        a: [..., K], any strides: this rank's columns of A. Kernels take bf16, fp16 and fp8 e4m3; fp32 and fp64 run
            the variant `library` on GPUs. The same shape and dtype on every rank.
        b: as in `gemm_rs`.
        bias: [N] of the result's dtype, added once to the sum; None adds nothing. The same on every rank for the
            results to be.
        scale_a, scale_b: fp32 on the device, with fp8 operands and only then: one element each, or [..., 1] and [1, N]
            for every row of `a` and every column of `b`. They multiply the product before it is rounded and summed.
        out_dtype: as in `ag_gemm`.
        out: where to write: [..., N] of the result's dtype, any strides, memory of its own. None allocates it.
        group: as in `all_reduce`.
        numerics: as in `gemm_rs`.
        max_sms: as in `all_reduce`.

    Returns:
        `out`, or a new contiguous tensor [..., N].

    Raises:
        NotInitializedError, GroupError, UnsupportedInputError, InfeasibleError, PeerTimeoutError: as in `all_reduce`.

    Can be captured in CUDA graphs; enqueues on the current stream; never synchronises the host.
    """
    try:
        if not is_dynamo_compiling():
            fast = _gemm_ar.last_fast_calls[world._default_pg if group is None else group]
            if (result := fast(a, b, bias, scale_a, scale_b, out, out_dtype, numerics, max_sms)) is not None:
                return result
        return _gemm_ar.call((a, b, bias, scale_a, scale_b, out), (out_dtype,), group, numerics, max_sms)
    except BaseException as error:
        _gemm_ar.on_error(error, a, group)
        raise
