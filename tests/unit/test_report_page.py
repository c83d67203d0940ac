"""The page of `tunedcomm report` in a browser: everything is drawn, readable on a phone and in the dark.

Screenshots are kept in REPORT_ARTIFACTS, else in pytest's directory of the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")

import chromium
from report_samples import gemm_csv, recorded_database

from tunedcomm.bench.csv import NEEDED
from tunedcomm.db.layers import named_layers
from tunedcomm.report.data import gather
from tunedcomm.report.figures import INK
from tunedcomm.report.page import render

BROWSER = chromium.find()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")

RESULTS = Path(__file__).parents[2] / "bench" / "results"
READY = "document.body !== null && document.body.dataset.ready === 'yes'"
# (width, height, is_phone, is_dark)
DEVICES = {"phone": (390, 844, True, False), "desktop": (1280, 900, False, False), "dark": (1280, 900, False, True)}
# Everything that plotly drew in each figure: length of its lines, bars and cells, or the heat map's image.
DRAWN = """[...document.querySelectorAll('.figure')].map(figure => {
  const marks = [...figure.querySelectorAll('.scatterlayer path, .barlayer path')];
  const long = marks.filter(mark => (mark.getAttribute('d') || '').length > 8).length;
  return long + figure.querySelectorAll('.heatmaplayer image, .heatmaplayer canvas').length;
})"""
# Text of tick labels that lies outside its figure, or upon another label of its axis.
CLASHES = """[...document.querySelectorAll('.figure')].flatMap(figure => {
  const frame = figure.getBoundingClientRect();
  return ['.xtick text', '.ytick text'].flatMap(axis => {
    const boxes = [...figure.querySelectorAll(axis)].map(text => [text.textContent, text.getBoundingClientRect()]);
    return boxes.filter(([, box], i) => box.left < frame.left - 1 || box.right > frame.right + 1 ||
      boxes.slice(0, i).some(([, other]) => box.left < other.right - 1 && other.left < box.right - 1 &&
        box.top < other.bottom - 2 && other.top < box.bottom - 2)).map(([text]) => text);
  });
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    files = [RESULTS / "all_reduce_h200.csv", RESULTS / "replay" / "regret_rules_h200.csv", gemm_csv(folder / "g.csv")]
    layers = named_layers(str(recorded_database(folder / "swept.db")))
    path = folder / "report.html"
    path.write_text(render(gather(layers, files)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    assert BROWSER is not None
    with chromium.Chromium(BROWSER, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def artifact(tmp_path: Path, name: str) -> Path:
    folder = Path(os.environ.get("REPORT_ARTIFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


@pytest.mark.parametrize("device", DEVICES)
def test_every_figure_is_drawn_and_fits(browser: chromium.Chromium, page: Path, tmp_path: Path, device: str) -> None:
    width, height, is_phone, is_dark = DEVICES[device]
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(width, height, is_phone=is_phone, is_dark=is_dark)
    browser.open(page, until=READY)
    shot = browser.screenshot(artifact(tmp_path, f"report-{device}.png"), whole=True)
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 50_000
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) >= 10
    assert all(drawn), drawn
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert browser.evaluate(CLASHES) == []
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 3 * 64) == is_dark, ground


def test_a_phone_shows_the_speedups_at_a_glance(browser: chromium.Chromium, page: Path) -> None:
    browser.resize(400, 844, is_phone=True)
    browser.open(page, until=READY)
    head = browser.evaluate(
        "[...document.querySelectorAll('#glance th')].map(th => [th.textContent, th.getBoundingClientRect().right])"
    )
    assert [name for name, _ in head][:4] == ["problems", "mean", "least", "most"]
    assert max(right for _, right in head[:4]) <= 400 - 10, head


def test_digits_of_heat_maps_stay_dark_in_the_dark(browser: chromium.Chromium, page: Path) -> None:
    browser.resize(1280, 900, is_dark=True)
    browser.open(page, until=READY)
    fills = browser.evaluate(
        "[...document.querySelectorAll('.heatmap-label text')].map(text => getComputedStyle(text).fill)"
    )
    assert len(fills) >= 3
    assert set(fills) == {f"rgb({', '.join(str(int(INK[i : i + 2], 16)) for i in (1, 3, 5))})"}


def test_the_toggle_turns_the_page_dark_and_the_figures_with_it(browser: chromium.Chromium, page: Path) -> None:
    browser.resize(1280, 900)
    browser.open(page, until=READY)
    ink = "getComputedStyle(document.querySelector('.figure .xtick text')).fill"
    before = browser.evaluate(ink)
    browser.evaluate("document.querySelector('.theme').click()")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate(f"new Promise(done => setTimeout(() => done({ink}), 500))") != before


def test_the_key_hides_a_contender_in_both_figures(browser: chromium.Chromium, page: Path) -> None:
    browser.resize(1280, 900)
    browser.open(page, until=READY)
    panel = "document.querySelector('#benchmarks .panel')"
    shown = (
        f"[...{panel}.querySelectorAll('.figure')]"
        ".map(f => f.data.filter(t => t.name === 'library' && t.visible !== false).length)"
    )
    assert browser.evaluate(shown) == [1, 1]
    button = f"{panel}.querySelector('[data-name=library]')"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(shown) == [0, 0]
    assert browser.evaluate(f"{button}.getAttribute('aria-pressed')") == "false"


def test_tables_are_there_without_scripts(browser: chromium.Chromium, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page, until="document.querySelectorAll('table tbody tr').length > 100")
        assert browser.evaluate("document.querySelectorAll('.figure svg').length") == 0
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_names_are_no_markup(browser: chromium.Chromium, tmp_path: Path) -> None:
    """Bars of one size, whose names stand on an axis, and lines of two, whose names a key shows and hides."""
    name, table, path = "<i>a</i> &lt; $b$", tmp_path / "bench.csv", tmp_path / "names.html"
    problems = [("all_reduce", 512), ("all_gather", 512), ("all_gather", 1024)]
    rows = [f"{op},{shape},{2 * shape},bfloat16,4,graph,{name},5.0" for op, shape in problems]
    table.write_text("\n".join([",".join(NEEDED), *rows]), encoding="utf-8")
    path.write_text(render(gather([], [table])), encoding="utf-8")
    browser.resize(1280, 900)
    browser.open(path, until=READY)
    assert browser.evaluate("[...document.querySelectorAll('.ytick text')].map(text => text.textContent)").count(name)
    assert browser.evaluate("document.querySelectorAll('.figure tspan').length") == 0, "plotly made a part italic"
    assert name in browser.evaluate("document.querySelector('.key button').textContent")
    browser.evaluate("document.querySelector('.key button').click()")
    shown = (
        "[...document.querySelector('.key').closest('.panel').querySelectorAll('.figure')].map(f => f.data[0].visible)"
    )
    assert set(browser.evaluate(shown)) == {False}
