"""Bad usage of every verb: one message that says what was wrong, exit code 2, nothing begun and nothing made."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import refused

from tunedcomm import hardware
from tunedcomm.cli import options
from tunedcomm.db import store
from tunedcomm.db.store import Database
from tunedcomm.metrics import format_bytes, plural
from tunedcomm.tuner.search.progress import Progress
from tunedcomm.tuner.search.spec import SweepSpec
from tunedcomm.tuner.search.summary import SweepOutcome


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of GPUs that are found here, none."""
    found = [0]
    monkeypatch.setattr(hardware, "num_gpu_ranks", lambda: found[0])
    return found


def begin(spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None) -> SweepOutcome:
    """Stand in for `sweep`: the first thing that is stored must be refused."""
    database.start_run(command=spec.command, seed=0, budget="", host="here")
    raise AssertionError("the sweep must not begin")


@pytest.fixture(autouse=True)
def _no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", begin)


TUNE = [
    ("--op all_reduse", "did you mean 'all_reduce'"),
    ("", "--op"),
    ("--op all_reduce --variants lamprt", "did you mean 'lamport'"),
    ("--op all_reduce --dtype bf16", "did you mean 'bfloat16'"),
    ("--op all_reduce --reduction mean", "Allowed: sum, avg"),
    ("--op all_reduce --shape 4096*8", "did you mean '4096x8'"),
    ("--op all_reduce --shape 4096x8", "2 dimensions"),
    ("--op all_reduce --shape 0", "no elements"),
    (f"--op all_reduce --shape {10**30}", "more elements"),
    ("--op all_reduce --shpe 8", "--shape"),
    ("--op all_reduce --backend cuda", "this machine has 0"),
    ("--op all_reduce --world-size 64", "64 ranks"),
    ("--op all_reduce --world-size 1", "--world-size"),
    ("--op all_reduce --budget soon", "'soon'"),
    ("--op all_reduce --gangs 1.5", "'1.5'"),
    ("--op all_reduce --gangs 0", "'0'"),
    ("--op gemm_rs --shape 4095x512x512", "4095"),
    ("--op all_gather --in-place yes", "cannot overwrite its input"),
    ("--op all_reduce --shape 1024 --seed 99999999999999999999", "'--seed': 99999999999999999999"),
    ("--op all_reduce --trials 0", "'--trials': 0 "),
    ("--op all_reduce --trials few", "'--trials': 'few'"),
    ("--op all_reduce --mode trt", "'--mode': 'trt' is not one of 'graph', 'eager', 'both'"),
    ("--op all_reduce --db sqlite://", "DatabaseAccessError"),
    ("--op all_reduce --db sqlite:///new.db?timeout=5", "DatabaseAccessError"),
    ("--op all_reduce --db /tmp", "directory"),
    ("--op all_reduce --db .", "directory"),
    ("--op all_reduce --model lama3-70b", "did you mean 'llama3-70b'"),
    ("--op all_reduce --model llama3-8b --shape 4096", "--model or --shape"),
    ("--op all_reduce --model llama3-8b --tp 2 --world-size 4", "--tp"),
    ("--op all_reduce --model llama3-8b --tp 1", "--tp"),
    ("--op all_reduce --model llama3-8b --tokens 0", "'0'"),
    ("--op all_reduce --model llama3-8b --tokens 1,-8", "'-8'"),
    ("--op all_reduce --model llama3-8b --tokens many", "'many'"),
    ("--op all_reduce --tp 4", "needs a model"),
    ("--op all_reduce --tokens 4", "needs a model"),
    ("--from-misses --shape 64", "--from-misses"),
]
ASKED = "--op all_reduce --shape 8 --world-size 2"
OTHERS = [
    ("lookp", "'lookup'"),
    ("trim", "trim"),
    ("lookup --op all_reduce", "--shape"),
    (f"lookup {ASKED} --op all_gather", "2 times"),
    ("tune --op all_reduce --budget 1s --budget 2s", "--budget"),
    ("lookup --op allreduce --shape 8 --world-size 2", "did you mean 'all_reduce'"),
    ("lookup --op all_reduce --shape 8 --world-size 0", "--world-size"),
    ("lookup --op all_reduce --shape wide --world-size 2", "'wide'"),
    ("lookup --op all_gather --shape 8 --world-size 2 --in-place", "cannot overwrite its input"),
    (f"explain {ASKED} --dtype fp16", "did you mean 'float16'"),
    (f"explain {ASKED} --mode lazy", "lazy"),
    (f"explain {ASKED} --reduction product", "'product'"),
    ("db pin --op all_gather --shape 8 --world-size 2 --in-place --variant library --reason x", "cannot overwrite"),
    ("db show --op all_reduce --shape 8x8 --world-size 2", "2 dimensions"),
    ("db list --db /nowhere/at/all.db", "does not exist"),
    ("db prune", "--superseded"),
    ("db prune --yes", "--superseded"),
    ("db prune --failed --older-than 999999w", "at most 1000 years"),
    ("db prune --older-than soon", "'soon'"),
    ("db prune --older-than -3d", "'-3d'"),
    ("db verify --tolerance much", "'much'"),
    ("db verify --tolerance -1%", "'-1%'"),
    ("db verify --tolerance 200%", "'200%'"),
    ("db export", "name the file"),
    ("db export -", "stdout"),
    ("db export - --format jsonl --json", "not both"),
    ("db export out.csv --format csv", "'csv'"),
    ("db export --cluster H200!", "cannot name a cluster"),
    ("db export --cluster h200 --format jsonl", "SQLite"),
    ("db export --cluster h200 /dev/null", "/dev/null cannot be made"),
    ("db import", "SRC"),
    ("db import absent.jsonl", "does not exist"),
    ("db merge absent.db", "--into"),
    ("db merge absent.db --into out.db", "does not exist"),
    ("db diff absent.db", "'B'"),
    ("db diff absent.db absent.db", "does not exist"),
]


@pytest.mark.parametrize(("arguments", "part"), [*((f"tune {more}", part) for more, part in TUNE), *OTHERS])
def test_bad_usage_is_named_and_makes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert part in refused(*arguments.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["tune --op all_reduce", "bench --op all_reduce", "demo"])
def test_more_ranks_than_gpus(gpus: list[int], verb: str) -> None:
    gpus[0] = 4
    assert "8 ranks need 8 GPUs, this machine has 4" in refused(*verb.split(), "--world-size", 8)


def test_a_database_that_is_locked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNEDCOMM_DB_PATIENCE_S", "1")  # a sweep waits for it, but not for ever
    path = tmp_path / "user.db"
    Database.open(path, create=True).close()
    monkeypatch.setitem(store.Database.open.__func__.__kwdefaults__, "busy_timeout_s", 0.2)  # type: ignore[attr-defined]
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    said = refused("tune", "--op", "all_reduce")
    assert "DatabaseBusyError" in said
    assert "user.db is locked" in said
    other.close()


def test_a_database_that_cannot_be_written(ordinary_user: Path) -> None:
    path = ordinary_user / "tuned.db"
    Database.open(path, create=True).close()
    path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    if os.geteuid() == 0:
        os.seteuid(65534)
    for target in (path, ordinary_user / "new.db", ordinary_user / "deeper" / "new.db"):
        said = refused("tune", "--op", "all_reduce", "--db", target)
        assert "DatabaseAccessError" in said
        assert str(ordinary_user) in said


# Values of options


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1h30m", 5400.0), ("0.5h", 1800.0), ("1M", 60.0)],
)
def test_budgets(text: str, seconds: float) -> None:
    assert options.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-5m", "10m5h", "1d"])
def test_a_bad_budget_is_quoted(text: str) -> None:
    with pytest.raises(options.typer.BadParameter, match=repr(text)):
        options.parse_budget(text)


def test_shares() -> None:
    shares = {"10%": 0.1, "0.25": 0.25, "7.5 %": 0.075, "0": 0.0}
    assert {text: options.parse_share(text) for text in shares} == pytest.approx(shares)
    with pytest.raises(options.typer.BadParameter):
        options.parse_share("10 %%")


def test_options_become_a_problem() -> None:
    named = options.ProblemOptions(op="all_reduce", shape="98304", dtype="bfloat16", world_size=4)
    assert str(named.problem()) == "all_reduce 98304 bfloat16 world_size=4 graph"


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


def test_plurals() -> None:
    assert [plural(count, "trial") for count in (0, 1, 2)] == ["0 trials", "1 trial", "2 trials"]
