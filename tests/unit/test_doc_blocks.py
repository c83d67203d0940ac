"""Run the code blocks of README and pages.

- ```python blocks of one page make one program, run on 2 ranks of CPU tensors. `<!-- skip: WHY -->` above a block
  leaves it out. A page that does not call `init_process_group` gets a group and a tensor `x` first.
- ```console blocks: the lines that begin with `$ ` are run in a folder that holds `tuning_db` and `bench`.
- ```bash blocks are recipes for other machines: `tunedcomm` has to take their options.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import tunedcomm
from tunedcomm.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"adding_a_variant.md": "tests/multirank/test_plugins.py"}
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


ALL = [block for page in PAGES for block in blocks(page)]
CONSOLES = [block for block in ALL if block.language == "console"]
PROGRAMS = {
    page.name: [block for block in ALL if block.page == page and block.language == "python" and not block.skipped]
    for page in PAGES
    if page.name not in ELSEWHERE
}


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
        verbs = command.list_commands(context)
        assert name in verbs, f"{name!r} is no verb; there are {', '.join(verbs)}"
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


@pytest.mark.parametrize(
    "page",
    [pytest.param(name, marks=() if name == "README.md" else pytest.mark.slow) for name in PROGRAMS if PROGRAMS[name]],
)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    text = "\n".join(block.text for block in PROGRAMS[page]).replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
    program = tmp_path / "page.py"
    program.write_text(PREAMBLE + ("" if "init_process_group" in text else GROUP) + text, encoding="utf-8")
    run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)], tmp_path
    )


@pytest.mark.parametrize("block", [pytest.param(block, marks=pytest.mark.slow) for block in CONSOLES], ids=str)
def test_console_blocks_run(block: Block, tmp_path: Path) -> None:
    if "tunedcomm report" in block.text:
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    run(["bash", "-euc", "\n".join(lines)], tmp_path)
