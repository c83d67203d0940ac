"""Two-stage timing: a cheap look at every candidate, more samples for those still in reach of the best.

Pure functions of numbers that every rank holds, so that the ranks of a gang, and recorded trials in a gang's place,
decide alike.
"""

from __future__ import annotations

from tunedcomm.tuner.commands import Command, Latency, Outcome
from tunedcomm.tuner.job import Settings

__all__ = ["pruned", "rounds_after_look"]


def rounds_after_look(command: Command, look_us: float, settings: Settings) -> int:
    """Timed rounds that a candidate gets after a first look of `look_us`; none if it is left at that look."""
    near = command.is_library or look_us <= settings.reach * command.threshold_us
    if command.final:
        # A finalist that is far off at this shape needs a point on its curve, not a precise one.
        return settings.final_rounds if near else settings.first_rounds
    return settings.more_rounds if near else 0


def pruned(command: Command, look: Latency, error: float | None) -> Outcome:
    """The outcome of a candidate that is left at its first look."""
    reason = f"{look.p50_us:.4g} µs at first look, the best so far is {command.threshold_us:.4g} µs"
    return Outcome(status="pruned", reason=reason, latency=look, error=error)
