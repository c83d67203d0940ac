"""A process group's communicator: workspace, agreed snapshot, plan cache.

Making one is collective over the group and happens at its first call. All ranks compare their settings, rank 0 loads
and merges the database layers and broadcasts what matters for this environment and world size, and every rank verifies
the digest; after that a choice is a pure function of the snapshot and the problem.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import weakref
from collections import Counter as CounterOf
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from tunedcomm import kernels
from tunedcomm.db.kept import kept_snapshot
from tunedcomm.db.layers import Layer, LayerFingerprint, differences, layer_fingerprints, load_snapshot
from tunedcomm.db.misses import Counter, Note
from tunedcomm.db.sidecar import with_checks
from tunedcomm.db.targets import warn_once
from tunedcomm.dispatch.compare import fault_of, fresh_copies, norm_of_input
from tunedcomm.dispatch.group_settings import AgreedSettings, policies
from tunedcomm.dispatch.launches import (
    LaneOrder,
    NanWatch,
    after,
    around,
    counted,
    in_range,
    interpreted,
    no_intercept,
    undisturbed,
)
from tunedcomm.dispatch.queue import Queue
from tunedcomm.errors import (
    AgreementError,
    GroupAbortedError,
    InfeasibleError,
    PeerTimeoutError,
    TunedCommError,
    TuningError,
    WorkspaceError,
    WrongResultError,
)
from tunedcomm.hardware import HARD_FIELDS, Environment, Sight, detect, kernel_identity, put_together, sight
from tunedcomm.kernels.common import binaries
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.launch import SHARE_OF_EAGER, AddressLaunch, within
from tunedcomm.kernels.moe.op import Overflow
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.settings import unknown_variables
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, Limits, NumericsPolicy, Problem, Variant, admits_library, get_variant, ops
from tunedcomm.state import clean_thread
from tunedcomm.symm.buffer import SymmetricBuffer, by_reason
from tunedcomm.symm.control import Control
from tunedcomm.symm.exchange import agree, exchange, first_difference, leave, left_by, on_every_rank, set_up
from tunedcomm.symm.layout import LaneLayout, limits_for
from tunedcomm.symm.nodes import (
    NodeGroups,
    NoWorkspace,
    make_node_groups,
    node_name,
    nodes_of,
    ranks_per_node,
    shares_hosts,
)
from tunedcomm.symm.ring import Call, HostRing
from tunedcomm.symm.workspace import Workspace

logger = logging.getLogger("tunedcomm")
T = TypeVar("T")

# Attributes of a communicator that reach its process group.
_HOLD_GROUPS = (
    *("group", "workspace", "_no_workspace", "node_groups", "plans", "fast_calls", "_captured", "_retired", "_leaving"),
)


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A block in which a GPU is the current one; nothing for CPU tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class PlanKey(NamedTuple):
    """The key of a kept plan; the problem is an eager one also where the plan is for captures."""

    problem: Problem
    policy: NumericsPolicy
    max_sms: int | None
    capturing: bool


class Communicator:
    """One process group on one kind of device; collective over the group.

    Attributes:
        rank, world_size: the caller's place in the group.
        device: where tensors must live.
        environment, limits: what was detected; equal on every rank.
        settings: environment variables, as they were when the group was made; equal on every rank.
        snapshot: the table all ranks agreed on.
        workspace: symmetric memory; None where the ranks cannot address each other.
        ring: shared memory for CPU tensors; None on GPUs, and where the ranks run on several hosts.
        nodes: the node of every rank.
        control: the words by which the ranks tell each other that the group has ended.
        node_groups: symmetric memory of the own node, and the group across nodes, where the group spans several.
        plans: the cache of plans, of at most `MAX_PROBLEMS` problems besides those that graphs captured.
        quarantined: op and variant to the reason why the group does not run it any more.
        fast_calls: the ops' cache of plans with all that a call needs besides: a kind of calls to its fast calls, each
            with its plan; none for a kind that was called once. At most `MAX_KINDS`.
        queue: asynchronous calls on CPU tensors; all other calls wait for them.
        noted: on rank 0, problems that were called while somebody wants to tune them; None while nobody does.

    Raises:
        AgreementError: the ranks' settings or machines differ; the text says in what.
        SettingError: an environment variable holds a value that it does not take; AgreementError on the other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        kernels.discover()
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.quarantined: dict[tuple[str, str], str] = {}
        with set_up(group):
            read = partial(AgreedSettings.read, group, device)
            self.settings = agree(group, "settings", read, AgreedSettings.by_variable)
            if self.settings.log_level:
                logger.setLevel(self.settings.log_level.upper())
                if not logger.hasHandlers():  # Python prints only warnings then
                    logger.addHandler(logging.StreamHandler())
            for name, near in unknown_variables(tuple(ops())).items() if self.rank == 0 else ():
                advice = f"; did you mean {near}?" if near else ""
                warn_once(f"the variable {name} is not one of tunedcomm's and has no effect{advice}")
            self.layout = LaneLayout.for_messages(self.settings.workspace_bytes)
            self.environment = self._agree_on_hardware()
            self._make_state()
            self.nan_watch = NanWatch(device, self.rank) if self.settings.nan_check else None
            self.snapshot = self._agree_on_snapshot()
            reads_binaries = device.type == "cuda" and self.nodes.index(self.nodes[self.rank]) == self.rank
            capability, sources = self.environment.compute_capability, self.settings.sources
            if reads_binaries and (why := binaries.misfit(capability, sources)):
                warn_once(why)
            self.noted: dict[Problem, Note] | None = {} if self.settings.autotune else None

    def _make_state(self, *, for_kernels: bool = True) -> None:
        """Make memory and all that is kept of calls."""
        drop_at_exit(self, *_HOLD_GROUPS)
        limits = limits_for(self.environment, self.world_size, layout=self.layout)
        self.limits = self._make_memory(limits if for_kernels else replace(limits, symmetric=False))
        self.plans: dict[PlanKey, Any] = {}
        self._bound: dict[
            tuple[Problem, NumericsPolicy, int | None], None
        ] = {}  # keys of plans without `capturing`, in the order of binding
        self._leaving: list[Any] = []  # plans that were dropped, until there are enough to ask the GPU about
        self.fast_calls: dict[Any, Any] = {}
        self._checked: dict[Any, int] = {}  # calls that TUNEDCOMM_CHECK counts
        self.queue = Queue()
        self.any_symmetric = False
        self._lane_order = LaneOrder(weakref.WeakMethod(self.forget_eager_plans))
        self._captured: dict[int, Any] = {}  # by id: what graphs replay
        self._retired: list[tuple[Any, list[Any]]] = []  # dropped plans and the event after their last launch
        self._has_graphs = self._rebinds_at_capture = False
        # What the hot path compares with the tensor's and the current CUDA device: CPU tensors beside GPUs are slow.
        self.device_index = self.device.index if self.device.type == "cuda" else -1
        self.status_view = self.control.status
        self.last_streams = [-1, -1]  # raw handle of the stream that last used the eager and the graph lane

    def with_own_memory(self, peer_timeout_s: float, *, for_kernels: bool = True) -> Communicator:
        """A communicator of the same group with memory, plans and a bound on waits of its own; collective.

        A wait that expires there leaves the group's own calls alone. Without `for_kernels` there is only what variants
        for CPU tensors need.
        """
        made = copy.copy(self)
        made.settings = replace(self.settings, peer_timeout_s=peer_timeout_s)
        made.nan_watch, made.noted = None, None
        with set_up(self.group, anew=False):
            made._make_state(for_kernels=for_kernels)
        return made

    def policy(self, numerics: NumericsPolicy | None) -> NumericsPolicy:
        """The policy of a call: its own, else the one of a block of `tunedcomm.numerics`, else TUNEDCOMM_NUMERICS."""
        if numerics is not None:
            return numerics
        return policies[-1] if policies else cast("NumericsPolicy", self.settings.numerics)

    def exchange(self, value: object) -> list[Any]:
        """Every rank's `value`, by rank; collective."""
        return exchange(self.group, value)

    def barrier(self, message: str, *, waits: bool = True) -> list[str]:
        """Every rank's `message`, by rank, in bounded time; without `waits` the own alone, at once.

        Raises:
            TuningError: a rank does not come within the group's time-out, or a graph is being captured.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TuningError("nothing can be tuned while a graph is captured; do it before the capture, or after it")
        store = PrefixStore("tunedcomm-meeting", _get_process_group_store(self.group))
        _num_barriers[self.group.group_name] += 1
        keys = [f"{_num_barriers[self.group.group_name]}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], message)
        if not waits:
            return [message]
        end_s = time.monotonic() + self.settings.peer_timeout_s
        missing = []
        for rank, key in enumerate(keys):
            try:
                store.wait([key], timedelta(seconds=max(end_s - time.monotonic(), 0.001)))
            except RuntimeError:
                missing.append(str(rank))
        if missing:
            raise TuningError(
                f"rank {', '.join(missing)} of the group of {self.world_size} did not come within "
                f"{self.settings.peer_timeout_s:g} s; all of them enter and leave the block, or make the call"
            )
        return [store.get(key).decode() for key in keys]

    def exchange_faults(self, fault: str) -> list[str]:
        """The faults that ranks have found, each with its rank; the same on every rank. Collective."""
        found = torch.tensor([int(bool(fault))], dtype=torch.int64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        if not found.item():
            return []
        return [f"rank {rank}: {text}" for rank, text in enumerate(self.exchange(fault)) if text]

    def agree_on_call(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """With TUNEDCOMM_DEBUG compare what the ranks ask for; collective then, and not for captures.

        Raises:
            AgreementError: on every rank, where they differ or where another rank's `describe` raised.
            Exception: what the caller's own `describe` raised.
        """
        if not self.settings.debug or self.world_size == 1:
            return
        with no_intercept():
            everyone = on_every_rank(self.group, "make its call", describe)
        if difference := first_difference(everyone):
            raise AgreementError(
                f"the ranks of the group make different calls: {difference}; nothing was launched. Make the same calls "
                "in the same order on every rank"
            )

    def refuse_call(self, refusal: TunedCommError) -> NoReturn:
        """Raise what refuses a call on this rank alone, so that the group ends; with TUNEDCOMM_DEBUG on every rank."""

        def describe() -> Mapping[str, Any]:
            raise refusal

        self.agree_on_call(describe)
        refusal.ends_group = self.world_size > 1
        raise refusal

    def _agree_on_hardware(self) -> Environment:
        everyone = self.exchange((node_name(self.settings.node_of_rank), kernel_identity().rpartition(" ")[0]))
        self.nodes = nodes_of([name for name, _ in everyone])
        if self.rank == 0 and not self.settings.node_of_rank and shares_hosts(everyone):
            warn_once(
                "ranks of different host names run on one machine, as in pods, and count as several nodes, between "
                "which the library serves; set TUNEDCOMM_NODE_OF_RANK to one number for each rank, such as "
                f"{','.join('0' for _ in everyone)}, if they can share memory"
            )
        index = self.device.index if self.device.type == "cuda" else None
        sights: list[Sight | None] = [None] * self.world_size
        if index is not None:
            sights = on_every_rank(self.group, "look at its machine", lambda: sight(index))
        beside = [seen for seen, node in zip(sights, self.nodes, strict=True) if node == self.nodes[self.rank]]
        return agree(
            self.group,
            "hardware",
            lambda: put_together(detect(index, nodes=len(set(self.nodes))), sights[self.rank], beside),
            lambda found: dict(zip(HARD_FIELDS, found.hard_key, strict=True)),
        )

    def _make_memory(self, limits: Limits) -> Limits:
        """Make what memory `limits` allows; the limits with what could be had."""
        timeout_ns, layout = int(self.settings.peer_timeout_s * 1e9), self.layout
        if self.settings.interpreted != (self.device.type == "cpu"):  # kernels were made for the other kind of device
            limits = replace(limits, symmetric=False, ranks_per_node=0)
        self.workspace: Workspace | None = None
        self.node_groups: NodeGroups | None = None
        self.ring: HostRing | None = None
        shared: Control | None = None
        if len(set(self.nodes)) == 1 < self.world_size:
            shared = _make_memory_everywhere(
                self.group, lambda: Control.share(self.group, self.device, timeout_ns=timeout_ns)
            )
        control = self.control = shared or Control.alone(self.rank)
        if limits.host_cores and shared:
            self.ring = _make_memory_everywhere(self.group, lambda: HostRing(self.group, control))
        if limits.host_cores and self.ring is None:
            limits = replace(limits, host_cores=0, symmetric=False)
        if limits.symmetric and shared:
            without = "kernels are left out" if self.ring else "every call goes to the library"
            self.workspace = _make_memory_everywhere(
                self.group, lambda: Workspace(self.group, self.device, layout, control), without=without
            )
        if limits.ranks_per_node and limits.ranks_per_node == ranks_per_node(self.nodes):
            self.node_groups = _make_memory_everywhere(
                self.group,
                lambda: make_node_groups(self.group, self.nodes, self.device, layout, timeout_ns=timeout_ns),
            )
        if self.node_groups is not None:
            self.control = self.node_groups.workspace.control
        self._no_workspace = NoWorkspace(self.group, self.device, self.node_groups, self.control, self.ring)
        if self.workspace is not None:
            self.workspace.ring = self.ring
        spanned = limits.ranks_per_node if self.node_groups else 0
        multicast = limits.multicast and self._maps_multicast()
        return replace(limits, symmetric=self.workspace is not None, ranks_per_node=spanned, multicast=multicast)

    def _maps_multicast(self) -> bool:
        """True if every rank has mapped multicast addresses of the lanes; collective."""
        lanes = () if self.workspace is None else self.workspace.lanes.values()
        return all(self.exchange(bool(lanes) and all(lane.multicast for lane in lanes)))

    def _agree_on_snapshot(self, prepare: Callable[[], Sequence[Layer] | None] = lambda: None) -> Snapshot:
        """Rank 0's merged layers on every rank; see `reload_snapshot`."""

        def load() -> tuple[Snapshot | None, tuple[LayerFingerprint, ...]]:
            if self.rank != 0:
                return None, layer_fingerprints()
            borrow, sources = self.settings.borrow, self.settings.sources
            if (layers := prepare()) is None:
                found = kept_snapshot(self.environment, self.world_size, borrow=borrow, sources=sources)
            else:
                found = load_snapshot(self.environment, self.world_size, layers=layers, borrow=borrow)
            return with_checks(found), layer_fingerprints()

        loaded = on_every_rank(self.group, "load the tuning databases", load)
        seen = [each for _, each in loaded]
        if differences(seen):  # rank 0 may have made a file after the others had looked
            seen = exchange(self.group, layer_fingerprints())
        if self.rank == 0 and (found := differences(seen)):
            warn_once(
                f"the ranks of a group see different tuning databases: {'; '.join(found)}. All of them dispatch from "
                "what rank 0 has; if that is not meant, set the same TUNEDCOMM_DB and TUNEDCOMM_DB_PATH everywhere"
            )
        snapshot = loaded[0][0]
        assert snapshot is not None  # every rank's is there, or `on_every_rank` has raised
        return self._agree_on_digest(lambda: snapshot)

    def _agree_on_digest(self, make: Callable[[], Snapshot]) -> Snapshot:
        return agree(self.group, "snapshot", make, lambda snapshot: {"digest": snapshot.digest})

    def reload_snapshot(self, prepare: Callable[[], Sequence[Layer] | None] = lambda: None) -> None:
        """Dispatch from what rank 0's databases hold now; plans are made anew. Collective.

        Args:
            prepare: called on rank 0 before they are read: stores what they lack, and returns the layers to read; None
                stands for the layers of every process.

        Raises:
            Exception: what `prepare` raised on rank 0; AgreementError on the other ranks.
        """
        self.snapshot = self._agree_on_snapshot(prepare)
        self.forget_plans()

    def replace_snapshot(self, snapshot: Snapshot) -> None:
        """Dispatch from another snapshot, the same on every rank; plans are made anew.

        Raises:
            AgreementError: the ranks were given different snapshots.
        """
        self.snapshot = self._agree_on_digest(lambda: snapshot)
        self.forget_plans()

    def keep_plans(self, key: tuple[Problem, NumericsPolicy, int | None], plans: Mapping[bool, Any]) -> None:
        """Keep the plans of a problem that was bound just now, and drop the plans of the problem bound first.

        All ranks bind the same problems in the same order, so they drop the same ones: a captured call that finds no
        plan goes to the library, which must not happen on one rank alone. So a use does not count, for calls of a rank
        whose tensors are aligned do not ask for their plan; and what made those calls fast goes with the plan. What
        graphs captured stays.

        Args:
            key: problem, policy and limit of SMs.
            plans: in captures or not, to the plan.
        """
        if key not in self._bound and len(self._bound) >= MAX_PROBLEMS:
            self._drop_first()
        self._bound[key] = None
        for capturing, plan in plans.items():
            self.plans[PlanKey(*key, capturing)] = plan

    def _drop_first(self) -> None:
        while self._bound:
            key = next(iter(self._bound))
            del self._bound[key]
            keys = [each for each in (PlanKey(*key, False), PlanKey(*key, True)) if each in self.plans]
            if any(id(self.plans[each]) in self._captured for each in keys):
                continue
            dropped = [self.plans.pop(each) for each in keys]
            for kind in [kind for plan in dropped for kind in plan.kinds]:
                self._drop_kind(kind)
            self._leaving += dropped
            if len(self._leaving) >= _PLANS_AT_ONCE:
                leaving, self._leaving = self._leaving, []
                self._retire(leaving)
            return

    def keep_fast_call(self, kind: Hashable, fast: Any = None, plan: Any = None) -> None:
        """Keep a fast call and its plan; without them note that calls of this kind were made."""
        known = self.fast_calls.get(kind)
        if known is None and len(self.fast_calls) >= MAX_KINDS:
            self._drop_kind(next(iter(self.fast_calls)))
        self.fast_calls[kind] = (*(known or ()), *([] if fast is None else [(fast, plan)]))
        if fast is not None:
            plan.kinds.add(kind)

    def _drop_kind(self, kind: Hashable) -> None:
        dropped = self.fast_calls.pop(kind, ())
        for _, plan in dropped:
            plan.kinds.discard(kind)
        for callback in on_drop if dropped else ():
            callback(self.group, [fast for fast, _ in dropped])

    def count_checked(self, what: Hashable) -> int:
        """The number of this call of `what`, from 1 on; the same on every rank, whichever plans it has kept."""
        if what not in self._checked and len(self._checked) >= MAX_COUNTED:
            del self._checked[next(iter(self._checked))]
        self._checked[what] = count = self._checked.get(what, 0) + 1
        return count

    def forget_plans(self) -> None:
        """Choose anew from the next calls on."""
        self._retire([*self.plans.values(), *self._leaving])
        self._leaving = []
        self.plans.clear()
        self._bound.clear()
        self.forget_calls()

    def forget_eager_plans(self) -> None:
        """Keep those for captures, for within one nothing can be bound."""
        self._retire([plan for key, plan in self.plans.items() if not key.capturing])
        self.plans = {key: plan for key, plan in self.plans.items() if key.capturing}
        self.forget_calls()

    def quarantine(self, candidate: Candidate, reason: str) -> None:
        """Run the candidate's variant no more in this group; to be called on every rank."""
        self.quarantined[candidate.op, candidate.variant] = reason
        self.forget_plans()

    def captured(self, plan: Any) -> None:
        """Keep a plan that a graph replays, and its buffers, for as long as the communicator.

        From the first one on eager kernels leave room for graphs' kernels, which may be replayed on any stream.
        """
        self._captured[id(plan)] = plan
        if not self._has_graphs:
            self._has_graphs = True
            if self._rebinds_at_capture:
                self.forget_eager_plans()

    def _retire(self, plans: list[Any]) -> None:
        """Hold dropped plans until the GPU is through with their launches; then their buffers may be another's."""
        last = self.last_streams[False]
        if self.device.type != "cuda" or last == -1 or not plans:
            return
        stream = torch.cuda.get_stream_from_external(last, self.device)
        if torch.cuda.is_current_stream_capturing() or _is_capturing(stream):  # events cannot be asked about
            self._captured.update((id(plan), plan) for plan in plans)
            return
        self._retired = [(event, held) for event, held in self._retired if not event.query()]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        self._retired.append((event, plans))

    def forget_calls(self) -> None:
        """Drop what makes calls fast; it is made anew with the next ones."""
        self.fast_calls = {}
        for callback in on_forget:
            callback()

    def abandon(self, what: str, error: BaseException) -> None:
        """End the group on every rank, for `error` ended the call `what` midway here."""
        was_told = isinstance(error, GroupAbortedError)
        self.control.abort(
            str(error) if isinstance(error, PeerTimeoutError) else f"rank {self.rank} {left_by(what, error)}",
            timed_out=isinstance(error, PeerTimeoutError) and not was_told,
        )
        if not was_told:
            leave(self.group, error, anew=False)  # peers may wait in an exchange for what the call needs

    @contextlib.contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """A block on the group's device that ends the group on every rank if an exception leaves it midway."""
        try:
            with current(self.device):
                yield
        except BaseException as error:
            if getattr(error, "ends_group", True):
                self.abandon(what, error)
            raise

    def release(self, *, for_graphs: bool) -> None:
        """Let go of all that the group holds, but, `for_graphs`, the memory of what graphs captured."""
        if for_graphs and self._captured:
            _kept_for_graphs.append((self.workspace, self.node_groups, dict(self._captured)))
        else:
            self.control.end(released=True)
            self.status_view[0] = 1
        Overflow.forget(self.group)
        self.plans.clear()  # calls hold their communicator, and it them
        self.fast_calls.clear()
        self._leaving.clear()

    @clean_thread()
    def bind(
        self,
        problem: Problem,
        candidate: Candidate,
        *,
        for_calls: bool = False,
        counter: Counter | None = None,
        policy: NumericsPolicy | None = None,
    ) -> Launch:
        """A launch of `candidate`; compiles, so never while a graph is captured.

        Args:
            problem, candidate: what to launch, and how.
            for_calls, counter, policy: see `wrap`.

        Raises:
            ConfigError: the config is not in the variant's space.
            InfeasibleError: its blocks do not fit on the GPU, or not beside blocks of the group's graphs, or there is
                no room for the lane that it is the first to use.
        """
        variant = get_variant(candidate.op, candidate.variant)
        config = variant.space.validate(candidate.config_dict)
        workspace = self.workspace or self._no_workspace
        if problem.mode == "eager" and config.get("launch_pdl"):
            config["launch_pdl"] = not self._has_graphs  # a kernel launched early takes room and waits: see LaneOrder
            self._rebinds_at_capture = True
        self._ensure_memory(problem, variant, config)
        with within(SHARE_OF_EAGER if problem.mode == "eager" else 1.0) as residency:
            try:
                launch = variant.bind(problem, config, workspace)
            except WorkspaceError as error:  # on every rank
                if self.workspace is None or problem.mode in self.workspace.lanes:
                    raise
                self.limits = replace(self.limits, symmetric=False)
                raise InfeasibleError(f"no symmetric memory, kernels are left out from here on: {error}") from error
        if not callable(launch):
            raise TypeError(f"bind of {variant.name} returned {launch!r}, not the function to launch")
        is_large = residency.share > SHARE_OF_EAGER
        if is_large and problem.mode == "eager":
            if self._has_graphs:
                raise InfeasibleError(
                    f"{candidate} takes {residency.share:.0%} of the GPU; once a group has captured graphs its eager "
                    f"calls may take {SHARE_OF_EAGER:.0%}, so that both find room on every rank"
                )
            self._rebinds_at_capture = True
        return self.wrap(
            problem, launch, candidate, is_large=is_large, for_calls=for_calls, counter=counter, policy=policy
        )

    def wrap(
        self,
        problem: Problem,
        launch: Launch,
        candidate: Candidate | None = None,
        *,
        is_large: bool = False,
        for_calls: bool = True,
        counter: Counter | None = None,
        policy: NumericsPolicy | None = None,
        has_input: bool = True,
    ) -> Launch:
        """A launch with all that surrounds it in this group, from the inside out; only ep_dispatch adds to it.

        Args:
            problem, launch: what is launched.
            candidate: whose launch it is; None for one that no variant has bound.
            is_large: it takes more than its share of the GPU.
            for_calls: as calls launch it; False: as the tuner and benchmarks do, which time nothing else.
            counter: counts the calls of an untuned problem.
            policy: of calls that TUNEDCOMM_CHECK compares with the library; None: it compares none.
            has_input: there is an input to look at for NaN.
        """
        if candidate is not None:
            uses_kernels = bool(get_variant(candidate.op, candidate.variant).kernels)
            if self.settings.nvtx and torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
                launch = around(launch, in_range, f"{problem}: {candidate}")
            if is_large and problem.mode == "graph":
                launch = self._lane_order.captured(launch)
            elif self.device.type == "cpu" and uses_kernels:
                launch = around(launch, interpreted, str(candidate), self.control, self.ring)
            elif self.ring is not None and self.world_size > 1 and not candidate.variant.startswith("host_"):
                launch = around(launch, after, partial(self.ring.meet, Call.of(problem)))
        if not for_calls:
            return launch
        if not isinstance(launch, AddressLaunch):  # which runs kernels alone: no surroundings reach them
            launch = undisturbed(launch, self.device.type)
        if counter is not None:
            launch = around(launch, counted, counter)
        if self._lane_order.taken and problem.mode == "eager":
            launch = self._lane_order.eager(launch)
        if self.nan_watch is not None and has_input:
            launch = self.nan_watch.guard(problem, launch)
        if policy is not None and candidate is not None and self.settings.check[0] and problem.mode == "eager":
            launch = launch if candidate.variant == "library" else self._compared(problem, launch, candidate, policy)
        return launch

    def _compared(self, problem: Problem, launch: Launch, candidate: Candidate, policy: NumericsPolicy) -> Launch:
        """`launch`, compared with the library at every N-th call (TUNEDCOMM_CHECK); ranks count alike and vote.

        Raises:
            WrongResultError: by the launch, on every rank, if a result was wrong on any and the library may not serve.
        """
        every, falls_back = self.settings.check
        plain = replace(problem, input_kind="plain")
        by_library = self.bind(plain, Candidate.of(problem.op, "library", {}), for_calls=True)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            count = self.count_checked((problem, policy))
            if count % every:
                launch(inputs, outputs, stream)
                return
            copies, expected = fresh_copies(inputs, outputs)
            size = norm_of_input(problem, inputs)
            launch(inputs, outputs, stream)
            by_library(copies, expected, stream)
            with no_intercept():
                faults = self.exchange_faults(fault_of(problem, copies, outputs, expected, size))
            if not faults:
                return
            reason = f"call {count} of {problem} gave another result than the library ({'; '.join(faults)})"
            self.quarantine(candidate, f"{reason}; it is not used in this group any more (TUNEDCOMM_CHECK)")
            said = f"{candidate} is wrong: {reason}. The group runs the library in its place from here on"
            if not falls_back or not admits_library(policy, problem.op):
                raise WrongResultError(f"{said}; graphs that were captured before still run it, so capture them anew")
            logger.warning("%s, in this call too; graphs that were captured before still run it", said)
            for output, due in zip(outputs, expected, strict=True):
                output.copy_(due)

        return run

    # Public names that `wrap` and `barrier` replace.

    def guarded(self, problem: Problem, launch: Launch, *, counter: Counter | None = None) -> Launch:
        """A bound launch as dispatch may call it."""
        return self.wrap(problem, launch, counter=counter)

    def in_turn(self, problem: Problem, launch: Launch, *, counter: Counter | None = None) -> Launch:
        """A bound launch without the search for NaN."""
        return self.wrap(problem, launch, counter=counter, has_input=False)

    meet = barrier

    def _ensure_memory(self, problem: Problem, variant: Variant, config: Mapping[str, Value]) -> None:
        """Have memory for what a call uses of its lane, before any step that may fail on this rank alone.

        Raises:
            InfeasibleError: too little memory, on every rank alike.
        """
        workspace = self.workspace or (self.node_groups and self.node_groups.workspace)
        if not workspace or problem.mode not in workspace.rooms:
            return
        layout = workspace.layout
        try:
            workspace.ensure(
                problem.mode, variant.lane_room(problem, config, layout) if variant.lane_room else layout.room
            )
        except WorkspaceError as error:
            raise InfeasibleError(f"{problem}: no room for {variant.name}: {error}") from error

    def order_streams(self, capturing: bool, stream: int) -> None:
        """Put this call behind the lane's last one if that ran on another stream.

        Calls on one stream are in order by themselves. In a capture both streams must belong to it; a stream of an
        earlier capture is left alone, because graphs of one group must not be replayed at the same time anyway. Nor may
        an eager call wait for a stream that is being captured, which would draw it into the graph.
        """
        last = self.last_streams[capturing]
        self.last_streams[capturing] = stream
        if last in (-1, stream) or self.device.type != "cuda":
            return
        earlier = torch.cuda.get_stream_from_external(last, self.device)  # ExternalStream takes 0 for a new one
        if _is_capturing(earlier) is not capturing:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(earlier)
        torch.cuda.current_stream(self.device).wait_event(event)

    def register_symmetric(self, tensor: torch.Tensor, buffer: SymmetricBuffer) -> None:
        """Let kernels address `tensor` on the peers; the same call on every rank."""
        if self.workspace is not None:
            self.workspace.register(tensor, buffer)
            if not self.any_symmetric:
                self.any_symmetric = True
                self.forget_calls()  # those that were made before do not ask whether a tensor is symmetric

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies in a registered symmetric allocation."""
        return (
            self.workspace is not None
            and tensor.layout is torch.strided  # others have no storage to ask about
            and tensor.untyped_storage().data_ptr() in self.workspace.symmetric
        )

    def check_peers(self) -> None:
        """Raise if the group has ended (`Control.check`), NanInputError if a graph was given NaN."""
        self.control.check()
        if self.nan_watch is not None:
            self.nan_watch.check()


def _make_memory_everywhere(
    group: dist.ProcessGroup, make: Callable[[], T], *, without: str = "every call goes to the library"
) -> T | None:
    """Symmetric memory, or None on every rank if any rank could not have it; rank 0 warns of it, with the reason.

    Args:
        group: process group.
        make: makes the memory; collective.
        without: the consequence in words, for the warning.
    """
    failure: str | None = None
    made: T | None = None
    try:
        made = make()
    except WorkspaceError as error:
        failure = str(error)
    if failed := by_reason(exchange(group, failure)):
        if dist.get_rank(group) == 0:
            warn_once(f"no symmetric memory, {without}: {failed}")
        return None
    return made


# Problems whose plans a group keeps, for sizes that never repeat would fill the memory.
MAX_PROBLEMS = 1024
# Kinds of calls, which tell more apart than problems: options and strides, for example.
MAX_KINDS = 2 * MAX_PROBLEMS
# Problems whose calls TUNEDCOMM_CHECK counts.
MAX_COUNTED = 16 * MAX_PROBLEMS
_PLANS_AT_ONCE = 64
_num_barriers: CounterOf[str] = CounterOf()  # so far, by group: the same on every rank
_kept_for_graphs: list[Any] = []
dropped_at_exit: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()


def drop_at_exit(holder: object, *names: str) -> None:
    """Delete these attributes of `holder`, through which it reaches a process group, when the program ends.

    A program may keep the object in a global. Its group would then live until the interpreter clears modules, and
    gloo's worker threads with it. Such a thread takes the GIL to free the tensors of the last call; an interpreter that
    is ending ends the thread there, inside a destructor, which aborts the process. The threads are joined when the last
    reference to the group goes, so all of ours go before.
    """
    dropped_at_exit[holder] = names


# Called whenever communicators are released.
on_release: list[Callable[[], None]] = []
# Called with the group and the fast calls that a communicator drops: for caches that hold some of them.
on_drop: list[Callable[[dist.ProcessGroup, list[Any]], None]] = []
# Called when communicators drop all their fast calls or are released: for caches that hold some of them.
on_forget: list[Callable[[], None]] = []
