"""`torch.ops.tunedcomm.*`: every op as an operator that PyTorch's compilers know, and the calls that go through them.

For an op with the results r, r2, …:

    <op>(inputs…, options…, int group_size, str group, [str numerics,] int? max_sms) -> (Tensor, …)      new results
    <op>.out(the same, *, Tensor(a!) r, Tensor(b!) r2, …) -> ()                                 into given tensors
    <op>_(Tensor(a!) x, the same) -> ()                                   in place, where a result may be the input

`ag_gemm_gathered` also returns the gathered a; `ag_gemm_list` takes several b and returns [products…, gathered a].

`group` is a process group's name in `torch.distributed` (`ProcessGroup.group_name`), resolved at every call. Its size
is an argument because the shapes of results depend on it: a compiler's cache on disk is keyed by the arguments.

Each operator has an implementation, which serves a call as the public function does, and a fake one, which refuses the
same inputs. An op's module defines its operators when it is imported, and importing `tunedcomm.ops` imports all ops.

Eager calls of plain tensors skip the operators: PyTorch's dispatcher costs several times what such a call costs. Calls
whose inputs need gradients go through them, for the operator records them, and so does everything that is traced: by
Dynamo, by `make_fx` and `torch.export`, with fake or functional tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tunedcomm.dispatch.dispatcher import check_max_sms, check_policy
from tunedcomm.errors import GroupError, NotInitializedError, UnsupportedInputError
from tunedcomm.ops._checks import check_differentiable, check_fits, check_input, check_tangents
from tunedcomm.ops.autograd import FORMULAS

NAMESPACE = "tunedcomm"
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_c10d: Any = distributed_c10d
Tensors: TypeAlias = Sequence[Any]
Results: TypeAlias = "list[tuple[tuple[int, ...], torch.dtype]]"

# Op to the `CallPath` or `ManyPath` that serves it.
paths: dict[str, Any] = {}

# C functions of torch that say whether a dispatch mode or a `torch.func` transform is active. Where a torch has none of
# that name, the calls concerned are served as plain ones.
_num_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch: Any = getattr(torch._C, "_functorch", None)
_transform: Any = getattr(_functorch, "peek_interpreter_stack", lambda: None)
_plain_dispatch: Any = torch.Tensor.__torch_dispatch__


def goes_by_operator(tensors: Sequence[Any]) -> bool:
    """True for inputs that need gradients or are being traced.

    Raises:
        UnsupportedInputError: inside a `torch.func` transform, which no operator of PyTorch's library supports, or a
            tensor has a forward-mode tangent.
    """
    check_tangents(tensors)
    if _num_modes():
        return True
    _check_transforms()
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (
            (recording and tensor.requires_grad) or type(tensor).__torch_dispatch__ is not _plain_dispatch
        ):
            return True
    return False


def _check_transforms() -> None:
    if _transform() is not None:
        raise UnsupportedInputError(
            "torch.func transforms (grad, vmap, …) do not reach through operators of torch.library; use "
            "torch.autograd.grad, or call this outside the transform"
        )


def check_plain(op: str, tensors: Sequence[Any]) -> None:
    """Refuse what only an operator could take, for ops that have none: such tensors have no memory to read or write.

    Raises:
        UnsupportedInputError: inside a `torch.func` transform, or a tensor defines `__torch_dispatch__`, or a tangent.
    """
    check_tangents(tensors)
    _check_transforms()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is not _plain_dispatch:
            raise UnsupportedInputError(
                f"{op} cannot be traced and takes plain tensors, not {type(tensor).__name__}; call it outside of what "
                "is traced, or pass .to_local() of a DTensor, .wait() of an AsyncCollectiveTensor"
            )


def group_arguments(group: dist.ProcessGroup | None) -> tuple[int, str]:
    """A group as an operator's arguments: its size and its name.

    Raises:
        NotInitializedError: there is no default group.
    """
    if group is None:
        group = dist.group.WORLD
    if group is None:
        raise NotInitializedError(
            "torch.distributed has no default process group; call torch.distributed.init_process_group() first"
        )
    return group.size(), group.group_name


def call(op: str, inputs: tuple[Any, ...], settings: tuple[Any, ...], refusal: str) -> Any:
    """The operator's new results.

    Args:
        op: its name.
        inputs: tensors, and None for those that are not there.
        settings: the arguments behind them.
        refusal: the reason for having no gradient, "" where there is one.

    Raises:
        UnsupportedInputError: an input needs a gradient and the op has none.
    """
    if refusal:
        check_differentiable(refusal, inputs)
    return getattr(torch.ops.tunedcomm, op).default(*inputs, *settings)


def call_into(
    op: str,
    inputs: tuple[Any, ...],
    outputs: dict[str, torch.Tensor],
    settings: tuple[Any, ...],
    *,
    in_place: bool,
) -> None:
    """The operator into given tensors; `in_place` if there is one output and it is the first input.

    Raises:
        UnsupportedInputError: a tensor needs gradients, which nothing would record.
    """
    check_differentiable(f"{op} into a given tensor", (*inputs, *outputs.values()))
    if in_place:
        getattr(torch.ops.tunedcomm, f"{op}_").default(*inputs, *settings)
    else:
        getattr(torch.ops.tunedcomm, op).out(*inputs, *settings, **outputs)


class Asked(NamedTuple):
    """The arguments behind the tensors in a call; `options` as a tuple."""

    options: tuple[Any, ...]
    group_size: int
    group: str
    numerics: Any
    max_sms: int | None


def _resolve(asked: Asked) -> Any:
    """The process group of that name.

    Raises:
        GroupError: no such group, or it has another size.
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


class OneTensor(Operator):
    """An op of one tensor in and one out, served by a `CallPath`."""

    inputs, outputs = ("x",), ("out",)

    def __init__(self, path: Any) -> None:
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


class SeveralTensors(Operator):
    """An op of several tensors in and out, served by a `ManyPath`."""

    reduces = True

    def __init__(self, path: Any) -> None:
        form = path.form
        self._path, self.name, self.options = path, form.operator, form.arguments
        self.inputs, self.optional, self.outputs = form.inputs, form.optional, form.outputs
        self.in_place = form.may_be_input

    def serve(self, inputs: Tensors, outputs: Tensors, asked: Asked) -> Tensors:
        group, option, tensors = _resolve(asked), asked.options or None, (*inputs, *outputs)
        fast = self._path.last.get(group)
        results: Tensors | None = None if fast is None else fast(tensors, option, asked.numerics, asked.max_sms)
        if results is None:
            results = self._path.serve(tensors, option, group, asked.numerics, asked.max_sms)
        return results

    def results(self, inputs: Tensors, asked: Asked) -> Results:
        form, option = self._path.form, asked.options or None
        form.check(tuple(inputs), option, asked.group_size)
        found: Results = form.results(tuple(inputs), option, asked.group_size)
        return found


class ListOperator(Operator):
    """An op with a list of b: (products…, gathered a) as one list; only the functional form."""

    inputs, outputs = ("a", "b", "scale_a", "scale_b"), ("products",)
    optional, options = ("scale_a",), ("ScalarType? out_dtype",)
    reduces, in_place = True, False

    def __init__(self, name: str, several: Any) -> None:
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
        found: Results = self._several.results((a, several, scale_a, scales), asked.options[0], asked.group_size)
        return found


def define(operator: Operator) -> None:
    """Define all forms of an operator, with its gradient."""
    name, letters = operator.name, "abcdefgh"
    if isinstance(operator, ListOperator):
        _define(name, f"({operator.declaration(mutated=False)}) -> Tensor[]", operator.run, operator.fake)
        _differentiate(name)
        return
    returns = ", ".join(["Tensor"] * len(operator.outputs))
    outs = ", ".join(f"Tensor({letters[i]}!) {output}" for i, output in enumerate(operator.outputs))
    plain = operator.declaration(mutated=False)
    _define(name, f"({plain}) -> ({returns})", operator.run, operator.fake)
    _define(f"{name}.out", f"({plain}, *, {outs}) -> ()", operator.run_into, operator.fake_into)
    if operator.in_place:
        mutated = operator.declaration(mutated=True)
        _define(f"{name}_", f"({mutated}) -> ()", operator.run_in_place, operator.fake_in_place)
    _differentiate(name)


def _define(name: str, signature: str, run: Any, fake: Any) -> None:
    _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _differentiate(name: str) -> None:
    if name in FORMULAS:
        setup, backward = FORMULAS[name]
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)
