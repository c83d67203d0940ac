"""Pages that are written by programs say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_on_ops_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_ops", ROOT / "docs" / "generate_ops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run `python docs/generate_ops.py`"
