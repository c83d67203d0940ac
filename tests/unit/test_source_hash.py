"""A source hash changes with the code of a kernel and of all it calls, and with nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

# Each value is one edit or several.
SAME = {
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
    "an argument's name": ("def _deep(x):\n    return x * WIDTH", "def _deep(value):\n    return value * WIDTH"),
    "names of local variables": (
        ("low, high = x, _deep(x)", "a, b = x, _deep(x)"),
        ("low + high * SCALE", "a + b * SCALE"),
    ),
    "a callee's name": (("def _deep(x)", "def _lower(x)"), ("_deep(x)  #", "_lower(x)  #")),
    "a constant's name": (
        ("_SHAPE = (2, 3)", "_SIZES = (2, 3)"),
        ("_SHAPE[0] * 10 + _SHAPE[1]", "_SIZES[0] * 10 + _SIZES[1]"),
    ),
    "a constexpr argument's name and the call by keyword": (
        ("SCALE: tl.constexpr = 2", "FACTOR: tl.constexpr = 2"),
        ("high * SCALE", "high * FACTOR"),
        ("tl.load(p), SCALE=3", "tl.load(p), FACTOR=3"),
    ),
    "a call by position": ("tl.load(p), SCALE=3", "tl.load(p), 3"),
    "the kernel's own name": ("def kernel(p, N: tl.constexpr)", "def renamed(p, N: tl.constexpr)"),
}
OTHER = {
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


@pytest.fixture
def hash_of(like: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Hashes a variant whose kernel is in a module of the given text."""

    def hashed(text: str, name: str = "hashed_module") -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / f"{name}.py").write_text(text)
        (folder / "hashed_helper.py").write_text(HELPER)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            for imported in (name, "hashed_helper"):
                patch.delitem(sys.modules, imported, raising=False)
            module = importlib.import_module(name)
            for imported in (name, "hashed_helper"):
                sys.modules.pop(imported)
        assert Path(module.__file__ or "").parent == folder
        (kernel,) = [value for key, value in vars(module).items() if key in ("kernel", "renamed")]
        return kernels.source_hash(dataclasses.replace(like, kernels=(kernel,)))

    return hashed


@pytest.mark.parametrize("what", [*SAME, *OTHER])
def test_code_counts_and_looks_and_names_do_not(what: str, hash_of: Callable[..., str]) -> None:
    edits: Any = SAME.get(what) or OTHER[what]
    text = SOURCE
    for before, after in [edits] if isinstance(edits[0], str) else edits:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    assert (hash_of(text, "elsewhere" if what in SAME else "hashed_module") == hash_of(SOURCE)) == (what in SAME)


def test_a_kernel_that_uses_what_cannot_be_hashed_is_refused(hash_of: Callable[..., str], like: Variant) -> None:
    with pytest.raises(TypeError, match="_SHAPE"):
        hash_of(SOURCE.replace("_SHAPE = (2, 3)", "class Opaque:\n    pass\n\n\n_SHAPE = Opaque()"))
    with pytest.raises(TypeError, match=r"all_reduce\.lamport: 3"):
        kernels.source_hash(dataclasses.replace(like, kernels=(3,)))


def test_version_counts(like: Variant) -> None:
    assert kernels.source_hash(dataclasses.replace(like, version=like.version + 1)) != kernels.source_hash(like)


def test_every_kernel_has_a_hash_of_its_own() -> None:
    kernels.discover()
    hashes = {v.kernels: kernels.source_hash(v) for v in variants("all_reduce").values() if v.kernels}
    assert len(set(hashes.values())) == len(hashes) >= 6
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in hashes.values())


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


def test_the_same_under_every_python(tmp_path: Path) -> None:
    """A database made under one Python serves under another."""
    found = (shutil.which(f"python3.{minor}") for minor in range(10, 16))
    starts = [path for path in found if path and not subprocess.run([path, "-c", ""], check=False).returncode]
    if len(starts) < 2:
        pytest.skip("there is only one supported Python on the PATH")
    (tmp_path / "hashed_module.py").write_text(SOURCE)
    (tmp_path / "hashed_helper.py").write_text(HELPER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PYTHONDONTWRITEBYTECODE": "1"}
    hashes = {
        path: subprocess.run([path, "-c", _STAND_IN], env=env, capture_output=True, text=True, check=True).stdout
        for path in starts
    }
    assert len(set(hashes.values())) == 1, hashes


def test_own_hashes_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> dict[str, str]:
        kept.cache_clear()
        return kernels.source_hashes()

    kept = sys.modules["tunedcomm.kernels.common.source_hash"]._kept
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        computed = start()
        (file,) = (tmp_path / "tunedcomm").iterdir()
        held = json.loads(file.read_text())
        planted = {**held, "value": dict.fromkeys(held["value"], "kept")}
        file.write_text(json.dumps(planted))
        assert "kept" in start().values()
        for text in ("", "[]", "{}", json.dumps({**planted, "key": "of other sources"})):
            file.write_text(text)
            assert start() == computed
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
        assert start() == computed
    finally:
        kept.cache_clear()
