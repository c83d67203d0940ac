"""The processes that run one trial together, and their control plane.

Every decision is the supervisor's, who sends it to all ranks, or a pure function of values that every rank holds after
a gather: no rank acts on its own clock, verdict or error. The control plane is a gloo group of its own, so that votes
work whatever the kernels do to the data plane.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import TuningError
from tunedcomm.spec import Problem
from tunedcomm.symm.buffer import SymmetricBuffer
from tunedcomm.symm.workspace import allocate
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.gang.ranks import join_group

T = TypeVar("T")

_MIN_BUFFER_BYTES = 1 << 16


class Trouble(IntEnum):
    """Troubles that a rank may report in a vote, lightest first; the heaviest one is the group's verdict."""

    NONE = 0
    TOO_LARGE = 1  # a rank has no memory for the problem; no candidate is to blame
    INFEASIBLE = 2
    COMPILE_ERROR = 3
    INCORRECT = 4
    HUNG = 5
    CRASHED = 6

    @property
    def status(self) -> str:
        """The status of the trial."""
        return self.name.lower() if self else "ok"


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote's outcome, the same on every rank: the heaviest trouble, its reason, the largest value and count."""

    trouble: Trouble = Trouble.NONE
    reason: str = ""
    value: float = 0.0
    count: int = 0


class Gang:
    """One rank's end of the gang: a control plane, the data plane's communicator, and a supervisor's line if any."""

    def __init__(self, control: dist.ProcessGroup, communicator: Communicator, line: Connection | None = None) -> None:
        self._control, self._line = control, line
        self.communicator = communicator
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.device: torch.device = communicator.device
        self.on_gpu = self.device.type == "cuda"  # launches are asynchronous there, and times come from events
        self._symmetric: dict[tuple[int, int], SymmetricBuffer] = {}
        self._token = torch.zeros(1, dtype=torch.float32, device=self.device)

    def report(self, event: str, value: object) -> None:
        """Send the supervisor an event from rank 0; the kernel holds the message when this returns."""
        if self.rank == 0 and self._line is not None:
            self._line.send((event, value))

    def report_failure(self, text: str) -> None:
        """Report to the supervisor that a launch raised on this rank: the other ranks may never answer again."""
        if self._line is not None:
            self._line.send(("failure", (time.monotonic(), text)))

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self._control)
        return everyone

    def vote(self, trouble: Trouble, reason: str = "", value: float = 0.0, count: int = 0) -> Vote:
        """Agree on the heaviest trouble of any rank, that rank's reason, and the largest `value` and `count` >= 0."""
        # The maximum of a NaN is not defined.
        finite = value if math.isfinite(value) else math.inf
        ballot = torch.tensor([float(trouble), finite, float(count)], dtype=torch.float64, device="cpu")
        dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._control)
        heaviest, largest, most = ballot.tolist()
        if not heaviest:
            return Vote(value=largest, count=int(most))
        return combine(self.gather((int(trouble), reason)), largest, int(most))

    def barrier(self) -> None:
        """Wait for every rank, on the control plane."""
        dist.barrier(group=self._control)

    def device_barrier(self) -> None:
        """Have the current stream wait for every rank's stream; the host does not wait."""
        dist.all_reduce(self._token, group=self.communicator.group)

    def symmetric_rooms(self, problem: Problem, sizes: Sequence[int], slot: int) -> list[torch.Tensor | None]:
        """Symmetric memory for inputs of these bytes, as uint8; None for each where any memory will do. Collective.

        The next problem uses the memory of its slot again.
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
        """Wait on the host for the device; raises the device's errors."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def combine(everyone: Sequence[tuple[int, str]], value: float = 0.0, count: int = 0) -> Vote:
    """The vote of all ranks: the heaviest trouble, and the reason of the first rank that has it."""
    heaviest = max(code for code, _ in everyone)
    blamed = [rank for rank, (code, _) in enumerate(everyone) if code == heaviest]
    reason = everyone[blamed[0]][1]
    if len(blamed) < len(everyone):
        reason = f"on rank {', '.join(str(rank) for rank in blamed)} of {len(everyone)}: {reason}"
    return Vote(Trouble(heaviest), reason, value, count)


def assemble(settings: Settings, line: Connection) -> Gang:
    """Join the gang's group and make its control plane; collective over the gang's ranks."""
    # Longer than any watchdog: a rank that waits for a lost peer is killed from outside, with a better reason.
    timeout = timedelta(seconds=settings.start_timeout_s + settings.compile_timeout_s + settings.trial_timeout_s)
    device = join_group(timeout)
    if (device.type == "cuda") != (settings.backend == "cuda"):
        raise TuningError(f"a gang of the backend {settings.backend} got {device.type} ranks; run `tunedcomm doctor`")
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Gang(control, get_communicator(None, device), line)
