"""What a coordinator asks of whoever sees to it that several supervisors do not run the same candidate.

The ledger only says who runs what now; the tuned database is the only truth about results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tunedcomm.spec import Candidate, Problem

__all__ = ["Claim", "Ledger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to run a candidate, until it is told or given back.

    Attributes:
        problem, candidate: what may be run.
        final: in the finals.
        key: the ledger's own name for it.
    """

    problem: Problem
    candidate: Candidate
    final: bool
    key: int


class Ledger(Protocol):
    """Shared by the supervisors that write to one database."""

    def claim(self, problem: Problem, candidate: Candidate, *, final: bool, again: bool = False) -> Claim | None:
        """Claim a candidate; None if another supervisor runs it now, or has run it: its row is stored then.

        With `again`, that it has been run does not matter.
        """

    def tell(self, claim: Claim, latency_us: float | None) -> None:
        """Report a claim's end, after its row was stored: the latency, or None if it did not get that far."""

    def holds(self, claim: Claim) -> bool:
        """False if others took this supervisor for dead meanwhile, and may have run the candidate themselves."""

    def give_back(self, claim: Claim) -> None:
        """End a claim whose candidate was not run after all."""

    def in_flight(self, problem: Problem, *, final: bool) -> frozenset[Candidate]:
        """What other live supervisors run of this problem."""

    def close(self) -> None:
        """Give every claim back and stop."""
