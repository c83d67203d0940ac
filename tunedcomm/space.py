"""Search spaces: what a variant's config may be.

A `Space` is a set of named axes. A config is a plain dict with one value per axis, so that it describes itself in a
database, on a command line and in an error message. The space validates a config that came from outside, enumerates
its points in a fixed order, and asks an Optuna-like trial for one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from tunedcomm.errors import ConfigError

Value: TypeAlias = int | bool | str
Config: TypeAlias = Mapping[str, Value]

__all__ = ["Axis", "Choice", "Config", "PowerOfTwo", "Space", "Value"]


class SuggestsCategorical(Protocol):
    """The part of an Optuna trial that a space needs."""

    def suggest_categorical(self, name: str, choices: list[Value]) -> Value: ...


def _is_in(value: Any, allowed: frozenset[tuple[type, Value]]) -> bool:
    try:
        return (type(value), value) in allowed
    except TypeError:  # a list from a database has no hash
        return False


@dataclass(frozen=True, slots=True)
class Choice:
    """An axis with the listed values, in the order in which they are tried."""

    options: tuple[Value, ...]

    def __init__(self, *options: Value) -> None:
        if not options:
            raise ValueError("Choice() needs at least one option")
        object.__setattr__(self, "options", options)

    def values(self) -> tuple[Value, ...]:
        return self.options


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """An axis of the powers of two from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        for bound in (self.low, self.high):
            if bound < 1 or bound & (bound - 1):
                raise ValueError(f"PowerOfTwo bounds must be powers of two, got {self.low} and {self.high}")
        if self.low > self.high:
            raise ValueError(f"PowerOfTwo needs low <= high, got {self.low} and {self.high}")

    def values(self) -> tuple[Value, ...]:
        return tuple(1 << e for e in range(self.low.bit_length() - 1, self.high.bit_length()))


Axis: TypeAlias = Choice | PowerOfTwo


@dataclass(frozen=True, slots=True)
class Space:
    """Named axes, in a fixed order.

    Args:
        axes: name to axis. An empty mapping is a space with one point, the empty config.
        leading: values of the first axes that go together; any if None.
    """

    axes: tuple[tuple[str, Axis], ...]
    leading: frozenset[tuple[Value, ...]] | None
    # Axis to its values with their types: dispatch validates dozens of configs for every new size.
    _allowed: Mapping[str, frozenset[tuple[type, Value]]] = field(init=False, repr=False, compare=False)

    def __init__(
        self, axes: Mapping[str, Axis] | None = None, *, leading: Collection[tuple[Value, ...]] | None = None
    ) -> None:
        object.__setattr__(self, "axes", tuple((axes or {}).items()))
        object.__setattr__(self, "leading", None if leading is None else frozenset(leading))
        # With the types, for True is not 1 in a config.
        allowed = {name: frozenset((type(value), value) for value in axis.values()) for name, axis in self.axes}
        object.__setattr__(self, "_allowed", allowed)

    @property
    def _num_leading(self) -> int:
        """Axes that `leading` is about."""
        return len(next(iter(self.leading))) if self.leading else 0

    @property
    def size(self) -> int:
        """Number of points."""
        rest = math.prod(len(axis.values()) for _, axis in self.axes[self._num_leading :])
        return rest if self.leading is None else len(self.leading) * rest

    def enumerate(self) -> Iterator[dict[str, Value]]:
        """Every point, the last axis varying fastest."""
        values = [axis.values() for _, axis in self.axes]
        first, rest = values[: self._num_leading], values[self._num_leading :]
        for begin in itertools.product(*first):
            if self.leading is None or begin in self.leading:
                for end in itertools.product(*rest):
                    yield dict(zip(self.names, (*begin, *end), strict=True))

    def validate(self, config: object) -> dict[str, Value]:
        """Return `config` as a plain dict in the axes' order.

        Raises:
            ConfigError: not a mapping, a missing or unknown axis, or a value that the axis does not hold. The text
                names the axis, the value and what is allowed. Databases from elsewhere pass through here before
                anything is launched.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"a config must be a mapping of axis to value, got {type(config).__name__}: {config!r}")
        if unknown := sorted(str(name) for name in config if name not in self._allowed):
            raise ConfigError(f"unknown axis {unknown[0]!r} in config {dict(config)!r}; the axes are {self.names}")
        clean: dict[str, Value] = {}
        for name, axis in self.axes:
            if name not in config:
                raise ConfigError(f"config {dict(config)!r} lacks axis {name!r}; the axes are {self.names}")
            value = config[name]
            if not _is_in(value, self._allowed[name]):
                raise ConfigError(f"{name}={value!r} is not in its axis; allowed: {list(axis.values())}")
            clean[name] = value
        if self.leading is None:
            return clean
        begin = tuple(clean.values())[: self._num_leading]
        if begin not in self.leading:
            raise ConfigError(f"{', '.join(self.names[: len(begin)])} = {begin} do not go together")
        return clean

    def suggest(self, trial: SuggestsCategorical, *, prefix: str = "") -> dict[str, Value]:
        """Ask `trial` for one point; parameter names are `prefix` + axis."""
        return {name: trial.suggest_categorical(prefix + name, list(axis.values())) for name, axis in self.axes}

    @property
    def names(self) -> list[str]:
        """The axes' names, in order."""
        return list(self._allowed)
