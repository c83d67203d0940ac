"""`EngineGroup` serves the collectives of one process group of a serving engine where dispatch has a kernel for them.

The engine's code asks it first, and goes on by itself where the answer is None. Every answer depends on what all ranks
have in common: operation, sizes, dtype, whether a graph is captured, and the table that the ranks agreed on.

**Set-up.** The group's workspace is made at the first call outside of a capture. Engines run once with their largest
batch before they measure how much memory is left, so this comes before it. Set-up is collective: it needs every rank to
have the plug-in. So each rank leaves a word in the group's store when the engine makes the group, and the
first rank that is asked looks whether all of them are there; its verdict holds for all.

**Determinism.** In an engine's deterministic mode sums are `ordered` at every size, tuned or not: the bits of a row
must not change with its batch. A group whose ranks share no memory is left to the engine whole.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from tunedcomm import ops  # noqa: F401 - fills `paths`
from tunedcomm.db.targets import warn_once
from tunedcomm.dispatch.launches import may_intercept, no_intercept
from tunedcomm.errors import TunedCommError, UnsupportedVersionError
from tunedcomm.integrations import check_torch
from tunedcomm.integrations.intercept import KEY, RoutedCall, RoutedGroup, run_served
from tunedcomm.ops.adapter import TorchServe
from tunedcomm.ops.call import leave, paths
from tunedcomm.ops.fast_call import is_capturing
from tunedcomm.ops.rms_norm import all_reduce_rms_norm

# The engine's own collectives come between the word of every rank and the first call, so nobody waits this long.
_MEET_S = 30.0
# The name of fused norms in the record.
NORM_CALL = "fused norm"
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)
# Rows of the ranks' shares; None: as many on every rank.
Sizes: TypeAlias = Sequence[int] | None


def are_equal(sizes: Sizes) -> bool:
    """True if the ranks' shares have one size."""
    return sizes is None or len(set(sizes)) == 1


class EngineGroup:
    """One group of an engine.

    Args:
        engine: `vllm` or `sglang`.
        group: the group whose backend works on the engine's device.
        device: where the engine's tensors are.
        ordered: the engine is in its deterministic mode.

    Attributes:
        size: ranks of the group.
    """

    def __init__(self, engine: str, group: dist.ProcessGroup, device: torch.device, *, ordered: bool) -> None:
        self._logger = logging.getLogger(f"{engine}.tunedcomm")
        self._routed = RoutedGroup(group, device, numerics="ordered" if ordered else None)
        self._ordered = ordered
        self._rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._speaks = dist.get_rank() == 0
        self._is_ready: bool | None = False if self.size == 1 else None
        self._passed: Counter[tuple[str, str]] = Counter()
        self._store = PrefixStore("tunedcomm-engine", _get_process_group_store(group))
        self._store.set(str(self._rank), "here")
        _open.add(self)

    def serve(
        self, call: str, op: str, xs: Sequence[torch.Tensor], options: tuple[Any, ...], out: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """The results of tunedcomm's `op` of every tensor, or None where the engine makes the call.

        Args:
            call: the engine's name for it, for the record.
            op: all_reduce, all_gather or reduce_scatter.
            xs: inputs, the same numbers of elements and dtypes on every rank; all are served or none.
            options: of the op: (reduction,), (dim,), (reduction, dim).
            out: where the one result goes, filled in the order of its elements; `x` itself for a sum in place.
        """
        adapter = paths[op].adapter
        if not self._sums_in_order(call, adapter.reduces, xs) or not self._ready(call):
            return None
        x = xs[0]
        try:
            routings: list[Any] = []
            for x in xs:
                like = x if out is None or out is x else x.detach().reshape(-1)
                is_sum = len(xs) == 1 and (op, *options) == ("all_reduce", "sum")
                if is_sum and (on := self._routed.on_wire(call, like)):
                    adapter, options = paths["all_reduce_wire"].adapter, ("sum", on[0])
                    routings.append(on[1])
                    continue
                routings.append(self._routed.serves(call, adapter, like, options, in_place=out is x))
            if None in routings:
                for routing in filter(None, routings):
                    routing.record.count -= 1
                return None
            found = []
            with no_intercept():
                for x in xs:
                    found.append(run_served(self._routed, adapter, TorchServe(options, x), x, out))
            return found
        except BaseException as error:
            leave(error, call, x, self._routed.group)
            raise

    def serve_rows(
        self, call: str, op: str, xs: Sequence[torch.Tensor], sizes: Sizes, out: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """`serve` where the ranks' shares have `sizes` rows: `op` is all_gather_v or reduce_scatter_v."""
        adapter, reduces = paths[op].adapter, op == "reduce_scatter_v"
        if sizes is None or are_equal(sizes):
            return self.serve(call, op.removesuffix("_v"), xs, ("sum", 0) if reduces else (0,), out)
        if not self._sums_in_order(call, reduces, xs) or not self._ready(call):
            return None
        most = 1 << (max(sizes) - 1).bit_length()  # few different problems
        x = xs[0]
        try:
            for x in xs:
                num_rows, rest = most * self.size if reduces else most, x.shape[1:]
                like = x.detach().new_empty((1, *rest)).expand(num_rows, *rest)
                usual = ((most,) * self.size, most, most)
                if self._routed.serves(call, adapter, like, usual, others=(None,)) is None:
                    return None
            with no_intercept():
                tensors = [(self._routed.plain(x), None, out) for x in xs]
                options, group = (tuple(sizes), sizes[self._rank], most), self._routed.group
                if reduces:
                    policy = self._routed.policy(adapter)
                    return [paths[op].serve_again(each, options, group, policy, None) for each in tensors]
                return [paths[op].serve_again((*each, None), options, group, "default", None)[0] for each in tensors]
        except BaseException as error:
            leave(error, call, x, self._routed.group)
            raise

    def _sums_in_order(self, call: str, reduces: bool, xs: Sequence[torch.Tensor]) -> bool:
        """True unless the engine is in its deterministic mode, and the tensors are not summed in a fixed order."""
        if self._ordered and reduces and any(x.dtype not in _SUMMED for x in xs):
            self.pass_on(call, "only bf16, fp16 and fp32 are summed in a fixed order")
            return False
        return True

    def serve_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor,
        eps: float,
        *,
        weight_offset: float = 0.0,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """(y, residual_out) of `tunedcomm.all_reduce_rms_norm`, or None where the engine makes the call.

        y is fp8 divided by `scale` where there is one.
        """
        if not self._ready(NORM_CALL):
            return None
        out_dtype = None if scale is None else torch.float8_e4m3fn
        path, options = paths["all_reduce_rms_norm"], (eps, out_dtype)
        if weight_offset:
            path = paths["all_reduce_rms_norm_quantized"]
            options = (eps, "tensor" if out_dtype else "", "row", False, False, weight_offset)  # type: ignore[assignment]
        try:
            if self._routed.serves(NORM_CALL, path.adapter, x, options, others=(weight, None, residual, scale)) is None:
                return None
            with no_intercept():
                return all_reduce_rms_norm(
                    self._routed.plain(x),
                    weight,
                    residual=residual,
                    eps=eps,
                    group=self._routed.group,
                    out=out,
                    residual_out=residual_out,
                    out_dtype=out_dtype,
                    scale=scale,
                    numerics=self._routed.numerics,
                    weight_offset=weight_offset,
                )
        except BaseException as error:
            leave(error, NORM_CALL, x, self._routed.group)
            raise

    def pass_on(self, call: str, why: str) -> None:
        """Count a call that is left to the engine for a reason that all ranks share."""
        self._passed[call, why] += 1

    def close(self) -> None:
        """The engine is about to destroy the group; its memory is freed when the next one is made."""
        self._is_ready = False
        self._routed.forget()
        _closed.append(self._told())
        _open.discard(self)
        if not _open:
            report()

    def _ready(self, call: str) -> bool:
        """True if the group is set up, which this does at the first chance."""
        if not may_intercept() or torch.compiler.is_compiling():  # within a call that was passed on, or traced
            return False
        if self._is_ready is None and not is_capturing():
            self._is_ready = self._set_up()
        if not self._is_ready:
            self.pass_on(call, "the group is left to the engine" if self._is_ready is False else "it is captured first")
        return bool(self._is_ready)

    def _set_up(self) -> bool:
        missing = self._missing()
        if missing:
            return self._leave_group(f"rank {missing} has no plug-in, or has it switched off")
        try:
            communicator = self._routed.communicator
        except TunedCommError as error:
            return self._leave_group(str(error))
        shared = (communicator.workspace, communicator.ring, communicator.node_groups)
        if self._ordered and all(memory is None for memory in shared):
            return self._leave_group("its ranks share no memory, so nothing sums in a fixed order")
        return True

    def _missing(self) -> str:
        """Ranks that have left no word, as the first rank that looked saw it: the same on every rank."""
        if self._store.add("looked", 1) == 1:
            end = timedelta(seconds=_MEET_S)
            try:
                self._store.wait([str(rank) for rank in range(self.size)], end)
                missing = ""
            except RuntimeError:
                missing = ", ".join(str(rank) for rank in range(self.size) if not self._store.check([str(rank)]))
            self._store.set("missing", missing or "none")
        self._store.wait(["missing"], timedelta(seconds=2 * _MEET_S))
        found = self._store.get("missing").decode()
        return "" if found == "none" else found

    def _leave_group(self, why: str) -> bool:
        if self._rank == 0 and self._speaks:
            self._logger.warning(
                "tunedcomm leaves a group of %d ranks (%s) to the engine: %s",
                self.size,
                self._routed.group.group_name,
                why,
            )
        return False

    def _told(self) -> tuple[logging.Logger | None, Counter[tuple[str, str, bool]]]:
        """Where to report to, and counts by call, reason and whether it was served."""
        found = by_reason(self._routed.counts())
        for (call, why), count in self._passed.items():
            found[call, why, False] += count
        return self._logger if self._speaks else None, found


def by_reason(calls: Mapping[RoutedCall, int]) -> Counter[tuple[str, str, bool]]:
    """Counts by call, reason and whether it was served, as `shares_of` takes them."""
    found: Counter[tuple[str, str, bool]] = Counter()
    for entry, count in calls.items():
        found[entry.call, f"{entry.problem}: {entry.why}", bool(entry.served_by)] += count
    return found


def serve_one(
    owner: Any, call: str, op: str, x: torch.Tensor, options: tuple[Any, ...], out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """`EngineGroup.serve` of one tensor, by the group that an object of the engine has as `tuned`, if any."""
    tuned: EngineGroup | None = getattr(owner, "tuned", None)
    found = None if tuned is None else tuned.serve(call, op, [x], options, out)
    return None if found is None else found[0]


_open: weakref.WeakSet[EngineGroup] = weakref.WeakSet()
_closed: list[tuple[logging.Logger | None, Counter[tuple[str, str, bool]]]] = []


def report() -> str:
    """Log one line: the share of the calls so far that were served, by call, and the commonest reason against one.

    Replays of graphs are not counted, only the calls that were captured. It comes from the worker of global rank 0 when
    the engine has destroyed its groups, or at the end of the process.
    """
    reports = [*_closed, *(group._told() for group in list(_open))]
    _closed.clear()
    counts = sum((found for _, found in reports), Counter[tuple[str, str, bool]]())
    logger = next((logger for logger, _ in reports if logger is not None), None)
    if logger is None or not counts:
        return ""
    text = f"tunedcomm served of the engine's calls: {shares_of(counts)}"
    logger.info(text)
    return text


def shares_of(counts: Mapping[tuple[str, str, bool], int]) -> str:
    """The share of calls that were served, by call, and the commonest reason against one.

    Args:
        counts: (call, reason, whether it was served) to number of calls.
    """
    shares = []
    for call in dict.fromkeys(call for call, *_ in counts):
        every = sum(count for (name, *_), count in counts.items() if name == call)
        served = sum(count for (name, _, is_served), count in counts.items() if name == call and is_served)
        shares.append(f"{call} {served / every:.0%} of {every}")
    text = ", ".join(shares)
    against = Counter({(call, why): count for (call, why, is_served), count in counts.items() if not is_served})
    if against:
        (call, why), count = against.most_common(1)[0]
        text += f"; most often not: {count} x {call}, {why}"
    return text


@atexit.register
def _report_at_exit() -> None:
    """Report calls since the last report."""
    report()
    _open.clear()


Serve = Callable[..., "tuple[torch.Tensor, ...] | None"]
_libraries: dict[str, Any] = {}


def serve_operator(name: str, serve: Serve) -> None:
    """Ask `serve` before an operator of the engine runs, which may be defined later.

    Our kernel stands at the dispatch key right above the devices', as the kernels of `tunedcomm.intercept` do, so
    compiled code comes to it, too, with real sizes.

    Args:
        name: e.g. `vllm::fused_norm`.
        serve: called with the operator's arguments by their names; None: the engine's kernel runs. An operator that
            returns nothing is served by an empty tuple.
    """
    if name in _libraries:
        return
    keys_after = "_dispatch_keyset_full_after"
    missing = [] if hasattr(torch._C, keys_after) else [f"torch._C.{keys_after}"]
    try:
        check_torch(f"serving {name}", "do without: the engine's own runs", lambda: missing)
    except UnsupportedVersionError as error:
        warn_once(str(error))
        return
    namespace, _, base = name.partition("::")
    meta = torch._C.DispatchKey.Meta
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def run(keys: Any, *given: Any, **named: Any) -> Any:
        operator = getattr(getattr(torch.ops, namespace), base).default
        if not keys.has(meta) and may_intercept():
            arguments = operator._schema.arguments
            values = {argument.name: argument.default_value for argument in arguments}
            values |= dict(zip(values, given, strict=False)) | named
            found = serve(**values)
            if found is not None:
                return found or None
        with no_intercept():
            return operator.redispatch(keys & below, *given, **named)

    make: Any = torch.library.Library  # untyped
    _libraries[name] = make(namespace, "IMPL")
    _libraries[name].impl(base, run, KEY, with_keyset=True)
