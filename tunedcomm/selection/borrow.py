"""Which other hardware's measurements may serve on this one, where the user lets them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tunedcomm.fabric import Fabric
from tunedcomm.hardware import Environment

__all__ = ["Loan", "loans", "matches", "objection"]

_PATTERN = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Loan:
    """A stored environment that the user named.

    Attributes:
        environment: where its rows were measured.
        objection: why they cannot serve here, None if they can.
    """

    environment: Environment
    objection: str | None


def matches(name: str, environment: Environment) -> bool:
    """True if `name` is part of the GPU's name, a pattern that it fits, or the beginning of the digest."""
    wanted = name.strip().lower()
    gpu = environment.gpu.lower()
    if _PATTERN & set(wanted):
        return fnmatchcase(gpu, wanted)
    return wanted in gpu or environment.digest.startswith(wanted)


def objection(here: Environment, there: Environment) -> str | None:
    """Why rows that were measured `there` cannot serve `here` however much the user may want it, or None.

    GPU model, number of SMs, memory and number of links may differ: kernels are ranked much alike then. Where the
    architecture or the way from GPU to GPU is another one, the ranking is too.
    """
    fields = [
        ("compute capability", here.compute_capability, there.compute_capability),
        ("kind of fabric", Fabric.parse(here.fabric).kind_in_words, Fabric.parse(there.fabric).kind_in_words),
        ("multicast", _yes(here.multicast), _yes(there.multicast)),
        ("number of hosts", here.nodes, there.nodes),
    ]
    different = [f"{name} is {mine} here and {theirs} there" for name, mine, theirs in fields if mine != theirs]
    return "; ".join(different) or None


def _yes(value: bool) -> str:
    return "on" if value else "off"


def loans(here: Environment, names: Sequence[str], stored: Iterable[Environment]) -> list[Loan]:
    """Stored environments of other hardware that any of the names means, each once, in the order of `stored`."""
    found: dict[str, Loan] = {}
    for environment in stored:
        if environment.hard_key != here.hard_key and any(matches(name, environment) for name in names):
            found.setdefault(environment.digest, Loan(environment, objection(here, environment)))
    return list(found.values())
