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
    """Databases and job files come from elsewhere: plain columns and JSON only.

    The ranks of a job exchange objects, as by PyTorch's object collectives; these are never stored.
    """
    for path in set(MODULES) - {PACKAGE / "symm" / "exchange.py"}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill", "shelve"} & set(names), relative(path)


# Functions of torch that make a tensor of the program's default dtype or on its default device.
FACTORIES = frozenset(
    "arange as_tensor asarray complex empty empty_permuted empty_strided eye full linspace logspace normal ones rand "
    "randint randn randperm range scalar_tensor tensor tril_indices triu_indices zeros bartlett_window blackman_window "
    "hamming_window hann_window kaiser_window".split()
)
LEGACY = re.compile(r"(Float|Double|Half|BFloat16|Byte|Char|Short|Int|Long|Bool|)Tensor")


def loose_factories(source: str) -> list[str]:
    """Calls that make a tensor whose dtype or device is the program's default, as `line: call`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        named = {word.arg for word in node.keywords}
        is_factory = owner in ("torch", "symm_mem") and name in FACTORIES
        if (is_factory and not named >= {"dtype", "device"}) or (owner == "torch" and LEGACY.fullmatch(name)):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_tensors_name_their_dtype_and_device() -> None:
    """Programs change the defaults while they load a model, which is when many groups make their first call."""
    sources = {relative(path): path.read_text(encoding="utf-8") for path in MODULES}
    assert {name: found for name, source in sources.items() if (found := loose_factories(source))} == {}
    assert sum(source.count("torch.empty(") for source in sources.values()) > 20, "what is looked for is there"


@pytest.mark.parametrize(
    ("call", "is_loose"),
    [
        ("torch.empty(3, device=x.device)", True),
        ("torch.zeros((3, 4), dtype=torch.int32)", True),
        ("symm_mem.empty(4, device=device)", True),
        ("torch.FloatTensor([1.0])", True),
        ("torch.Tensor(3)", True),
        ("torch.full((1,), 0.5, dtype=torch.float32, device='cpu')", False),
        ("torch.empty_like(x)", False),
        ("x.new_empty(3)", False),
        ("torch.frombuffer(memory, dtype=torch.uint8)", False),
        ("np.empty(3)", False),
    ],
)
def test_loose_factories_are_found(call: str, is_loose: bool) -> None:
    assert bool(loose_factories(f"def run():\n    return {call}\n")) is is_loose


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
