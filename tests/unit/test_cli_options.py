from __future__ import annotations

import pytest
import typer

from tunedcomm.cli import options
from tunedcomm.metrics import format_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("0.5h", 1800.0), ("1M", 60.0)],
)
def test_budgets(text: str, seconds: float) -> None:
    assert options.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "0m", "-5m", "10m5h", "1d"])
def test_bad_budget_is_bad_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        options.parse_budget(text)
    assert repr(text) in str(caught.value)


def named(**changes: object) -> options.ProblemOptions:
    values: dict[str, object] = {"op": "all_reduce", "shape": "98304", "dtype": "bfloat16", "world_size": 4, **changes}
    return options.ProblemOptions(**values)  # type: ignore[arg-type]


def test_options_become_a_problem() -> None:
    problem = named(mode="eager", input_kind="symmetric", reduction="avg").problem()
    assert str(problem) == "all_reduce 98304 bfloat16 world_size=4 eager (avg, symmetric)"


def test_reduction_defaults_to_the_first_of_the_op() -> None:
    assert named().problem().reduction == "sum"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"shape": "4x8"}, ["2 extents", "number of elements"]),
        ({"shape": "many"}, ["'many'", "98304"]),
        ({"dtype": "bf16"}, ["'bf16'", "bfloat16"]),
        ({"reduction": "product"}, ["'product'", "sum, avg"]),
    ],
)
def test_what_does_not_fit_the_op_is_bad_usage(changes: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        named(**changes).problem()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (98304 * 2, "192 KiB"),
        (3 << 19, "1.5 MiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
