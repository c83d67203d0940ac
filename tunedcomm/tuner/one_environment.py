"""Gangs of one sweep run in one environment."""

from __future__ import annotations

from tunedcomm.errors import TuningError
from tunedcomm.hardware import Environment

__all__ = ["other_environment"]


def other_environment(gang: int, first: Environment, other: Environment) -> TuningError:
    """What to raise where a gang runs in another environment than the first one."""
    differences = first.differences(other).values() or first.drift(other)
    return TuningError(
        f"gang {gang} runs in another environment than the first one: {'; '.join(differences)}. A sweep "
        "measures one environment: tune the GPUs of each kind by themselves, with CUDA_VISIBLE_DEVICES"
    )
