"""Pages that are written by programs say what the code says, and the site builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tunedcomm import errors
from tunedcomm.db.schema import Base
from tunedcomm.tuner.search.sweep import SweepSpec, _settings

ROOT = Path(__file__).parents[2]
GENERATORS = sorted((ROOT / "docs").glob("generate_*.py"))


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda path: path.stem)
def test_written_pages_are_current(generator: Path) -> None:
    spec = importlib.util.spec_from_file_location(generator.stem, generator)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), f"run `python docs/{generator.name}`"


def test_every_column_is_described() -> None:
    bare = [
        f"{table.name}.{column.name}"
        for table in Base.metadata.tables.values()
        for column in table.columns
        if not column.comment and not column.primary_key
    ]
    assert bare == []


def test_every_error_says_what_to_do() -> None:
    """A second paragraph in its docstring, which docs/errors.md shows."""
    for name in errors.__all__:
        if name != "TunedCommError":
            parts = (getattr(errors, name).__doc__ or "").split("\n\n")
            assert len(parts) >= 2, name
            assert len(parts[1].split()) >= 6, name


def test_the_time_limits_of_a_trial_are_those_of_the_tuner() -> None:
    page = " ".join((ROOT / "docs" / "adding_a_variant.md").read_text(encoding="utf-8").split())
    host = _settings(SweepSpec(op="all_reduce"), "host", 2, 1)
    gpus = _settings(SweepSpec(op="all_reduce"), "cuda", 2, 1)
    assert host.compile_timeout_s == gpus.compile_timeout_s
    assert f": {host.trial_timeout_s:g} s on the host, {gpus.trial_timeout_s:g} s on GPUs." in page
    assert f"A `bind` has {gpus.compile_timeout_s:g} s." in page


def test_every_page_is_in_the_readme_and_on_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"- {page.name}$", menu, re.MULTILINE), f"{page.name} is not in mkdocs.yml"
        assert f"](docs/{page.name})" in readme, f"README.md does not link to docs/{page.name}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra `docs`)")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="tuning.html"' in index
    assert (tmp_path / "site" / "cli.html").exists()
