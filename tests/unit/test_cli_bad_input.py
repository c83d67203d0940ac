"""Bad input on the command line: one message that says what was wrong and what to do, exit code 2, nothing begun."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunedcomm.cli import main, options, tune
from tunedcomm.db import store
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.sweep import Progress, SweepOutcome, SweepSpec


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "num_gpus", lambda: 0)


def refuse(spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None) -> SweepOutcome:
    raise AssertionError(f"the sweep must not begin: {spec}")


def begin_and_store(
    spec: SweepSpec, database: Database, progress: Callable[[Progress], None] | None = None
) -> SweepOutcome:
    database.start_run(command=spec.command, seed=0, budget="", host="here")
    raise AssertionError("the database must not take it")


def refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said about bad usage."""
    with pytest.raises(SystemExit) as caught:
        main.run(arguments.split())
    shown = capsys.readouterr()
    assert caught.value.code == 2, shown
    assert shown.out == ""
    assert "Traceback" not in shown.err
    return " ".join(shown.err.split())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--op all_reduse", ["unknown op 'all_reduse'; did you mean 'all_reduce'", "The ops are "]),
        ("--op all_reduce --model lama3-70b", ["unknown model 'lama3-70b'; did you mean 'llama3-70b'", "--shape"]),
        (
            "--op all_reduce --variants lamprt",
            ["no variant 'lamprt'; did you mean 'lamport'", "Its variants are", "doctor"],
        ),
        ("--op all_reduce --dtype bf16", ["'bf16' is not a dtype of all_reduce; did you mean 'bfloat16'"]),
        ("--op all_reduce --reduction mean", ["'mean' is not a reduction of all_reduce", "Allowed: sum, avg"]),
        ("--op all_reduce --shape 4096*8", ["shape '4096*8' is not of the form", "did you mean '4096x8'"]),
        ("--op all_reduce --shape 4096x8", ["has 2 extents, a shape of all_reduce has 1", "98304"]),
        ("--op all_reduce --shape 0", ["'0' has no elements: there is nothing to measure"]),
        (f"--op all_reduce --shape {10**30}", ["more elements than any memory holds"]),
        ("--op all_reduce --shpe 8", ["No such option: --shpe", "--shape"]),
        ("--op all_reduce --backend cuda", ["at least 2 GPUs, this machine has 0", "--backend host"]),
        ("--op all_reduce --world-size 64", ["64 ranks are more than the 8 that kernels serve"]),
        ("--op all_reduce --world-size 1", ["--world-size", "2"]),
        ("--op gemm_rs --shape 4095x512x512", ["M = 4095 of gemm_rs is no multiple of 2 ranks"]),
        ("--op all_gather --in-place yes", ["all_gather cannot overwrite its input"]),
        ("--op all_reduce --shape 1024 --seed 99999999999999999999", ["--seed", "less than or equal to"]),
        ("--op all_reduce --db sqlite://", ["DatabaseAccessError", "give a file's path"]),
        ("--op all_reduce --db sqlite:///{path}?timeout=5", ["DatabaseAccessError", "give a file's path"]),
    ],
)
def test_tune_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    parts: list[str],
) -> None:
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", refuse)
    said = refused(f"tune {arguments}".format(path=tmp_path / "user.db"), capsys)
    for part in parts:
        assert part in said
    assert not (tmp_path / "user.db").exists(), "no database is made for a sweep that cannot be"


@pytest.mark.parametrize("verb", ["tune", "bench", "demo"])
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    monkeypatch.setattr(options, "num_gpus", lambda: 4)
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", refuse)
    op = "" if verb == "demo" else "--op all_reduce"
    assert "8 ranks need 8 GPUs, this machine has 4" in refused(f"{verb} {op} --world-size 8", capsys)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("lookup --op allreduce --shape 8 --world-size 2", "did you mean 'all_reduce'"),
        ("explain --op all_reduce --shape 8 --world-size 2 --dtype fp16", "did you mean 'float16'"),
        ("lookup --op all_gather --shape 8 --world-size 2 --in-place", "all_gather cannot overwrite its input"),
        (
            "db pin --op all_gather --shape 8 --world-size 2 --in-place --variant library --reason x",
            "all_gather cannot overwrite its input",
        ),
        ("db prune --failed --older-than 999999w", "at most 1000 years"),
        ("lookp", "Did you mean 'lookup'"),
    ],
)
def test_other_verbs_say_it_too(capsys: pytest.CaptureFixture[str], arguments: str, part: str) -> None:
    assert part in refused(arguments, capsys)


def test_a_database_that_is_locked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", begin_and_store)
    monkeypatch.setenv("TUNEDCOMM_DB_PATIENCE_S", "1")  # a sweep waits for it, but not for ever
    path = tmp_path / "user.db"
    Database.open(path, create=True).close()
    monkeypatch.setitem(store.Database.open.__func__.__kwdefaults__, "busy_timeout_s", 0.2)  # type: ignore[attr-defined]
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    said = refused("tune --op all_reduce", capsys)
    assert "DatabaseBusyError" in said
    assert "user.db is locked by another writer" in said
    assert "wait for it to end, or give each host its own file" in said
    other.close()


def _drop_privileges() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def test_a_database_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, ordinary_user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", begin_and_store)
    path = ordinary_user / "tuned.db"
    Database.open(path, create=True).close()
    path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    _drop_privileges()
    for target in (path, ordinary_user / "new.db", ordinary_user / "deeper" / "new.db"):
        said = refused(f"tune --op all_reduce --db {target}", capsys)
        assert "DatabaseAccessError" in said
        assert str(ordinary_user) in said
        assert "TUNEDCOMM_DB" in said


@pytest.mark.parametrize(
    ("variables", "spare"),
    [
        ({}, False),
        ({"LOCAL_RANK": "3"}, True),
        ({"SLURM_LOCALID": "1"}, True),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, True),
        ({"LOCAL_RANK": ""}, False),
    ],
)
def test_one_copy_a_host_tunes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], spare: bool
) -> None:
    for name in ("RANK", *tune.LOCAL_RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", refuse)
    assert tune.is_spare_copy() == spare
    shown = CliRunner().invoke(main.app, ["tune", "--op", "all_reduce"])
    if spare:
        assert (shown.exit_code, shown.stdout) == (0, "")
        assert "another copy of this command uses this host's GPUs" in shown.stderr
        assert not (tmp_path / "user.db").exists()
    else:
        assert isinstance(shown.exception, AssertionError)
