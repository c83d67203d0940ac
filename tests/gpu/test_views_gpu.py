"""Processes that see their GPUs in different ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import python


@pytest.mark.gpu(2)
def test_views() -> None:
    done = python(Path(__file__).with_name("run_views.py"), timeout=900.0)
    assert done.stdout.count("\nOK ") >= 3
