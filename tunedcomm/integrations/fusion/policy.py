"""Decides whether a fused op pays: its latency in the database against its parts' by the library.

A fused op's `library` variant *is* the parts: the library's GEMM and its collective, or the collective and the norm,
measured beside the kernels. So a fused kernel pays where the dispatcher chooses one for the problem.

**Shards.** Ranks must agree on the problem, but a graph has local tensors only. Rows of what is gathered or reduced are
the same on every rank; a product's inner dimension in front of a sum, or its columns behind a gather, need not be: 127
features over two ranks are 64 and 63, and nothing in a rank's graph tells 64 of 127 from 64 of 128. All ranks know the
global shapes and placements of the parameters that are DTensors. The tracing context holds them while the forward graph
is compiled; they are kept for the backward graph, which has the same context. A size is known to be equal on all ranks
where the group splits some dimension of them into equal parts of that size, and none into unequal parts of that size.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.plans import explain
from tunedcomm.errors import InfeasibleError, UnsupportedInputError
from tunedcomm.integrations.fusion.match import LeftError, Node, static
from tunedcomm.metrics import format_us
from tunedcomm.ops.call import paths
from tunedcomm.spec import Mode, NumericsPolicy, Problem

When: TypeAlias = Literal["pays", "always", "never"]
WHEN: tuple[When, ...] = ("pays", "always", "never")
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Shards:
    """Sizes of the parts into which a group splits what is compiled now; the same on every rank.

    Attributes:
        even: of equal parts.
        uneven: of parts of dimensions that the group does not split into equal ones.
    """

    even: frozenset[int] = frozenset()
    uneven: frozenset[int] = frozenset()

    @classmethod
    def of(cls, group: str) -> Shards:
        """The sizes that the parameters of the model being compiled give for a group, by its name."""
        context: Any = torch._guards.TracingContext.try_get()
        if context is None:
            return cls()
        kept = _kept.setdefault(context, {})
        tensors = list(getattr(context, "tensor_to_context", ()))
        if tensors:
            kept[group] = cls._among(tensors, group)
        return kept.get(group, cls())

    @classmethod
    def _among(cls, tensors: list[torch.Tensor], group: str) -> Shards:
        even: set[int] = set()
        uneven: set[int] = set()
        parameters = [each for each in tensors if isinstance(each, DTensor) and isinstance(each, torch.nn.Parameter)]
        for spec in (parameter._spec for parameter in parameters):
            mesh: Any = spec.mesh
            is_member = mesh.get_coordinate() is not None
            names = [mesh.get_group(dim).group_name for dim in range(mesh.ndim)] if is_member else []
            if group not in names:
                continue
            own_dim = names.index(group)
            for dim, size in enumerate(spec.shape):
                splits = [i for i, placement in enumerate(spec.placements) if _dim_of(placement) == dim]
                ways = [mesh.size(i) for i in (splits if own_dim in splits else [*splits, own_dim])]
                sizes = _parts(size, ways)
                if size % math.prod(ways):
                    uneven |= sizes
                elif own_dim in splits:
                    even |= sizes
        return cls(frozenset(even), frozenset(uneven))

    def check(self, what: str, size: Any, problem: str) -> None:
        """Raise LeftError for a size of this rank's tensor, of what in words, that ranks may differ in."""
        if isinstance(size, int) and size in self.even and size not in self.uneven:
            return
        raise LeftError(
            f"ranks may differ in {what}, {size}: it is not known from parameters that are DTensors split evenly; "
            "fusion_pass(even_shards=True) says that they do not",
            problem,
        )


# Tracing context to what was known of groups while the forward graph was compiled.
_kept: weakref.WeakKeyDictionary[Any, dict[str, Shards]] = weakref.WeakKeyDictionary()


def _dim_of(placement: Any) -> int | None:
    """The dimension that a placement splits."""
    return None if placement.is_replicate() or placement.is_partial() else getattr(placement, "dim", None)


def _parts(size: int, ways: list[int]) -> set[int]:
    """Sizes of the parts, split by one dimension of a mesh after another as torch.chunk does."""
    sizes = {int(size)}
    for count in ways:
        longest = {part: -(-part // count) for part in sizes}
        sizes = {max(0, min(long, part - i * long)) for part, long in longest.items() for i in range(count)}
    return sizes


class Payoff(NamedTuple):
    """The judgement of a pattern that is fused.

    Attributes:
        why: one sentence.
        problem: in words; "" where its sizes are symbolic.
        saved_us: predicted time of the parts less the fused op's; 0 where it is not known.
    """

    why: str
    problem: str
    saved_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Judges one group's patterns; arguments as in `fusion_pass`.

    Attributes:
        shards: the sizes known to be equal on all ranks; None: all are.
    """

    communicator: Communicator
    when: When
    numerics: NumericsPolicy | None
    max_sms: int | None
    mode: Mode
    shards: Shards | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """The last arguments of the fused operators."""
        communicator = self.communicator
        return communicator.world_size, communicator.group.group_name, self.numerics, self.max_sms

    def judge(self, operator: str, inputs: Sequence[Any], option: Any, rank_sizes: Mapping[str, Any] = _NONE) -> Payoff:
        """Judge whether the operator replaces its parts; the same on every rank.

        Args:
            operator: its name.
            inputs: its tensors as nodes or fake tensors, None for absent tensors.
            option: as its path takes it.
            rank_sizes: sizes that may differ from rank to rank, each by the name of its extent.
        """
        adapter, communicator = paths[operator].adapter, self.communicator
        fakes = tuple(each.meta["val"] if isinstance(each, fx.Node) else each for each in inputs)
        present = [fake for fake in fakes if fake is not None]
        for fake in present:
            if fake.device.type != communicator.device.type:
                raise LeftError(
                    f"tensors on {fake.device.type}; this group's kernels work on {communicator.device.type}"
                )
        try:
            adapter.check(fakes, option, communicator.world_size)
        except UnsupportedInputError as refusal:
            raise LeftError(str(refusal)) from None
        payoff = Payoff(f"when={self.when!r}", "")
        if all(static(*fake.shape, *fake.stride()) for fake in present):
            problem = adapter.problem(fakes, option, communicator.world_size)
            payoff = self._payoff(replace(problem, mode=self.mode))
        elif self.when != "always":
            raise LeftError("its sizes are symbolic: whether it pays depends on them")
        if self.shards is not None:
            for what, size in rank_sizes.items():
                self.shards.check(what, size, payoff.problem)
        return payoff

    def _payoff(self, problem: Problem) -> Payoff:
        name = str(problem)
        if self.when == "never":
            raise LeftError("when='never'", name)
        if self.when == "always":
            return Payoff("when='always'", name)
        try:
            decision = explain(self.communicator, problem, policy=self.numerics, max_sms=self.max_sms)
        except InfeasibleError as error:
            raise LeftError(str(error), name) from None
        if decision.candidate.variant == "library":
            raise LeftError(f"it does not pay: {decision.why}", name)
        known = decision.latency_us is not None and decision.library_us is not None
        saved = decision.library_us - decision.latency_us if known else 0.0  # type: ignore[operator]
        return Payoff(decision.why, name, saved)

    def with_bias(self, payoff: Payoff, bias: Node, reduction: str) -> Payoff:
        """The payoff where a bias that may differ between ranks is summed by a call of its own."""
        if self.when != "pays":
            return payoff
        summed = paths["all_reduce"].adapter.problem((bias.meta["val"],), (reduction,), self.communicator.world_size)
        decision = explain(
            self.communicator, replace(summed, mode=self.mode), policy=self.numerics, max_sms=self.max_sms
        )
        if decision.latency_us is not None and decision.latency_us < payoff.saved_us:
            return payoff._replace(saved_us=payoff.saved_us - decision.latency_us)
        takes = "an unknown time" if decision.latency_us is None else f"{format_us(decision.latency_us)} µs"
        saved = f"{format_us(payoff.saved_us)} µs are saved"
        raise LeftError(f"its bias would have to be summed, too, which takes {takes} where {saved}", payoff.problem)
