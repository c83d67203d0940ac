"""Whether a fused op is worth its place: what the database says of its problem, against the parts by the library.

A fused op's `library` variant *is* the parts: the library's GEMM and its collective, or the collective and the norm,
measured beside the kernels. So a fused kernel pays where the dispatcher chooses one for the problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import fx

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.dispatcher import explain
from tunedcomm.errors import InfeasibleError, UnsupportedInputError
from tunedcomm.integrations._fusion_graph import LeftError, Node, static
from tunedcomm.integrations._fusion_shards import Shards
from tunedcomm.ops import _operators
from tunedcomm.ops._path import paths
from tunedcomm.spec import Mode, NumericsPolicy, Problem

__all__ = ["WHEN", "Policy", "Verdict", "When"]

When: TypeAlias = Literal["pays", "always", "never"]
WHEN: tuple[When, ...] = ("pays", "always", "never")
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found out about one pattern.

    Attributes:
        fuse: whether to rewrite it.
        why: one sentence.
        problem: in words; "" where none could be formed.
        saved_us: predicted time of the parts less that of the fused op; 0 where it is not known.
    """

    fuse: bool
    why: str
    problem: str = ""
    saved_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """How one group's patterns are judged; arguments as `fusion_pass` has them.

    Attributes:
        shards: what is known of sizes that ranks may differ in; None: they differ in none.
    """

    communicator: Communicator
    when: When
    numerics: NumericsPolicy
    max_sms: int | None
    mode: Mode
    shards: Shards | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """What the fused operators take at the end."""
        communicator = self.communicator
        return communicator.world_size, communicator.group.group_name, self.numerics, self.max_sms

    def judge(self, operator: str, inputs: Sequence[Any], option: Any, own: Mapping[str, Any] = _NONE) -> Verdict:
        """Whether the operator is to stand for its parts; the same on every rank.

        Args:
            operator: its name.
            inputs: its tensors as nodes or fake tensors, None for those that are not there.
            option: as its path takes it.
            own: sizes that ranks may differ in, by what they are of.
        """
        verdict = self._judge(operator, inputs, option)
        if not verdict.fuse or self.shards is None:
            return verdict
        try:
            for what, size in own.items():
                self.shards.check(what, size)
        except LeftError as left:
            return replace(verdict, fuse=False, why=str(left))
        return verdict

    def _judge(self, operator: str, inputs: Sequence[Any], option: Any) -> Verdict:
        """The verdict on this rank's sizes."""
        fakes = tuple(each.meta["val"] if isinstance(each, fx.Node) else each for each in inputs)
        try:
            problem = self._problem(operator, fakes, option)
        except (UnsupportedInputError, LeftError) as refusal:
            return Verdict(False, str(refusal))
        if problem is None:
            why = "its sizes are symbolic: whether it pays depends on them"
            return Verdict(self.when == "always", f"when={self.when!r}" if self.when == "always" else why)
        said = str(problem)
        if self.when != "pays":
            return Verdict(self.when == "always", f"when={self.when!r}", said)
        try:
            decision = explain(self.communicator, problem, policy=self.numerics, max_sms=self.max_sms)
        except InfeasibleError as error:
            return Verdict(False, str(error), said)
        if decision.candidate.variant == "library":
            return Verdict(False, f"it does not pay: {decision.why}", said)
        known = decision.latency_us is not None and decision.library_us is not None
        saved = decision.library_us - decision.latency_us if known else 0.0  # type: ignore[operator]
        return Verdict(True, decision.why, said, saved)

    def with_bias(self, verdict: Verdict, bias: Node, reduction: str) -> Verdict:
        """The verdict where a bias, in which ranks may differ, is summed over them by a call of its own."""
        if not verdict.fuse or self.when != "pays":
            return verdict
        asked = paths["all_reduce"].form.problem(bias.meta["val"], reduction, self.communicator.world_size)
        decision = explain(
            self.communicator, replace(asked, mode=self.mode), policy=self.numerics, max_sms=self.max_sms
        )
        if decision.latency_us is not None and decision.latency_us < verdict.saved_us:
            return replace(verdict, saved_us=verdict.saved_us - decision.latency_us)
        takes = "nobody knows how long" if decision.latency_us is None else f"{decision.latency_us:.2f} µs"
        why = f"its bias would have to be summed, too, which takes {takes} where {verdict.saved_us:.2f} µs are saved"
        return replace(verdict, fuse=False, why=why)

    def _problem(self, operator: str, fakes: tuple[Any, ...], option: Any) -> Problem | None:
        """What the dispatcher would be asked; None where that depends on symbolic sizes.

        Raises:
            UnsupportedInputError: the op refuses such operands.
            LeftError: they are on another device than the group's kernels.
        """
        form, communicator = _operators.paths[operator].form, self.communicator
        there = [fake for fake in fakes if fake is not None]
        for fake in there:
            if fake.device.type != communicator.device.type:
                raise LeftError(
                    f"tensors on {fake.device.type}; this group's kernels work on {communicator.device.type}"
                )
        form.check(fakes, option, communicator.world_size)
        if not all(static(*fake.shape, *fake.stride()) for fake in there):
            return None
        problem: Problem = form.problem(fakes, option, communicator.world_size)
        return replace(problem, mode=self.mode)
