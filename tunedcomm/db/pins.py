"""Whether something may be pinned: a pin that cannot run would be of no effect."""

from __future__ import annotations

from collections.abc import Mapping

from tunedcomm.errors import InfeasibleError
from tunedcomm.space import Value
from tunedcomm.spec import Candidate, Limits, Problem, check_candidate, get_variant

__all__ = ["pinnable"]


def pinnable(problem: Problem, variant: str, config: Mapping[str, Value] | None = None, *, limits: Limits) -> Candidate:
    """The candidate to give to `Database.pin`.

    Args:
        problem: what the pin is for; its variants must be registered.
        variant: a name.
        config: a point of the variant's space; by default the variant's own for the problem.
        limits: of the machine that the pin is for.

    Raises:
        UnknownNameError: no such variant.
        ConfigError: the config is not in its space.
        InfeasibleError: dispatch would not run it there.
    """
    found = get_variant(problem.op, variant)
    values = found.default_config(problem, limits) if config is None else dict(config)
    candidate = Candidate.of(problem.op, variant, found.space.validate(values))
    reason = None if found.is_library else check_candidate(problem, candidate, limits, by_name=False)
    if reason is not None:
        raise InfeasibleError(
            f"{candidate} cannot run {problem} there: {reason}; pin another one, `tunedcomm explain` lists them"
        )
    return candidate
