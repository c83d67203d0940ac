"""Which binaries a sweep will need, handed to the compile pool in about the order in which it will need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tunedcomm.spec import Candidate, Limits, Problem, get_op, get_variant
from tunedcomm.tuner.job import Settings
from tunedcomm.tuner.measure.compile_pool import CompilePool
from tunedcomm.tuner.measure.correctness import odd_problems
from tunedcomm.tuner.search.study import default_candidates, interleave, search_space

__all__ = ["compile_ahead"]

# The first problems' come first, and later problems share most of them.
_MAX_BINARIES = 4000


def compile_ahead(
    pool: CompilePool,
    problems: Iterable[Problem],
    settings: Settings,
    limits: Limits,
    compute_capability: int,
    chosen: Mapping[Problem, Sequence[Candidate]] | None = None,
) -> Iterator[int]:
    """Hand over the binaries of one problem at each step; yields how many of them were new.

    Without `chosen`, those of all candidates that a search may try.
    """
    handed = 0
    for problem in problems:
        allowed = search_space(problem, limits, settings) if chosen is None else chosen[problem]
        first = [candidate for candidate in default_candidates(problem, limits) if candidate in set(allowed)]
        requests: dict[Any, None] = {}
        for candidate in [*first, *interleave(allowed)]:
            requests.update(dict.fromkeys(_binaries(problem, candidate)))
        fresh = pool.submit(list(requests)[: _MAX_BINARIES - handed], compute_capability)
        handed += fresh
        yield fresh
        if handed >= _MAX_BINARIES:
            return


def _binaries(problem: Problem, candidate: Candidate) -> Iterator[Any]:
    """What a candidate's trial launches, at the odd shapes of its checks too."""
    variant = get_variant(candidate.op, candidate.variant)
    for shape in (problem, *odd_problems(get_op(problem.op), problem)):
        yield from variant.compile_requests(shape, candidate.config_dict)
