"""bench/same_code.py: measured rows outlive an edit where the same is compiled and launched."""

from __future__ import annotations

import copy
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
from tunedcomm.db.store import Database
from tunedcomm.spec import get_variant

TOOL = Path(__file__).parents[2] / "bench" / "same_code.py"
# Edits the variant in one of ways, and tells what the tool sees.
EDITED = """
import dataclasses, json, sys
import same_code
from pathlib import Path
same_code.import_everything()
from tunedcomm import spec
from tunedcomm.kernels.common import launch
hash_of = same_code.common_hash(Path(sys.argv[1]))
asked = json.loads(sys.argv[2])
original = spec.get_variant("all_reduce", "one_shot")
real = launch.bind_kernel


def binding(edit):
    def bind(problem, config, workspace):
        seen = original.bind.__func__.__globals__ if hasattr(original.bind, "__func__") else original.bind.__globals__
        users = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "bind_kernel")]
        old = [(user, user["bind_kernel"]) for user in users]
        for user, function in old:
            user["bind_kernel"] = lambda request, grid, device, function=function: edit(function, request, grid, device)
        try:
            return original.bind(problem, config, workspace)
        finally:
            for user, function in old:
                user["bind_kernel"] = function
    return bind


def constant(function, request, grid, device):
    changed = tuple((name, value * 2 if name == "BLOCK" else value) for name, value in request.constants)
    return function(dataclasses.replace(request, constants=changed), grid, device)


def swapped(function, request, grid, device):
    kernel = function(request, grid, device)

    def fix(arguments):
        order = list(arguments)
        order[3], order[4] = order[4], order[3]
        return kernel.fix(order)

    return dataclasses.replace(kernel, fix=fix)


class Edited:
    def __init__(self, bind):
        self.bind = bind

    def __getattr__(self, name):
        return getattr(original, name)


edits = {
    "nothing": lambda function, *rest: function(*rest),
    "grid": lambda function, request, grid, device: function(request, grid + 1, device),
    "arguments": swapped,
    "constant": constant,
}
found = {}
for name, edit in edits.items():
    variant = Edited(binding(edit))
    from tunedcomm import settings
    from tunedcomm.symm.layout import LaneLayout
    problem = spec.Problem.from_dict(asked["problem"])
    layout = LaneLayout.for_messages(settings.workspace_bytes())
    config = original.space.validate(asked["config"])
    events, _ = same_code.launch_record(variant, spec.get_op("all_reduce"), problem, config, layout)
    found[name] = {**same_code.described(asked, hash_of), "events": events}
print(json.dumps(found))
"""
ANSWER: Mapping[str, Any] = {
    "source": "current",
    "version": 1,
    "numerics": "ordered",
    "num_blocks": 4,
    "num_rounds": 1,
    "infeasible": None,
    "defaults": "d",
    "asked": ["a"],
    "events": [["bind", 0, {"num_warps": 4}, 8], ["launch", 0, "stream", ["in0", "out0"]]],
    "kernels": ["k"],
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location("same_code", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def edited(tool: ModuleType) -> dict[str, dict[str, Any]]:
    """What the tool says of all_reduce.one_shot, and of the same with an edit each of its host code."""
    kernels.discover()
    config = {name: axis.values()[0] for name, axis in get_variant("all_reduce", "one_shot").space.axes}
    asked = tool.asked_of(trial(config=config))
    paths = [str(TOOL.parent), str(TOOL.parents[1]), *(path for path in sys.path if path)]
    unseen = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", EDITED, str(TOOL.parents[1]), json.dumps(asked)]
    done = subprocess.run(command, env={**os.environ, **unseen}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_edits_of_host_code_are_noticed(tool: ModuleType, edited: dict[str, dict[str, Any]]) -> None:
    same = edited["nothing"]
    assert any(event[0] == "launch" and "in0" in event[3] for event in same["events"])
    assert tool.difference(same, copy.deepcopy(same)) is None
    for edit in ("grid", "arguments", "constant"):
        assert "event" in tool.difference(same, edited[edit])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "version"),
        ({"num_blocks": 5}, "num_blocks"),
        ({"infeasible": "too large"}, "infeasible"),
        ({"defaults": "e"}, "defaults"),
        ({"asked": []}, "asked"),
        ({"events": ANSWER["events"][:1]}, "events"),
        ({"failed": "CompilationError: at 1:0"}, "CompilationError"),
        ({"unbound": "RuntimeError"}, "one tree alone"),
    ],
)
def test_anything_else_that_differs_is_told(tool: ModuleType, change: Mapping[str, Any], why: str) -> None:
    assert why in tool.difference(ANSWER, {**ANSWER, **change})


def test_other_code_is_told_and_names_and_numbers_are_not_code(tool: ModuleType) -> None:
    one = ".visible .entry old(\n.param .u64 old_param_0\n)\n{\n.reg .b32 %r<9>;\nadd.s32 %r4, %r7, %r4; // x\n}"
    other = one.replace("{\n", "{\n$L__tmp3:\n").replace("old", "new").replace("%r4", "%r8").replace("%r7", "%r1")
    assert tool.normalised(one) == tool.normalised(other)
    assert tool.normalised(one) != tool.normalised(one.replace("%r7", "%r4"))
    assert "other code" in tool.difference({**ANSWER, "ptx": ["a"]}, {**ANSWER, "ptx": ["b"]})


def test_equal_rows_take_the_new_hash_and_others_stay(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.discover()
    today = kernels.source_hash(get_variant("all_reduce", "one_shot"))
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True) as database:
        database.record([trial(config={"num_blocks": blocks}) for blocks in (4, 8)])

    def ask(tree: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        new = tree == TOOL.parents[1]
        other = {"num_rounds": 2} if new else {}
        source = {"source": today if new else "current"}
        return [{**ANSWER, **source, **(other if row["config"]["num_blocks"] == 8 else {})} for row in rows]

    monkeypatch.setattr(tool, "ask", ask)
    monkeypatch.setattr(sys, "argv", ["same_code.py", "--before", str(tmp_path), str(path)])
    assert tool.main() == 1
    assert "num_rounds" in capsys.readouterr().out
    with Database.open(path, readonly=True) as database:
        found = {t.config["num_blocks"]: t.source_hash for t in database.trials()}
    assert found == {4: today, 8: "current"}
