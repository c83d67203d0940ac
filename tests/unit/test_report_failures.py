"""What a report shows of trials that failed, and what it says where there are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")

from report_samples import recorded_trials

from tunedcomm.db.layers import named_layers
from tunedcomm.db.store import Database
from tunedcomm.report.data import StoredFile, gather
from tunedcomm.report.figures import failure_panel, template


def read(path: Path) -> list[StoredFile]:
    return gather(named_layers(str(path)), []).databases


def test_reasons_that_differ_by_numbers_are_counted_together(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    with Database.open(path, create=True) as database:
        database.record(recorded_trials())
    (stored,) = read(path)
    panel = failure_panel(stored)
    rows = panel.tables[0].rows
    assert sum(int(row[0]) for row in rows) == int(panel.title.split()[0])
    counts = [int(row[0]) for row in rows]
    assert counts == sorted(counts, reverse=True)
    kinds = {(*row[1:4], template(row[4])) for row in rows}
    assert len(kinds) == len(rows), "one kind stands in two rows"
    together = next(row for row in rows if "registers" in row[4])
    assert int(together[0]) > 5
    assert not re.search(r"\d", together[4])
