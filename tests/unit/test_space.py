from __future__ import annotations

import pytest

from tunedcomm.errors import ConfigError
from tunedcomm.space import Choice, PowerOfTwo, Space, Value

SPACE = Space({"num_blocks": Choice(4, 8), "num_warps": PowerOfTwo(1, 4), "pdl": Choice(False, True)})


class Trial:
    """The part of an Optuna trial that a space uses: remembers what it was asked and answers with the last choice."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Value]] = {}

    def suggest_categorical(self, name: str, choices: list[Value]) -> Value:
        self.asked[name] = choices
        return choices[-1]


def test_enumerate_gives_every_point_once_the_last_axis_fastest() -> None:
    points = list(SPACE.enumerate())
    assert len(points) == SPACE.size == 12
    assert len({tuple(point.items()) for point in points}) == 12
    assert points[0] == {"num_blocks": 4, "num_warps": 1, "pdl": False}
    assert points[1] == {"num_blocks": 4, "num_warps": 1, "pdl": True}
    assert points[-1] == {"num_blocks": 8, "num_warps": 4, "pdl": True}


def test_every_point_is_valid_and_comes_back_in_the_axes_order() -> None:
    for point in SPACE.enumerate():
        shuffled = dict(reversed(point.items()))
        clean = SPACE.validate(shuffled)
        assert clean == point
        assert list(clean) == SPACE.names


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ([4, 1, True], ["mapping", "list"]),
        (None, ["mapping", "NoneType"]),
        ({"num_blocks": 4, "num_warps": 1}, ["lacks", "'pdl'"]),
        ({"num_blocks": 4, "num_warps": 1, "pdl": True, "stages": 2}, ["unknown axis", "'stages'"]),
        ({"num_blocks": 5, "num_warps": 1, "pdl": True}, ["num_blocks=5", "[4, 8]"]),
        ({"num_blocks": 4, "num_warps": 3, "pdl": True}, ["num_warps=3", "[1, 2, 4]"]),
    ],
)
def test_refusal_names_axis_value_and_what_is_allowed(config: object, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SPACE.validate(config)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [1, 0, 1.0, "True", None])
def test_types_are_not_mixed_up(value: object) -> None:
    with pytest.raises(ConfigError):
        SPACE.validate({"num_blocks": 4, "num_warps": 1, "pdl": value})
    with pytest.raises(ConfigError):
        SPACE.validate({"num_blocks": 4, "num_warps": True, "pdl": True})


def test_suggest_asks_every_axis_with_its_prefix() -> None:
    trial = Trial()
    point = SPACE.suggest(trial, prefix="lamport.")
    assert point == {"num_blocks": 8, "num_warps": 4, "pdl": True}
    assert trial.asked == {"lamport.num_blocks": [4, 8], "lamport.num_warps": [1, 2, 4], "lamport.pdl": [False, True]}


@pytest.mark.parametrize(("low", "high"), [(0, 4), (3, 8), (2, 6), (-2, 4), (8, 4)])
def test_bad_bounds_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=rf"{low}.*{high}"):
        PowerOfTwo(low, high)


def test_powers_of_two_hold_both_ends() -> None:
    assert PowerOfTwo(1, 1).values() == (1,)
    assert PowerOfTwo(16, 128).values() == (16, 32, 64, 128)
