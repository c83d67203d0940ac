"""An op that nothing can run, and supervisors that pretend to run it, each in a process of its own."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from db_samples import H200, trial

from tunedcomm import spec
from tunedcomm.db.store import Database
from tunedcomm.space import Choice, Space
from tunedcomm.spec import Candidate, Problem, Variant
from tunedcomm.tuner.ledger import OptunaLedger, open_ledger
from tunedcomm.tuner.owners import Owner

OP = "pretended"
PROBLEM = Problem(OP, (1024,), "bfloat16", 2)
BLOCKS, WARPS = (1, 2, 4, 8), (1, 2, 4, 8)


def _nothing(*_: Any) -> Any:
    return None


def variants() -> dict[tuple[str, str], Variant]:
    """By the registry's keys."""
    space = Space({"num_blocks": Choice(*BLOCKS), "num_warps": Choice(*WARPS)})
    return {
        (OP, name): Variant(OP, name, "ordered", "", space, _nothing, _nothing, _nothing, _nothing)
        for name in ("one", "two", "three")
    }


CANDIDATES = [
    Candidate.of(OP, name, {"num_blocks": blocks, "num_warps": warps})
    for name in ("one", "two", "three")
    for blocks in BLOCKS
    for warps in WARPS
]


def open_as(url: str, host: str | None, **options: Any) -> OptunaLedger:
    """The ledger as a process on this host sees it, or as one that pretends to be on another."""
    owner = Owner.here() if host is None else replace(Owner.here(), name=host, kernel=host)
    return open_ledger(url, H200.digest, lambda op: "sources of " + op, owner=owner, **options)


def work(url: str, index: int, log: str, host: str | None, run_s: float, gate: Any) -> None:
    """Run every candidate that nobody else runs or has run, until all have a row."""
    spec._variants.update(variants())
    order = list(CANDIDATES)
    random.Random(index).shuffle(order)
    ledger = open_as(url, host, heartbeat_s=1, grace_s=4)
    with Database.open(url, patience_s=60) as database, Path(log).open("a", buffering=1) as file:
        gate.wait()
        while left := [c for c in order if c not in stored(database)]:
            for candidate in left:
                if candidate in ledger.in_flight(PROBLEM, final=False):
                    continue
                claim = ledger.claim(PROBLEM, candidate, final=False)
                if claim is None:
                    if candidate in ledger.in_flight(PROBLEM, final=False) or candidate in stored(database):
                        continue
                    # Who ran it died without storing its row.
                    claim = ledger.claim(PROBLEM, candidate, final=False, again=True)
                if claim is None:
                    continue
                file.write(f"{os.getpid()} {candidate}\n")
                time.sleep(run_s)
                if ledger.holds(claim):
                    name, config = candidate.variant, candidate.config_dict
                    database.record([trial(name, 5.0 + index, problem=PROBLEM, config=config)])
                ledger.tell(claim, 5.0 + index)
            time.sleep(0.05)
    ledger.close()


def stored(database: Database) -> set[Candidate]:
    return {record.candidate for record in database.trials(problem=PROBLEM)}


FIRST, SECOND = CANDIDATES[:2]


def claim(ledger: OptunaLedger, candidate: Candidate = FIRST, **options: Any) -> Any:
    return ledger.claim(PROBLEM, candidate, **{"final": False, **options})


def flying(ledger: OptunaLedger, *, final: bool = False) -> set[Candidate]:
    return set(ledger.in_flight(PROBLEM, final=final))
