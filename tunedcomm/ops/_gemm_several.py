"""One gathered A, several B: the widest through the fused op, the others by the library from what it gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from tunedcomm.errors import UnsupportedInputError
from tunedcomm.kernels.gemm.op import operands_of, product
from tunedcomm.ops import torch_ops
from tunedcomm.ops._checks import check_apart, check_differentiable, check_fits, check_input, check_out
from tunedcomm.ops._gemm import GemmForm
from tunedcomm.ops._path import communicator_for
from tunedcomm.ops.all_gather import all_gather
from tunedcomm.spec import NumericsPolicy

__all__ = ["Several"]


def _tensors(*arguments: Any) -> list[Any]:
    """All arguments in a row, those in lists too."""
    return [one for given in arguments for one in (given if isinstance(given, (list, tuple)) else [given])]


# (tensors of a call that also wants the gathered A, out_dtype, group, numerics, max_sms) to (result, gathered A).
Fused: TypeAlias = Callable[[tuple[Any, ...], Any, Any, NumericsPolicy, "int | None"], tuple[torch.Tensor, ...]]


class Several:
    """Calls of an op with a list of b; `<op>_list` is their operator.

    Args:
        form: of the op with one b.
        fused: its call.
    """

    def __init__(self, form: GemmForm, fused: Fused) -> None:
        self._form = form
        self._fused = fused

    def call(
        self,
        a: Any,
        several: Sequence[Any],
        rest: tuple[Any, Any, Any],
        out_dtype: Any,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The products and the gathered A; everything is checked before a peer is asked for anything.

        Args:
            a: this rank's rows.
            several: the b.
            rest: scale_a, scale_b and out, as the caller gave them.
            out_dtype, group, numerics, max_sms: as the caller gave them.
        """
        if is_dynamo_compiling() or (
            isinstance(group, dist.ProcessGroup) and torch_ops.goes_by_operator(_tensors(a, several, *rest))
        ):
            return self._operate(a, several, rest, out_dtype, group, numerics, max_sms)
        return self.serve(a, several, rest, out_dtype, group, numerics, max_sms)

    def _operate(
        self,
        a: Any,
        several: Sequence[Any],
        rest: tuple[Any, Any, Any],
        out_dtype: Any,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """`call` by the operator: what is recorded or traced. Traced by Dynamo itself."""
        form = self._form
        scales = [scale for scale in self._as_list(rest[1], "scale_b", len(several)) if scale is not None]
        outs = self._as_list(rest[2], "out", len(several))
        refusal = form.refusal((a,), None)
        if rest[2] is not None:
            refusal = f"{form.op} into a given tensor"
        if refusal:
            check_differentiable(refusal, (a, *several, *outs))
        group_size, group_name = torch_ops.group_arguments(group)
        settings = (out_dtype, group_size, group_name, numerics, max_sms)
        *made, gathered = torch_ops.call(f"{form.op}_list", (a, list(several), rest[0], scales), settings, "")
        for index, out in enumerate(outs):
            if out is not None:
                check_fits(a, out, made[index].shape, made[index].dtype, name=f"out[{index}]", input_name="a")
                made[index] = out.copy_(made[index])
        return made, gathered

    def results(
        self, inputs: tuple[Any, Sequence[Any], Any, Sequence[Any]], out_dtype: Any, world_size: int
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every product and of the gathered A.

        Args:
            inputs: a, the b, scale_a and the scale_b, which may be none.
            out_dtype: as the caller gave it.
            world_size: of the group.

        Raises:
            UnsupportedInputError: what cannot be served.
        """
        a, several, scale_a, scales = inputs
        scales = self._as_list(scales or None, "scale_b", len(several))
        self._checked((a, several, scale_a, scales), [None] * len(several), out_dtype, world_size)
        form = self._form
        found = [form.results((a, b), (out_dtype,), world_size)[0] for b in several]
        return [*found, ((*form.leading(a, world_size), a.shape[-1]), a.dtype)]

    def _checked(
        self, inputs: tuple[Any, Sequence[Any], Any, Sequence[Any]], outs: list[Any], out_dtype: Any, world_size: int
    ) -> str:
        """How the operands are scaled, after everything was checked."""
        form, (a, several, scale_a, scales) = self._form, inputs
        check_input(form.op, a, "a")
        for index, b in enumerate(several):
            self._check(index, (a, b, scale_a, scales[index]), several[0], outs, out_dtype, world_size)
        kinds = [form.scaling(a, b, scale_a, scale_b) for b, scale_b in zip(several, scales, strict=True)]
        if len(set(kinds)) > 1:
            raise UnsupportedInputError(f"scales of {form.op} are {kinds}; they must be of one kind for all b")
        return kinds[0]

    def serve(
        self,
        a: Any,
        several: Sequence[Any],
        rest: tuple[Any, Any, Any],
        out_dtype: Any,
        group: dist.ProcessGroup | None,
        numerics: NumericsPolicy,
        max_sms: int | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """`call` for plain tensors, at once."""
        form, scale_a = self._form, rest[0]
        check_input(form.op, a, "a")
        scales = self._as_list(rest[1], "scale_b", len(several))
        outs = self._as_list(rest[2], "out", len(several))
        world_size = communicator_for(form.op, a, group).world_size
        kind = self._checked((a, several, scale_a, scales), outs, out_dtype, world_size)
        widest = max(range(len(several)), key=lambda index: (several[index].shape[1], -index))
        tensors = (a, several[widest], scale_a, scales[widest], outs[widest], None)
        first, gathered = self._fused(tensors, out_dtype, group, numerics, max_sms)
        if kind == "rowwise" and len(several) > 1:
            scale_a = all_gather(scale_a.detach(), group=group)
        found = [
            first if index == widest else self._product(gathered, b, (scale_a, scales[index]), outs[index], out_dtype)
            for index, b in enumerate(several)
        ]
        return found, gathered

    def _as_list(self, given: Any, name: str, count: int) -> list[Any]:
        """One for every b."""
        if count == 0:
            raise UnsupportedInputError(f"b of {self._form.op} is an empty list; pass at least one matrix [K, N]")
        if given is None:
            return [None] * count
        if not isinstance(given, (list, tuple)) or len(given) != count:
            what = f"{len(given)} elements" if isinstance(given, (list, tuple)) else f"type {type(given).__name__}"
            raise UnsupportedInputError(
                f"{name} of {self._form.op} has {what}; b is a list of {count}, so it must be a list as long"
            )
        return list(given)

    def _check(
        self, index: int, inputs: tuple[Any, ...], first: Any, outs: list[Any], out_dtype: Any, world_size: int
    ) -> None:
        form, a, b, out = self._form, inputs[0], inputs[1], outs[index]
        for name, tensor in zip(("a", f"b[{index}]", "scale_a", f"scale_b[{index}]"), inputs, strict=True):
            if tensor is not None:
                check_input(form.op, tensor, name)
                if tensor.device != a.device:
                    raise UnsupportedInputError(
                        f"{name} of {form.op} is on {tensor.device}, a on {a.device}; move one to the other's device"
                    )
        if b is not None and first is not None and b.dtype != first.dtype:
            raise UnsupportedInputError(
                f"b[{index}] of {form.op} is of {b.dtype}, b[0] of {first.dtype}; all must be of a's dtype, {a.dtype}"
            )
        form.check(inputs, (out_dtype,), world_size)
        if out is not None:
            shape, dtype = form.results(inputs, (out_dtype,), world_size)[0]
            name = f"out[{index}]"
            check_out(a, out, shape, dtype, may_be_input=False, name=name, input_name="a")
            check_apart(b, out, may_be_other=False, name=name, other_name=f"b[{index}]")
            for other in range(index):
                if outs[other] is not None:
                    check_apart(outs[other], out, may_be_other=False, name=name, other_name=f"out[{other}]")
        check_differentiable(form.op, (*inputs, out))

    def _product(
        self, gathered: torch.Tensor, b: torch.Tensor, scales: tuple[Any, Any], out: torch.Tensor | None, out_dtype: Any
    ) -> torch.Tensor:
        """The product of what was gathered and b, by the library."""
        form = self._form
        b, gathered = b.detach(), gathered.detach()
        inputs = (gathered, b, *scales)
        (shape, dtype), *_ = form.results(inputs, (out_dtype,), 1)
        result = torch.empty(shape, dtype=dtype, device=gathered.device) if out is None else out
        sink = result.detach() if result.is_contiguous() else torch.empty(shape, dtype=dtype, device=gathered.device)
        if not form.is_idle(inputs, (sink,), (out_dtype,)):
            problem = form.problem(inputs, (out_dtype,), 1)
            taken = tuple(tensor for tensor in form.operands(inputs) if tensor is not None)
            product(problem, operands_of(problem, taken), form.written(sink))
        if sink.data_ptr() != result.data_ptr():
            result.detach().copy_(sink)
        return result
