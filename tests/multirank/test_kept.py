"""A start whose databases have not changed since the last one: rank 0 reads what that one kept."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from harness import run_ranks
from test_dispatch import problem, trial

from tunedcomm.db.store import Database

WORLD_SIZE = 2


def test_a_first_call_imports_no_sqlalchemy_where_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def start() -> tuple[list[bool], str, str]:
        ranks = run_ranks(WORLD_SIZE, "kept_body:first_call", fresh=True)
        assert len({rank[1:] for rank in ranks}) == 1, ranks
        return [rank[0] for rank in ranks], *ranks[0][1:]

    path, asked = tmp_path / "user.db", replace(problem(4096), world_size=WORLD_SIZE)
    with Database.open(path, create=True) as database:
        database.record([trial("library", 4096, 10.0, problem=asked)])
    _settle(path)
    loaded, digest, source = start()
    assert loaded == [True, False], "rank 0 reads the database, the other one none"
    assert start() == ([False, False], digest, source)
    with Database.open(path) as database:
        database.record([trial("two_shot", 4096, 1.0, problem=asked)])
    loaded, other, _ = start()
    assert loaded == [True, False]
    assert other != digest, "the new row is seen at once"


def _settle(path: Path) -> None:
    """Wait until a file is so old that a later change shows."""
    time.sleep(max(0.0, 3.2 - (time.time() - os.stat(path).st_ctime)))  # noqa: PTH116
