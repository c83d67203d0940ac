from __future__ import annotations

import pytest

from tunedcomm.bench.runner import run_module


@pytest.mark.slow
def test_demo_ranks_get_the_right_sums(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a kernel; the ranks must also end cleanly, and leave stdout alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "one_shot")
    assert run_module("tunedcomm.cli.demo", ["512", "777"], world_size=2) == 0
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.count("sum right on every rank") == 2
