"""The boundaries of docs/design.md, checked on the sources."""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from quick import some

from tunedcomm import kernels
from tunedcomm.spec import Limits, Problem, get_op, ops, variants

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tunedcomm"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for pattern in ("tunedcomm/**/*", "tests/**/*", "bench/**/*", "docs/**/*", "tuning_db/*", "*", ".ci/*")
    for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".md", ".toml", ".yaml", ".sh", ".ini"} or path.name in {"Makefile", "run"}
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imported(node: ast.AST) -> Iterator[str]:
    """Names that a module imports, also within functions; not those for type checkers alone."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in ast.iter_child_nodes(node) if not is_for_types else ():
        yield from _imported(child)


def test_no_import_cycles() -> None:
    """Neither at the top of modules nor hidden in functions."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
    known, graph = set(names.values()), {}
    for path, module in names.items():
        found = _imported(ast.parse(path.read_text(encoding="utf-8")))
        graph[module] = {name if name in known else name.rpartition(".")[0] for name in found} & known - {module}
    cycle: list[str] = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = error.args[1]
    assert not cycle, f"import cycle: {' <- '.join(cycle)}"


def test_nothing_is_pickled() -> None:
    """Databases and job files come from elsewhere: plain columns and JSON only."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill", "shelve"} & set(names), relative(path)


@pytest.mark.parametrize(("backend", "multicast"), some([(b, m) for b in ("cuda", "host") for m in (True, False)], 4))
def test_default_configs_are_points_of_their_space(backend: Literal["cuda", "host"], multicast: bool) -> None:
    """Also where no config is feasible: tuner and `explain` ask the default why not."""
    kernels.discover()
    limits = Limits(backend, 132 if backend == "cuda" else 1, multicast, 256, 1 << 26, 1 << 22, 1 << 22)
    every = [variant for op in ops() for variant in variants(op).values()]
    for variant, numel, world_size in some(itertools.product(every, (1, 512, 98304, 1 << 28), (2, 3, 8)), 5):
        problem = Problem(variant.op, (numel,) * get_op(variant.op).rank_of_shape, "bfloat16", world_size)
        config = variant.default(problem, limits)
        assert variant.space.validate(config) == config, (variant.name, str(problem))


# Written in pieces, so that this file does not hold what it looks for.
FOREIGN = re.compile("|".join(["/" + r"home/\w", "/" + r"root\b", "/" + r"work/", r"(?<![\w./])/" + r"Users/\w"]))


def test_no_path_of_a_machine() -> None:
    assert [relative(path) for path in SOURCES if FOREIGN.search(path.read_text(encoding="utf-8"))] == []
