"""The boundaries of docs/design.md, checked on the sources."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tunedcomm"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for pattern in ("tunedcomm/**/*", "tests/**/*", "bench/**/*", "docs/**/*", "tuning_db/*", "*", ".ci/*")
    for path in ROOT.glob(pattern)
    if path.suffix in {".py", ".md", ".toml", ".yaml", ".sh", ".ini", ".mako"} or path.name in {"Makefile", "run"}
)
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Decorated for Triton: device code is as long as its protocol is."""
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter", reason="import-linter is not installed (extra `lint`)")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(node):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name


def test_selection_needs_neither_torch_nor_triton() -> None:
    code = "import sys, tunedcomm.db.select; print(sorted({'torch', 'triton', 'numpy', 'optuna'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_is_pickled() -> None:
    """Databases and job files come from elsewhere: plain columns and JSON only."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill", "shelve"} & set(names), relative(path)


# Written in pieces, so that this file does not hold what it looks for.
FOREIGN = re.compile("|".join(["/" + r"home/\w", "/" + r"root\b", "/" + r"work/", r"(?<![\w./])/" + r"Users/\w"]))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_path_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not FOREIGN.findall(text)


def test_install_names_no_package_index() -> None:
    for name in ("pyproject.toml", "Makefile", ".ci/run", ".pre-commit-config.yaml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "index-url" not in text, name
        assert "://" not in text, name
