"""What a person pins on the command line is what real ranks launch, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from cases import report, same_bits, settings
from dispatch_table import (
    MIDDLE,
    SMALL,
    WORLD_SIZE,
    config_of,
    inputs_of,
    launched,
    problem,
    ran,
    run_on_table,
    write_database,
)
from harness import run_ranks
from typer.testing import CliRunner

import tunedcomm
from tunedcomm.cli import main
from tunedcomm.dispatch.communicator import get_communicator

REASON = "until the switch is replaced"
ASKED = ("--op", "all_reduce", "--world-size", str(WORLD_SIZE), "--dtype", "float32", "--mode", "eager")


def invoke(verb: str, numel: int, *more: str, database: str) -> tuple[int, str]:
    arguments = [*verb.split(), *ASKED, "--shape", str(numel), *more, "--db", database]
    shown = CliRunner().invoke(main.app, arguments)
    return shown.exit_code, shown.output


def pinned_config() -> dict[str, object]:
    """Not the default, nor what wins there."""
    return dict(config_of("two_shot", SMALL))


def pinned_variant_runs(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    for _ in range(3):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "two_shot"
        assert launched[0].config == pinned_config()
        assert same_bits(out, expected)
    decision = tunedcomm.explain(get_communicator(), problem(SMALL))
    assert (decision.source, decision.candidate.variant, decision.layer) == ("pin", "two_shot", "user")
    assert REASON in decision.why


def library_can_be_pinned(rank: int) -> None:
    x, _ = inputs_of(rank, MIDDLE)
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "library"
    assert tunedcomm.explain(get_communicator(), problem(MIDDLE)).source == "pin"


def other_problems_are_left_alone(rank: int) -> None:
    x, _ = inputs_of(rank, SMALL)
    in_place = problem(SMALL, in_place=True)
    assert tunedcomm.explain(get_communicator(), in_place).source == "interpolated"
    assert ran(lambda: tunedcomm.all_reduce_(x))[0] == "lamport"


def measurements_decide_again_once_it_is_unpinned(rank: int) -> None:
    x, expected = inputs_of(rank, SMALL)
    if rank == 0:
        code, text = invoke("db unpin", SMALL, database=os.environ["TEST_DB"])
        assert code == 0, text
    assert ran(lambda: tunedcomm.all_reduce(x))[0] == "two_shot", "a group keeps to what it agreed on"
    dist.barrier()
    with settings({}):
        name, out = ran(lambda: tunedcomm.all_reduce(x))
        assert name == "lamport"
        assert same_bits(out, expected)


CASES = {
    "the pinned variant runs": pinned_variant_runs,
    "the library can be pinned": library_can_be_pinned,
    "other problems are left alone": other_problems_are_left_alone,
    "measurements decide again": measurements_decide_again_once_it_is_unpinned,
}


def body(rank: int, world_size: int) -> dict[str, str]:
    return run_on_table(CASES, rank)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    database = tmp_path_factory.mktemp("pins") / "tuned.db"
    write_database(database)
    config = ",".join(f"{name}={value}" for name, value in pinned_config().items())
    for numel, options in ((SMALL, ("--variant", "two_shot", "--config", config)), (MIDDLE, ("--variant", "library"))):
        code, text = invoke("db pin", numel, *options, "--reason", REASON, database=str(database))
        assert code == 0, text
    code, text = invoke("explain", SMALL, database=str(database))
    assert code == 0
    assert f"pinned in the user layer: {REASON}" in text
    return run_ranks(WORLD_SIZE, body, env={"TEST_DB": str(database)}, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_pins(outcomes: list[dict[str, str]], name: str) -> None:
    report(outcomes, name)


def test_missing_pin_is_exit_code_1(tmp_path: Path) -> None:
    write_database(tmp_path / "tuned.db")
    code, text = invoke("db unpin", SMALL, database=str(tmp_path / "tuned.db"))
    assert code == 1
    assert "no pin of" in text
