from __future__ import annotations

from pathlib import Path

import pytest

from tunedcomm.bench.runner import run_module
from tunedcomm.cli import demo, main


@pytest.mark.slow
def test_demo_ranks_get_the_right_sums(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a kernel; the ranks must also end cleanly, and leave stdout alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TUNEDCOMM_FORCE_ALL_REDUCE", "one_shot")
    assert run_module("tunedcomm.cli.demo", ["bfloat16", "512", "777"], world_size=2) == 0
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_demo_fits_a_screen(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(demo, "SIZES", (1 << 10, 64 << 10))
    monkeypatch.setattr(demo, "TRIALS", 2)
    assert main.code_of(["demo", "--db", str(tmp_path / "demo.db")]) == 0
    shown, progress = capfd.readouterr()
    assert len(shown.splitlines()) + len(progress.splitlines()) <= 25
    for told in ("gloo µs", "64 KiB", "runs", "checked", "NCCL µs", "4 H200"):
        assert told in shown
