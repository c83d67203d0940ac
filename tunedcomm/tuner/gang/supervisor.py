"""Starts gangs, passes commands and results between gangs and the coordinator, and kills gangs that hang.

The supervisor holds no GPU context. A gang that dies or falls silent costs the candidate that it was running, which is
recorded as `crashed` or `hung`, and a restart. The other gangs go on meanwhile, and all earlier results are kept.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunedcomm.db.values import LOST
from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment
from tunedcomm.spec import Candidate, Limits, Problem
from tunedcomm.tuner.gang.process import GangProcess, Loss, Phase
from tunedcomm.tuner.gang.protocol import Command, Settings, TrialResult
from tunedcomm.tuner.search.coordinator import Coordinator
from tunedcomm.tuner.search.knowledge import Knowledge

_log = logging.getLogger("tunedcomm")

# Longest wait for events; deaths are noticed and `on_turn` is called at least this often.
_TICK_S = 0.1
# Ask again for a gang without work this often: other supervisors may have changed what is left.
_IDLE_ASK_S = 1.0
# This many gangs in a row may die in a slot without a result and without a candidate to blame.
_MAX_FRUITLESS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GangProgress:
    """The state of one gang.

    Attributes:
        slot: index among the gangs that run at once.
        phase: phase of the gang's life.
        problem, candidate: the trial that the gang runs; None if there is none.
        final: the candidate is measured as in the finals.
        best_us, library_us: latencies of the problem; None where not yet known.
        num_trials: candidates tried at the problem so far, in earlier sweeps too.
        silent_s: seconds since the gang's last message.
        patience_s: seconds of silence after which the gang is killed; None if nothing is expected of it.
    """

    slot: int
    phase: Phase
    problem: Problem | None = None
    candidate: Candidate | None = None
    final: bool = False
    best_us: float | None = None
    library_us: float | None = None
    num_trials: int = 0
    silent_s: float = 0.0
    patience_s: float | None = None


class Supervisor:
    """Runs gangs until the coordinator has nothing left for them.

    Args:
        coordinator: decides.
        settings: of the gangs.
        devices: GPUs of each gang that runs at once, as CUDA_VISIBLE_DEVICES names them; None leaves it as it is.
        on_result: called with each result of a gang, after the gang's next command was sent.
        on_turn: called after all messages were answered, and at least ten times a second.

    Attributes:
        num_gangs: gangs started so far.
        start_s: seconds that all gangs together took to start.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: Settings,
        devices: Sequence[str | None],
        *,
        on_result: Callable[[TrialResult], None] = lambda result: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._coordinator, self._settings, self._devices = coordinator, settings, devices
        self._on_result, self._on_turn = on_result, on_turn
        self._selector = selectors.DefaultSelector()
        self._gangs: dict[int, GangProcess] = {}
        # After a first loss the next one may come soon: gangs that have done their imports stand by.
        self._spares: dict[int, GangProcess] = {}
        self._fruitless: Counter[int] = Counter()
        self._on_known: Callable[[Knowledge], None] = lambda known: None
        self._failure = self._reason = ""
        self._ask_idle_at = 0.0  # next time to ask for gangs without work; 0 after a change
        self.num_gangs = 0
        self.start_s = 0.0

    def run(self, on_known: Callable[[Knowledge], None] = lambda known: None) -> str:
        """Run to the end; returns the reason for the end, `done` or `budget`.

        `on_known` is called once the first gang is ready, before that gang gets a command.

        Raises:
            TuningError: in every slot gangs die one after the other without a result, or their environments differ.
        """
        self._on_known = on_known
        try:
            for slot in range(len(self._devices)):
                if self._coordinator.has_time:
                    self._start(slot)
            while self._gangs:
                self._turn()
        finally:
            for gang in [*self._gangs.values(), *self._spares.values()]:
                gang.finish()
            self._selector.close()
        if not self._reason and self._coordinator.has_time:
            raise TuningError(self._failure)
        return self._reason or "budget"

    def states(self) -> list[GangProgress]:
        """The phase, problem and candidate of every gang, by slot; the caller adds latencies and trials."""
        found = []
        for slot, gang in sorted(self._gangs.items()):
            at = self._coordinator.activity(slot) or Command(kind="wait")
            found.append(
                GangProgress(
                    slot=slot,
                    phase=gang.phase,
                    problem=at.problem,
                    candidate=at.candidate,
                    final=at.final,
                    silent_s=gang.silent_s,
                    patience_s=gang.patience_s,
                )
            )
        return found

    def _start(self, slot: int) -> None:
        self.num_gangs += 1
        self._fruitless[slot] += 1  # until the gang has a result or a candidate is blamed for its end
        self._gangs[slot] = self._spares.pop(slot) if slot in self._spares else self._make(slot)
        self._gangs[slot].go()

    def _make(self, slot: int) -> GangProcess:
        return GangProcess(slot, self._settings, self._selector, self._devices[slot])

    def _turn(self) -> None:
        results: list[TrialResult] = []
        if self._coordinator.is_overdue:
            for gang in self._gangs.values():
                if gang.phase != "ending":
                    self._coordinator.abandon(gang.slot)
                    gang.retire()
        for key, _ in self._selector.select(_TICK_S):
            self._listen(key.data, results)
        for gang in list(self._gangs.values()):
            if gang.phase == "ending":
                self._replace(gang)
            else:
                self._watch(gang, results)
        self._command_idle()
        for result in results:
            self._on_result(result)
        self._on_turn()

    # Messages of gangs

    def _listen(self, gang: GangProcess, results: list[TrialResult]) -> None:
        """Answer the messages of a gang: commands leave at once, everything else can wait."""
        for name, value in gang.read():
            if name == "ready":
                self._greet(gang, *value)
            elif name == "result":
                self._coordinator.learn(gang.slot, value)
                self._ask_idle_at = 0.0
                self._fruitless[gang.slot] = 0
                results.append(value)
                if value.status in LOST:
                    self._coordinator.lost(gang.slot, value.status, value.reason, begun=None)
                    gang.retire()
                else:
                    self._command(gang)

    def _greet(self, gang: GangProcess, environment: Environment, limits: Limits) -> None:
        assert gang.went_at is not None
        self.start_s += time.monotonic() - gang.went_at
        known = self._coordinator.gang_ready(gang.slot, environment, limits)
        if known is not None:
            self._on_known(known)
        self._command(gang)
        if self.num_gangs > len(self._devices) and not self._settings.stand_in:
            self._spares[gang.slot] = self._make(gang.slot)

    def _command(self, gang: GangProcess) -> None:
        command = self._coordinator.next(gang.slot)
        if command.kind == "trial":
            gang.send(command)
        elif command.kind == "end":
            self._reason = command.reason
            gang.retire()

    def _command_idle(self) -> None:
        """Ask again for gangs without work; once the sweep is done, do not wait for gangs that still start."""
        due = time.monotonic() >= self._ask_idle_at
        if due:
            self._ask_idle_at = time.monotonic() + _IDLE_ASK_S
        for gang in self._gangs.values():
            if gang.phase == "waiting" and due:
                self._command(gang)
            elif gang.phase == "starting" and self._reason:
                gang.retire()

    # How gangs end

    def _watch(self, gang: GangProcess, results: list[TrialResult]) -> None:
        if gang.loss() is None:
            return
        self._listen(gang, results)  # messages from before its death, or from while this process used the database
        if gang.phase != "ending" and (loss := gang.loss()) is not None:
            self._lose(gang, loss)

    def _lose(self, gang: GangProcess, loss: Loss) -> None:
        row = self._coordinator.lost(gang.slot, loss.status, loss.reason, begun=gang.begun, killed=loss.killed)
        self._ask_idle_at = 0.0
        gang.retire()
        at = "" if row is None else f" at {row.candidate}"
        _log.warning("a gang %s%s: %s", loss.status, at, loss.reason)
        if row is not None:
            self._fruitless[gang.slot] = 0
        if self._fruitless[gang.slot] >= _MAX_FRUITLESS:
            self._failure = (
                f"{self._fruitless[gang.slot]} gangs of {self._settings.world_size} processes in a row {loss.status} "
                f"without measuring anything; the last one: {loss.reason}. Run `tunedcomm doctor` on this machine"
            )
            self._coordinator.abandon(gang.slot)
            if len(self._gangs) > 1:
                _log.error("%s; the other gangs go on", self._failure)

    def _replace(self, gang: GangProcess) -> None:
        """Start the next gang in the slot of a gang that is gone, if there may be work for it."""
        if not gang.is_gone():
            return
        del self._gangs[gang.slot]
        if not self._reason and self._coordinator.has_time and self._fruitless[gang.slot] < _MAX_FRUITLESS:
            self._start(gang.slot)
