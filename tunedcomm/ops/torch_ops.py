"""`torch.ops.tunedcomm.*`: every op as an operator that PyTorch's compilers know.

For an op with the results r, r2, …:

    <op>(inputs…, options…, int group_size, str group, [str numerics,] int? max_sms) -> (Tensor, …)      new results
    <op>.out(the same, *, Tensor(a!) r, Tensor(b!) r2, …) -> ()                                 into given tensors
    <op>_(Tensor(a!) x, the same) -> ()                                   in place, where a result may be the input

`ag_gemm_gathered` also returns the gathered a; `ag_gemm_list` takes several b and returns [products…, gathered a].

`group` is a process group's name in `torch.distributed` (`ProcessGroup.group_name`), resolved at every call. Its size
is an argument because results' shapes depend on it: what a compiler stores on disk is found again by the arguments.

Each operator has an implementation, which serves a call as the public function does, and a fake one, which refuses what
the other would refuse. Gradients are in `gradients`. Importing this module defines the operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import distributed_c10d

from tunedcomm.dispatch.dispatcher import check_max_sms, check_policy
from tunedcomm.errors import GroupError
from tunedcomm.integrations import gradients
from tunedcomm.ops import (  # noqa: F401 - each enters its path
    ag_gemm,
    all_gather,
    all_reduce,
    all_reduce_bias,
    all_reduce_rms_norm,
    all_to_all,
    gemm_ar,
    gemm_rs,
    reduce_scatter,
)
from tunedcomm.ops._checks import check_differentiable, check_fits, check_input
from tunedcomm.ops._gemm_several import Several
from tunedcomm.ops._many import ManyPath
from tunedcomm.ops._operators import lists, paths
from tunedcomm.ops._path import CallPath

__all__ = ["NAMESPACE", "Asked", "Operator", "define"]

NAMESPACE = "tunedcomm"
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_c10d: Any = distributed_c10d
Tensors: TypeAlias = Sequence[Any]
Results: TypeAlias = "list[tuple[tuple[int, ...], torch.dtype]]"


class Asked(NamedTuple):
    """What follows the tensors in a call; `options` as a tuple."""

    options: tuple[Any, ...]
    group_size: int
    group: str
    numerics: Any
    max_sms: int | None


def _resolve(asked: Asked) -> Any:
    """The process group of that name.

    Raises:
        GroupError: there is none, or it has another size.
    """
    try:
        group = _c10d._resolve_process_group(asked.group)  # as functional collectives do
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"there is no process group named {asked.group!r} in this process; pass the group_name of one"
        ) from error
    if group.size() != asked.group_size:
        raise GroupError(
            f"the process group {asked.group!r} has {group.size()} ranks, but the call says {asked.group_size}; trace "
            "or compile it again for this group"
        )
    return group


class Operator(ABC):
    """An op as its operator's schema has it.

    Attributes:
        name: the op's.
        inputs, optional, outputs: names of its tensors; which inputs may be None.
        options: declarations of its options.
        reduces: it takes `numerics`.
        in_place: its one output may be its first input.
    """

    name: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    outputs: tuple[str, ...]
    options: tuple[str, ...]
    reduces: bool
    in_place: bool

    @abstractmethod
    def serve(self, inputs: Tensors, outputs: Tensors, asked: Asked) -> Tensors:
        """The results of a call of plain tensors; outputs that are None are made."""

    @abstractmethod
    def results(self, inputs: Tensors, asked: Asked) -> Results:
        """Shape and dtype of every output, from shapes and dtypes alone.

        Raises:
            UnsupportedInputError: no variant takes such inputs.
        """

    def declaration(self, *, mutated: bool) -> str:
        """The arguments, the first of which may be mutated."""
        kinds = ["Tensor?" if name in self.optional else "Tensor" for name in self.inputs]
        if mutated:
            kinds[0] = "Tensor(a!)"
        tensors = [f"{kind} {name}" for kind, name in zip(kinds, self.inputs, strict=True)]
        policy = ['str numerics="default"'] if self.reduces else []
        return ", ".join([*tensors, *self.options, "int group_size", "str group", *policy, "int? max_sms=None"])

    def split(self, arguments: Sequence[Any]) -> tuple[Tensors, Asked]:
        """A call's inputs and the rest; the dispatcher leaves trailing defaults out."""
        inputs, rest = arguments[: len(self.inputs)], arguments[len(self.inputs) :]
        options, (group_size, group, *policy) = rest[: len(self.options)], rest[len(self.options) :]
        numerics = (policy.pop(0) if policy else "default") if self.reduces else "default"
        return inputs, Asked(tuple(options), group_size, group, numerics, policy[0] if policy else None)

    def run(self, *arguments: Any) -> Any:
        """The functional form."""
        inputs, asked = self.split(arguments)
        made = self.serve([_plain(tensor) for tensor in inputs], (None,) * len(self.outputs), asked)
        return made[0] if len(made) == 1 else tuple(made)

    def run_into(self, *arguments: Any, **given: Any) -> None:
        """The form with `out`."""
        inputs, asked = self.split(arguments)
        outputs = [given[name] for name in self.outputs]
        check_differentiable(f"{self.name} into a given tensor", (*inputs, *outputs))
        self.serve(inputs, outputs, asked)
        torch.autograd.graph.increment_version(outputs)

    def run_in_place(self, *arguments: Any) -> None:
        """The form that ends in an underscore."""
        inputs, asked = self.split(arguments)
        check_differentiable(f"{self.name} in place", inputs)
        self.serve(inputs, (inputs[0],), asked)
        torch.autograd.graph.increment_version(inputs[0])

    def fake(self, *arguments: Any) -> Any:
        """The functional form's results without their contents."""
        inputs, results = self._fake_results(arguments)
        made = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in results)
        return made[0] if len(made) == 1 else made

    def fake_into(self, *arguments: Any, **given: Any) -> None:
        """The form with `out`: its checks."""
        inputs, results = self._fake_results(arguments)
        check_differentiable(f"{self.name} into a given tensor", (*inputs, *given.values()))
        for name, (shape, dtype) in zip(self.outputs, results, strict=True):
            check_fits(inputs[0], given[name], shape, dtype, name=name)

    def fake_in_place(self, *arguments: Any) -> None:
        """The form that ends in an underscore: its checks."""
        inputs, _ = self._fake_results(arguments)
        check_differentiable(f"{self.name} in place", inputs)

    def _fake_results(self, arguments: Sequence[Any]) -> tuple[Tensors, Results]:
        inputs, asked = self.split(arguments)
        for name, tensor in zip(self.inputs, inputs, strict=True):
            if tensor is not None:
                check_input(self.name, tensor, name)
        check_policy(asked.numerics)
        check_max_sms(asked.max_sms)
        return inputs, self.results(inputs, asked)


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor


class _One(Operator):
    """An op of `ops._path`: one tensor in, one out."""

    inputs, outputs = ("x",), ("out",)

    def __init__(self, path: CallPath) -> None:
        form = path.form
        self._path, self.name, self.options = path, form.op, form.arguments
        self.reduces, self.in_place = form.reduces, form.may_be_input

    def _option(self, asked: Asked) -> Any:
        return asked.options if len(self.options) > 1 else asked.options[0] if self.options else None

    def serve(self, inputs: Tensors, outputs: Tensors, asked: Asked) -> Tensors:
        group, option, x, out = _resolve(asked), self._option(asked), inputs[0], outputs[0]
        fast = self._path.last.get(group)
        result = None if fast is None else fast(x, option, out, asked.numerics, asked.max_sms)
        if result is None:
            result = self._path.serve(x, option, out, group, asked.numerics, asked.max_sms)
        return (result,)

    def results(self, inputs: Tensors, asked: Asked) -> Results:
        form, option, x = self._path.form, self._option(asked), inputs[0]
        form.check(x, option, asked.group_size)
        return [(form.result_shape(x, option, asked.group_size), x.dtype)]


class _Many(Operator):
    """An op of `ops._many`: several tensors in and out."""

    reduces = True

    def __init__(self, path: ManyPath) -> None:
        form = path.form
        self._path, self.name, self.options = path, form.operator, form.arguments
        self.inputs, self.optional, self.outputs = form.inputs, form.optional, form.outputs
        self.in_place = form.may_be_input

    def serve(self, inputs: Tensors, outputs: Tensors, asked: Asked) -> Tensors:
        group, option, tensors = _resolve(asked), asked.options or None, (*inputs, *outputs)
        fast = self._path.last.get(group)
        results = None if fast is None else fast(tensors, option, asked.numerics, asked.max_sms)
        if results is None:
            results = self._path.serve(tensors, option, group, asked.numerics, asked.max_sms)
        return results

    def results(self, inputs: Tensors, asked: Asked) -> Results:
        form, option = self._path.form, asked.options or None
        form.check(tuple(inputs), option, asked.group_size)
        return form.results(tuple(inputs), option, asked.group_size)


class _List(Operator):
    """An op with a list of b: (products…, gathered a) as one list; only the functional form."""

    inputs, outputs = ("a", "b", "scale_a", "scale_b"), ("products",)
    optional, options = ("scale_a",), ("ScalarType? out_dtype",)
    reduces, in_place = True, False

    def __init__(self, name: str, several: Several) -> None:
        self.name, self._several = name, several

    def declaration(self, *, mutated: bool) -> str:
        # No defaults: PyTorch leaves such arguments out, and with lists then counts too many gradients.
        plain = super().declaration(mutated=mutated).replace('="default"', "").replace("=None", "")
        return plain.replace("Tensor b", "Tensor[] b").replace("Tensor scale_b", "Tensor[] scale_b")

    def run(self, *arguments: Any) -> list[torch.Tensor]:
        (a, several, scale_a, scales), asked = self.split(arguments)
        return [*self.serve((_plain(a), [_plain(b) for b in several], scale_a, scales), (), asked)]

    def fake(self, *arguments: Any) -> list[torch.Tensor]:
        inputs, asked = self.split(arguments)
        check_policy(asked.numerics)
        check_max_sms(asked.max_sms)
        return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in self.results(inputs, asked)]

    def serve(self, inputs: Tensors, outputs: Tensors, asked: Asked) -> Tensors:
        a, several, scale_a, scales = inputs
        rest, group = (scale_a, list(scales) or None, None), _resolve(asked)
        made, gathered = self._several.serve(a, several, rest, asked.options[0], group, asked.numerics, asked.max_sms)
        return [*made, gathered]

    def results(self, inputs: Tensors, asked: Asked) -> Results:
        a, several, scale_a, scales = inputs
        return self._several.results((a, several, scale_a, scales), asked.options[0], asked.group_size)


def define(operator: Operator) -> None:
    """Define all forms of an operator."""
    name, letters = operator.name, "abcdefgh"
    returns = ", ".join(["Tensor"] * len(operator.outputs))
    outs = ", ".join(f"Tensor({letters[i]}!) {output}" for i, output in enumerate(operator.outputs))
    plain = operator.declaration(mutated=False)
    _define(name, f"({plain}) -> ({returns})", operator.run, operator.fake)
    _define(f"{name}.out", f"({plain}, *, {outs}) -> ()", operator.run_into, operator.fake_into)
    if operator.in_place:
        mutated = operator.declaration(mutated=True)
        _define(f"{name}_", f"({mutated}) -> ()", operator.run_in_place, operator.fake_in_place)


def _define(name: str, signature: str, run: Any, fake: Any) -> None:
    _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _define_all() -> None:
    for path in paths.values():
        define(_One(path) if isinstance(path, CallPath) else _Many(path))
    for name, several in lists.items():
        listed = _List(name, several)
        _define(name, f"({listed.declaration(mutated=False)}) -> Tensor[]", listed.run, listed.fake)
    for name, (setup, backward) in gradients.formulas().items():
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)


_define_all()
