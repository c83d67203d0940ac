"""Kernels by op: `kernels/<op>/op.py` says what the op is, every other file there is one variant.

`discover()` imports them all, which fills the registries of `tunedcomm.spec`, and then what other packages bring.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib
import inspect
import linecache
import logging
import os
import pkgutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from tunedcomm.kernels._plugins import load_plugins
from tunedcomm.spec import Variant

__all__ = ["discover", "source_hash"]

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver on Linux, and under Windows
_UNTOLD = ("ctx", "kind", "type_comment")  # fields of syntax trees that say nothing about what runs


def _choose_interpreter() -> None:
    """Interpret kernels where there is no GPU, unless TRITON_INTERPRET says otherwise.

    Kernels are decorated when their module is imported, and Triton's own `tl.max` and the like when Triton is: so this
    must come before either, and a program that imported Triton before stays without interpreted kernels.
    """
    if "TRITON_INTERPRET" in os.environ or _has_gpu():
        return
    if "triton" in sys.modules:
        logging.getLogger("tunedcomm").warning(
            "Triton was imported before tunedcomm on a machine without GPUs, so its interpreter cannot be switched on: "
            "every call goes to the library; set TRITON_INTERPRET=1, or import tunedcomm.kernels before Triton"
        )
        return
    os.environ["TRITON_INTERPRET"] = "1"


def _has_gpu() -> bool:
    """What torch says, where it is imported: whoever launches kernels imports it first.

    Who only reads databases should not wait for torch. Without it, no device file means no GPU; one that is there and
    cannot be used is taken for a GPU, which changes nothing for a reader.
    """
    if "torch" in sys.modules:
        import torch

        return torch.cuda.is_available()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and any(Path(device).exists() for device in _DEVICE_FILES)


@functools.cache
def discover() -> None:
    """Import every op and variant, once; then those of packages with entry points in the group `tunedcomm.variants`."""
    for package in pkgutil.iter_modules(__path__, f"{__name__}."):
        if package.ispkg:
            module = importlib.import_module(package.name)
            for member in sorted(info.name for info in pkgutil.iter_modules(module.__path__, f"{package.name}.")):
                importlib.import_module(member)
    load_plugins(source_hash)


_choose_interpreter()


@functools.lru_cache(maxsize=64)
def _functions_in(lines: tuple[str, ...]) -> dict[int, ast.FunctionDef]:
    """Functions at the top of a module by their first line, which may be a decorator's: a module is parsed once."""
    found = [node for node in ast.parse("".join(lines)).body if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *(part.lineno for part in node.decorator_list)]): node for node in found}


def _definition(function: Any) -> ast.FunctionDef:
    """Syntax tree of a function without comments, docstring, decorators and formatting."""
    lines = linecache.getlines(inspect.getsourcefile(function) or "", function.__globals__)
    found: ast.stmt | None = _functions_in(tuple(lines)).get(function.__code__.co_firstlineno)
    if found is None:  # inside of another function, say
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, ast.FunctionDef)
    definition = copy.copy(found)
    if ast.get_docstring(definition, clean=False) is not None:
        definition.body = definition.body[1:] or [ast.Pass()]
    definition.decorator_list = []
    return definition


def _dump(node: object, names: set[str]) -> str:
    """A syntax tree as text that every supported Python writes alike; the names that it uses are added to `names`.

    `ast.unparse` sets parentheses differently from version to version, and newer Pythons add fields to nodes: those are
    empty in code that older ones can read, so empty fields are left out.
    """
    if isinstance(node, ast.AST):
        if isinstance(node, ast.Name):
            names.add(node.id)
        fields = [(n, v) for n, v in ast.iter_fields(node) if v is not None and v != [] and n not in _UNTOLD]
        return f"{type(node).__name__}({', '.join(f'{name}={_dump(value, names)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(_dump(item, names) for item in node)}]"
    return repr(node)


def _plain(function: Any) -> Any:
    """The Python function inside a Triton function or constexpr function; None for anything else."""
    inner = getattr(function, "fn", None)
    if inner is None and inspect.isfunction(function):
        inner = function
    module = getattr(inner, "__module__", "") or ""
    return inner if inspect.isfunction(inner) and not module.startswith("triton.") else None


@functools.cache
def _told(function: Any) -> tuple[str, tuple[str, ...]]:
    """A function's syntax tree as text, and the names it uses; most kernels call the same few functions."""
    names: set[str] = set()
    return _dump(_definition(function), names), tuple(sorted(names))


def _collect(function: Any, seen: dict[str, str]) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in seen:
        return
    seen[name], used = _told(function)
    for global_name in used:
        value = function.__globals__.get(global_name)
        inner = _plain(value)
        if inner is not None:
            _collect(inner, seen)
        elif isinstance(value, (int, float, str)) or hasattr(value, "value"):
            constant = getattr(value, "value", value)
            if isinstance(constant, (int, float, str)) and global_name != "INTERPRET":
                seen[f"{function.__module__}:{global_name}"] = repr(constant)


def source_hash(variant: Variant) -> str:
    """SHA-256 over the sources of the variant's kernels and all they call, first 16 hex digits.

    Comments, docstrings and formatting do not count, so that only a change of code retires stored rows. Variants
    without kernels hash to their version alone.
    """
    functions = []
    for kernel in variant.kernels:
        inner = _plain(kernel)
        if inner is None:
            raise TypeError(f"{variant.op}.{variant.name}: {kernel!r} is not a Triton function")
        functions.append(inner)
    return _hash_of(variant.version, *functions)


@functools.cache
def _hash_of(version: int, *functions: Any) -> str:
    # Of plain functions, since a Triton function that is looked up in a cache works out a hash of its own.
    seen: dict[str, str] = {}
    for function in functions:
        _collect(function, seen)
    text = "\n".join([f"version {version}", *(f"{name}\n{seen[name]}" for name in sorted(seen))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
