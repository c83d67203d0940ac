"""Who runs what now, shared by all supervisors that write to one tuned database; results are no business of it.

Claims are trials of Optuna studies, one study for each problem, environment and state of the op's sources. The storage
gives every trial a number in one atomic step, and of two claims of one candidate the lower number holds. A claim ends
when it is told or given back, or when its owner dies (see `owners`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from optuna.trial import TrialState

from tunedcomm.db.patience import Patience
from tunedcomm.db.records import canonical_json
from tunedcomm.errors import DatabaseError
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.board import Entry, Note
from tunedcomm.tuner.life_lock import LifeLock
from tunedcomm.tuner.owners import Local, Owner, Presence, Seats
from tunedcomm.tuner.search.claims import Claim
from tunedcomm.tuner.studies import Studies, journal_path, open_studies

__all__ = ["GRACE_S", "HEARTBEAT_S", "OptunaLedger", "open_ledger"]

# A supervisor on another host is given up after GRACE_S without heartbeats and two more of them.
HEARTBEAT_S = 20
GRACE_S = 90
_CLOSE_S = 5.0

T = TypeVar("T")
_log = logging.getLogger("tunedcomm")


def open_ledger(
    database: str | Path,
    environment: str,
    source_digest: Callable[[str], str],
    *,
    owner: Owner | None = None,
    patience_s: float = 600.0,
    heartbeat_s: int = HEARTBEAT_S,
    grace_s: int = GRACE_S,
) -> OptunaLedger:
    """The ledger that belongs to a tuned database.

    Args:
        database: path or URL of the tuned database.
        environment: digest of the environment in which trials run.
        source_digest: an op's name to a digest of the sources of its variants.
        owner: this process, if not told.
        patience_s: how long to wait for a storage that is away or locked.
        heartbeat_s: whole seconds between two heartbeats on a server.
        grace_s: a supervisor on another host without heartbeats for so long counts as dead.

    Raises:
        DatabaseError: the storage cannot be opened or made.
        ValueError: a database in memory.
    """
    studies = open_studies(database, heartbeat_s=heartbeat_s, grace_s=grace_s)
    me = owner or Owner.here()
    presence: Presence
    try:
        with studies.translated():
            if studies.target.path is not None:
                presence = Local(me, LifeLock(journal_path(studies.target.path).with_suffix(".owners")))
            else:
                presence = Seats(studies.storage, me, heartbeat_s=heartbeat_s, grace_s=grace_s)
    except BaseException:
        studies.close()
        raise
    ledger = OptunaLedger(studies, presence, environment, source_digest, patience=Patience(patience_s))
    if isinstance(presence, Seats):
        ledger.start_heartbeats(heartbeat_s)
    return ledger


class OptunaLedger:
    """The `Ledger` over an Optuna storage; used from one thread. Make it after a fork, not before."""

    def __init__(
        self,
        studies: Studies,
        presence: Presence,
        environment: str,
        source_digest: Callable[[str], str],
        *,
        patience: Patience,
    ) -> None:
        self._studies = studies
        self._board = studies.board
        self._presence = presence
        self._environment = environment
        self._source_digest = source_digest
        self._patience = patience
        self._ids: dict[tuple[Problem, bool], int] = {}
        self._held: dict[int, Claim] = {}
        self._is_closed = False
        self._ending = threading.Event()
        self._heart: threading.Thread | None = None

    # The Ledger protocol

    def claim(self, problem: Problem, candidate: Candidate, *, final: bool, again: bool = False) -> Claim | None:
        """Claim a candidate; None if another supervisor runs it now, or has run it: its row is stored then.

        One that died while it ran the candidate may have stored the row or not. Whoever is refused and finds neither
        the candidate in flight nor its row asks `again`.

        Args:
            problem: what is tuned.
            candidate: what to run.
            final: in the finals.
            again: run it even if it was run already, as after a row was lost or to try a failure again.

        Raises:
            DatabaseError: the storage is away for too long, or broken.
        """
        study = self._study(problem, final)
        key = _key(candidate)
        # Looked at first, so that a candidate that many want leaves no trail of failed claims.
        if self._is_taken(self._run(lambda: self._board.entries(study, key, told=not again)), again):
            return None
        note = Note(candidate, key, uuid.uuid4().hex, self._presence.mark())
        trial_id, before = self._run(lambda: self._board.claim(study, note, told=not again))
        if self._is_taken(before, again):
            if trial_id is not None:
                self._end(trial_id, TrialState.FAIL)
            return None
        if trial_id is None:  # Those before have just died: whoever asks next gets it.
            return None
        claim = Claim(problem=problem, candidate=candidate, final=final, key=trial_id)
        self._held[claim.key] = claim
        return claim

    def holds(self, claim: Claim) -> bool:
        """False if others took this process for dead and may run the candidate themselves; ask before storing."""
        if self._presence.is_trusted():
            return True
        return self._run(lambda: self._board.is_running(claim.key))

    def tell(self, claim: Claim, latency_us: float | None) -> None:
        """Report a claim's end, after its row was stored: the latency, or None if it did not get that far."""
        self._end(claim.key, TrialState.PRUNED if latency_us is None else TrialState.COMPLETE, latency_us)
        self._held.pop(claim.key, None)

    def give_back(self, claim: Claim) -> None:
        """End a claim whose candidate was not run after all."""
        self._end(claim.key, TrialState.FAIL)
        self._held.pop(claim.key, None)

    def in_flight(self, problem: Problem, *, final: bool) -> frozenset[Candidate]:
        """What other live supervisors run of this problem."""
        study = self._study(problem, final)
        entries = self._run(lambda: self._board.entries(study, None, told=False))
        others = [entry for entry in entries if entry.trial_id not in self._held]
        return frozenset(_candidate(problem.op, entry.key) for entry in others if self._lives(entry))

    def close(self) -> None:
        """Give every claim back and stop; a storage that is away is left to find out by itself."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ending.set()
        if self._heart is not None:
            self._heart.join()
        hasty = Patience(_CLOSE_S)
        with contextlib.suppress(DatabaseError):
            hasty.run(lambda _: self._translated(self._leave))
        self._studies.close()

    def _leave(self) -> None:
        for trial_id in self._held:
            self._board.end(trial_id, TrialState.FAIL)
        self._presence.leave()

    # Heartbeats

    def start_heartbeats(self, interval_s: float) -> None:
        """Tell the others from a thread, until `close`, that this process lives."""
        self._heart = threading.Thread(target=self._beat, args=(interval_s,), name="tunedcomm-heartbeat", daemon=True)
        self._heart.start()

    def _beat(self, interval_s: float) -> None:
        while not self._ending.wait(interval_s):
            try:
                self._translated(self._presence.beat)
            except DatabaseError as error:
                # The main thread meets the same trouble and says so.
                _log.debug("no heartbeat: %s", error)
                self._presence.disturbed()

    # What may be repeated

    def _run(self, operation: Callable[[], T]) -> T:
        def attempt(_: bool) -> T:
            try:
                return self._translated(operation)
            except DatabaseError:
                self._presence.disturbed()
                raise

        return self._patience.run(attempt)

    def _translated(self, operation: Callable[[], T]) -> T:
        with self._studies.translated():
            return operation()

    def _study(self, problem: Problem, final: bool) -> int:
        if (problem, final) not in self._ids:
            name = study_name(problem, self._environment, self._source_digest(problem.op), final=final)
            self._ids[problem, final] = self._run(lambda: self._board.study(name))
        return self._ids[problem, final]

    def _is_taken(self, entries: Iterable[Entry], again: bool) -> bool:
        """True if one of them holds the candidate; on the way the claims of dead owners are ended as if told."""
        is_taken = False
        for entry in entries:
            if entry.is_running and not self._lives(entry):
                self._end(entry.trial_id, TrialState.PRUNED)
                is_taken = is_taken or not again
            else:
                is_taken = True
        return is_taken

    def _lives(self, entry: Entry) -> bool:
        return self._run(lambda: self._presence.lives(entry.mark))

    def _end(self, trial_id: int, state: TrialState, latency_us: float | None = None) -> None:
        """Nothing happens if others, which took its owner for dead, have ended it."""
        self._run(lambda: self._board.end(trial_id, state, latency_us))


def study_name(problem: Problem, environment: str, sources: str, *, final: bool) -> str:
    """Readable, and another one for every problem, environment and state of the sources."""
    digests = f"{problem.digest[:12]} {environment[:12]} {sources[:12]}"
    return f"{str(problem)[:400]} [{digests}]{' final' if final else ''}"


def _key(candidate: Candidate) -> str:
    return canonical_json([candidate.variant, candidate.config_dict])


def _candidate(op: str, key: str) -> Candidate:
    variant, config = json.loads(key)
    return Candidate.of(op, variant, config)
