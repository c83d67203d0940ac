"""What variants are asked before they run: a question that raises is answered by a sentence, and said once.

A leaf. Any package may bring variants, and a call may ask all of an op's, on one rank or on every: one that raises must
not end a call that runs another variant.
"""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

from tunedcomm.errors import ConfigError

if TYPE_CHECKING:
    from tunedcomm.space import Config, Value
    from tunedcomm.spec import Limits, Problem, Variant

__all__ = ["default_config", "objection"]

logger = logging.getLogger("tunedcomm")
_said: set[tuple[str, str, str]] = set()


def objection(variant: Variant, problem: Problem, config: Config, limits: Limits) -> str | None:
    """Why `variant` cannot run `problem` with `config`, in its own words, or None."""
    try:
        reason: object = variant.infeasible(problem, config, limits)
    except Exception as error:  # noqa: BLE001 - of whatever package
        return _raised(variant, "infeasible", error)
    if reason is None or isinstance(reason, str):
        return reason
    return _say(variant, "infeasible", f"its infeasible() must return None or a sentence, and returned {reason!r:.80}")


def default_config(variant: Variant, problem: Problem, limits: Limits) -> dict[str, Value]:
    """The config that `variant` has tried first.

    Raises:
        ConfigError: its `default` raises, or gives no mapping.
    """
    try:
        found: object = variant.default(problem, limits)
    except Exception as error:
        raise ConfigError(f"{variant.op}.{variant.name}: {_raised(variant, 'default', error)}") from error
    if isinstance(found, dict):
        return found
    reason = f"its default() must return a dict of axis to value, and returned {found!r:.80}"
    raise ConfigError(f"{variant.op}.{variant.name}: {_say(variant, 'default', reason)}")


def _raised(variant: Variant, what: str, error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error}"
    return _say(variant, what, f"its {what}() raised {text:.200} at {frame.filename}:{frame.lineno}")


def _say(variant: Variant, what: str, reason: str) -> str:
    """Log it once a variant and question, whatever it was asked about."""
    key = (variant.op, variant.name, what)
    if key not in _said:
        _said.add(key)
        logger.warning("variant %s of %s is passed over: %s", variant.name, variant.op, reason)
    return reason
