"""The operators `torch.ops.tunedcomm.*`: every op as PyTorch's compilers know it.

For an op with the results r, r2, …:

    <op>(inputs…, options…, int group_size, str group, [str? numerics,] int? max_sms) -> (Tensor, …)      new results
    <op>.out(the same, *, Tensor(a!) r, Tensor(b!) r2, …) -> ()                                 into given tensors
    <op>_(Tensor(a!) x, the same) -> ()                                   in place, where a result may be the input

`ag_gemm_gathered` also returns the gathered a; `ag_gemm_list` takes several b and returns [products…, gathered a].

`group` is a process group's name in `torch.distributed` (`ProcessGroup.group_name`), resolved at every call. Its size
is an argument because the shapes of results depend on it: a compiler's cache on disk is keyed by the arguments.

Each operator has an implementation, which serves a call as the public function does, and a fake one, which refuses the
same inputs. `operators` is the table of them; importing `tunedcomm.ops` defines them all, with their gradients.

Eager calls of plain tensors skip the operators: PyTorch's dispatcher costs several times what such a call costs. Calls
whose inputs need gradients go through them, for the operator records them, and so does everything that is traced: by
Dynamo, by `make_fx` and `torch.export`, with fake or functional tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import distributed_c10d

from tunedcomm.errors import GroupError, TunedCommError, UnsupportedInputError
from tunedcomm.ops import attention, autograd, by_counts, collectives, experts, gemm, rms_norm  # noqa: F401 - fills the table of paths
from tunedcomm.ops.adapter import Results
from tunedcomm.ops.arguments import check_differentiable, check_fits
from tunedcomm.ops.call import CallPath, detached, leave, paths

NAMESPACE = "tunedcomm"
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_c10d: Any = distributed_c10d
Tensors: TypeAlias = Sequence[Any]


class OperatorArguments(NamedTuple):
    """The arguments of an operator's call behind its tensors."""

    options: tuple[Any, ...]
    group_size: int
    group: str
    numerics: Any
    max_sms: int | None


def _resolve(trailing: OperatorArguments) -> Any:
    """The process group of that name.

    Raises:
        GroupError: no such group, or it has another size.
    """
    try:
        group = _c10d._resolve_process_group(trailing.group)  # as functional collectives do
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"there is no process group named {trailing.group!r} in this process; pass the group_name of one"
        ) from error
    if group.size() != trailing.group_size:
        raise GroupError(
            f"the process group {trailing.group!r} has {group.size()} ranks, but the call says {trailing.group_size}; "
            "trace or compile it again for this group"
        )
    return group


class Operator:
    """An op as its operator's schema has it.

    Args:
        path: of the op's calls.
    """

    def __init__(self, path: CallPath[Any]) -> None:
        self.path, self.adapter = path, path.adapter
        self.name, self.gradient = self.adapter.operator, self.adapter.gradient

    def serve(self, inputs: Tensors, outputs: Tensors, trailing: OperatorArguments) -> Any:
        """The result of a call of plain tensors, or a tuple of several; outputs that are None are made."""
        group, tensors = _resolve(trailing), (*inputs, *outputs)
        return self.path.serve_again(tensors, trailing.options, group, trailing.numerics, trailing.max_sms)

    def results(self, inputs: Tensors, trailing: OperatorArguments) -> Results:
        """Shape and dtype of every output; refuses what the public function would."""
        return self.path.checked_results(
            tuple(inputs), trailing.options, trailing.group_size, trailing.numerics, trailing.max_sms
        )

    def declaration(self, *, mutated: bool) -> str:
        """The arguments, the first of which may be mutated."""
        adapter = self.adapter
        kinds = ["Tensor?" if name in adapter.optional else "Tensor" for name in adapter.inputs]
        if mutated:
            kinds[0] = "Tensor(a!)"
        tensors = [f"{kind} {name}" for kind, name in zip(kinds, adapter.inputs, strict=True)]
        policy = ["str? numerics=None"] if adapter.reduces else []
        return ", ".join([*tensors, *adapter.options, "int group_size", "str group", *policy, "int? max_sms=None"])

    def define(self) -> None:
        """Define all forms of the operator, with its gradient."""
        name, outputs = self.name, self.adapter.outputs
        returns = ", ".join(["Tensor"] * len(outputs))
        outs = ", ".join(f"Tensor({letter}!) {output}" for letter, output in zip("abcdefgh", outputs, strict=False))
        plain = self.declaration(mutated=False)
        _define(name, f"({plain}) -> ({returns})", self.split, self.run, self.fake)
        _define(f"{name}.out", f"({plain}, *, {outs}) -> ()", self.split, self.run_into, self.fake_into)
        if self.adapter.may_be_input:
            declared = f"({self.declaration(mutated=True)}) -> ()"
            _define(f"{name}_", declared, self.split, self.run_in_place, self.fake_in_place)
        _differentiate(self)

    def split(self, arguments: Sequence[Any]) -> tuple[Tensors, OperatorArguments]:
        """A call's inputs and the rest; the dispatcher leaves trailing defaults out."""
        adapter = self.adapter
        inputs, rest = arguments[: len(adapter.inputs)], arguments[len(adapter.inputs) :]
        options, (group_size, group, *policy) = rest[: len(adapter.options)], rest[len(adapter.options) :]
        numerics = (policy.pop(0) if policy else None) if adapter.reduces else "default"
        return inputs, OperatorArguments(tuple(options), group_size, group, numerics, policy[0] if policy else None)

    def run(self, *arguments: Any) -> Any:
        """The functional form."""
        inputs, trailing = self.split(arguments)
        return self.serve([detached(tensor) for tensor in inputs], (None,) * len(self.adapter.outputs), trailing)

    def run_into(self, *arguments: Any, **given: Any) -> None:
        """The form with `out`."""
        inputs, trailing = self.split(arguments)
        outputs = [given[name] for name in self.adapter.outputs]
        how = "in place" if outputs[0] is inputs[0] else "into a given tensor"
        try:
            check_differentiable(f"{self.name} {how}", (*inputs, *outputs))
        except UnsupportedInputError:
            with contextlib.suppress(TunedCommError):
                self.run(*arguments)  # peers may need no gradients: they get their results
            raise
        self.serve(inputs, outputs, trailing)
        torch.autograd.graph.increment_version(outputs)

    def run_in_place(self, *arguments: Any) -> None:
        """The form that ends in an underscore."""
        self.run_into(*arguments, **{self.adapter.outputs[0]: arguments[0]})

    def fake(self, *arguments: Any) -> Any:
        """The functional form's results without their contents."""
        inputs, trailing = self.split(arguments)
        made = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in self.results(inputs, trailing))
        return made[0] if len(made) == 1 else made

    def fake_into(self, *arguments: Any, **given: Any) -> None:
        """The form with `out`: its checks."""
        inputs, trailing = self.split(arguments)
        results = self.results(inputs, trailing)
        check_differentiable(f"{self.name} into a given tensor", (*inputs, *given.values()))
        for name, (shape, dtype) in zip(self.adapter.outputs, results, strict=True):
            check_fits(inputs[0], given[name], shape, dtype, name=name)

    def fake_in_place(self, *arguments: Any) -> None:
        """The form that ends in an underscore: its checks."""
        self.fake_into(*arguments, **{self.adapter.outputs[0]: arguments[0]})


class ListOperator(Operator):
    """`ag_gemm` with a list of b: (products…, gathered a) as one list; only the functional form."""

    def __init__(self) -> None:
        self.name, self.adapter = "ag_gemm_list", operators["ag_gemm"].adapter
        self.gradient = autograd.keep_gathered, autograd.ag_gemm_gathered

    def declaration(self, *, mutated: bool) -> str:
        # No defaults: PyTorch leaves such arguments out, and with lists then counts too many gradients.
        plain = super().declaration(mutated=mutated).replace("=None", "")
        return plain.replace("Tensor b", "Tensor[] b").replace("Tensor? scale_b", "Tensor[] scale_b")

    def define(self) -> None:
        _define(self.name, f"({self.declaration(mutated=False)}) -> Tensor[]", self.split, self.run, self.fake)
        _differentiate(self)

    def run(self, *arguments: Any) -> list[torch.Tensor]:
        operator, inputs, trailing = self._of_length(arguments)
        return list(operator.serve([detached(t) for t in inputs], (None,) * len(operator.adapter.outputs), trailing))

    def fake(self, *arguments: Any) -> list[torch.Tensor]:
        operator, inputs, trailing = self._of_length(arguments)
        return [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in operator.results(inputs, trailing)]

    def _of_length(self, arguments: Sequence[Any]) -> tuple[Operator, Tensors, OperatorArguments]:
        """The operator for lists of this length, the call's tensors in one tuple, and its options."""
        (a, several, scale_a, scales), trailing = self.split(arguments)
        scales = gemm.as_list(scales or None, "scale_b", len(several))
        return Operator(gemm.list_path(len(several))), (a, scale_a, *several, *scales), trailing


def _define(name: str, signature: str, split: Any, run: Any, fake: Any) -> None:
    def run_whole(*arguments: Any, **given: Any) -> Any:
        try:
            return run(*arguments, **given)
        except BaseException as error:
            with contextlib.suppress(GroupError):
                leave(error, name, arguments[0], _resolve(split(arguments)[1]))
            raise

    _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run_whole, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _differentiate(operator: Operator) -> None:
    if operator.gradient is None:
        return
    adapter, (keep, formula) = operator.adapter, operator.gradient

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, trailing = operator.split(inputs)
        if refusal := adapter.refusal(tuple(tensors), trailing.options):
            raise UnsupportedInputError(
                f"{refusal} is not differentiable; call it under torch.no_grad() or pass its inputs detached"
            )
        policy = (trailing.numerics,) if adapter.reduces else ()
        ctx.settings = (trailing.group_size, trailing.group, *policy, trailing.max_sms)
        ctx.options, ctx.num_arguments = trailing.options, len(inputs)
        ctx.shape, ctx.dtype = tensors[0].shape, tensors[0].dtype
        keep(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = formula(ctx, *grads)
        return *found, *(None,) * (ctx.num_arguments - len(found))

    name = f"{NAMESPACE}::{operator.name}"
    torch.library.register_autograd(name, backward, setup_context=setup, lib=_library)


# Name to operator.
operators: dict[str, Operator] = {name: Operator(path) for name, path in paths.items() if path.adapter.has_operator}
operators["ag_gemm_list"] = ListOperator()
for _operator in operators.values():
    _operator.define()
