"""`tunedcomm tune --model`, with a sweep that only keeps what it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from tunedcomm.cli import main, options
from tunedcomm.db.store import Database
from tunedcomm.tuner.models import catalog
from tunedcomm.tuner.search.sweep import Progress, SweepOutcome, SweepSpec


class Sweep:
    """Stands in for `sweep`."""

    def __init__(self) -> None:
        self.spec: SweepSpec | None = None

    def __call__(
        self, spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None
    ) -> SweepOutcome:
        self.spec = spec
        return SweepOutcome(
            run_id=1,
            environment=None,
            problems=(),
            reason="done",
            progress=Progress(
                problems=1,
                problems_done=1,
                trials=0,
                trials_planned=0,
                failures={},
                gangs=(),
                num_gangs=0,
                elapsed_s=0.0,
            ),
            dropped=(),
            start_s=3.5,
            compiled_ahead=0,
        )


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Sweep:
    stand_in = Sweep()
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", stand_in)
    monkeypatch.setattr(options, "num_gpus", lambda: 4)
    return stand_in


def start(options: str, *, op: str = "--op all_reduce") -> Any:
    return CliRunner().invoke(main.app, ["tune", *op.split(), *options.split()])


def asked(sweep: Sweep, options: str) -> SweepSpec:
    shown = start(options)
    assert shown.exit_code == 0, shown.output
    assert sweep.spec is not None
    return sweep.spec


def test_a_model_becomes_shapes_and_a_world_size(sweep: Sweep) -> None:
    spec = asked(sweep, "--model llama3-70b --tp 2 --tokens 1,8,64 --tokens 4096")
    assert spec.shapes == ((8192,), (65536,), (524288,), (33554432,))
    assert (spec.world_size, spec.dtypes) == (2, ("bfloat16",))


def test_host_ranks_follow_tp(sweep: Sweep) -> None:
    spec = asked(sweep, "--model llama3-8b --tp 8 --tokens 1 --backend host")
    assert (spec.backend, spec.world_size) == ("host", 8)
    assert asked(sweep, "--model llama3-8b --tokens 1 --backend host").world_size == 2


@pytest.mark.parametrize(
    ("options", "option", "text"),
    [
        ("--model llama3-8b --shape 4096", "--model", "pass --model or --shape"),
        ("--model llama3-8b --tp 2 --world-size 4", "--tp", "pass one of them"),
        ("--model llama3-8b --tp 8", "--world-size", "this machine has 4"),
        ("--model llama3-8b --tp 1", "--tp", "2"),
        ("--model llama3-8b --tokens 0", "--tokens", "'0' is not a number of tokens"),
        ("--model llama3-8b --tokens 1,-8", "--tokens", "'-8' is not a number of tokens"),
        ("--model llama3-8b --tokens many", "--tokens", "'many' is not a number of tokens"),
        ("--tp 4", "--tp", "needs a model"),
        ("--tokens 4", "--tokens", "needs a model"),
    ],
)
def test_options_that_do_not_go_together(sweep: Sweep, options: str, option: str, text: str) -> None:
    shown = start(options)
    assert shown.exit_code == 2
    assert option in shown.stderr
    assert text in " ".join(shown.stderr.split())
    assert sweep.spec is None


def test_models_are_listed_without_an_op() -> None:
    shown = start("--list-models", op="")
    assert shown.exit_code == 0, shown.output
    line = next(line for line in shown.stdout.splitlines() if line.startswith("llama3-70b"))
    for part in ("llama3.3-70b", "80", "8192", "28672", "64", "128256", "meta-llama/Meta-Llama-3-70B: config.json"):
        assert part in line
    assert len(shown.stdout.splitlines()) == 1 + len(catalog())


@pytest.mark.parametrize(
    ("model", "op", "scalings"),
    [
        ("deepseek-v3", "all_reduce_rms_norm", ("", "group128")),
        ("llama3-70b", "all_reduce_rms_norm", ()),
        ("deepseek-v3", "all_reduce", ()),
        ("deepseek-v3 --scaling token,fp8+norm", "all_reduce_rms_norm", ("token", "fp8+norm")),
    ],
)
def test_norms_of_models_that_ship_in_fp8_are_tuned_so_too(
    sweep: Sweep, model: str, op: str, scalings: tuple[str, ...]
) -> None:
    shown = start(f"--model {model} --tp 4 --tokens 1", op=f"--op {op}")
    assert shown.exit_code == 0, shown.output
    assert sweep.spec is not None
    assert sweep.spec.scalings == scalings
    assert sweep.spec.shapes == (((1, 7168) if "deepseek" in model else (1, 8192)) if "norm" in op else (7168,),)
