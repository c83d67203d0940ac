"""Claims of supervisors on the candidates that they run now, in one table of the tuned database.

A supervisor inserts a claim before it runs a candidate, and deletes it in the transaction that stores the trial. So a
supervisor that gets a claim and then finds no stored trial is the only one that runs the candidate. A claim expires
when its owner has ended, as far as this kernel can tell, or has sent no heartbeat for `GRACE_S`. Any supervisor may
take an expired claim over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Delete, bindparam, delete, func, select, type_coerce, update
from sqlalchemy.dialects import postgresql, sqlite

from tunedcomm.db.records import Reader, Trial
from tunedcomm.db.schema import ClaimRow, ProblemRow, TrialRow, UtcDateTime
from tunedcomm.db.store import Database
from tunedcomm.db.values import canonical_json
from tunedcomm.errors import DatabaseError
from tunedcomm.hardware import kernel_identity, process_start
from tunedcomm.spec import Candidate, Problem

HEARTBEAT_S = 20.0
GRACE_S = 90.0
_CLOSE_S = 5.0
# A server assigns ids before rows are visible: a search for new trials begins this many ids before the last one seen.
_ID_LAG = 1000
_PROBLEM_ID = select(ProblemRow.id).where(ProblemRow.digest == bindparam("digest")).scalar_subquery()
_OTHERS = select(TrialRow.id).where(
    TrialRow.problem_id == _PROBLEM_ID,
    TrialRow.id > bindparam("after_id"),
    TrialRow.run_id.is_distinct_from(bindparam("run_id", type_=TrialRow.run_id.type)),
)
# With the time by the database's clock.
_HELD = select(
    ClaimRow.candidate, ClaimRow.owner, ClaimRow.heartbeat_at, type_coerce(func.now(), UtcDateTime).label("now")
)
_log = logging.getLogger("tunedcomm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to run a candidate, in the search or in the finals, until the row of this key is deleted."""

    problem: Problem
    candidate: Candidate
    final: bool
    key: str


def owner_id(*, host: str = "", kernel: str = "", pid: int = 0) -> str:
    """Name of an owner in the table; by default of this process, and different at every call."""
    pid = pid or os.getpid()
    return canonical_json(
        [host or socket.gethostname(), kernel or kernel_identity(), pid, process_start(pid), uuid.uuid4().hex]
    )


def owner_lives(owner: str) -> bool | None:
    """True if the owner's process runs, False if it has ended, None if this kernel cannot tell."""
    _, kernel, pid, start, _ = json.loads(owner)
    if kernel != kernel_identity():
        return None
    return start is not None and process_start(pid) == start


class Claims:
    """This supervisor's claims, and its view of other supervisors' trials. Make it after a fork, not before.

    Args:
        database: writable.
        environment: digest of the environment in which trials run.
        source_digest: an op's name to a digest of the sources of its variants.
        run_id: run of this supervisor, whose trials are not news.
        known: further trials that are not news.
        owner: name of this supervisor, see `owner_id`.
        heartbeat_s: seconds between two heartbeats, which a thread sends.
        grace_s: an owner that this kernel cannot see is dead after this many seconds without a heartbeat.
    """

    def __init__(
        self,
        database: Database,
        environment: str,
        source_digest: Callable[[str], str],
        *,
        run_id: int | None = None,
        known: Iterable[Trial] = (),
        owner: str = "",
        heartbeat_s: float = HEARTBEAT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._database, self._environment, self._source_digest = database, environment, source_digest
        self.owner = owner or owner_id()
        self._heartbeat_s, self._grace_s = heartbeat_s, grace_s
        self._run_id = run_id
        self._seen: dict[Problem, set[int]] = {}
        for trial in known:
            self._seen.setdefault(trial.problem, set()).add(trial.id or 0)
        self._fresh: dict[Problem, set[int]] = {}  # ids of new trials that `news` has not read yet
        self._flying: dict[tuple[Problem, bool], tuple[float, frozenset[Candidate]]] = {}  # with the time of reading
        self._searches: dict[tuple[Problem, bool], str] = {}
        # Time at which each heartbeat was first seen to be too old. After a jump of the clock, or an outage of the
        # server, living owners look dead until their next heartbeat.
        self._suspects: dict[tuple[str, datetime], float] = {}
        self._beaten = _uptime_s()
        self._is_late = False
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="tunedcomm-heartbeat", daemon=True)
        self._heart.start()

    def acquire(self, problem: Problem, candidate: Candidate, *, final: bool) -> Claim | None:
        """Claim a candidate; None while another supervisor has it. `news` then includes its trial if one is stored."""
        search = self._search(problem, final)
        text = canonical_json([candidate.variant, candidate.config_dict])
        key = _digest([search, text])

        def attempt(connection: Connection) -> bool:
            insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
            row = {"key": key, "search": search, "candidate": text, "owner": self.owner, "heartbeat_at": func.now()}
            connection.execute(insert(ClaimRow).values(row).on_conflict_do_nothing())
            held = connection.execute(_HELD.where(ClaimRow.key == key).with_for_update()).one_or_none()
            # None if the owner has just ended the claim: the candidate is free at the next attempt.
            is_owner = held is not None and bool(held.owner == self.owner)
            if held is not None and not is_owner and self._has_expired(held):
                connection.execute(update(ClaimRow).where(ClaimRow.key == key).values(row))
                is_owner = True
            self._look(connection, problem)  # after the claim, so that it sees every earlier trial
            return is_owner

        if not self._database.change(attempt):
            return None
        return Claim(problem=problem, candidate=candidate, final=final, key=key)

    def holds(self, claim: Claim) -> bool:
        """False if another supervisor has taken the claim over; ask before storing its trial."""
        if not self._is_late and _uptime_s() - self._beaten < self._grace_s:
            return True
        query = select(ClaimRow.key).where(ClaimRow.key == claim.key, ClaimRow.owner == self.owner)

        def ask(connection: Connection, _: Reader) -> bool:
            self._look(connection, claim.problem)
            return connection.execute(query).one_or_none() is not None

        return self._database.ask(ask)

    def record(self, trials: Sequence[Trial], claims: Iterable[Claim]) -> None:
        """Store trials and end their claims, all or nothing."""
        ended = self._end(claims)
        self._database.record(trials, then=lambda connection: connection.execute(ended))

    def release(self, claims: Iterable[Claim]) -> None:
        """End claims whose candidates were not run after all. Ignores claims that were taken over."""
        ended = self._end(claims)
        self._database.change(lambda connection: connection.execute(ended))

    def _end(self, claims: Iterable[Claim]) -> Delete:
        keys = [claim.key for claim in claims]
        return delete(ClaimRow).where(ClaimRow.key.in_(keys), ClaimRow.owner == self.owner)

    def in_flight(self, problem: Problem, *, final: bool, max_age_s: float = 0.0) -> frozenset[Candidate]:
        """Candidates of a problem that other live supervisors run, as of at most `max_age_s` ago.

        `news` then includes the trials that they had stored by that time.
        """
        read_at, flying = self._flying.get((problem, final), (-math.inf, frozenset()))
        if time.monotonic() - read_at < max_age_s:
            return flying
        now = time.monotonic()
        query = _HELD.where(ClaimRow.search == self._search(problem, final), ClaimRow.owner != self.owner)

        def ask(connection: Connection, _: Reader) -> Sequence[Any]:
            rows = connection.execute(query).all()
            self._look(connection, problem)  # after the claims, which end with the transaction that stores a trial
            return rows

        live = [row for row in self._database.ask(ask) if not self._has_expired(row)]
        flying = frozenset(Candidate.of(problem.op, *json.loads(row.candidate)) for row in live)
        self._flying[problem, final] = (now, flying)
        return flying

    def _look(self, connection: Connection, problem: Problem) -> None:
        """Note the ids of trials of a problem that other supervisors have stored."""
        seen = self._seen.setdefault(problem, set())
        bound = {"digest": problem.digest, "after_id": max(max(seen, default=0) - _ID_LAG, 0), "run_id": self._run_id}
        fresh = set(connection.execute(_OTHERS, bound).scalars()) - seen
        seen |= fresh
        self._fresh.setdefault(problem, set()).update(fresh)

    def news(self, problem: Problem) -> list[Trial]:
        """Trials of a problem that others had stored by the last look; each trial is returned once."""
        if not (fresh := self._fresh.pop(problem, None)):
            return []
        found = self._database.trials(problem=problem, after_id=min(fresh) - 1)
        return [trial for trial in found if trial.id in fresh]

    def close(self) -> None:
        """Release every claim and stop."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._heart.join(_CLOSE_S)
        with contextlib.suppress(DatabaseError):  # they expire
            self._database.change(lambda c: c.execute(delete(ClaimRow).where(ClaimRow.owner == self.owner)))

    def _search(self, problem: Problem, final: bool) -> str:
        if (problem, final) not in self._searches:
            sources = self._source_digest(problem.op)
            self._searches[problem, final] = _digest([problem.digest, self._environment, sources, final])
        return self._searches[problem, final]

    def _has_expired(self, held: Any) -> bool:
        lives = owner_lives(held.owner)
        if lives is not None:
            return not lives
        if held.now - held.heartbeat_at < timedelta(seconds=self._grace_s):
            return False
        seen = self._suspects.setdefault((held.owner, held.heartbeat_at), time.monotonic())
        return time.monotonic() - seen >= 2 * self._heartbeat_s

    def _beat(self) -> None:
        beat = update(ClaimRow).where(ClaimRow.owner == self.owner).values(heartbeat_at=func.now())
        while not self._closing.wait(self._heartbeat_s):
            begin = _uptime_s()
            try:
                self._database.change(lambda connection: connection.execute(beat))
            except DatabaseError as error:  # the main thread meets the same error and reports it
                _log.debug("no heartbeat: %s", error)
                continue
            # Other supervisors may have taken claims over: from now on `holds` asks the database.
            self._is_late = self._is_late or begin - self._beaten >= self._grace_s
            self._beaten = begin


def _digest(values: list[object]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()[:32]


def _uptime_s() -> float:
    """Monotonic seconds; they also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
