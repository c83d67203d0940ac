"""What a report shows of trials that failed, and what it says where there are none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")

from report_samples import recorded_trials, stored_trials

from tunedcomm.db.layers import named_layers
from tunedcomm.db.store import Database
from tunedcomm.report.data import StoredFile, gather
from tunedcomm.report.figures import failure_panel, template


def read(path: Path) -> list[StoredFile]:
    return gather(named_layers(str(path)), []).databases


def test_pruned_trials_are_no_failures(tmp_path: Path) -> None:
    (sample,) = read(stored_trials(tmp_path / "t.db", {"library": (10.0, 10.0)}))
    slow = replace(sample.trials[0], variant="lamport", status="pruned", reason="7 µs at first look", final=False)
    panel = failure_panel(replace(sample, trials=(*sample.trials, slow, slow)))
    assert not panel.figures
    assert not panel.tables
    assert panel.title.startswith("0 of 3 trials")
    assert panel.note.endswith(" 2.")
    crashed = replace(slow, status="crashed", reason="CUDA error")
    panel = failure_panel(replace(sample, trials=(*sample.trials, slow, crashed)))
    assert panel.title.startswith("1 of 3 trials")
    assert [entry["name"] for entry in panel.key] == ["crashed"]
    assert panel.tables[0].rows == [["1", "all_reduce", "lamport", "crashed", "CUDA error"]]


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


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("3.557 µs at first look, the best so far is 1.71 µs", "… µs at first look, the best so far is … µs"),
        ("fp16 on sm_90 with num_blocks=132: 12.5% at 0x7fFF12.", "fp16 on sm_90 with num_blocks=…: …% at …."),
        ("error 3.2e-2 > 1e-3", "error … > …"),
        ("no NVLink multicast", "no NVLink multicast"),
    ],
)
def test_a_template_keeps_words_and_drops_numbers(reason: str, expected: str) -> None:
    assert template(reason) == expected
