"""The growth rules of docs/design.md, each with a dummy: a variant is one new file, an op is one new folder."""

from __future__ import annotations

import json
from pathlib import Path

from programs import python

ROOT = Path(__file__).parents[2]

VARIANT = """
from spec_samples import toy_variant
from tunedcomm.space import Choice, Space
from tunedcomm.spec import register_variant

register_variant(
    toy_variant(
        "all_reduce",
        "dummy_ring",
        Space({"num_blocks": Choice(1, 2), "eager": Choice(False, True)}),
        infeasible=lambda problem, config, limits: "two is too many" if config["num_blocks"] == 2 else None,
    )
)
"""
OP = """
from spec_samples import toy_op
from tunedcomm.spec import register_op

register_op(toy_op("dummy_op"))
"""

LIBRARY = VARIANT.replace("all_reduce", "dummy_op").replace("dummy_ring", "library")

# One process of its own, so that the dummies stay out of the other tests' registries.
GROW = """
import dataclasses, json, sys
import tunedcomm.kernels.all_reduce

files, database = sys.argv[1:]
tunedcomm.kernels.all_reduce.__path__.append(files + "/all_reduce")
tunedcomm.kernels.__path__.append(files)

from typer.testing import CliRunner
from tunedcomm import kernels, spec
from tunedcomm.cli import main
from tunedcomm.symm.layout import limits_for
from tunedcomm.db.records import Trial
from tunedcomm.db.store import Database
from tunedcomm.hardware import detect

kernels.discover()
problem = spec.Problem("all_reduce", (4096,), "float32", 2, mode="eager")
found = {"variants": list(spec.variants("all_reduce")), "ops": list(spec.ops())}
candidates = spec.candidates(problem, limits_for(detect(), 2))
found["candidates"] = [str(candidate) for candidate in candidates if candidate.variant == "dummy_ring"]


def explain(op, *options):
    asked = ("--shape", "4096", "--dtype", "float32", "--world-size", "2", "--mode", "eager")
    shown = CliRunner().invoke(main.app, ["explain", "--op", op, *asked, "--db", database, *options])
    return shown.stdout + (repr(shown.exception) if shown.exception else "")


variant = spec.get_variant("all_reduce", "dummy_ring")
record = Trial(
    problem=problem, environment=detect(), variant="dummy_ring", numerics="ordered",
    source_hash=kernels.source_hash(variant), config={"num_blocks": 1, "eager": True}, status="ok",
    latency_p50_us=1.0, baseline_p50_us=9.0, final=True,
)
with Database.open(database, create=True) as opened:
    opened.record([dataclasses.replace(record, variant="library", numerics="library", config={}, latency_p50_us=9.0)])
found["before"] = explain("all_reduce", "--all")
with Database.open(database) as opened:
    opened.record([record])
found["after"] = json.loads(explain("all_reduce", "--json"))
found["op"] = explain("dummy_op")
print(json.dumps(found))
"""


def test_one_file_is_a_variant_and_one_folder_an_op(tmp_path: Path) -> None:
    folder = tmp_path / "grown"
    for name, text in (
        ("all_reduce/dummy_ring.py", VARIANT),
        ("dummy_op/__init__.py", ""),
        ("dummy_op/op.py", OP),
        ("dummy_op/library.py", LIBRARY),
    ):
        path = folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = python("-c", GROW, folder / "files", folder / "grown.db", cwd=folder, TRITON_INTERPRET="1", COLUMNS="200")
    grown = json.loads(done.stdout)
    assert {"dummy_ring", "lamport"} <= set(grown["variants"])
    assert grown["candidates"] == [f"dummy_ring(eager={eager}, num_blocks=1)" for eager in (False, True)]
    assert "no trial" in next(line for line in grown["before"].splitlines() if "dummy_ring" in line)
    assert (grown["after"]["variant"], grown["after"]["source"]) == ("dummy_ring", "exact")
    assert "dummy_op" in grown["ops"]
    assert "library(" in grown["op"]
