"""Variants and ops of other packages, which they name under the entry point group `tunedcomm.variants`.

An entry point names a module, whose import registers variants, or a function without arguments that does so. A package
that cannot be loaded costs one warning with its name and the error, and leaves nothing behind.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, distributions, entry_points

from tunedcomm import spec
from tunedcomm.errors import ConfigError, UnknownNameError
from tunedcomm.kernels.common.source_hash import source_hash
from tunedcomm.spec import OpSpec, Variant, did_you_mean

__all__ = ["GROUP", "brought", "failed", "load_plugins", "loading", "misspelt_groups"]

GROUP = "tunedcomm.variants"
# Package to the variants it registered, `OP.VARIANT` each; package to why it brings nothing.
brought: dict[str, list[str]] = {}
failed: dict[str, str] = {}
# The package that is being loaded now and its entry point, for who waits in another thread; at most one.
loading: list[str] = []
logger = logging.getLogger("tunedcomm")


def load_plugins() -> None:
    """Register what installed packages bring, in the order of their names, the same on every machine."""
    for point in sorted(entry_points(group=GROUP), key=lambda point: (_package(point), point.name, point.value)):
        loading.append(f"{_package(point)} ({point.value})")
        try:
            names = _load(point)
        except Exception as error:  # noqa: BLE001 - somebody else's code must not take this library along
            why = f"its entry point {point.name} = {point.value} failed: {type(error).__name__}: {error}"
            failed[_package(point)] = why
            logger.warning("the package %s brings no variants: %s; fix or uninstall it", _package(point), why)
        else:
            brought.setdefault(_package(point), []).extend(names)
            logger.info("%s brings %s", _package(point), ", ".join(names) or "nothing")
        finally:
            loading.clear()


def misspelt_groups() -> list[tuple[str, str]]:
    """(package, group) of installed entry points that look as if they were meant for `GROUP`, sorted."""
    found = {(dist.name or "of no name", point.group) for dist in distributions() for point in dist.entry_points}
    return sorted(
        (package, group)
        for package, group in found
        if group != GROUP
        and (group.startswith("tunedcomm.") or difflib.get_close_matches(group.lower(), [GROUP], cutoff=0.85))
    )


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "of no name"


def _load(point: EntryPoint) -> list[str]:
    """Load an entry point; returns its variants, `OP.VARIANT` each, or raises and takes all of it back."""
    ops, variants = dict(spec._ops), dict(spec._variants)
    try:
        loaded = point.load()
        if callable(loaded):
            loaded()
        return _check_added(ops, variants)
    except BaseException:
        for registry, before in ((spec._ops, ops), (spec._variants, variants)):
            registry.clear()
            registry.update(before)  # type: ignore[arg-type]
        raise


def _check_added(ops: Mapping[str, OpSpec], variants: Mapping[tuple[str, str], Variant]) -> list[str]:
    """`OP.VARIANT` of what is registered now and was not before.

    Raises:
        TunedCommError: it replaces what was there, or cannot be used.
    """
    for name, known in ops.items():
        if spec._ops[name] is not known:
            raise UnknownNameError(f"it registers an op {name!r}, which is there already; choose another name")
    for (op, name), variant in variants.items():
        if spec._variants[op, name] is not variant:
            raise UnknownNameError(
                f"it registers a variant {name!r} of {op}, which is there already; choose another name"
            )
    added = spec._variants.keys() - variants.keys()
    for op, name in added:
        if op not in spec._ops:
            hint = did_you_mean(op, spec._ops)
            raise UnknownNameError(f"variant {name!r} is of op {op!r}, which nobody registered{hint.rstrip('.')}")
        source_hash(spec._variants[op, name])  # raises for what cannot be told apart from others' rows
    for op in spec._ops.keys() - ops.keys():
        if (op, "library") not in spec._variants:
            raise ConfigError(f"its op {op!r} has no variant 'library', which serves what no kernel can")
    return [f"{op}.{name}" for op, name in spec._variants if (op, name) in added]
