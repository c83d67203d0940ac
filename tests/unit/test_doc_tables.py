"""Tables and the plot on the pages are what bench/results says."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunedcomm.bench.csv import COLUMNS, known_link_gb_s

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import measured  # noqa: E402
from measured import TABLES  # noqa: E402


@pytest.mark.parametrize("page", measured.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert measured.written(text) == text, "run `python docs/measured.py`"


def test_every_table_is_on_one_page() -> None:
    found = [name for page in measured.pages() for name in measured.names(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(TABLES)
    for page in measured.pages():
        text = page.read_text(encoding="utf-8")
        assert len(measured.names(text)) == text.count("begin generated") == text.count("end generated")


def test_tables_are_written_where_they_stand() -> None:
    begin, end = "<!-- begin generated bound cost -->\n", "<!-- end generated bound cost -->\n"
    page = f"# Page\n\n{begin}| old |\n{end}\nAfter it.\n"
    assert measured.written(page) == f"# Page\n\n{begin}{TABLES['bound cost']()}\n{end}\nAfter it.\n"


def forget() -> None:
    measured.rows.cache_clear()
    measured.runs.cache_clear()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in the place of bench/results and of the repository."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


@pytest.mark.usefixtures("elsewhere")
def test_there_is_no_table_without_a_file() -> None:
    for make in TABLES.values():
        with pytest.raises(FileNotFoundError):
            make()


def test_a_changed_result_changes_its_table(elsewhere: Path) -> None:
    source = ROOT / "bench" / "results" / "bound_cost_h200.csv"
    copy = elsewhere / source.name
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    before = TABLES["bound cost"]()
    copy.write_text(source.read_text(encoding="utf-8").replace("2.1251", "2.2251"), encoding="utf-8")
    forget()
    assert TABLES["bound cost"]() == before.replace("2.13", "2.23", 1)


def test_the_ceiling_of_bench_and_reports_is_the_largest_bandwidth_of_the_results() -> None:
    link = known_link_gb_s("NVIDIA H200", "nvswitch-18")
    both = [row for name in (measured.ALL_REDUCE, measured.COLLECTIVES) for row in measured.rows(name)]
    largest = max(float(row["busbw_gb_s"]) for row in both if row["busbw_gb_s"])
    assert link == pytest.approx(largest, rel=2e-3), "correct tunedcomm/bench/csv.py"


def test_columns_that_pages_read_are_those_of_bench() -> None:
    for name in (measured.ALL_REDUCE, measured.COLLECTIVES):
        with (measured.RESULTS / name).open(newline="", encoding="utf-8") as file:
            assert set(csv.DictReader(file).fieldnames or []) <= set(COLUMNS)


def test_the_plot_shows_the_results() -> None:
    shown = json.loads(measured.text_of(measured.PLOT, "Points"))
    assert shown == measured.points(), "run `python docs/measured.py`"
    assert {"NCCL", "PyTorch's operators, the best", "tunedcomm"} <= set(shown)
    assert all(len(curve) >= 5 for curve in shown.values())
    assert "](docs/all_reduce_h200.png)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plot_is_drawn_from_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")
    drawn = tmp_path / "plot.png"
    measured.draw(drawn)
    assert json.loads(measured.text_of(drawn, "Points")) == measured.points()
    for path in (drawn, measured.PLOT):
        assert 20_000 < path.stat().st_size < 150_000
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(KeyError):
        measured.text_of(drawn, "Pixels")


def test_points_are_rows_of_the_results() -> None:
    times = {float(row["latency_p50_us"]) for row in measured.rows(measured.ALL_REDUCE)}
    for curve in measured.points().values():
        assert {us for _, us, _ in curve} <= times
    assert {ratio for _, _, ratio in measured.points()["NCCL"]} == {1.0}
