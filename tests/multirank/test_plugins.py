"""Packages that bring variants: found, tuned, dispatched and agreed on like ours; broken ones are left out."""

from __future__ import annotations

import json
import os
import re
import shlex
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from programs import python
from quick import some

from tunedcomm.spec import Problem

PROBLEM = Problem("all_reduce", (65536,), "bfloat16", 2, mode="eager")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_variant.md"


def block(title: str) -> str:
    """The page's code block that begins with this comment."""
    found = re.findall(rf"```\w+\n# {re.escape(title)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1, title
    return str(found[0])


def commands(program: str) -> list[list[str]]:
    """Arguments of the page's command lines that call a program, in their order."""
    found = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    words = [shlex.split(line) for line in "\n".join(found).splitlines() if line.strip()]
    assert {first for first, *_ in words} == {"pip", "export", "tunedcomm", "torchrun"}
    return [rest for first, *rest in words if first == program]


def install(folder: Path, package: str, module: str, text: str, value: str) -> None:
    """What an installer leaves behind: the module and its metadata."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tunedcomm.variants]\nnice = {value}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the page's package."""
    folder = tmp_path / "site"
    project = block("pyproject.toml")
    assert 'entry-points."tunedcomm.variants"' in project
    (value,) = re.findall(r'^nice = "(.*)"$', project, re.MULTILINE)
    (package,) = re.findall(r'^name = "(.*)"$', project, re.MULTILINE)
    install(folder, package, "nice_variants", block("nice_variants.py"), value)
    (folder / "run_page.py").write_text(block("run.py"))
    (folder / "run.py").write_text(block("run.py"))
    return folder


VARIABLES = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def discovered(*folders: Path) -> tuple[list[str], str]:
    """Variants of all_reduce in a fresh process, and its warnings."""
    code = (
        "import json; from tunedcomm import kernels, spec; kernels.discover(); kernels.discover(); "
        "print(json.dumps([*spec.variants('all_reduce'), *spec.ops()]))"
    )
    done = python("-c", code, paths=folders, **VARIABLES)
    return json.loads(done.stdout), done.stderr


def body(rank: int, world_size: int, folder: str, ranks: tuple[int, ...], tuned: str) -> Any:
    if rank in ranks:
        sys.path.insert(0, folder)
    os.environ["TUNEDCOMM_DB"] = tuned
    import tunedcomm
    from tunedcomm.dispatch.groups import get_communicator
    from tunedcomm.spec import get_op

    communicator = get_communicator()  # refuses where the ranks' packages differ
    from run_page import total

    x = torch.arange(65536).bfloat16()
    (expected,) = get_op("all_reduce").ordered_reference(PROBLEM, [(x,), (x * 2,)], rank)
    x = x * (rank + 1)

    assert torch.equal(total(x), expected)
    decision = tunedcomm.explain(communicator, PROBLEM)
    assert torch.equal(tunedcomm.all_reduce(x), expected)
    return decision.candidate.variant, decision.source


@pytest.mark.slow
def test_the_page_is_tuned_and_dispatched(site: Path, tmp_path: Path) -> None:
    database = tmp_path / "tuned.db"
    asked: dict[str, Any] = {"paths": [site], "cwd": tmp_path, **VARIABLES}
    asked |= {"TUNEDCOMM_DB": str(database), "TUNEDCOMM_WORKSPACE_MIB": "1"}
    code = "from tunedcomm.cli.main import run; run()"
    shown = [python("-c", code, *arguments, **asked).stdout for arguments in commands("tunedcomm")]
    with sqlite3.connect(database) as opened:
        rows = opened.execute(
            "SELECT status, config FROM trial JOIN variant ON variant.id = trial.variant_id "
            "WHERE variant.name = 'gather_sum'"
        ).fetchall()
        statuses = {status for status, _ in rows}
        assert "ok" in statuses, rows
        assert statuses <= {"ok", "pruned"}, rows
        assert len({config for _, config in rows}) >= 2, rows
        # Which is faster on this machine is a matter of chance: let it be this one, and see dispatch follow.
        opened.execute(
            "UPDATE trial SET latency_p10_us = 1, latency_p50_us = 1, latency_p90_us = 1 "
            "WHERE status = 'ok' AND variant_id = (SELECT id FROM variant WHERE name = 'gather_sum')"
        )
        opened.execute("UPDATE trial SET baseline_p50_us = 1000")
    assert "nice-variants brings all_reduce.gather_sum" in shown[0]
    assert "  runs  " in shown[2]
    assert "gather_sum" in shown[3]
    found = run_ranks(2, body, str(site), (0, 1), str(database), timeout=90, fresh=True)
    assert found == [("gather_sum", "exact")] * 2
    (arguments,) = commands("torchrun")
    done = python("-m", "torch.distributed.run", "--standalone", *arguments, **{**asked, "cwd": site})
    assert "forced: gather_sum(num_pieces=2) (" in done.stdout
    assert "by itself: gather_sum(" in done.stdout


OURS = (
    "import dataclasses\nfrom tunedcomm.spec import get_variant, register_variant\n"
    "ours = get_variant('all_reduce', 'lamport')\n"
)
HALF = "register_variant(dataclasses.replace(ours, name='half_registered'{}))\n"
# Package to its module, its entry point, and what is warned of.
BROKEN = {
    "cannot-import": ("import nothing_of_that_name\n", "broken", "nothing_of_that_name"),
    "no-attribute": ("", "broken:absent", "absent"),
    "leaves": ("import sys\n\n\ndef add():\n    raise RuntimeError('not today')\n", "broken:add", "not today"),
    "takes-ours": (f"{OURS}{HALF.format('')}register_variant(dataclasses.replace(ours))\n", "broken", "'lamport' of"),
    "no-such-op": (f"{OURS}register_variant(dataclasses.replace(ours, op='all_redoose'))\n", "broken", "'all_reduce'"),
    "no-source": (OURS + HALF.format(", kernels=(print,)"), "broken", "is not a Triton function"),
}


@pytest.mark.parametrize("package", some(BROKEN))
def test_a_broken_package_is_left_out_with_one_warning(package: str, site: Path, tmp_path: Path) -> None:
    text, value, reason = BROKEN[package]
    install(tmp_path / "other", package, "broken", text, value)
    names, warnings = discovered(tmp_path / "other", site)
    assert "gather_sum" in names, "the good package is there all the same"
    assert "lamport" in names
    assert "half_registered" not in names
    told = [line for line in warnings.splitlines() if f"the package {package} brings no variants" in line]
    assert len(told) == 1, warnings
    assert reason in told[0]


def test_a_package_may_bring_an_op(tmp_path: Path) -> None:
    text = (
        "import dataclasses\nfrom tunedcomm.spec import get_op, get_variant, register_op, register_variant\n\n\n"
        "def add():\n"
        "    register_op(dataclasses.replace(get_op('all_reduce'), name='all_sum'))\n"
        "    register_variant(dataclasses.replace(get_variant('all_reduce', 'library'), op='all_sum'))\n"
    )
    install(tmp_path / "other", "an-op", "an_op", text, "an_op:add")
    names, warnings = discovered(tmp_path / "other")
    assert "all_sum" in names, warnings
