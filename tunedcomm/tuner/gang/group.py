"""The processes that run one trial together, and how they stay in step.

Every decision is either the supervisor's, who tells all ranks the same, or a pure function of numbers that every rank
holds after a gather: no rank acts on its own clock, verdict or error. The control plane is a gloo group of its own, so
that votes work whatever the kernels do to the data plane.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator, get_communicator
from tunedcomm.hardware import gpu_of
from tunedcomm.spec import Problem
from tunedcomm.symm.buffer import SymmetricBuffer
from tunedcomm.symm.workspace import allocate
from tunedcomm.tuner.gang.protocol import STORE_FD, Settings

T = TypeVar("T")

_MIN_BUFFER_BYTES = 1 << 16


class Trouble(IntEnum):
    """Troubles that a rank may report in a vote, by rising weight: the group's verdict is the heaviest."""

    NONE = 0
    TOO_LARGE = 1  # the problem, for the memory of a rank: no candidate's doing
    INFEASIBLE = 2
    COMPILE_ERROR = 3
    INCORRECT = 4
    HUNG = 5
    CRASHED = 6

    @property
    def status(self) -> str:
        """The trial status that it leads to."""
        return self.name.lower() if self else "ok"


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote's outcome, the same on every rank: the heaviest trouble, its reason, the largest number and count."""

    trouble: Trouble = Trouble.NONE
    reason: str = ""
    number: float = 0.0
    count: int = 0


class Gang:
    """One rank's end of the gang; the communicator is bound to the data plane, the line to a supervisor if any."""

    def __init__(self, control: dist.ProcessGroup, communicator: Communicator, line: Connection | None = None) -> None:
        self._control, self._line = control, line
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.device: torch.device = communicator.device
        self.on_gpu = self.device.type == "cuda"  # launches are asynchronous there, and times come from events
        self._symmetric: dict[tuple[int, int], SymmetricBuffer] = {}
        self._token = torch.zeros(1, device=self.device)

    def report(self, event: str, value: object) -> None:
        """Tell the supervisor an event, on rank 0; it is in the kernel's hands when this returns."""
        if self.rank == 0 and self._line is not None:
            self._line.send((event, value))

    def report_failure(self, text: str) -> None:
        """Tell the supervisor that a launch raised on this rank: the other ranks may never answer again."""
        if self._line is not None:
            self._line.send(("failure", (time.monotonic(), text)))

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self._control)
        return everyone

    def vote(self, trouble: Trouble, reason: str = "", number: float = 0.0, count: int = 0) -> Vote:
        """Agree on the heaviest trouble of any rank, that rank's reason, and the largest `number` and `count` >= 0."""
        # A NaN has no defined place in a maximum.
        finite = number if math.isfinite(number) else math.inf
        ballot = torch.tensor([float(trouble), finite, float(count)], dtype=torch.float64)
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._control)
        heaviest, largest, most = ballot.tolist()
        if not heaviest:
            return Vote(number=largest, count=int(most))
        return combine(self.gather((int(trouble), reason)), largest, int(most))

    def barrier(self) -> None:
        """Wait for every rank, on the control plane."""
        dist.barrier(group=self._control)

    def device_barrier(self) -> None:
        """Have the current stream wait until every rank's has come here: nothing waits on the host."""
        dist.all_reduce(self._token, group=self.communicator.group)

    def symmetric_rooms(self, problem: Problem, sizes: Sequence[int], slot: int) -> list[torch.Tensor | None]:
        """Symmetric memory of these bytes, uint8, for each input; None where the problem takes any; collective.

        Memory of the same slot is used again by the next problem.
        """
        workspace = self.communicator.workspace
        if problem.input_kind == "plain" or workspace is None:
            return [None] * len(sizes)
        rooms: list[torch.Tensor | None] = []
        for index, nbytes in enumerate(sizes):
            held = self._symmetric.get((slot, index))
            if held is None or held.nbytes < nbytes:
                held = allocate(self.communicator.group, self.device, max(nbytes, _MIN_BUFFER_BYTES))
                self._symmetric[slot, index] = held
            workspace.register(held.local, held)
            rooms.append(held.local[:nbytes])
        return rooms

    def synchronize(self) -> None:
        """Wait on the host for the device; raises whatever went wrong on it."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def combine(everyone: Sequence[tuple[int, str]], number: float = 0.0, count: int = 0) -> Vote:
    """One verdict from every rank's: the heaviest trouble, and the first rank's reason for it."""
    heaviest = max(code for code, _ in everyone)
    blamed = [rank for rank, (code, _) in enumerate(everyone) if code == heaviest]
    reason = everyone[blamed[0]][1]
    if len(blamed) < len(everyone):
        reason = f"on rank {', '.join(str(rank) for rank in blamed)} of {len(everyone)}: {reason}"
    return Vote(Trouble(heaviest), reason, number, count)


def assemble(settings: Settings, line: Connection) -> Gang:
    """Join the gang that the environment describes; collective over its ranks."""
    rank = int(os.environ["RANK"])
    # Longer than any watchdog: a rank that waits for a lost one is ended from outside, with a better reason.
    timeout = timedelta(seconds=settings.start_timeout_s + settings.compile_timeout_s + settings.trial_timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        settings.world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=int(os.environ[STORE_FD]) if rank == 0 else None,
    )
    device = gpu_of(rank) if settings.backend == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device is not None else "gloo",
        store=store,
        rank=rank,
        world_size=settings.world_size,
        timeout=timeout,
        device_id=device,
    )
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Gang(control, get_communicator(None, device), line)
