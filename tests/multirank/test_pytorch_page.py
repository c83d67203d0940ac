"""The examples of docs/pytorch.md run, one after another as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"


def examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def body(rank: int, world_size: int) -> Any:
    kept = torch.compile
    torch.compile = lambda *args, **kwargs: kept(*args, backend="aot_eager", **kwargs)  # Inductor is tested elsewhere
    names: dict[str, Any] = {"__name__": "__main__"}
    for text in examples():
        exec(text.replace('dist.init_process_group("gloo")', "pass"), names)  # the harness did
    program, seen = names["program"], names["seen"]
    return program.graph is not None, names["x"].grad is not None, str(program.graph), str(seen).splitlines()


@pytest.mark.parametrize("world_size", [2])
def test_examples_run(world_size: int) -> None:
    assert len(examples()) == 5
    for exported, recorded, graph, seen in run_ranks(world_size, body, timeout=120):
        assert exported
        assert recorded
        assert "torch.ops.tunedcomm.all_gather.default" in graph, "as the page says"
        shown = re.findall(r"^\d+ x group 0: .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        for line, told in zip(shown, seen, strict=True):
            pattern = ".*".join(re.escape(part) for part in line.split("…"))
            assert re.fullmatch(pattern, told), told
