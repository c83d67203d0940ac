"""Winners timed again on real GPUs: they hold, a number that is too good is found out, old software is healed."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from programs import python

ROOT = Path(__file__).parents[2]
# Generous: a test may share its host with others, and what is planted is far off.
TOLERANCE = "50%"


def command(*arguments: str, code: int = 0) -> str:
    return python("-m", "tunedcomm.cli.main", *arguments, timeout=400, code=code).stdout


def verify(path: Path, *more: str, code: int = 0) -> dict[int, str]:
    """The verdict at each size."""
    options = ("--world-size", "2", "--db", str(path), "--tolerance", TOLERANCE, "--json")
    found: dict[str, Any] = json.loads(command("db", "verify", *options, *more, code=code))
    told = [(w["problem"]["shape"], w["variant"], w["verdict"], w["stored"], w["measured"]) for w in found["winners"]]
    sys.stderr.write(f"\n{found['seconds']:.1f} s, {found['num_trials']} trials: {told}\n")
    return {w["problem"]["shape"][0]: w["verdict"] for w in found["winners"] if "default" in w["policies"]}


@pytest.mark.gpu(2)
def test_winners_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "tuned.db"
    options = ("--shape", "4096,65536", "--world-size", "2", "--trials", "12", "--variants", "lamport,two_shot")
    command("tune", "--op", "all_reduce", *options, "--db", str(path))
    found = verify(path)
    assert (set(found), set(found.values()) <= {"ok", "tied"}) == ({4096, 65536}, True)

    # A stored number that nothing reaches any more.
    with closing(sqlite3.connect(path)) as plain:
        small = "problem_id = (SELECT id FROM problem WHERE shape = '4096') AND variant_id IN "
        challengers = "(SELECT id FROM variant WHERE name <> 'library')"
        times = ", ".join(f"latency_p{p}_us = latency_p{p}_us / 4" for p in (10, 50, 90))
        plain.execute(f"UPDATE trial SET {times} WHERE {small} {challengers}")
        plain.commit()
    found = verify(path, "--no-store", code=1)
    assert found[4096] == "drifted"
    assert found[65536] in ("ok", "tied")
