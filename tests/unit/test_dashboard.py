"""Optuna's dashboard reads the studies of a sweep, as docs/tuning.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
from db_samples import problem, trial
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.tuner.search.study import StudyMirror, journal_path

dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (extra `dashboard`)")


def get(app: Any, path: str) -> str:
    environ = {"PATH_INFO": path, "QUERY_STRING": "after=0"}
    setup_testing_defaults(environ)
    return b"".join(app(environ, lambda *status: None)).decode()


def test_it_shows_candidates_and_latencies_of_a_journal(tmp_path: Path) -> None:
    kernels.discover()
    config = {"num_blocks": 4, "num_warps": 2, "launch_pdl": True}
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        path = journal_path(database)
    mirror = StudyMirror(path)
    mirror.add([trial("lamport", 2.5, config=config), trial("library", None, status="crashed", reason="planted")])
    mirror.close()
    app = dashboard.wsgi(JournalStorage(JournalFileBackend(str(path))))
    (study,) = json.loads(get(app, "/api/studies"))["study_summaries"]
    assert study["study_name"].startswith(str(problem()))
    trials = json.loads(get(app, f"/api/studies/{study['study_id']}"))["trials"]
    assert [trial["state"] for trial in trials] == ["Complete", "Pruned"]
    assert trials[0]["values"] == [2.5]
    shown = {parameter["name"]: parameter["param_external_value"] for parameter in trials[0]["params"]}
    assert (shown["variant"], shown["lamport.num_blocks"]) == ("lamport", "4")
    assert "<html" in get(app, "/dashboard/").lower()
