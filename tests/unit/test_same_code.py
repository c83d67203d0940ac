"""bench/same_code.py: measured rows outlive an edit where the same is compiled and launched."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from db_samples import trial
from programs import python

from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.spec import get_variant

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import same_code  # noqa: E402

# Edits the variant in one of ways, and tells what the tool sees.
EDITED = """
import contextlib, dataclasses, functools, json, sys
from unittest import mock
import same_code
same_code.import_everything()
from tunedcomm import settings, spec
from tunedcomm.symm.layout import LaneLayout
asked = json.loads(sys.argv[1])
original = spec.get_variant("all_reduce", "one_shot")


class Edited:
    def __init__(self, edit):
        self.edit = edit

    def bind(self, problem, config, workspace):
        with contextlib.ExitStack() as stack:
            for module in [module for module in sys.modules.values() if "bind_kernel" in vars(module)]:
                edited = functools.partial(self.edit, module.bind_kernel)
                stack.enter_context(mock.patch.object(module, "bind_kernel", edited))
            return original.bind(problem, config, workspace)

    def __getattr__(self, name):
        return getattr(original, name)


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


edits = {
    "nothing": lambda function, *rest: function(*rest),
    "grid": lambda function, request, grid, device: function(request, grid + 1, device),
    "arguments": swapped,
    "constant": constant,
}
problem = spec.Problem.from_dict(asked["problem"])
layout = LaneLayout.for_messages(settings.workspace_bytes())
config = original.space.validate(asked["config"])
found = {}
for name, edit in edits.items():
    events, requests = same_code.launch_record(Edited(edit), spec.get_op("all_reduce"), problem, config, layout)
    constants = [dict(request.constants) for request in requests]
    found[name] = {**same_code.described(asked), "events": events, "constants": constants}
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
    "constants": [{"BLOCK": 64}],
}


@pytest.fixture(scope="module")
def edited() -> dict[str, dict[str, Any]]:
    """What the tool says of all_reduce.one_shot, and of the same with an edit each of its host code."""
    kernels.discover()
    config = {name: axis.values()[0] for name, axis in get_variant("all_reduce", "one_shot").space.axes}
    asked = same_code.asked_of(trial(config=config))
    unseen = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = python("-c", EDITED, json.dumps(asked), paths=[ROOT / "bench"], **unseen)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_edits_of_host_code_are_noticed(edited: dict[str, dict[str, Any]]) -> None:
    same = edited["nothing"]
    assert any(event[0] == "launch" and "in0" in event[3] for event in same["events"])
    assert same_code.difference(same, copy.deepcopy(same)) is None
    for edit, word in (("grid", "event"), ("arguments", "event"), ("constant", "constants")):
        assert word in same_code.difference(same, edited[edit])


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
        ({"constants": [{"BLOCK": 32}]}, "constants"),
    ],
)
def test_anything_else_that_differs_is_told(change: Mapping[str, Any], why: str) -> None:
    assert why in same_code.difference(ANSWER, {**ANSWER, **change})


def test_other_code_is_told_and_names_and_numbers_are_not_code() -> None:
    one = ".visible .entry old(\n.param .u64 old_param_0\n)\n{\n.reg .b32 %r<9>;\nadd.s32 %r4, %r7, %r4; // x\n}"
    other = one.replace("{\n", "{\n$L__tmp3:\n").replace("old", "new").replace("%r4", "%r8").replace("%r7", "%r1")
    assert same_code.normalised(one) == same_code.normalised(other)
    assert same_code.normalised(one) != same_code.normalised(one.replace("%r7", "%r4"))
    assert "other code" in same_code.difference({**ANSWER, "ptx": ["a"]}, {**ANSWER, "ptx": ["b"]})
    renamed = {**ANSWER, "kernels": ["l"], "constants": [{"BLOCK": 64, "WIDE": False}]}
    assert same_code.difference({**ANSWER, "ptx": ["a"]}, {**renamed, "ptx": ["a"]}) is None, "PTX decides"


def test_equal_rows_take_the_new_hash_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.discover()
    today = kernels.source_hash(get_variant("all_reduce", "one_shot"))
    path = tmp_path / "tuned.db"
    with Database.open(path, create=True) as database:
        database.record([trial(config={"num_blocks": blocks}) for blocks in (4, 8)])

    def ask(tree: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        new = tree == ROOT
        other = {"num_rounds": 2} if new else {}
        source = {"source": today if new else "current"}
        return [{**ANSWER, **source, **(other if row["config"]["num_blocks"] == 8 else {})} for row in rows]

    monkeypatch.setattr(same_code, "ask", ask)
    monkeypatch.setattr(sys, "argv", ["same_code.py", "--before", str(tmp_path), str(path)])
    assert same_code.main() == 1
    assert "num_rounds" in capsys.readouterr().out
    with Database.open(path, readonly=True) as database:
        found = {t.config["num_blocks"]: t.source_hash for t in database.trials()}
    assert found == {4: today, 8: "current"}
