"""What the public functions of the fused GEMMs share: questions asked of the operands, and their problems.

`b` is [K, N] in any strides. The transposed view of a contiguous [N, K] matrix, as linear layers store their weights,
is served as it lies (layout `nk`), and so is a contiguous [K, N] one (`kn`); others are copied into the nearer of the
two. So which problem a call is depends on how `b` is stored, which must be alike on every rank.

Launches by address (`ManyLaunch`) take the addresses of the op's `inputs` in order, then of out and, of ag_gemm, of the
gathered a; 0 for what there is not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.gemm.op import Wanted, layout_of, operands_of, product
from tunedcomm.ops._checks import FLOATS, is_nk
from tunedcomm.ops._many import ManyForm, Tensors
from tunedcomm.spec import Problem

__all__ = ["OUT_DTYPES", "GemmForm", "out_dtype_of"]

_FP8 = torch.float8_e4m3fn
_LEAST_K = 64  # of a product that stands for one without columns
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


class GemmForm(ManyForm):
    """The option is (dtype of the result, None for the usual one), and the reduction behind it if there is a choice."""

    inputs: tuple[str, ...] = ("a", "b", "scale_a", "scale_b")
    outputs: tuple[str, ...] = ("out",)
    aliases: dict[str, str] = {}  # noqa: RUF012 - never changed
    least_dims = 2
    optional: tuple[str, ...] = ("scale_a", "scale_b")
    arguments: tuple[str, ...] = ("ScalarType? out_dtype",)
    reduction = ""

    def leading(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        """The result's dimensions before N."""
        return tuple(a.shape[:-1])

    def check(self, inputs: Tensors, option: Any, world_size: int) -> None:
        del world_size
        given = dict(zip(self.inputs, inputs, strict=True))
        a, b = given["a"], given["b"]
        self._check_shapes(a, b)
        if b.dtype != a.dtype or a.dtype not in OUT_DTYPES:
            raise UnsupportedInputError(
                f"{self.op} does not take a of {a.dtype} with b of {b.dtype}; both must be one of {_names(OUT_DTYPES)}"
            )
        if option[0] is not None and option[0] not in OUT_DTYPES[a.dtype]:
            raise UnsupportedInputError(
                f"out_dtype={option[0]!r} of {self.op} with operands of {a.dtype}; allowed: None, "
                f"{_names(OUT_DTYPES[a.dtype])}"
            )
        self.scaling(a, b, given["scale_a"], given["scale_b"])
        bias, dtype = given.get("bias"), out_dtype_of(a, option[0])
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
        """What `Problem.scaling` says of these scales.

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

    def problem(self, inputs: Tensors, option: Any, world_size: int) -> Problem:
        given = dict(zip(self.inputs, inputs, strict=True))
        a, b = given["a"], given["b"]
        shape = (math.prod(self.problem_rows(a, world_size)), b.shape[1], b.shape[0])
        dtype, out = _NAMED[a.dtype], _NAMED[out_dtype_of(a, option[0])]
        wanted = Wanted(is_nk(b), given.get("bias") is not None, "gathered" in self.outputs, out)
        scaling = self.scaling(a, b, given["scale_a"], given["scale_b"])
        layout = layout_of(wanted, dtype)
        reduction = option[1] if len(option) > 1 else self.reduction
        return Problem(self.op, shape, dtype, world_size, reduction, layout=layout, scaling=scaling, mode="eager")

    def refusal(self, inputs: Tensors, option: Any) -> str:
        return f"{self.op} of {_FP8}" if inputs[0].dtype == _FP8 else ""

    def problem_rows(self, a: torch.Tensor, world_size: int) -> tuple[int, ...]:
        """Dimensions whose product is M."""
        del world_size
        return tuple(a.shape[:-1])

    def results(self, inputs: Tensors, option: Any, world_size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        a, b = inputs[:2]
        leading = self.leading(a, world_size)
        found = [((*leading, b.shape[1]), out_dtype_of(a, option[0])), ((*leading, a.shape[-1]), a.dtype)]
        return found[: len(self.outputs)]

    def scalars(self, option: Any) -> tuple[float, ...]:
        del option
        return ()

    def words(self, option: Any) -> tuple[int, ...]:
        del option
        return ()

    def key(self, tensors: Tensors) -> Hashable:
        a, b = tensors[:2]
        return tuple(a.shape), tuple(b.shape) if isinstance(b, torch.Tensor) else None

    def is_idle(self, inputs: Tensors, results: Tensors, option: Any) -> bool:
        """There are no results where M or N is 0; a K of 0 is this rank's own matter where products are summed."""
        del inputs, option
        return all(result.numel() == 0 for result in results)

    def served(self, inputs: Tensors) -> Tensors:
        """Operands without columns as some of zeros: the sum over ranks is taken all the same."""
        if inputs[0].shape[-1]:
            return inputs
        a, b = inputs[:2]
        columns = b.new_zeros((b.shape[1], _LEAST_K)).t() if is_nk(b) else b.new_zeros((_LEAST_K, b.shape[1]))
        return (a.new_zeros((*a.shape[:-1], _LEAST_K)), columns, *inputs[2:])

    def operands(self, inputs: Tensors) -> Tensors:
        given = dict(zip(self.inputs, inputs, strict=True))
        a, b, scale_a, scale_b = (given[name] for name in ("a", "b", "scale_a", "scale_b"))
        given["a"] = a.reshape(-1, a.shape[-1])
        given["b"] = b.t() if is_nk(b) else b
        if scale_a is not None:
            rowwise = self.scaling(a, b, scale_a, scale_b) == "rowwise"
            given["scale_a"] = scale_a.reshape((-1, 1) if rowwise else (1,))
            given["scale_b"] = scale_b.reshape((1, -1) if rowwise else (1,))
        return tuple(given.values())

    def written(self, output: torch.Tensor) -> torch.Tensor:
        return output.view(math.prod(output.shape[:-1]), output.shape[-1])

    def alone(self, inputs: Tensors, option: Any) -> tuple[torch.Tensor, ...]:
        problem = self.problem(inputs, option, 1)
        operands = operands_of(problem, tuple(t for t in self.operands(inputs) if t is not None))
        m, n, _ = problem.shape
        dtype = out_dtype_of(inputs[0], option[0])
        out = product(problem, operands, torch.empty((m, n), dtype=dtype, device=inputs[0].device))
        if operands.bias is not None:
            out += operands.bias
        shapes = [shape for shape, _ in self.results(inputs, option, 1)]
        return tuple(found.view(shape) for found, shape in zip((out, operands.a), shapes, strict=False))
