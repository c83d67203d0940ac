"""Pages: generated parts are current, links lead somewhere, docstrings are complete, and the code blocks run.

- ```python blocks of one page make one program, run on 2 ranks of CPU tensors. `<!-- skip: WHY -->` above a block
  leaves it out. A page that does not call `init_process_group` gets a group and a tensor `x` first.
- ```console blocks: the lines that begin with `$ ` are run in a folder that holds `tuning_db` and `bench`.
- ```bash blocks are recipes for other machines: `tunedcomm` has to take their options.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from quick import some

import tunedcomm
from tunedcomm import kernels
from tunedcomm.bench.csv import COLUMNS, known_link_gb_s
from tunedcomm.cli.main import app
from tunedcomm.spec import get_op, ops

ROOT = Path(__file__).parents[2]
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*SHOWN, ROOT / "CONTRIBUTING.md", ROOT / "tuning_db" / "README.md", ROOT / "bench" / "peers" / "README.md"]
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8 e4m3": "float8_e4m3fn"}


sys.path.append(str(ROOT / "docs"))

import generate  # noqa: E402

kernels.discover()


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.written(text) == text, "run `python docs/generate.py`"


def test_every_part_is_on_a_page() -> None:
    found = set()
    for page in generate.pages():
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"<!-- begin generated (.+?) -->", text)
        assert names == re.findall(r"<!-- end generated (.+?) -->", text)
        found |= set(names)
    assert found == set(generate.PARTS)


def test_the_plot_shows_the_results() -> None:
    points = generate.points()
    assert json.dumps(points).encode() in generate.PLOT.read_bytes(), "run `python docs/generate.py`"
    assert all(len(curve) >= 5 for curve in points.values())


def test_the_ceiling_of_bench_is_the_largest_bandwidth_of_the_results() -> None:
    both = [row for name in (generate.ALL_REDUCE, generate.COLLECTIVES) for row in generate.rows_of(name)]
    largest = max(float(row["busbw_gb_s"]) for row in both if row["busbw_gb_s"])
    assert known_link_gb_s("NVIDIA H200", "nvswitch-18") == pytest.approx(largest, rel=2e-3)
    assert all(set(row) <= set(COLUMNS) for row in both)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), (target, anchor)


def test_pages_that_sources_name_exist() -> None:
    found = [
        path for folder in ("tunedcomm", "tests", "bench", "examples", ".ci") for path in (ROOT / folder).rglob("*")
    ]
    sources = [path for path in found if path.suffix in (".py", ".sh", ".md") or path.name == "run"]
    texts = [path.read_text(encoding="utf-8") for path in (*sources, ROOT / "Makefile")]
    named = {name for text in texts for name in re.findall(r"docs/[a-z_]+\.(?:md|py)", text)}
    assert "docs/ops.md" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_readme_and_on_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"- {page.name}$", menu, re.MULTILINE), f"{page.name} is not in mkdocs.yml"
        assert f"](docs/{page.name})" in readme, f"README.md does not link to docs/{page.name}"


@pytest.mark.parametrize("name", list(ops()))
def test_docstrings_of_ops_describe_every_parameter(name: str) -> None:
    function = getattr(tunedcomm, name)
    told = generate.docstring(function)
    assert list(told.sections["Args"]) == list(inspect.signature(function).parameters)
    assert told.returns
    assert {"UnsupportedInputError", "PeerTimeoutError"} <= set(told.sections["Raises"])
    dtypes = re.search(r"Kernels take (.+?)[;.]", next(iter(told.sections["Args"].values())))
    spec = get_op(name)
    if dtypes is not None:
        assert tuple(SHORT[dtype] for dtype in re.split(r", | and ", dtypes[1])) == spec.dtypes
    else:
        assert len(spec.dtypes) > len(SHORT), "an op that only moves bytes takes any dtype"


# Code blocks

PREAMBLE = """
import functools, torch, torch.distributed, tunedcomm
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # Inductor is tested elsewhere
torch.cuda.set_device, torch.cuda.device_count = (lambda device: None), (lambda: 1)
"""
GROUP = """
torch.distributed.init_process_group("gloo")
x = torch.ones(4096)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    skipped: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"(<!-- skip: .+ -->\n)?^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text[: match.start(2)].count("\n") + 1
        found.append(Block(page, line, match[2], bool(match[1]), match[3]))
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), f"{page.name}: a block does not end"
    return found


ALL = [block for page in SHOWN for block in blocks(page)]
PROGRAMS: dict[str, list[Block]] = {}
for _block in ALL:
    if _block.language == "python" and not _block.skipped and _block.page.name != "adding_a_variant.md":
        PROGRAMS.setdefault(_block.page.name, []).append(_block)  # that page's is in multirank/test_plugins.py


def commands(text: str) -> list[list[str]]:
    """Arguments of every call of tunedcomm in a shell block, up to a redirection."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            continue
        for start, word in enumerate(words):
            called = word == "tunedcomm" and (start == 0 or words[start - 1] != "install")
            if called or word == "tunedcomm.cli.main":
                rest = words[start + 1 :]
                end = next((i for i, w in enumerate(rest) if re.match(r"\d?[<>|&]", w)), len(rest))
                found.append(rest[:end])
                break
    return found


def parse(arguments: list[str]) -> None:
    """Have the verb's own parser read them; nothing is run."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="tunedcomm")
    name = ""
    while hasattr(command, "list_commands"):
        name, *arguments = arguments
        assert name in command.list_commands(context)
        command = command.get_command(context, name)
    if "--help" not in arguments:
        command.make_context(name, list(arguments))


@pytest.mark.parametrize("block", [block for block in ALL if commands(block.text)], ids=str)
def test_tunedcomm_takes_the_command_lines(block: Block) -> None:
    if block.language in ("bash", "console"):
        for arguments in commands(block.text):
            parse(arguments)


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_python_is_python_and_its_names_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tunedcomm":
            assert hasattr(tunedcomm, node.attr), f"{block}: tunedcomm.{node.attr}"


def run(command: list[str], folder: Path) -> None:
    (folder / "bin").mkdir()
    script = folder / "bin" / "tunedcomm"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tunedcomm.cli.main "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    for name in ("tuning_db", "bench"):
        (folder / name).symlink_to(ROOT / name)
    paths = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path),
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", some(sorted(PROGRAMS), len(PROGRAMS)))  # README.md in `make test`
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    text = "\n".join(block.text for block in PROGRAMS[page]).replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
    program = tmp_path / "page.py"
    program.write_text(PREAMBLE + ("" if "init_process_group" in text else GROUP) + text, encoding="utf-8")
    run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)], tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in ALL if block.language == "console"], ids=str)
def test_console_blocks_run(block: Block, tmp_path: Path) -> None:
    if "tunedcomm report" in block.text:
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    run(["bash", "-euc", "\n".join(lines)], tmp_path)
