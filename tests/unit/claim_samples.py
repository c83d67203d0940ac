"""Supervisors that pretend to run candidates, each in a process of its own."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from db_samples import H200, trial

from tunedcomm.db.store import Database
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.search.claims import Claim, Claims, owner_id

PROBLEM = Problem("all_reduce", (1024,), "bfloat16", 2)
CANDIDATES = [
    Candidate.of("all_reduce", "lamport", {"num_blocks": blocks, "num_warps": warps, "launch_pdl": pdl})
    for blocks in (1, 2, 4, 8)
    for warps in (1, 2, 4, 8)
    for pdl in (False, True)
]
FIRST, SECOND = CANDIDATES[:2]


def claims_of(database: Database, host: str = "", **options: Any) -> Claims:
    """Claims of a supervisor on this host, or of one that passes for a supervisor on another."""
    owner = owner_id(host=host, kernel=host) if host else ""
    return Claims(database, H200.digest, lambda op: "sources of " + op, owner=owner, **options)


def acquire(claims: Claims, candidate: Candidate = FIRST, *, final: bool = False) -> Claim | None:
    return claims.acquire(PROBLEM, candidate, final=final)


def flying(claims: Claims, *, final: bool = False) -> set[Candidate]:
    return set(claims.in_flight(PROBLEM, final=final))


def stored(database: Database) -> set[Candidate]:
    return {record.candidate for record in database.trials(problem=PROBLEM)}


def work(url: str, index: int, log: str, host: str, run_s: float, gate: Any) -> None:
    """Run every candidate that nobody else runs or has run, until all have a row."""
    order = list(CANDIDATES)
    random.Random(index).shuffle(order)
    with Database.open(url, patience_s=60) as database, Path(log).open("a", buffering=1) as file:
        gate.wait()
        claims = claims_of(database, host, heartbeat_s=1, grace_s=4)
        while left := [c for c in order if c not in stored(database)]:
            for candidate in left:
                claim = acquire(claims, candidate)
                if claim is None:
                    continue
                if candidate not in stored(database):
                    file.write(f"{os.getpid()} {candidate}\n")
                    time.sleep(run_s)
                    if claims.holds(claim):
                        name, config = candidate.variant, candidate.config_dict
                        database.record([trial(name, 5.0 + index, problem=PROBLEM, config=config)])
                claims.release([claim])
            time.sleep(0.05)
        claims.close()
