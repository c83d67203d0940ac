"""The entry point that engines load in every process: what it costs, and that it never raises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from programs import ROOT, python

from tunedcomm import settings

GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")
SPIED = """
import __future__, importlib.metadata, json, logging, os, sys, time
(entry,) = [e for e in importlib.metadata.entry_points(group={group!r}) if e.name == "tunedcomm"]
{before}
known, environment = set(sys.modules), dict(os.environ)
register = entry.load()
loaded = set(sys.modules) - known
begin = time.process_time()
for _ in range(3):
    register()
took = time.process_time() - begin
new = set(sys.modules) - known - loaded
print(json.dumps([sorted(loaded), sorted(new), os.environ == environment, took, len(sys.meta_path)]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Metadata of an installed tunedcomm with the entry points of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.findall(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', text, re.MULTILINE)
    assert {group for group, *_ in found} == set(GROUPS)
    info = tmp_path / "site" / "tunedcomm-0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tunedcomm\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {value}\n" for group, name, value in found))
    return info.parent


@pytest.mark.parametrize("group", GROUPS)
def test_it_imports_nothing_and_changes_nothing(group: str, site: Path) -> None:
    # torch is there before it in every engine; importing it here would hide whether CUDA was started.
    before = f"sys.modules[{group.split('.', maxsplit=1)[0]!r}] = sys"
    done = python("-c", SPIED.format(group=group, before=before), paths=[site])
    loaded, new, same_environment, took, _ = json.loads(done.stdout)
    assert loaded == ["tunedcomm_plugin"]
    assert new == []
    assert same_environment
    assert took < 0.05, "5 ms of CPU"
    assert done.stderr == ""


def test_cuda_is_not_started(site: Path) -> None:
    code = (
        "import torch, sys; sys.modules['vllm'] = sys.modules['sglang'] = sys; import tunedcomm_plugin as p; "
        "p.register(); print(torch.cuda.is_initialized(), 'tunedcomm' in sys.modules)"
    )
    assert python("-c", code, paths=[site]).stdout.split() == ["False", "False"]


@pytest.mark.parametrize("value", settings._OFF)
def test_it_can_be_switched_off(value: str, site: Path) -> None:
    before = "sys.modules['vllm'] = sys"
    code = SPIED.format(group=GROUPS[0], before=before) + "\nprint([type(f).__name__ for f in sys.meta_path])"
    shown = [
        python("-c", code, paths=[site], TUNEDCOMM_ENGINES=text).stdout.splitlines()[-1]
        for text in (value.upper(), "1")
    ]
    assert ["_AfterImport" in text for text in shown] == [False, True]


STRANGE = {
    "vllm": "class Other:\n    pass\n",
    "sglang": "class GroupCoordinator:\n    pass\n",
}


@pytest.mark.parametrize("engine", STRANGE)
def test_an_engine_without_the_hooks_gets_one_warning(engine: str, site: Path) -> None:
    where = {"vllm": "vllm/platforms/cuda.py", "sglang": "sglang/srt/distributed/parallel_state.py"}[engine]
    path = site / where
    path.parent.mkdir(parents=True)
    for parent in path.relative_to(site).parents[:-1]:
        (site / parent / "__init__.py").write_text("")
    path.write_text(STRANGE[engine])
    module = where.removesuffix(".py").replace("/", ".")
    code = f"import {engine}, tunedcomm_plugin as p; p.register(); p.register(); import {module}; p.register()"
    for rank in ("0", "1"):
        warnings = [line for line in python("-c", code, paths=[site], RANK=rank).stderr.splitlines() if line]
        assert len(warnings) == (rank == "0"), warnings
        assert not warnings or re.search(rf"tested with {engine} \d", warnings[0])


def test_hooks_wait_for_the_import(site: Path) -> None:
    """A module is hooked once it has been imported, and its import raises its own errors."""
    (site / "late.py").write_text("import sys\nif 'broken' in sys.modules:\n    raise OSError('its own')\nvalue = 1\n")
    code = (
        "import sys, tunedcomm_plugin as p\n"
        "seen = []\n"
        "p._after_import('late', lambda module: seen.append(module.value))\n"
        "sys.modules['broken'] = sys\n"
        "try:\n    import late\nexcept OSError:\n    del sys.modules['broken']\n"
        "assert not seen\n"
        "import late\n"
        "p._after_import('late', lambda module: seen.append(module.value))\n"
        "print(seen, sum(type(f).__name__ == '_AfterImport' for f in sys.meta_path))"
    )
    assert python("-c", code, paths=[site]).stdout.strip() == "[1, 1] 0"
