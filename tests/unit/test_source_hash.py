"""A source hash changes with the code of a kernel and of all it calls, and with nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tunedcomm import kernels
from tunedcomm.spec import Variant, get_variant, variants

ROOT = Path(__file__).parents[2]

SOURCE = '''
import triton
import triton.language as tl

WIDTH = tl.constexpr(4)
LABEL = tl.constexpr("LOOP")
UNUSED = tl.constexpr(1)


@triton.constexpr_function
def _asm(count):
    """Text of the block."""
    return f"add {count}, {LABEL};"


@triton.jit
def _deep(x):
    return x * WIDTH


@triton.jit
def _middle(x, SCALE: tl.constexpr = 2):
    """What is between."""
    low, high = x, _deep(x)  # both
    return low + high * SCALE


@triton.jit
def _unused(x):
    return x - 1


@triton.jit
def kernel(p, N: tl.constexpr):
    """Add up."""
    # Why it is done so.
    text: tl.constexpr = _asm(N)
    tl.store(p, _middle(tl.load(p)) + 1)
'''

COSMETIC = {
    "comment": ("# Why it is done so.", "# Another reason,\n    # at length."),
    "comment at the end": ("  # both", ""),
    "docstring": ('"""Add up."""', '"""Adds everything up.\n\n    At length.\n    """'),
    "docstring of a callee": ('    """What is between."""\n', ""),
    "line breaks": (
        "tl.store(p, _middle(tl.load(p)) + 1)",
        "tl.store(\n        p,\n        _middle(tl.load(p)) + 1,\n    )",
    ),
    "blanks and parentheses": ("return x * WIDTH", "return (x  *  WIDTH)"),
    "quotes": ('tl.constexpr("LOOP")', "tl.constexpr('LOOP')"),
    "place in the file": ("import triton\n", "import triton\n\n\n\n"),
    "a constant that is not used": ("UNUSED = tl.constexpr(1)", "UNUSED = tl.constexpr(2)"),
    "a function that is not called": ("return x - 1", "return x - 2"),
}
CODE = {
    "the kernel": ("_middle(tl.load(p)) + 1", "_middle(tl.load(p)) + 2"),
    "its argument": ("def kernel(p, N: tl.constexpr)", "def kernel(p, N)"),
    "a callee": ("low + high * SCALE", "low - high * SCALE"),
    "a callee's default": ("SCALE: tl.constexpr = 2", "SCALE: tl.constexpr = 3"),
    "a callee's callee": ("return x * WIDTH", "return x // WIDTH"),
    "a constant": ("WIDTH = tl.constexpr(4)", "WIDTH = tl.constexpr(8)"),
    "a text": ('tl.constexpr("LOOP")', 'tl.constexpr("POOL")'),
    "a constexpr function": ("add {count}, ", "add.u32 {count}, "),
}


@pytest.fixture(scope="module")
def like() -> Variant:
    kernels.discover()
    return get_variant("all_reduce", "lamport")


def hash_of(like: Variant, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hash of a variant whose kernel is in a module of this text; the module's name is always the same."""
    folder.mkdir()
    (folder / "hashed_module.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "hashed_module", raising=False)
    module = importlib.import_module("hashed_module")
    assert Path(module.__file__ or "").parent == folder
    monkeypatch.delitem(sys.modules, "hashed_module")
    return kernels.source_hash(dataclasses.replace(like, kernels=(module.kernel,)))


def changed(entry: tuple[str, str]) -> str:
    assert SOURCE.count(entry[0]) == 1, entry
    return SOURCE.replace(*entry)


@pytest.mark.parametrize("what", COSMETIC)
def test_looks_do_not_count(like: Variant, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of(like, SOURCE, tmp_path / "before", monkeypatch)
    assert hash_of(like, changed(COSMETIC[what]), tmp_path / "after", monkeypatch) == before


@pytest.mark.parametrize("what", CODE)
def test_code_counts(like: Variant, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of(like, SOURCE, tmp_path / "before", monkeypatch)
    assert hash_of(like, changed(CODE[what]), tmp_path / "after", monkeypatch) != before


def test_version_counts(like: Variant) -> None:
    assert kernels.source_hash(dataclasses.replace(like, version=like.version + 1)) != kernels.source_hash(like)


def test_every_kernel_has_a_hash_of_its_own() -> None:
    kernels.discover()
    hashes = {name: kernels.source_hash(v) for name, v in variants("all_reduce").items() if v.kernels}
    assert len(set(hashes.values())) == len(hashes) >= 6
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in hashes.values())


def test_only_triton_functions_are_hashed(like: Variant) -> None:
    with pytest.raises(TypeError, match=r"all_reduce\.lamport: 3 is not a Triton function"):
        kernels.source_hash(dataclasses.replace(like, kernels=(3,)))


_EVERY_HASH = """
import json
from tunedcomm import kernels
from tunedcomm.spec import variants
kernels.discover()
print(json.dumps({name: kernels.source_hash(v) for name, v in variants("all_reduce").items()}))
"""


@pytest.mark.parametrize(("interpret", "seed"), [("1", "1"), ("0", "77")])
def test_the_same_in_every_process(interpret: str, seed: str) -> None:
    """Interpreted or compiled, whatever Python's own hashes: rows of a GPU are read where there is none."""
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_HASH], env=env, cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    kernels.discover()
    assert json.loads(done.stdout) == {n: kernels.source_hash(v) for n, v in variants("all_reduce").items()}


# Without torch and triton, which the other interpreters need not have: decorators that keep the function as theirs do.
_STAND_IN = """
import sys, types
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_available=lambda: True)
triton, tl = types.ModuleType("triton"), types.ModuleType("triton.language")
triton.language = tl
triton.jit = triton.constexpr_function = lambda fn: types.SimpleNamespace(fn=fn)
tl.constexpr = lambda value: types.SimpleNamespace(value=value)
sys.modules.update({"torch": torch, "triton": triton, "triton.language": tl})
import hashed_module
from tunedcomm import kernels
kernels.source_hash = kernels.source_hash.__wrapped__
print(kernels.source_hash(types.SimpleNamespace(op="o", name="n", version=1, kernels=(hashed_module.kernel,))))
"""


def _pythons() -> list[str]:
    """Interpreters on the PATH that this package supports and that start."""
    found = []
    for minor in range(10, 16):
        path = shutil.which(f"python3.{minor}")
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            found.append(path)
    return found


def test_the_same_under_every_python(tmp_path: Path) -> None:
    """A database made under one Python serves under another."""
    others = _pythons()
    if len(others) < 2:
        pytest.skip("there is only one supported Python on the PATH")
    (tmp_path / "hashed_module.py").write_text(SOURCE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PYTHONDONTWRITEBYTECODE": "1"}
    found = {
        path: subprocess.run([path, "-c", _STAND_IN], env=env, capture_output=True, text=True, check=True).stdout
        for path in others
    }
    assert len(set(found.values())) == 1, found
