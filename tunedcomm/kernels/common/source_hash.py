"""The source hash of a variant: equal while its kernels compute the same, wherever they are and whatever their names.

A stored row serves only while the hash of its variant is the one that was measured. The hash covers what runs:

- the syntax of every kernel and of every function that it calls, without comments, docstrings and formatting;
- each global name as its value: a function as the hash of its own source, a constant as its type and value,
  things of Triton, Python and other libraries as their qualified name;
- arguments and local variables as their number in order of appearance, so that renaming them changes nothing;
  arguments of a call as the callee's parameters that they bind;
- the decorators with their options, and `Variant.version`.

The switch between the interpreter and the compiler (`ignore`) does not count: rows of a GPU are read on machines that
have none.

Hashes of this package's own kernels are kept in the user's cache directory, because they take tenths of a second. They
serve while every source file has its size and time of change, and under the same Python, Triton and torch. Kernels of
other packages are hashed at every start: nobody knows on what else they depend.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import hashlib
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tunedcomm import cache
from tunedcomm.spec import Variant

_IGNORED: list[object] = []
_LIBRARIES = sys.stdlib_module_names | {"numpy", "torch", "triton"}
_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SKIPPED_FIELDS = frozenset({"ctx", "kind", "type_comment", "type_params", "lineno"})


def ignore(value: object) -> None:
    """Leave this very object out of every hash, as the switch between interpreter and compiler."""
    _IGNORED.append(value)


def source_hash(variant: Variant) -> str:
    """SHA-256 over what the variant's kernels run, first 16 hex digits; of its version alone if it has no kernels.

    Raises:
        TypeError: `kernels` holds something that is no Triton function, or one of them uses a global of a type whose
            value cannot be told.
    """
    kernels = []
    for kernel in variant.kernels:
        function = _python_function(kernel)
        if function is None:
            raise TypeError(f"{variant.op}.{variant.name}: {kernel!r} is not a Triton function")
        kernels.append(function)
    if not kernels or not all(map(_is_own, kernels)):
        return _hash_of(variant.version, *kernels)
    name = f"{variant.version} " + " ".join(f"{f.__module__}:{f.__qualname__}" for f in kernels)
    if name not in _kept():
        _kept()[name] = _hash_of(variant.version, *kernels)
        _new.append(name)
    return _kept()[name]


def keep_hashes() -> None:
    """Write what was computed into the user's cache directory; where that is not possible, the next start computes."""
    if _new:
        _new.clear()
        cache.keep(_KEPT_AS, cache.package_state(), _kept())


_KEPT_AS = "hashes"
_new: list[str] = []  # names that the file does not have


def _is_own(function: Any) -> bool:
    """True for a function of one of this package's modules, which its name tells from all others."""
    held = getattr(sys.modules.get(function.__module__), function.__name__, None)
    return function.__module__.startswith("tunedcomm.kernels.") and getattr(held, "fn", held) is function


@functools.cache
def _kept() -> dict[str, str]:
    """The stored hashes, and those computed since."""
    held = cache.read(_KEPT_AS, cache.package_state())
    return dict(held) if isinstance(held, dict) else {}


@functools.cache
def _hash_of(version: int, *functions: Any) -> str:
    text = "\n".join([f"version {version}", *sorted(_digest(function) for function in functions)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _python_function(value: Any) -> Any:
    """The Python function inside of a Triton function or constexpr function, or the function itself; else None."""
    inner = getattr(value, "fn", value)
    return inner if inspect.isfunction(inner) and not _is_library(inner) else None


def _is_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _LIBRARIES


@functools.cache
def _digest(definition: Any) -> str:
    """SHA-256 over a function or class and all that it uses."""
    text = _HashWalk(definition).text()
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _syntax(definition: Any) -> ast.FunctionDef | ast.ClassDef:
    """Parse the source of a function or class."""
    found: ast.stmt | None = None
    if inspect.isfunction(definition):
        lines = linecache.getlines(inspect.getsourcefile(definition) or "", _globals(definition))
        with contextlib.suppress(SyntaxError):  # its own lines alone: modules are long
            found = ast.parse("".join(_lines_of(lines[definition.__code__.co_firstlineno - 1 :]))).body[0]
    if found is None:  # a class, or defined inside of another function
        found = ast.parse(textwrap.dedent(inspect.getsource(definition))).body[0]
    assert isinstance(found, (ast.FunctionDef, ast.ClassDef))
    return found


def _lines_of(lines: Iterable[str]) -> Iterator[str]:
    """Take a module's lines from a function's first decorator to its end."""
    inside = False
    for line in lines:
        if inside and line[0] not in " \t\n)#":
            return
        inside = inside or line.startswith("def ")
        yield line


def _globals(definition: Any) -> dict[str, Any]:
    if inspect.isclass(definition):
        return vars(sys.modules[definition.__module__])
    found = dict(definition.__globals__) if definition.__closure__ else definition.__globals__
    for name, cell in zip(definition.__code__.co_freevars, definition.__closure__ or (), strict=True):
        found[name] = cell.cell_contents
    return found


def _bound_in(scope: ast.AST) -> Iterator[str]:
    """Names that a function, lambda or comprehension binds itself, in order of appearance."""
    args = getattr(scope, "args", None)
    if isinstance(args, ast.arguments):
        yield from (arg.arg for arg in _parameters(args))
    pending = [node for node in ast.iter_child_nodes(scope) if node is not args][::-1]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, (ast.Store, ast.Del)):
                yield node.id
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.ExceptHandler):
            yield node.name or ""
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        if not isinstance(node, (*_SCOPES, ast.ClassDef)):
            pending += [*ast.iter_child_nodes(node)][::-1]


def _parameters(args: ast.arguments) -> list[ast.arg]:
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [arg for arg in every if arg is not None]


def _dotted(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """Split `a.b.c` into the expression before the first dot and the names after it."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    return node, attributes


class _HashWalk:
    """Writes one definition's syntax as text, each name as its value."""

    def __init__(self, definition: Any) -> None:
        self._definition = definition
        self._globals = _globals(definition)
        self._scopes: list[dict[str, int]] = []
        self._count = 0

    def text(self) -> str:
        node = _syntax(self._definition)
        if isinstance(node, ast.FunctionDef):
            return self._function(node)
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        return f"class {self._node([*node.decorator_list, *node.bases])};{self._node(body)}"

    def _node(self, node: object) -> str:
        if isinstance(node, list):
            return f"[{','.join(map(self._node, node))}]"
        if not isinstance(node, ast.AST):
            return f"{type(node).__name__}:{node!r}"
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            return self._function(node)
        if isinstance(node, _SCOPES):
            with_names = self._enter(node)
            # The targets bind what the element uses, so they are written first.
            inner = self._fields(node, first="generators")
            self._scopes.pop()
            return f"{with_names}{inner}"
        return self._fields(node)

    def _fields(self, node: ast.AST, *, first: str = "") -> str:
        # Newer Pythons add fields, which are empty in code that older ones can read.
        names = sorted(node._fields, key=lambda name: name != first) if first else node._fields
        parts = [(name, getattr(node, name, None)) for name in names if name not in _SKIPPED_FIELDS]
        inner = ",".join(f"{name}={self._node(value)}" for name, value in parts if value is not None and value != [])
        return f"{type(node).__name__}({inner})"

    def _enter(self, node: ast.AST) -> str:
        scope: dict[str, int] = {}
        for name in _bound_in(node):
            if name not in scope:
                scope[name] = self._count
                self._count += 1
        self._scopes.append(scope)
        return f"{len(scope)}:"

    def _function(self, node: ast.FunctionDef | ast.Lambda) -> str:
        args = node.args
        outside = [self._node(getattr(node, "decorator_list", [])), self._node([*args.defaults, *args.kw_defaults])]
        counts = len(args.posonlyargs), len(args.args), len(args.kwonlyargs)
        kinds = f"{counts},{bool(args.vararg)},{bool(args.kwarg)}"
        annotations = [self._node(arg.annotation) for arg in _parameters(args)]
        names = self._enter(node)
        body = node.body
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            body = node.body[1:] or [ast.Pass()]
        inner = self._node(body)
        self._scopes.pop()
        return f"{type(node).__name__}({names}{kinds};{outside};{annotations};{inner})"

    def _name(self, node: ast.Name | ast.Attribute) -> str:
        base, attributes = _dotted(node)
        if not isinstance(base, ast.Name):
            return f"{self._node(base)}.{'.'.join(attributes)}"
        for scope in reversed(self._scopes):
            if base.id in scope:
                return ".".join([f"local{scope[base.id]}", *attributes])
        if base.id not in self._globals:
            qualified = f"builtins.{base.id}" if hasattr(builtins, base.id) else f"undefined.{base.id}"
            return ".".join([qualified, *attributes])
        value = self._globals[base.id]
        while attributes and isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
            value = getattr(value, attributes.pop(0))
        return ".".join([self._value(value, base.id), *attributes])

    def _called(self, node: ast.expr) -> Any:
        """The function of our own that an expression names, or None."""
        base, attributes = _dotted(node)
        if not isinstance(base, ast.Name) or any(base.id in scope for scope in self._scopes):
            return None
        value = self._globals.get(base.id)
        for name in attributes:
            if not isinstance(value, types.ModuleType):
                return None
            value = getattr(value, name, None)
        return _python_function(value)

    def _call(self, node: ast.Call) -> str:
        callee = self._called(node.func)
        positions: dict[str, int] = {}
        if callee is not None and not any(isinstance(arg, ast.Starred) for arg in node.args):
            args = _syntax(callee).args  # type: ignore[union-attr]
            positions = {arg.arg: place for place, arg in enumerate(_parameters(args))}
        given = [(f"{place:03}", arg) for place, arg in enumerate(node.args)]
        given += [
            (f"{positions[word.arg]:03}" if word.arg in positions else f"{word.arg}=", word.value)
            for word in node.keywords
        ]
        parts = ",".join(f"{name} {self._node(value)}" for name, value in sorted(given, key=lambda pair: pair[0]))
        return f"Call({self._node(node.func)};{parts})"

    def _value(self, value: Any, name: str) -> str:
        if any(value is ignored for ignored in _IGNORED):
            return "ignored"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if (function := _python_function(value)) is not None:
            return "self" if function is self._definition else f"function {_digest(function)}"
        if inspect.isclass(value) and not _is_library(value):
            return f"class {_digest(value)}"  # type: ignore[arg-type]
        return _constant(value, f"{self._definition.__module__}.{self._definition.__qualname__}", name)


def _constant(value: Any, where: str, name: str) -> str:
    """A constant by type and value; things of libraries by their qualified name."""
    if type(value).__name__ == "constexpr":
        return f"constexpr {_constant(value.value, where, name)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, (tuple, list, set, frozenset)):
        items = [_constant(item, where, name) for item in value]
        return f"{type(value).__name__}:[{','.join(items if isinstance(value, (tuple, list)) else sorted(items))}]"
    if isinstance(value, Mapping):
        inner = (f"{_constant(key, where, name)}:{_constant(item, where, name)}" for key, item in value.items())
        return f"{type(value).__name__}:{{{','.join(inner)}}}"
    inner = getattr(value, "fn", value)
    if _is_library(inner) and hasattr(inner, "__qualname__"):
        return f"{inner.__module__.partition('.')[0]}:{inner.__qualname__}"
    if _is_library(type(value)):
        return f"{type(value).__module__.partition('.')[0]}:{type(value).__qualname__}:{value}"
    raise TypeError(f"{where} uses {name}, a {type(value).__qualname__}: its source hash cannot tell what that holds")
