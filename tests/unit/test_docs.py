"""Generated parts of the pages are current, links lead somewhere, docstrings that pages show are complete."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tunedcomm
from tunedcomm import kernels
from tunedcomm.bench.csv import COLUMNS, known_link_gb_s
from tunedcomm.spec import get_op, ops

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "tuning_db" / "README.md", ROOT / "bench" / "peers" / "README.md"]
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8 e4m3": "float8_e4m3fn"}


sys.path.append(str(ROOT / "docs"))

import generate  # noqa: E402

kernels.discover()


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.written(text) == text, "run `python docs/generate.py`"


def test_every_part_is_on_a_page() -> None:
    found = set()
    for page in generate.pages():
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"<!-- begin generated (.+?) -->", text)
        assert names == re.findall(r"<!-- end generated (.+?) -->", text)
        found |= set(names)
    assert found == set(generate.PARTS)


def test_the_plot_shows_the_results() -> None:
    points = generate.points()
    assert json.dumps(points).encode() in generate.PLOT.read_bytes(), "run `python docs/generate.py`"
    assert all(len(curve) >= 5 for curve in points.values())


def test_the_ceiling_of_bench_is_the_largest_bandwidth_of_the_results() -> None:
    both = [row for name in (generate.ALL_REDUCE, generate.COLLECTIVES) for row in generate.rows_of(name)]
    largest = max(float(row["busbw_gb_s"]) for row in both if row["busbw_gb_s"])
    assert known_link_gb_s("NVIDIA H200", "nvswitch-18") == pytest.approx(largest, rel=2e-3)
    assert all(set(row) <= set(COLUMNS) for row in both)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), (target, anchor)


def test_pages_that_sources_name_exist() -> None:
    found = [
        path for folder in ("tunedcomm", "tests", "bench", "examples", ".ci") for path in (ROOT / folder).rglob("*")
    ]
    sources = [path for path in found if path.suffix in (".py", ".sh", ".md") or path.name == "run"]
    texts = [path.read_text(encoding="utf-8") for path in (*sources, ROOT / "Makefile")]
    named = {name for text in texts for name in re.findall(r"docs/[a-z_]+\.(?:md|py)", text)}
    assert "docs/ops.md" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_readme_and_on_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"- {page.name}$", menu, re.MULTILINE), f"{page.name} is not in mkdocs.yml"
        assert f"](docs/{page.name})" in readme, f"README.md does not link to docs/{page.name}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra `docs`)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'href="tuning.html"' in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(ops()))
def test_docstrings_of_ops_describe_every_parameter(name: str) -> None:
    function = getattr(tunedcomm, name)
    told = generate.docstring(function)
    assert list(told.sections["Args"]) == list(inspect.signature(function).parameters)
    assert told.returns
    assert {"UnsupportedInputError", "PeerTimeoutError"} <= set(told.sections["Raises"])
    dtypes = re.search(r"Kernels take (.+?)[;.]", next(iter(told.sections["Args"].values())))
    spec = get_op(name)
    if dtypes is not None:
        assert tuple(SHORT[dtype] for dtype in re.split(r", | and ", dtypes[1])) == spec.dtypes
    else:
        assert len(spec.dtypes) > len(SHORT), "an op that only moves bytes takes any dtype"
