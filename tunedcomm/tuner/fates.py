"""What became of each variant in a sweep: whether anything of it runs, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tunedcomm.db.records import TrialRecord
from tunedcomm.spec import Candidate, Problem
from tunedcomm.tuner.job import FAILED

__all__ = ["VariantFate", "num_failed", "variant_fates"]

_RAN = frozenset({"ok", "pruned"})
_BROKEN = FAILED - {"infeasible"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFate:
    """One variant's candidates over all problems of a sweep, trials of earlier sweeps counted.

    Attributes:
        variant: its name.
        num_ran: trials that ran, fast or not.
        failures: status to how many failed with it; what is infeasible has not failed.
        firsts: the first trial of each kind of failure.
        infeasible: why it cannot run, where that holds for every problem.
    """

    variant: str
    num_ran: int
    failures: Mapping[str, int]
    firsts: tuple[TrialRecord, ...] = ()
    infeasible: str = ""

    @property
    def is_broken(self) -> bool:
        """True if some were tried and none runs."""
        return bool(self.failures) and not self.num_ran


def variant_fates(records: Iterable[TrialRecord]) -> tuple[VariantFate, ...]:
    """Sum up trials of one environment and of the kernels as they are, by variant."""
    by_variant: dict[str, list[TrialRecord]] = {}
    for record in _latest(records).values():
        by_variant.setdefault(record.variant, []).append(record)
    return tuple(_fate(variant, mine) for variant, mine in sorted(by_variant.items()))


def num_failed(records: Iterable[TrialRecord]) -> int:
    """How many candidates of how many problems failed in these trials, at last; infeasible ones did not."""
    return sum(record.status in _BROKEN for record in _latest(records).values())


def _latest(records: Iterable[TrialRecord]) -> dict[tuple[Problem, Candidate], TrialRecord]:
    return {(record.problem, record.candidate): record for record in records if not record.final}


def _fate(variant: str, records: list[TrialRecord]) -> VariantFate:
    failures: Counter[str] = Counter(record.status for record in records if record.status in _BROKEN)
    num_ran = sum(record.status in _RAN for record in records)
    reasons = [record.reason for record in records if record.status == "infeasible"]
    return VariantFate(
        variant=variant,
        num_ran=num_ran,
        failures=dict(failures),
        firsts=tuple(next(r for r in records if r.status == status) for status in failures),
        infeasible=reasons[0] if reasons and not failures and not num_ran else "",
    )
