"""A large database: what a snapshot and `lookup` read of it, how long that takes, and what `lookup` imports.

`TUNEDCOMM_TEST_TRIALS=1000000` makes it as large as the one in bench/results/db/db_scale.csv.
"""

from __future__ import annotations

import csv
import importlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunedcomm import kernels
from tunedcomm.db import engine
from tunedcomm.db.layers import Layer, load_snapshot
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import decide
from tunedcomm.hardware import Environment
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Problem
from tunedcomm.symm.layout import limits_for

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
TRIALS = int(os.environ.get("TUNEDCOMM_TEST_TRIALS", "50000"))
HARDWARE = 10 if TRIALS >= 500_000 else 2
WORLD_SIZE = 8
# What is asked for on an idle machine; tests share theirs with others.
SNAPSHOT_S, LOOKUP_S, SLACK = 0.2, 0.5, 10


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Environment]:
    """A file of several kinds of machines, and the first of them."""
    path = tmp_path_factory.mktemp("big") / "tuned.db"
    sys.path.insert(0, str(BENCH))
    made_up = importlib.import_module("made_up")
    made_up.make_database(path, trials=TRIALS, hardware=HARDWARE, software=1, world_sizes=(2, 4, WORLD_SIZE), seed=0)
    return str(path), made_up.environments(1, 1)[0]


def load(big: tuple[str, Environment], like: Problem | None = None) -> Snapshot:
    path, environment = big
    return load_snapshot(environment, WORLD_SIZE, layers=[Layer("user", path)], strict=True, like=like)


def asked(rows: Snapshot) -> list[Problem]:
    """Problems that were measured, some that were not, and some of which only relatives were."""
    rng = random.Random(0)
    found = sorted({row.problem for row in rows.rows if row.problem.op == "all_reduce"})
    found = rng.sample(found, min(30, len(found)))
    between = [replace(p, shape=(p.shape[0] * 3 // 2 + 1,)) for p in found]
    related = [replace(p, reduction="avg", in_place=not p.in_place, input_kind="symmetric") for p in found]
    return [*found, *between, *related, replace(found[0], dtype="float32"), replace(found[0], shape=(0,))]


@pytest.mark.slow
def test_what_is_read_for_one_problem_decides_as_the_whole(big: tuple[str, Environment]) -> None:
    kernels.discover()
    whole = load(big)
    limits = limits_for(whole.environment, WORLD_SIZE)
    problems = asked(whole)
    for problem in problems:
        narrow = load(big, problem)
        assert len(narrow.rows) <= len(whole.rows)
        assert decide(problem, narrow, limits) == decide(problem, whole, limits), problem
        assert decide(problem, narrow, limits, max_sms=16) == decide(problem, whole, limits, max_sms=16), problem
    sources = {decide(problem, whole, limits).source for problem in problems}
    assert {"exact", "interpolated"} <= sources


def test_what_does_not_count_is_not_looked_at(big: tuple[str, Environment], monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of SQLite's virtual machine, which are the same on every machine."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return False

    def count_steps(connection: Any, path: Path) -> None:
        connection.set_progress_handler(look, 100)

    def steps(like: Problem | None = None) -> int:
        nonlocal looks
        looks = 0
        load(big, like)
        return 100 * looks

    monkeypatch.setattr(engine, "_limit_steps", count_steps)
    with Database.open(big[0], readonly=True) as database:
        held = database.stats()["trials"]
    # Of other kinds of machines there are as many trials each, which may not matter.
    assert 0 < steps() < 30 * held / HARDWARE
    few = replace(asked(load(big))[0], dtype="float32")
    assert steps(few) < steps() / 2


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tunedcomm.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "lookup --op all_reduce --shape 98304 --world-size 8 --hardware {digest}",
        "explain --op all_reduce --shape 98304 --world-size 8 --hardware {digest}",
        "db list --op all_to_all --hardware {digest}",
        "db show --op all_reduce --shape 512 --world-size 8 --hardware {digest}",
        "db stats",
    ],
)
def test_who_reads_does_not_wait_for_torch(big: tuple[str, Environment], command: str) -> None:
    code = (
        "import sys\n"
        "from tunedcomm.cli import main\n"
        "code = main.code_of(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'optuna', 'alembic', 'rich', 'pynvml'} & set(sys.modules)\n"
        "sys.exit(f'{code} {sorted(heavy)}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command.format(digest=big[1].digest[:10]).split()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TUNEDCOMM_DB": big[0], "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "0 []"


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    command = [sys.executable, str(BENCH / "db_scale.py"), "--trials", "4000", "--hardware", "2", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with out.open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["trials"] == "4000"
    assert int(row["snapshot_rows"]) > 0
