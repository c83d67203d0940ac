"""The part of a call that is special to one op, and the types that a call is made of."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from tunedcomm.spec import NumericsPolicy, Problem

if TYPE_CHECKING:
    from tunedcomm.dispatch.communicator import Communicator
    from tunedcomm.dispatch.plans import Plan

Tensors: TypeAlias = tuple[Any, ...]
Group: TypeAlias = "dist.ProcessGroup | None"
# Shape and dtype of every output.
Results: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]

# What is kept of (ctx, inputs, output), and the gradients of (ctx, gradients of results); see `autograd`.
Formula: TypeAlias = tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]

# A problem costs more to make than to look up.
problem_of = functools.lru_cache(1024)(Problem)
# Makes a problem: `problem_of`, or `Problem` where sizes may be symbols, which are not looked up.
Maker: TypeAlias = Callable[..., Problem]


class TorchCall(NamedTuple):
    """A call of one of PyTorch's collective operators.

    Attributes:
        x: its input.
        out: the tensor to fill, which is `x` for operators in place; None: the operator returns a new one.
        reduction: in tunedcomm's words, "" for operators that do not reduce.
        arguments: the operator's other arguments, by the schema's names.
        world_size: of the group.
        max_count: bound on rows that the program promised (see `tunedcomm.intercept`), or None.
    """

    x: torch.Tensor
    out: torch.Tensor | None
    reduction: str
    arguments: Mapping[str, Any]
    world_size: int
    max_count: int | None

    @property
    def flat(self) -> torch.Tensor:
        """`x` in one dimension, for operators that count elements."""
        x = self.x
        return x.detach().reshape(-1) if x.layout is torch.strided and not x.is_nested else x

    def gives(self, times: int, over: int) -> bool:
        """True if the result has `times` / `over` as many elements as `x`; others the library refuses."""
        x, out = self.x, self.out
        if out is None:
            return bool(self.arguments["group_size"] == self.world_size and x.dim() > 0)
        return out.numel() * over == x.numel() * times and out.dtype == x.dtype and out.device == x.device


class TorchServe(NamedTuple):
    """A call of this package that does what a `TorchCall` asks for.

    Attributes:
        options: of the op.
        like: a tensor, alike on all ranks, by which the variant is chosen; its values are not read.
        counts_elements: kernels that fill a given tensor see it and `x` in one dimension.
        common: the options that all ranks share, from which the call is planned; None: all.
    """

    options: tuple[Any, ...]
    like: torch.Tensor
    counts_elements: bool = True
    common: tuple[Any, ...] | None = None


class OpAdapter(ABC):
    """The part of a call that is special to one op.

    Methods get a call's inputs as a tuple in the order of `inputs`, None for those that are not there, and its options
    as a tuple in the order of `options`. The defaults suit an op of one tensor: the result
    has its shape and dtype, an empty input needs no peers, and nothing else is changed.

    Attributes:
        op: the op's name.
        suffix: of the operator's name in `torch.ops.tunedcomm`, where an op has several.
        inputs, outputs: names of the tensors, in the order of the operator's schema and of launches; the first input is
            never None.
        optional: inputs that may be None.
        aliases: output to the input whose place it may take.
        options: the options as the operator's schema declares them.
        reduces: the operator takes `numerics`.
        has_operator: the op is one of `torch.ops.tunedcomm`.
        repeats: calls with the same options come again, so that fast calls pay.
        depends_on_memory: problems say whether the input is in symmetric memory and whether the result takes its place.
        wants_aligned: the library, too, takes tensors at 16-byte boundaries only.
        gradient: of the operator; None: it has none.
        torch_operators: PyTorch's operators that `tunedcomm.intercept` may serve by this op.
    """

    op: str
    suffix = ""
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("out",)
    optional: tuple[str, ...] = ()
    aliases: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    reduces = True
    has_operator = True
    repeats = True
    depends_on_memory = False
    wants_aligned = False
    gradient: Formula | None = None
    torch_operators: tuple[str, ...] = ()

    @property
    def operator(self) -> str:
        """The operator's name in `torch.ops.tunedcomm`."""
        return self.op + self.suffix

    @property
    def may_be_input(self) -> bool:
        """True if the one output may take the first input's place."""
        return self.aliases == {self.outputs[0]: self.inputs[0]} and len(self.outputs) == 1

    @abstractmethod
    def check(self, inputs: Tensors, options: Any, world_size: int) -> None:
        """Refuse what no variant takes; every input is a dense tensor on one device, or None.

        Raises:
            UnsupportedInputError: says what to do.
        """

    @abstractmethod
    def problem(self, inputs: Tensors, options: Any, world_size: int) -> Problem:
        """The problem of a call that was checked: eager, on plain inputs, out of place."""

    def under_policy(self, problem: Problem, policy: NumericsPolicy) -> Problem:
        """The problem that is served for a call that asks for `problem` under a numerics policy."""
        return problem

    def results(self, inputs: Tensors, options: Any, world_size: int) -> Results:
        """Shape and dtype of every output; by default the first input's."""
        return [(tuple(inputs[0].shape), inputs[0].dtype)]

    def asks_for(self, problem: Problem) -> bool:
        """True if calls of this adapter, and not of another one of the same op, ask for `problem`."""
        return True

    def call_of(self, problem: Problem, inputs: Tensors, outputs: Tensors) -> tuple[Tensors, tuple[Any, ...]]:
        """The tensors and options of the call that asks for `problem`, whose tensors are those that the op makes."""
        return (*inputs, *outputs), ()

    def refusal(self, inputs: Tensors, options: Any) -> str:
        """The call in words, where it has no gradient; "" where it has one."""
        return ""

    def serve_torch(self, call: TorchCall) -> TorchServe | None:
        """The call of this op that does what one of `torch_operators` asks for; None: leave it to the library."""
        raise NotImplementedError

    def torch_refusal(self, x: torch.Tensor, options: Any) -> str:
        """The reason why calls of `torch_operators` on such a tensor go to the library; "" for none."""
        return "" if x.numel() else "no elements"

    def check_own(self, options: Any, communicator: Communicator) -> Any:
        """The options, normalised, where they are this rank's own and peers do not know them.

        Raises:
            UnsupportedInputError: they are wrong; the peers' calls end, too.
        """
        return options

    def key(self, tensors: Tensors) -> Hashable:
        """The key that tells calls apart, besides the first input's dtype and the options."""
        return tuple(tensors[0].shape)

    def needs_no_peers(self, inputs: Tensors, results: Tensors, options: Any) -> bool:
        """True if the results, filled in now, ask nothing of the peers; every rank must come to the same answer."""
        return bool(inputs[0].numel() == 0)

    def is_bounded(self, options: Any) -> bool:
        """False for calls that the library serves because ranks have nothing in common to choose a kernel by."""
        return True

    def may_hold_input(self, inputs: Tensors, options: Any, output: torch.Tensor, rank: int) -> bool:
        """True if the first input may lie in the output where it does: it is written with its own values."""
        return False

    def common_options(self, options: Any) -> Any:
        """The options that every rank passes alike."""
        return options

    def launch_inputs(self, inputs: Tensors) -> Tensors:
        """Inputs to launch with: the call's, or others that give the same results."""
        return inputs

    def single_rank_result(self, inputs: Tensors, options: Any) -> Tensors:
        """The results in a group of one."""
        return inputs[:1]

    def fill_alone(self, communicator: Communicator, inputs: Tensors, targets: Tensors, options: Any) -> None:
        """Fill the results in a group of one."""
        for target, value in zip(targets, self.single_rank_result(inputs, options), strict=True):
            target.copy_(value)

    def extend(self, plan: Plan, communicator: Communicator, inputs: Tensors, signature: CallSignature) -> Plan:
        """The plan to launch: `plan`, or one that also launches what this op needs before or after it."""
        return plan

    def is_direct(self, inputs: Tensors, options: Any) -> bool:
        """True if kernels write the elements of results in the order in which the caller wants them."""
        return True

    def operands(self, inputs: Tensors, options: Any) -> Tensors:
        """The inputs in the shapes and orders that launches take: views, or copies where there is no such view."""
        return inputs

    def scalars(self, inputs: Tensors, options: Any) -> Tensors:
        """Arguments that launches of tensors take after the inputs."""
        return ()

    def scalar_args(self, options: Any) -> tuple[int, ...]:
        """Arguments that launches by address take after the outputs."""
        return ()

    def launch_output(self, output: torch.Tensor) -> torch.Tensor:
        """A contiguous output as a view of the shape that launches write."""
        return output

    def as_result(self, written: torch.Tensor, inputs: Tensors, options: Any, world_size: int) -> torch.Tensor:
        """View what kernels wrote in the result's order, for calls that are not direct.

        Dimensions of the result may be split: (2, 3) may be left where the shape has 6.
        """
        return written


class CallArguments(NamedTuple):
    """The arguments of a call, as the caller gave them.

    Attributes:
        tensors: inputs, then outputs, whatever they are.
        options: the op's own.
    """

    tensors: Tensors
    options: tuple[Any, ...]
    group: Group
    numerics: NumericsPolicy | None
    max_sms: int | None


class CallSignature(NamedTuple):
    """The arguments that a fast call is made for, besides tensors of one kind.

    Attributes:
        options: the op's own.
        present: for each tensor, whether it is there.
        aliases: for each output, the index of the input that it is, or −1.
        numerics, max_sms: as the caller gave them.
        capturing: whether a graph is being captured.
        policy: the numerics policy, where the caller gave none the one in force.
    """

    options: tuple[Any, ...]
    present: tuple[bool, ...]
    aliases: tuple[int, ...]
    numerics: NumericsPolicy | None
    max_sms: int | None
    capturing: bool
    policy: NumericsPolicy
