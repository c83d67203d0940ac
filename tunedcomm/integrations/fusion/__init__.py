"""`tunedcomm.fusion_pass` lets `torch.compile` replace collectives and the products and norms around them by fused ops.

    compiled = torch.compile(model, options={"post_grad_custom_post_pass": tunedcomm.fusion_pass(group)})

The pass is a hook of Inductor that runs after its other passes, on forward and backward graphs. There functional
collectives, and with them DTensor's tensor and sequence parallel plans, are operators `_c10d_functional::*`:

| in the graph | becomes |
|---|---|
| all_gather → products | `ag_gemm`; several products share one gather, and others get what was gathered |
| product → reduce_scatter | `gemm_rs` |
| product → all_reduce | `gemm_ar` |
| all_reduce → (bias, residual added) → RMS norm | `all_reduce_rms_norm` |
| the same → fp8 with a given scale, one a row or one for each 128 columns | the same with `quantize=` |
| any other all_reduce, with `wire=` alone | `all_reduce` on a quantised wire |

**Ranks.** All ranks must rewrite alike. They share the table, the pass's arguments and the graph, but not the sizes of
shards, because a dimension need not be split evenly. A product is fused if DTensors show that its shard has the same
size on every rank, or if the caller passes `even_shards=True`.

**Not fused.** Everything else stays as it is; `records` and the log give the reason.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._inductor import config, custom_graph_pass

from tunedcomm import ops  # noqa: F401 - defines the operators that graphs are rewritten to
from tunedcomm.dispatch.communicator import drop_at_exit
from tunedcomm.dispatch.decide import check_limit, check_policy, forced_here
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import UnsupportedInputError
from tunedcomm.fp8 import WIRES, Wire
from tunedcomm.integrations import check_torch
from tunedcomm.integrations.fusion.match import LeftError, Node
from tunedcomm.integrations.fusion.policy import WHEN, Payoff, Policy, Shards, When
from tunedcomm.integrations.fusion.rewrite import (
    Pattern,
    gathered_by,
    norm_of_sum,
    on_wire,
    quantised_norm_of_sum,
    reduced_by,
)
from tunedcomm.spec import Mode, NumericsPolicy
from tunedcomm.version import VERSION

logger = logging.getLogger(__name__)

# Collectives, in the order in which they are looked at, and the patterns that each may be part of.
_PATTERNS: Mapping[Any, Sequence[Callable[[Node], Pattern | None]]] = {
    torch.ops._c10d_functional.all_gather_into_tensor.default: (gathered_by,),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: (reduced_by,),
    torch.ops._c10d_functional.all_reduce.default: (quantised_norm_of_sum, norm_of_sum, reduced_by),
}
_INSTEAD = "call tunedcomm.ag_gemm and its like directly"


@dataclass(frozen=True, slots=True)
class FusionRecord:
    """The record of one pattern.

    Attributes:
        collective: the node's name in the graph.
        op: the fused op; "" where there was no pattern.
        problem: what was asked of the database, in words; "" where it was not asked.
        fused: whether the op stands there now.
        why: one sentence.
    """

    collective: str
    op: str
    problem: str
    fused: bool
    why: str

    def __str__(self) -> str:
        target = self.problem or self.op
        where = f"{self.collective} -> {target}" if target else self.collective
        return f"{where}: {'fused' if self.fused else 'left'} ({self.why})"


@functools.cache
def _source() -> str:
    """Hash of the pass's own code."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _group_name(collective: Node) -> str:
    """Name of the group of a functional collective; newer torch may pass the group itself."""
    group: Any = collective.args[-1]
    return group if isinstance(group, str) else str(getattr(group, "group_name", group))


class FusionPass(custom_graph_pass.CustomGraphPass):
    """Inductor's pass, and a context manager that sets it for everything compiled inside; `fusion_pass` returns it.

    Attributes:
        records: one entry for every pattern in every graph so far.
    """

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, ...],
        when: When,
        numerics: NumericsPolicy | None,
        max_sms: int | None,
        mode: Mode | None,
        *,
        even_shards: bool = False,
        wire: Wire | None = None,
    ) -> None:
        drop_at_exit(self, "_groups")
        self._groups = groups
        self._asked = (when, numerics, max_sms)
        self._mode = mode
        self._even_shards = even_shards
        self._wire = wire
        self._patches: list[Any] = []
        self.records: list[FusionRecord] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        policies = self._policies()
        fused = False
        for collective in _PATTERNS:
            for node in graph.find_nodes(op="call_function", target=collective):
                fused |= self._settle(graph, node, policies)
        if fused:
            graph.eliminate_dead_code()
            graph.lint()

    def uuid(self) -> str:
        """The key of Inductor's cache: a hash of code, arguments, groups' tables and the known sizes of shards."""
        known: list[Any] = []
        for group in self._groups:
            communicator = get_communicator(group)
            settings = communicator.settings
            known.append((group.group_name, communicator.world_size, communicator.snapshot.digest, settings.mode))
            known.append(communicator.policy(self._asked[1]))
            known.append((repr(communicator.limits), sorted(settings.forced.items())))
            shards = self._shards(group)
            known.append(shards and (sorted(shards.even), sorted(shards.uneven)))
        key = (self._asked, self._mode, self._wire, sorted(forced_here().items()), known)
        return hashlib.sha256(f"{_source()} {key!r}".encode()).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionPass:
        """The pass itself: Inductor copies its settings, and a process group cannot be copied."""
        return self

    def __enter__(self) -> FusionPass:
        """Set the pass for what is compiled in the block: graphs are compiled when they first run."""
        before: Any = config.post_grad_custom_post_pass
        if before is not None and not hasattr(custom_graph_pass, "get_custom_graph_passes"):
            raise UnsupportedInputError(
                f"post_grad_custom_post_pass is {before!r} already, and torch {torch.__version__} takes one pass; pass "
                "one that calls both"
            )
        several = [*before, self] if isinstance(before, (list, tuple)) else [before, self]
        patch: Any = config.patch(post_grad_custom_post_pass=self if before is None else several)
        patch.__enter__()
        self._patches.append(patch)
        return self

    def __exit__(self, *raised: object) -> None:
        self._patches.pop().__exit__(*raised)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records)) or "no collectives"

    def _policies(self) -> dict[str, Policy]:
        """Group name to how its patterns are judged."""
        mode: Mode = self._mode or ("graph" if config.triton.cudagraphs else "eager")
        return {
            group.group_name: Policy(get_communicator(group), *self._asked, mode, self._shards(group))
            for group in self._groups
        }

    def _shards(self, group: dist.ProcessGroup) -> Shards | None:
        return None if self._even_shards else Shards.of(group.group_name)

    def _settle(self, graph: fx.Graph, node: Node, policies: dict[str, Policy]) -> bool:
        """Fuse the best of the patterns that a collective is part of; True if there was one."""
        name, group = node.name, _group_name(node)
        if (policy := policies.get(group)) is None:
            self._record(FusionRecord(name, "", "", False, f"group {group!r} is not among the pass's"))
            return False
        found: list[tuple[Payoff, Pattern]] = []
        left: list[FusionRecord] = []
        for find in (*_PATTERNS[node.target], *self._further(node)):
            op = ""
            try:
                if (pattern := find(node)) is not None:
                    op = pattern.op
                    found.append((pattern.judge(policy), pattern))
            except LeftError as error:
                left.append(FusionRecord(name, op, error.problem, False, str(error)))
        found.sort(key=lambda pair: -pair[0].saved_us)
        for place, (payoff, pattern) in enumerate(found):
            why = f"{found[0][1].op} is more" if place else payoff.why
            self._record(FusionRecord(name, pattern.op, payoff.problem, not place, why))
        for record in left:
            self._record(record)
        if found:
            found[0][1].rewrite(graph, policy)
        return bool(found)

    def _further(self, node: Node) -> Sequence[Callable[[Node], Pattern | None]]:
        """Patterns that have to be asked for."""
        sums = node.target is torch.ops._c10d_functional.all_reduce.default
        return (functools.partial(on_wire, wire=self._wire),) if self._wire and sums else ()

    def _record(self, record: FusionRecord) -> None:
        self.records.append(record)
        logger.info("%s", record)


def _missing() -> Iterator[str]:
    """The internals of torch that the pass uses and this torch lacks."""
    if not hasattr(config, "post_grad_custom_post_pass"):
        yield "Inductor's post_grad_custom_post_pass"
    if not hasattr(torch._guards, "TracingContext"):
        yield "torch._guards.TracingContext"


def fusion_pass(
    *groups: dist.ProcessGroup | None,
    when: When = "pays",
    numerics: NumericsPolicy | None = None,
    max_sms: int | None = None,
    mode: Mode | None = None,
    even_shards: bool = False,
    wire: Wire | None = None,
) -> FusionPass:
    """A pass for `torch.compile` that fuses collectives on `groups` with the products and norms around them.

    Give it to one model, `torch.compile(model, options={"post_grad_custom_post_pass": tunedcomm.fusion_pass(group)})`,
    or set it for all that is compiled in a block, `with tunedcomm.fusion_pass(group):`. A model is compiled when it
    first runs, and its backward pass when that does.

    Args:
        groups: process groups that this rank belongs to; none, or None, for the default group. On all ranks of a group
            alike: the first use of a group is collective set-up.
        when: `pays`, where the database says that a fused kernel is faster than its parts by the library at that very
            shape; `always`, wherever the pattern is found and the op takes it; `never`.
        numerics, max_sms: for the fused ops, and for what they are judged by. Without `numerics` the policy in force
            counts, when the graph is compiled and when it runs.
        mode: whether the compiled code runs in CUDA graphs (`graph`) or not (`eager`), which decides what pays. None:
            as `torch.compile` is asked for by `mode="reduce-overhead"`; pass `graph` if you capture it yourself.
        even_shards: promise that every product has the same sizes on all ranks. It is not checked: where it does not
            hold, ranks wait for each other in different kernels. Without it products are fused whose shards
            belong to parameters that are DTensors split evenly over the group.
        wire: let sums that are fused with nothing travel quantised, as of `all_reduce`, where a kernel is tuned for it.
            Results then differ from the uncompiled model's. None: nothing is quantised.

    Raises:
        NotInitializedError: no default process group.
        GroupError: not a member of a group, or it has no backend for this device.
        UnsupportedInputError: an unknown value of an option.
        UnsupportedVersionError: a torch that this is not known to work with (2.11 to 2.14 are).

    What was fused and what was left, and why, is in the pass's `records` and printed by TORCH_LOGS with this module's
    name, `TORCH_LOGS=tunedcomm.integrations.fusion`.
    """
    check_torch("tunedcomm.fusion_pass()", _INSTEAD, _missing)
    allowed_values = (("when", when, WHEN), ("mode", mode, (None, "graph", "eager")), ("wire", wire, (None, *WIRES)))
    for name, value, allowed in allowed_values:
        if value not in allowed:
            raise UnsupportedInputError(
                f"{name}={value!r} of fusion_pass is not one of {', '.join(map(repr, allowed))}"
            )
    check_policy(numerics)
    check_limit("max_sms", max_sms, "SMs")
    resolved = tuple(dict.fromkeys(get_communicator(group).group for group in groups or (None,)))
    return FusionPass(resolved, when, numerics, max_sms, mode, even_shards=even_shards, wire=wire)
