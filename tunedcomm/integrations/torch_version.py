"""The versions of torch that the integrations work with, and the error for any other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tunedcomm.errors import UnsupportedVersionError

__all__ = ["NEWEST", "OLDEST", "check_torch"]

OLDEST = (2, 11)
NEWEST = (2, 13)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _types_of(namespace: str, name: str) -> tuple[str, ...] | None:
    """Types of an operator's arguments as this torch has them; None if there is no such operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None or "default" not in packet.overloads():
        return None
    return tuple(str(argument.type) for argument in packet.default._schema.arguments)


def check_torch(what: str, operators: Mapping[tuple[str, str], tuple[str, ...]], instead: str) -> None:
    """Refuse a torch whose operators are not those that `what` was written for.

    Args:
        what: what was asked for, for the error's text.
        operators: (namespace, name) to the types of the arguments; a group's name may be of another type, for newer
            versions take the group itself, too.
        instead: what to do with such a torch.

    Raises:
        UnsupportedVersionError: an older or newer version, or one whose operators differ.
    """
    known = f"torch {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
    if not OLDEST <= _version() <= NEWEST:
        raise UnsupportedVersionError(
            f"{what} is known to work with {known}, this is {torch.__version__}; install one of those, or {instead}"
        )
    for (namespace, name), types in operators.items():
        found = _types_of(namespace, name)
        if found is None or tuple("str" if of == "Any" else of for of in found) != types:
            raise UnsupportedVersionError(
                f"{what} does not know this build of torch {torch.__version__}: {namespace}::{name} takes {found}, "
                f"not {types}; install a release of {known}, or {instead}"
            )
