"""Variants and ops of other packages, which they name under the entry point group `tunedcomm.variants`.

An entry point names a module, whose import registers variants, or a function without arguments that does so. A package
that cannot be loaded costs one warning with its name and what it said, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distributions, entry_points

from tunedcomm import spec
from tunedcomm.errors import ConfigError, UnknownNameError
from tunedcomm.kernels.common.source_hash import source_hash
from tunedcomm.spec import Variant, did_you_mean, get_op, ops, variants

__all__ = ["GROUP", "brought", "failed", "load_plugins", "misspelt_groups"]

GROUP = "tunedcomm.variants"
# Package to what it registered, `OP.VARIANT` each; package to why it brings nothing.
brought: dict[str, list[str]] = {}
failed: dict[str, str] = {}
logger = logging.getLogger("tunedcomm")


def load_plugins() -> None:
    """Register what installed packages bring, in the order of their names, the same on every machine."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: (_package(point), point.name, point.value)):
        try:
            with _all_or_nothing():
                names = _load(point)
        except Exception as error:  # noqa: BLE001 - somebody else's code must not take this library along
            why = f"its entry point {point.name} = {point.value} failed: {type(error).__name__}: {error}"
            failed[_package(point)] = why
            logger.warning("the package %s brings no variants: %s; fix or uninstall it", _package(point), why)
        else:
            brought.setdefault(_package(point), []).extend(names)
            logger.info("%s brings %s", _package(point), ", ".join(names) or "nothing")


def misspelt_groups() -> list[tuple[str, str]]:
    """(package, group) of installed entry points that look as if they were meant for `GROUP`, sorted."""
    found = {(dist.name or "of no name", point.group) for dist in distributions() for point in dist.entry_points}
    return sorted(
        (package, group)
        for package, group in found
        if group != GROUP
        and (group.startswith("tunedcomm.") or difflib.get_close_matches(group.lower(), [GROUP], cutoff=0.85))
    )


@contextlib.contextmanager
def _all_or_nothing() -> Iterator[None]:
    """Take back what is registered in the block if it raises, also variants of ops that nobody registered."""
    before = dict(spec._ops), dict(spec._variants)
    try:
        yield
        for op, name in spec._variants.keys() - before[1].keys():
            if op not in spec._ops:
                hint = did_you_mean(op, spec._ops)
                raise UnknownNameError(f"variant {name!r} is of op {op!r}, which nobody registered{hint.rstrip('.')}")
    except BaseException:
        spec._ops.clear()
        spec._ops.update(before[0])
        spec._variants.clear()
        spec._variants.update(before[1])
        raise


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "of no name"


def _registered() -> dict[tuple[str, str], Variant]:
    return {(variant.op, variant.name): variant for op in ops() for variant in variants(op).values()}


def _load(point: EntryPoint) -> list[str]:
    """Load an entry point; returns what it registered, `OP.VARIANT` each."""
    before, ops_before = _registered(), ops()
    loaded = point.load()
    if callable(loaded):
        loaded()
    for name, known in ops_before.items():
        if get_op(name) is not known:
            raise UnknownNameError(f"it registers an op {name!r}, which is there already; choose another name")
    after = _registered()
    for (op, name), variant in before.items():
        if after[op, name] is not variant:
            raise UnknownNameError(
                f"it registers a variant {name!r} of {op}, which is there already; choose another name"
            )
    added = {key: variant for key, variant in after.items() if key not in before}
    for variant in added.values():
        source_hash(variant)  # raises for what cannot be told apart from others' rows
    for op in ops().keys() - ops_before.keys():
        if "library" not in variants(op):
            raise ConfigError(f"its op {op!r} has no variant 'library', which serves what no kernel can")
    return [f"{op}.{name}" for op, name in added]
