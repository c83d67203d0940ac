"""bench/same_code.py: rows outlive an edit of their kernels' sources where what is compiled for them stays the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from db_samples import trial

from tunedcomm import kernels
from tunedcomm.db.records import TrialRecord
from tunedcomm.db.store import Database
from tunedcomm.spec import get_variant

TOOL = Path(__file__).parents[2] / "bench" / "same_code.py"
TOY = """
import triton
import triton.language as tl

@triton.jit
def toy(x, out, DTYPE: tl.constexpr):
    value = tl.load(x.to(tl.pointer_type(tl.float32)))
    {}
    tl.store(out.to(tl.pointer_type(tl.float32)), total)
"""
BEFORE = "total = value * 2"
AFTER = """# Another one for fp8.
    if DTYPE == "float8_e4m3fn":
        total = value * 3
    else:
        total = value * 2"""
COMPILE = """
import importlib, json, sys
import triton
import same_code
from tunedcomm.kernels.common.launch import CompileRequest
triton.compile = same_code.ir_of
found = []
for dtype in ("bfloat16", "float8_e4m3fn"):
    for name in ("toy_before", "toy_after"):
        toy = importlib.import_module(name).toy
        request = CompileRequest.of(toy, {"DTYPE": dtype}, num_warps=4)
        found.append(same_code.binary_of(request, 90))
wide = CompileRequest.of(toy, {"DTYPE": "bfloat16"}, num_warps=8)
print(json.dumps([*found, same_code.binary_of(wide, 90)]))
"""
ANSWER: Mapping[str, Any] = {
    "source": "current",
    "version": 1,
    "kernels": {"m.f": "1", "m.g": "2"},
    "binaries": [["m", "f", "abc"]],
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_code", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_compiled_is_compared_and_not_the_source(tmp_path: Path) -> None:
    for name, body in (("toy_before", BEFORE), ("toy_after", AFTER)):
        (tmp_path / f"{name}.py").write_text(TOY.format(body))
    paths = [str(tmp_path), str(TOOL.parent), str(TOOL.parents[1]), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, before_fp8, after_fp8, wide = (code for _, _, code in json.loads(done.stdout))
    assert before == after == before_fp8
    assert len({before, after_fp8, wide}) == 3


def test_equal_answers_keep_a_row(tool: ModuleType) -> None:
    edited = {**ANSWER, "source": "new", "kernels": {"m.f": "3", "m.g": "2"}}
    assert tool.difference("current", ANSWER, edited) is None


@pytest.mark.parametrize(
    ("stored", "change", "why"),
    [
        ("current", {"binaries": [["m", "f", "abx"]]}, "f is other code"),
        ("current", {"binaries": [["m", "f", "abc"], ["m", "f", "abc"]]}, "asks for other binaries"),
        ("current", {"binaries": []}, "asks for other binaries"),
        ("current", {"kernels": {"m.f": "1", "m.g": "3"}}, "m.g has other sources, and no binary to compare"),
        ("current", {"kernels": {"m.f": "1"}}, "the variant's kernels were"),
        ("current", {"version": 2}, "version was 1 and is 2"),
        ("current", {"failed": "CompilationError: at 1:0"}, "today: CompilationError"),
        ("older", {}, "was measured with sources older, those of the tree before are current"),
    ],
)
def test_anything_else_refuses_it(tool: ModuleType, stored: str, change: Mapping[str, Any], why: str) -> None:
    assert why in tool.difference(stored, ANSWER, {**ANSWER, "source": "new", **change})


def test_rows_of_one_variant_may_part(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.discover()
    today = kernels.source_hash(get_variant("all_reduce", "one_shot"))
    records = [trial(config={"num_blocks": blocks}) for blocks in (4, 8)]
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True) as database:
        database.record(records)

    def ask(tree: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        other = {"binaries": [["m", "f", "abx"]]} if tree == TOOL.parents[1] else {}
        return [{**ANSWER, **(other if row["config"]["num_blocks"] == 8 else {})} for row in rows]

    monkeypatch.setattr(tool, "ask", ask)
    monkeypatch.setattr(sys, "argv", ["same_code.py", "--before", str(tmp_path), str(path)])
    assert tool.main() == 1
    assert "one_shot: 1 rows are left: f is other code" in capsys.readouterr().out
    assert rows_of(path) == {4: today, 8: "current"}
    monkeypatch.setattr(tool, "ask", lambda tree, rows: [dict(ANSWER) for _ in rows])
    assert tool.main() == 0
    assert rows_of(path) == {4: today, 8: today}
    with Database.open(path) as database:
        assert database.stats()["variants"] == 1
        found = [dataclasses.replace(t, id=None, source_hash="current") for t in database.trials()]
    assert found == records


def rows_of(path: Path) -> dict[Any, str]:
    """Blocks of each row to its source hash."""
    with Database.open(path, readonly=True) as database:
        found: list[TrialRecord] = database.trials()
    assert len(found) == 2
    return {trial.config["num_blocks"]: trial.source_hash for trial in found}
