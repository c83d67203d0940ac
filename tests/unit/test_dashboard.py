"""Optuna's dashboard reads the studies of a sweep, as docs/tuning.md says."""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (extra `dashboard`)")

from db_samples import problem, trial

from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.study import StudyMirror, journal_path

START_S = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return json.loads(answer.read()) if "api" in path else answer.read().decode()


def test_it_starts_on_a_journal_and_shows_candidates_and_latencies(tmp_path: Path) -> None:
    kernels.discover()
    config = {"num_blocks": 4, "num_warps": 2, "launch_pdl": True}
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        path = journal_path(database)
    mirror = StudyMirror(path)
    mirror.add([trial("lamport", 2.5, config=config), trial("library", None, status="crashed", reason="planted")])
    mirror.close()
    asked = problem()
    binary, port = Path(sysconfig.get_path("scripts"), "optuna-dashboard"), free_port()
    assert binary.is_file()
    dashboard = subprocess.Popen(
        [binary, str(path), "--port", str(port), "--server", "wsgiref", "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        end = time.monotonic() + START_S
        while True:
            try:
                studies = get(port, "/api/studies")["study_summaries"]
                break
            except (urllib.error.URLError, ConnectionError):
                assert dashboard.poll() is None, (dashboard.stderr.read() if dashboard.stderr else b"").decode()
                assert time.monotonic() < end
                time.sleep(0.2)
        (study,) = studies
        assert study["study_name"].startswith(str(asked))
        trials = get(port, f"/api/studies/{study['study_id']}?after=0")["trials"]
        assert [trial["state"] for trial in trials] == ["Complete", "Pruned"]
        assert trials[0]["values"] == [2.5]
        shown = {parameter["name"]: parameter["param_external_value"] for parameter in trials[0]["params"]}
        assert shown["variant"] == "lamport"
        assert shown["lamport.num_blocks"] == "4"
        assert "<html" in get(port, "/dashboard/").lower()
    finally:
        dashboard.terminate()
        dashboard.wait(10)
