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

import hashed_helper

WIDTH = tl.constexpr(4)
_SHAPE = (2, 3)
LABEL = tl.constexpr("LOOP")
UNUSED = tl.constexpr(1)


@triton.constexpr_function
def _asm(count):
    """Text of the block."""
    return f"add {count}, {LABEL};"


@triton.constexpr_function
def _area():
    return _SHAPE[0] * 10 + _SHAPE[1]


@triton.jit(noinline=False)
def _deep(x):
    return x * WIDTH


@triton.jit
def _other(x):
    return x + WIDTH


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
    tl.store(p, _middle(tl.load(p), SCALE=3) + hashed_helper.shift(hashed_helper.ONE) + _area())
'''

HELPER = """
import triton
import triton.language as tl

ONE = tl.constexpr(1)
TWO = tl.constexpr(2)


@triton.jit
def shift(x):
    return x + 7


@triton.jit
def unshift(x):
    return x - 7
"""

COSMETIC = {
    "comment": ("# Why it is done so.", "# Another reason,\n    # at length."),
    "comment at the end": ("  # both", ""),
    "docstring": ('"""Add up."""', '"""Adds everything up.\n\n    At length.\n    """'),
    "docstring of a callee": ('    """What is between."""\n', ""),
    "line breaks": ("_middle(tl.load(p), SCALE=3)", "_middle(\n        tl.load(p),\n        SCALE=3,\n    )"),
    "blanks and parentheses": ("return x * WIDTH", "return (x  *  WIDTH)"),
    "quotes": ('tl.constexpr("LOOP")', "tl.constexpr('LOOP')"),
    "place in the file": ("import triton\n", "import triton\n\n\n\n"),
    "a constant that is not used": ("UNUSED = tl.constexpr(1)", "UNUSED = tl.constexpr(2)"),
    "a function that is not called": ("return x - 1", "return x - 2"),
}
RENAMED = {
    "an argument": [("def _deep(x):\n    return x * WIDTH", "def _deep(value):\n    return value * WIDTH")],
    "local variables": [("low, high = x, _deep(x)", "a, b = x, _deep(x)"), ("low + high * SCALE", "a + b * SCALE")],
    "a callee": [("def _deep(x)", "def _lower(x)"), ("_deep(x)  #", "_lower(x)  #")],
    "a constant": [
        ("_SHAPE = (2, 3)", "_SIZES = (2, 3)"),
        ("_SHAPE[0] * 10 + _SHAPE[1]", "_SIZES[0] * 10 + _SIZES[1]"),
    ],
    "a constexpr argument and the call by keyword": [
        ("SCALE: tl.constexpr = 2", "FACTOR: tl.constexpr = 2"),
        ("high * SCALE", "high * FACTOR"),
        ("tl.load(p), SCALE=3", "tl.load(p), FACTOR=3"),
    ],
    "nothing, with a call by position": [("tl.load(p), SCALE=3", "tl.load(p), 3")],
}
CODE = {
    "the kernel": ("+ _area())", "- _area())"),
    "its argument": ("def kernel(p, N: tl.constexpr)", "def kernel(p, N)"),
    "a callee": ("low + high * SCALE", "low - high * SCALE"),
    "swapped operands": ("low + high * SCALE", "high + low * SCALE"),
    "another callee": ("low, high = x, _deep(x)", "low, high = x, _other(x)"),
    "a callee's default": ("SCALE: tl.constexpr = 2", "SCALE: tl.constexpr = 3"),
    "a callee's callee": (
        "return x * WIDTH\n\n\n@triton.jit\ndef _other",
        "return x // WIDTH\n\n\n@triton.jit\ndef _other",
    ),
    "a constant": ("WIDTH = tl.constexpr(4)", "WIDTH = tl.constexpr(8)"),
    "a constant's type": ("WIDTH = tl.constexpr(4)", "WIDTH = tl.constexpr(4.0)"),
    "a tuple": ("_SHAPE = (2, 3)", "_SHAPE = (3, 2)"),
    "a text": ('tl.constexpr("LOOP")', 'tl.constexpr("POOL")'),
    "a constexpr function": ("add {count}, ", "add.u32 {count}, "),
    "an option of the compiler": ("@triton.jit(noinline=False)", "@triton.jit(noinline=True)"),
    "a function of Triton": ("_middle(tl.load(p)", "_middle(tl.trans(p)"),
    "a constant of another module": ("hashed_helper.ONE", "hashed_helper.TWO"),
    "a function of another module": ("hashed_helper.shift", "hashed_helper.unshift"),
}


@pytest.fixture(scope="module")
def like() -> Variant:
    kernels.discover()
    return get_variant("all_reduce", "lamport")


def hash_of(
    like: Variant, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "hashed_module"
) -> str:
    """Hash of a variant whose kernel is in a module of this text."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    (folder / "hashed_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(folder))
    for imported in (name, "hashed_helper"):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    module = importlib.import_module(name)
    assert Path(module.__file__ or "").parent == folder
    for imported in (name, "hashed_helper"):
        monkeypatch.delitem(sys.modules, imported)
    return kernels.source_hash(dataclasses.replace(like, kernels=(module.kernel,)))


def changed(entry: tuple[str, str]) -> str:
    assert SOURCE.count(entry[0]) == 1, entry
    return SOURCE.replace(*entry)


@pytest.mark.parametrize("what", COSMETIC)
def test_looks_do_not_count(like: Variant, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of(like, SOURCE, tmp_path / "before", monkeypatch)
    assert hash_of(like, changed(COSMETIC[what]), tmp_path / "after", monkeypatch) == before


@pytest.mark.parametrize("what", RENAMED)
def test_names_do_not_count(like: Variant, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SOURCE
    for before, after in RENAMED[what]:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    assert hash_of(like, text, tmp_path / "after", monkeypatch) == hash_of(like, SOURCE, tmp_path / "b", monkeypatch)


def test_a_kernel_that_is_moved_and_renamed_keeps_its_hash(
    like: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = SOURCE.replace("def kernel(", "def renamed(") + "\n\nkernel = renamed\n"
    before = hash_of(like, SOURCE, tmp_path / "before", monkeypatch)
    assert hash_of(like, moved, tmp_path / "after", monkeypatch, name="elsewhere") == before


def test_a_kernel_that_uses_what_cannot_be_hashed_is_refused(
    like: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opaque = SOURCE.replace("_SHAPE = (2, 3)", "class Opaque:\n    pass\n\n\n_SHAPE = Opaque()")
    with pytest.raises(TypeError, match="_SHAPE"):
        hash_of(like, opaque, tmp_path / "opaque", monkeypatch)


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
triton.constexpr_function = lambda fn: types.SimpleNamespace(fn=fn)
triton.jit = lambda fn=None, **options: types.SimpleNamespace(fn=fn) if fn else triton.jit
tl.constexpr = type("constexpr", (), {"__init__": lambda self, value: setattr(self, "value", value)})
sys.modules.update({"torch": torch, "triton": triton, "triton.language": tl})
import hashed_module
from tunedcomm import kernels
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
    (tmp_path / "hashed_helper.py").write_text(HELPER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PYTHONDONTWRITEBYTECODE": "1"}
    found = {
        path: subprocess.run([path, "-c", _STAND_IN], env=env, capture_output=True, text=True, check=True).stdout
        for path in others
    }
    assert len(set(found.values())) == 1, found
