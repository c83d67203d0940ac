"""A process group's communicator: workspace, agreed snapshot, plan cache.

Making one is collective over the group and happens at its first call. All ranks compare their settings, rank 0 loads
and merges the database layers and broadcasts what matters for this environment and world size, and every rank verifies
the digest; after that a choice is a pure function of the snapshot and the problem.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tunedcomm import kernels, settings
from tunedcomm.db.layers import load_snapshot
from tunedcomm.db.select import Snapshot
from tunedcomm.errors import AgreementError, GroupError, NotInitializedError, WorkspaceError
from tunedcomm.hardware import Environment, detect
from tunedcomm.kernels import _sync
from tunedcomm.spec import Candidate, Limits, Problem, get_variant
from tunedcomm.symm.buffer import SymmetricBuffer
from tunedcomm.symm.layout import MAX_BLOCKS, MAX_WORLD_SIZE, LaneLayout
from tunedcomm.symm.workspace import Workspace

__all__ = [
    "Communicator",
    "get_communicator",
    "limits_for",
    "live_communicators",
    "on_release",
    "release_communicators",
]

logger = logging.getLogger("tunedcomm")


def limits_for(environment: Environment, world_size: int, *, layout: LaneLayout | None = None) -> Limits:
    """What an environment and a workspace layout allow; needs no GPU: stored environments can be asked about."""
    layout = layout or LaneLayout.for_messages(settings.workspace_bytes())
    return Limits(
        backend="host" if environment.is_host else "cuda",
        num_sms=environment.num_sms,
        multicast=environment.multicast,
        max_blocks=MAX_BLOCKS,
        staging_bytes=layout.staging_bytes,
        one_shot_bytes=layout.one_shot_bytes,
        stage_bytes=layout.stage_bytes,
        symmetric=environment.nodes == 1 and 2 <= world_size <= MAX_WORLD_SIZE and environment.fabric != "pcie",
        launch_pdl=environment.compute_capability >= 90,
    )


def _serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if the group has a backend for tensors on this kind of device."""
    try:
        return group._get_backend(torch.device(device.type)) is not None
    except RuntimeError:
        return False


class Communicator:
    """One process group on one kind of device; collective over the group.

    Attributes:
        rank, world_size: the caller's place in the group.
        device: where tensors must live.
        environment, limits: what was detected; equal on every rank.
        snapshot: the table all ranks agreed on.
        workspace: symmetric memory; None where the ranks cannot address each other (the library serves then).
        plans: the dispatcher's cache.

    Raises:
        AgreementError: the ranks' settings or machines differ; the text says in what.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        kernels.discover()
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.layout = LaneLayout.for_messages(settings.workspace_bytes())
        nodes = self._agree_on_settings()
        self.environment = detect(device.index if device.type == "cuda" else None, nodes=nodes)
        self._agree("hardware", list(self.environment.hard_key))
        self.limits = limits_for(self.environment, self.world_size, layout=self.layout)
        interpreted = bool(_sync.INTERPRET)
        if interpreted != (device.type == "cpu"):  # kernels were made for the other kind of device
            self.limits = _without_symmetric(self.limits)
        self.workspace = self._make_workspace() if self.limits.symmetric else None
        if self.workspace is None:
            self.limits = _without_symmetric(self.limits)
        self.snapshot = self._agree_on_snapshot()
        self.plans: dict[Any, Any] = {}
        self.any_symmetric = False
        # What the hot path compares the current CUDA device with: CPU tensors beside GPUs take the slow path.
        self.device_index = device.index if device.type == "cuda" else -int(torch.cuda.is_available())
        self.status_view = self.workspace.status_view if self.workspace else memoryview(b"\0")
        self.last_streams = [-1, -1]  # raw handle of the stream that last used the eager and the graph lane

    def _exchange(self, value: object) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def _agree(self, what: str, value: object) -> None:
        theirs = self._exchange(value)
        for rank, other in enumerate(theirs):
            if other != theirs[0]:
                raise AgreementError(
                    f"the ranks of the group differ in {what}: rank 0 has {theirs[0]!r}, rank {rank} has {other!r}; "
                    "set the same TUNEDCOMM_* variables and install the same version on every rank"
                )

    def _agree_on_settings(self) -> int:
        """Compare what changes dispatch; returns the number of hosts."""
        self._agree(
            "settings",
            {
                "workspace_bytes": settings.workspace_bytes(),
                "mode": settings.mode(),
                "forced": settings.forced_all(),
                "peer_timeout_s": settings.peer_timeout_s(),
                "device": self.device.type,
            },
        )
        return len(set(self._exchange(socket.gethostname())))

    def _make_workspace(self) -> Workspace | None:
        """The workspace, or None on every rank if any rank could not have it."""
        failure: str | None = None
        workspace: Workspace | None = None
        try:
            timeout_ns = int(settings.peer_timeout_s() * 1e9)
            workspace = Workspace(self.group, self.device, self.layout, timeout_ns=timeout_ns)
        except WorkspaceError as error:
            failure = str(error)
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self._exchange(failure)) if text]
        if failures:
            logger.warning("no symmetric memory, every call goes to the library: %s", "; ".join(failures))
            return None
        return workspace

    def _agree_on_snapshot(self) -> Snapshot:
        """Rank 0's merged layers on every rank."""
        offer: list[Any] = [None]
        if self.rank == 0:
            snapshot = load_snapshot(self.environment, self.world_size)
            offer = [(snapshot.to_json(), snapshot.digest)]
        dist.broadcast_object_list(offer, src=dist.get_global_rank(self.group, 0), group=self.group)
        text, digest = offer[0]
        mine = Snapshot.from_json(text)
        self._agree("the snapshot", mine.digest)
        if mine.digest != digest:
            raise AgreementError(f"the snapshot arrived changed: digest {mine.digest} instead of {digest}")
        return mine

    def replace_snapshot(self, snapshot: Snapshot) -> None:
        """Dispatch from another snapshot, the same on every rank; plans are made anew.

        Raises:
            AgreementError: the ranks were given different snapshots.
        """
        self._agree("the snapshot", snapshot.digest)
        self.snapshot = snapshot
        self.plans.clear()

    def bind(self, problem: Problem, candidate: Candidate) -> Callable[[tuple[Any, ...], tuple[Any, ...], int], None]:
        """A launch of `candidate`; compiles, so never while a graph is captured.

        Raises:
            ConfigError: the config is not in the variant's space.
            InfeasibleError: its blocks do not fit on the GPU.
        """
        variant = get_variant(candidate.op, candidate.variant)
        config = variant.space.validate(candidate.config_dict)
        return variant.bind(problem, config, self.workspace or _LibraryOnly(self.group, self.device))

    def order_streams(self, capturing: bool, stream: int) -> None:
        """Put this call behind the lane's last one if that ran on another stream.

        Calls on one stream are in order by themselves. In a capture both streams must belong to it; a stream of an
        earlier capture is left alone, because graphs of one group must not be replayed at the same time anyway.
        """
        last = self.last_streams[capturing]
        self.last_streams[capturing] = stream
        if last in (-1, stream) or self.device.type != "cuda":
            return
        earlier = torch.cuda.ExternalStream(last, device=self.device)  # type: ignore[no-untyped-call]
        if capturing:
            with torch.cuda.stream(earlier):
                if not torch.cuda.is_current_stream_capturing():
                    return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(earlier)
        torch.cuda.current_stream(self.device).wait_event(event)

    def register_symmetric(self, tensor: torch.Tensor, buffer: SymmetricBuffer) -> None:
        """Let kernels address `tensor` on the peers; the same call on every rank."""
        if self.workspace is not None:
            self.workspace.register(tensor, buffer)
            self.any_symmetric = True

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies in a registered symmetric allocation."""
        return self.workspace is not None and tensor.untyped_storage().data_ptr() in self.workspace.symmetric

    def check_peers(self) -> None:
        """Raise PeerTimeoutError if a kernel of this group gave up waiting for a peer."""
        if self.workspace is not None:
            self.workspace.check_peers()


class _LibraryOnly:
    """What library variants need of a workspace where there is none."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device


def _without_symmetric(limits: Limits) -> Limits:
    return replace(limits, symmetric=False)


_communicators: dict[tuple[dist.ProcessGroup, str], Communicator] = {}


def get_communicator(group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> Communicator:
    """The communicator of a group (None: the default group), made at the first call; collective then.

    Args:
        device: where the tensors live; by default the current CUDA device, or the CPU where there is none.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
        GroupError: the caller is no member of the group, or the group has no backend for the device.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NotInitializedError(
            "torch.distributed has no default process group; call torch.distributed.init_process_group() first"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    resolved = dist.group.WORLD if group is None else group
    if not isinstance(resolved, dist.ProcessGroup) or dist.get_rank(resolved) < 0:
        raise GroupError(
            f"rank {dist.get_rank()} is not a member of the group {group!r}; only the ranks that were given to "
            "torch.distributed.new_group() may call on it"
        )
    key = (resolved, device.type)
    found = _communicators.get(key)
    if found is None:
        if not _serves(resolved, device):
            raise GroupError(
                f"the group's backend {dist.get_backend(resolved)!r} has nothing for {device.type} tensors; move the "
                "tensor, or make the group with backend 'nccl' for CUDA or 'gloo' for CPU tensors"
            )
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotInitializedError(
                "a group's first call cannot be captured: call tunedcomm once outside the graph first (a warm-up run)"
            )
        found = _communicators[key] = Communicator(resolved, device)
    return found


def live_communicators() -> list[Communicator]:
    """Every communicator made so far."""
    return list(_communicators.values())


def release_communicators() -> None:
    """Forget every communicator, so that the next call makes it anew from settings and databases.

    Also to be called before `torch.distributed.destroy_process_group()` if groups are made again in the process.
    """
    _communicators.clear()
    for callback in _on_release:
        callback()


_on_release: list[Callable[[], None]] = []


def on_release(callback: Callable[[], None]) -> None:
    """Call `callback` whenever communicators are released: for caches that hold them."""
    _on_release.append(callback)
