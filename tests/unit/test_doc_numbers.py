"""Every number on the pages is a row of bench/results or computed from some, or a comment says why it is none."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunedcomm.cli._bench_rank import COLUMNS
from tunedcomm.report import ceiling

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import measured  # noqa: E402
import measured_figures  # noqa: E402
import measured_plot  # noqa: E402
import measured_rows  # noqa: E402
import measured_tables  # noqa: E402
from measured_figures import FIGURES  # noqa: E402
from measured_tables import TABLES  # noqa: E402


def faults(page: str) -> list[str]:
    return measured.faults(page, TABLES, FIGURES)


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_numbers_are_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert faults(text) == []
    assert measured.written(text, TABLES) == text


def test_the_pages_are_all_there() -> None:
    named = {str(page.relative_to(ROOT)) for page in measured.PAGES}
    assert named >= {"README.md", "tuning_db/README.md", "docs/performance.md", "docs/scale.md", "docs/maintenance.md"}
    assert named.isdisjoint({"docs/cli.md", "docs/environment.md"})


def marks(kind: str) -> list[str]:
    pages = [measured.blocks(page.read_text(encoding="utf-8")) for page in measured.PAGES]
    return [block.marks[kind] for blocks in pages for block in blocks if kind in block.marks]


def test_no_table_and_no_figure_is_left_over() -> None:
    assert set(marks("table")) == set(TABLES)
    assert set(marks("measured")) == set(FIGURES)


def changed(number: str) -> str:
    """With another last digit."""
    at = max(index for index, letter in enumerate(number) if letter.isdigit())
    return number[:at] + str((int(number[at]) + 1) % 10) + number[at + 1 :]


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_any_other_number_would_be_noticed(page: Path) -> None:
    for block in measured.blocks(page.read_text(encoding="utf-8")):
        if "table" in block.marks or "measured" in block.marks:
            head = "".join(f"<!-- {kind}: {text} -->\n" for kind, text in block.marks.items())
            assert faults(head + block.text) == []
            numbers = re.findall(r"(?<![\w.-])\d[\d,.]*\d", block.text) if "table" in block.marks else []
            for number in numbers or measured.figures(block.text):
                wrong = re.sub(
                    rf"(?<![\w.,]){re.escape(number).replace(' ', r's+')}", changed(number), block.text, count=1
                )
                if wrong != block.text:
                    assert faults(head + wrong), number


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("It takes 2.10 µs.", "no mark says why"),
        ("It is 1.29× as fast.", "no mark says why"),
        ("It is 3 times as fast.", "no mark says why"),
        ("It sends 351 GB/s.", "no mark says why"),
        ("One sweep ran 1,812 trials.", "no mark says why"),
        ("## 40 % faster\n", "no mark says why"),
        ("- a list\n- of 7 ms\n", "no mark says why"),
        ("| size | µs |\n|---|---|\n| 4 KiB | 2.12 |\n", "no mark says why"),
        ("It takes 205 MiB.", "no mark says why"),
        ("<!-- measured: two gangs -->\n2.3 times as many", "'two gangs' says ['2.2 times']"),
        ("<!-- measured: two gangs -->\n2.2 times as many in 3 s", "'two gangs' says ['2.2 times']"),
        ("<!-- measured: two gangs -->\nAs many", "'two gangs' says ['2.2 times']"),
        ("<!-- measured: three gangs -->\n2.2 times as many", "no figures 'three gangs'"),
        ("<!-- table: three gangs -->\n| a |\n|---|", "no table 'three gangs'"),
        ("<!-- not measured: 90 s (a limit) -->\nwithin 80 s", "names '90 s', which is not there"),
    ],
)
def test_planted_faults_are_found(page: str, why: str) -> None:
    found = faults(page)
    assert found
    assert why in " ".join(found)


@pytest.mark.parametrize(
    "page",
    [
        "At 4 KiB and 256 MiB on 4 × H200 in bf16, sm_90, SHA-256, 2 ranks of 16.",
        "[a link](to/page-1.29.html) and `code of 2.10 µs`\n\n```\n2.10 µs\n```\n<!-- 2.10 µs -->",
        "<!-- not measured: 90 s (a limit); 8192, 4,096 (shapes) -->\nwithin 90 s for 8192 and 4,096",
        "<!-- measured: two gangs -->\n<!-- not measured: 3 s (a limit) -->\n2.2 times as many\nin 3 s",
        "1. First\n2. Second\n",
    ],
)
def test_what_is_no_result_may_stand(page: str) -> None:
    assert faults(page) == []


def test_a_number_without_a_result_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="lacks a reason"):
        faults("<!-- not measured: 90 s -->\nwithin 90 s")


def test_tables_are_written_where_they_stand() -> None:
    page = "# Page\n\n<!-- table: bound cost -->\n| old |\n\nAfter it.\n"
    written = measured.written(page, TABLES)
    assert written == f"# Page\n\n<!-- table: bound cost -->\n{TABLES['bound cost']()}\n\nAfter it.\n"
    assert measured.written(written, TABLES) == written


def forget() -> None:
    measured_rows.rows.cache_clear()
    measured_rows.runs.cache_clear()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in the place of bench/results and of the repository."""
    monkeypatch.setattr(measured_rows, "RESULTS", tmp_path)
    for module in (measured_figures, measured_tables):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


@pytest.mark.parametrize("name", [*TABLES, *FIGURES])
@pytest.mark.usefixtures("elsewhere")
def test_there_is_no_number_without_a_file(name: str) -> None:
    with pytest.raises(FileNotFoundError):
        {**TABLES, **FIGURES}[name]()


def test_a_changed_result_changes_what_the_pages_must_say(elsewhere: Path) -> None:
    source = ROOT / "bench" / "results" / "bound_cost_h200.csv"
    copy = elsewhere / source.name
    copy.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    before = FIGURES["bound of lamport"](), TABLES["bound cost"]()
    copy.write_text(source.read_text(encoding="utf-8").replace("2.1251", "2.2251"), encoding="utf-8")
    forget()
    after = FIGURES["bound of lamport"](), TABLES["bound cost"]()
    assert before[0] == ["0.03 µs"]
    assert after[0] == ["0.13 µs"]
    assert before[1] != after[1]


def test_the_ceiling_of_bench_and_reports_is_the_largest_bandwidth_of_the_results() -> None:
    link = ceiling.known_link_gb_s("NVIDIA H200", "nvswitch-18")
    assert link == pytest.approx(measured_figures.largest_busbw(), rel=2e-3), "correct tunedcomm/report/ceiling.py"


def test_columns_that_pages_read_are_those_of_bench() -> None:
    for name in ("all_reduce_h200.csv", "collectives_h200.csv"):
        with (measured_rows.RESULTS / name).open(newline="", encoding="utf-8") as file:
            assert set(csv.DictReader(file).fieldnames or []) <= set(COLUMNS)


def test_the_plot_shows_the_results() -> None:
    shown = json.loads(measured_plot.text_of(measured_plot.PLOT, "Points"))
    assert shown == measured_plot.points(), "run `python docs/measured_plot.py`"
    assert {"NCCL", "PyTorch's operators, the best", "tunedcomm"} <= set(shown)
    assert all(len(curve) >= 5 for curve in shown.values())
    assert "](docs/all_reduce_h200.png)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plot_is_drawn_from_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")
    drawn = tmp_path / "plot.png"
    measured_plot.draw(drawn)
    assert json.loads(measured_plot.text_of(drawn, "Points")) == measured_plot.points()
    for path in (drawn, measured_plot.PLOT):
        assert 20_000 < path.stat().st_size < 150_000
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(KeyError):
        measured_plot.text_of(drawn, "Pixels")


def test_points_are_rows_of_the_results() -> None:
    times = {float(row["latency_p50_us"]) for row in measured_rows.rows("all_reduce_h200.csv")}
    for curve in measured_plot.points().values():
        assert {us for _, us, _ in curve} <= times
    assert {ratio for _, _, ratio in measured_plot.points()["NCCL"]} == {1.0}
