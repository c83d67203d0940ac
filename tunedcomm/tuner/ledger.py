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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tunedcomm.db.patience import Patience
from tunedcomm.db.records import canonical_json
from tunedcomm.errors import DatabaseError
from tunedcomm.spec import Candidate, Problem, get_variant, variants
from tunedcomm.tuner.claims import Claim
from tunedcomm.tuner.owners import Local, Owner, Presence, Seats
from tunedcomm.tuner.studies import Studies, open_studies

__all__ = ["GRACE_S", "HEARTBEAT_S", "OptunaLedger", "open_ledger"]

# A supervisor on another host is given up after GRACE_S without heartbeats and two more of them.
HEARTBEAT_S = 20
GRACE_S = 90
_CLOSE_S = 5.0
_TOLD = (TrialState.COMPLETE, TrialState.PRUNED)
# User attribute of a claim's trial.
_ATTRIBUTE = "claim"

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
            if studies.target.is_sqlite:
                presence = Local(me)
            else:
                presence = Seats(studies.storage, me, heartbeat_s=heartbeat_s, grace_s=grace_s)
    except BaseException:
        studies.close()
        raise
    ledger = OptunaLedger(studies, presence, environment, source_digest, patience=Patience(patience_s))
    if isinstance(presence, Seats):
        ledger.start_heartbeats(heartbeat_s)
    return ledger


@dataclass(frozen=True, slots=True)
class _Rival:
    """Another claim in a study."""

    trial_id: int
    number: int
    state: TrialState
    key: str
    nonce: str
    mark: dict[str, Any]


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
        self._storage: Any = studies.storage
        self._presence = presence
        self._environment = environment
        self._source_digest = source_digest
        self._patience = patience
        self._ids: dict[tuple[Problem, bool], int] = {}
        self._held: dict[int, Claim] = {}
        self._parsed: dict[int, tuple[str, str, dict[str, Any]]] = {}
        self._is_closed = False
        self._ending = threading.Event()
        self._heart: threading.Thread | None = None

    # The Ledger protocol

    def claim(self, problem: Problem, candidate: Candidate, *, final: bool, again: bool = False) -> Claim | None:
        """Claim a candidate; None if another supervisor runs it now, or has run it: its row is stored then.

        Args:
            problem: what is tuned.
            candidate: what to run.
            final: in the finals.
            again: run it even if it was run already, as after a row was lost or to try a failure again.

        Raises:
            DatabaseError: the storage is away for too long, or broken.
        """
        study = self._run(lambda _: self._study(problem, final))
        key, nonce = _key(candidate), uuid.uuid4().hex
        # Looked at first, so that a candidate that many want leaves no trail of failed claims.
        if self._run(lambda _: self._is_taken(self._rivals(study, again), key)):
            return None
        trial = _template(candidate, {"candidate": key, "nonce": nonce, **self._presence.mark()})
        self._run(lambda _: self._create(study, trial))
        number = self._run(lambda _: self._settle(study, key, nonce, again))
        if number is None:
            return None
        claim = Claim(problem=problem, candidate=candidate, final=final, key=number)
        self._held[claim.key] = claim
        return claim

    def holds(self, claim: Claim) -> bool:
        """False if others took this process for dead and may run the candidate themselves; ask before storing."""
        if self._presence.is_trusted():
            return True
        return self._run(lambda _: bool(self._storage.get_trial(claim.key).state == TrialState.RUNNING))

    def tell(self, claim: Claim, latency_us: float | None) -> None:
        """Report a claim's end, after its row was stored: the latency, or None if it did not get that far."""
        state = TrialState.PRUNED if latency_us is None else TrialState.COMPLETE
        self._run(lambda _: self._end(claim.key, state, latency_us))
        self._held.pop(claim.key, None)

    def give_back(self, claim: Claim) -> None:
        """End a claim whose candidate was not run after all."""
        self._run(lambda _: self._end(claim.key, TrialState.FAIL))
        self._held.pop(claim.key, None)

    def in_flight(self, problem: Problem, *, final: bool) -> frozenset[Candidate]:
        """What other live supervisors run of this problem."""

        def look(_: bool) -> frozenset[Candidate]:
            study = self._study(problem, final)
            rivals = [r for r in self._rivals(study, True) if r.trial_id not in self._held]
            return frozenset(_candidate(problem.op, r.key) for r in rivals if self._presence.lives(r.mark))

        return self._run(look)

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
        for key in self._held:
            self._end(key, TrialState.FAIL)
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

    # One transaction each, which may be repeated

    def _run(self, operation: Callable[[bool], T]) -> T:
        def attempt(again: bool) -> T:
            try:
                return self._translated(lambda: operation(again))
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
            self._ids[problem, final] = _get_or_create(self._storage, name)
        return self._ids[problem, final]

    def _create(self, study: int, trial: FrozenTrial) -> None:
        try:
            self._storage.create_new_trial(study, template_trial=trial)
        except ValueError:
            # Another supervisor knows other variants or other values of an axis: Optuna takes no such parameters, but
            # the claim names its candidate without them.
            bare = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=trial.user_attrs)
            self._storage.create_new_trial(study, template_trial=bare)

    def _settle(self, study: int, key: str, nonce: str, again: bool) -> int | None:
        """The id of the claim that was just made; None, and its end, if a lower number holds the candidate.

        When an answer was lost on the way the claim was made several times, and the lowest number is enough.
        """
        rivals = list(self._rivals(study, again))
        mine, *others = [rival for rival in rivals if rival.nonce == nonce]
        is_taken = self._is_taken((rival for rival in rivals if rival.number < mine.number), key)
        for rival in [mine, *others] if is_taken else others:
            self._end(rival.trial_id, TrialState.FAIL)
        return None if is_taken else mine.trial_id

    def _is_taken(self, rivals: Iterable[_Rival], key: str) -> bool:
        for rival in rivals:
            if rival.key != key:
                continue
            if rival.state != TrialState.RUNNING or self._presence.lives(rival.mark):
                return True
            self._end(rival.trial_id, TrialState.FAIL)
        return False

    def _rivals(self, study: int, only_running: bool) -> Iterator[_Rival]:
        """Claims in the order of their numbers."""
        states = (TrialState.RUNNING,) if only_running else (TrialState.RUNNING, *_TOLD)
        for trial in self._storage.get_all_trials(study, deepcopy=False, states=states):
            parsed = self._parsed.get(trial._trial_id)
            if parsed is None:
                attribute = dict(trial.user_attrs.get(_ATTRIBUTE) or {})
                parsed = (str(attribute.pop("candidate", "")), str(attribute.pop("nonce", "")), attribute)
                self._parsed[trial._trial_id] = parsed
            if parsed[0]:
                yield _Rival(trial._trial_id, trial.number, trial.state, *parsed)

    def _end(self, trial_id: int, state: TrialState, latency_us: float | None = None) -> None:
        values = None if latency_us is None else [latency_us]
        # Ended already: by an attempt before whose answer was lost, or by others that took its owner for dead.
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, state=state, values=values)


def study_name(problem: Problem, environment: str, sources: str, *, final: bool) -> str:
    """Readable, and another one for every problem, environment and state of the sources."""
    digests = f"{problem.digest[:12]} {environment[:12]} {sources[:12]}"
    return f"{str(problem)[:400]} [{digests}]{' final' if final else ''}"


def _get_or_create(storage: Any, name: str) -> int:
    for _ in range(2):
        with contextlib.suppress(KeyError):
            return int(storage.get_study_id_from_name(name))
        with contextlib.suppress(DuplicatedStudyError):
            return int(storage.create_new_study([StudyDirection.MINIMIZE], name))
    return int(storage.get_study_id_from_name(name))


def _key(candidate: Candidate) -> str:
    return canonical_json([candidate.variant, candidate.config_dict])


def _candidate(op: str, key: str) -> Candidate:
    variant, config = json.loads(key)
    return Candidate.of(op, variant, config)


def _template(candidate: Candidate, attribute: dict[str, Any]) -> FrozenTrial:
    """A running trial with the candidate as parameters, named as the tuner's search names them."""
    params: dict[str, Any] = {"variant": candidate.variant}
    distributions: dict[str, BaseDistribution] = {
        "variant": CategoricalDistribution(sorted(variants(candidate.op))),
    }
    for name, axis in get_variant(candidate.op, candidate.variant).space.axes:
        params[f"{candidate.variant}.{name}"] = candidate.config_dict[name]
        distributions[f"{candidate.variant}.{name}"] = CategoricalDistribution(list(axis.values()))
    return optuna.trial.create_trial(
        state=TrialState.RUNNING,
        params=params,
        distributions=distributions,
        user_attrs={_ATTRIBUTE: attribute},
    )
