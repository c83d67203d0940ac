"""The code blocks of README and docs: each says whether it runs here, and those that do are run.

Above a block stands a comment: `<!-- runs -->` (in an empty directory), `<!-- runs in the repository -->` (with $OUT
for what it writes), `<!-- runs on 2 ranks -->` (Python, after `init_process_group`, with a tensor `x`), or
`<!-- not run: WHY -->`. In all of them the command lines of tunedcomm have to be ones that it takes, and the Python to
be Python.
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
MARKS = re.compile(r"<!-- (runs|runs in the repository|runs on 2 ranks.*|not run: .+) -->")
RUN_S = 120
ON_TWO_RANKS = """
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
x = torch.ones(4096)
"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    begin: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begin is None:
            begin = number
            continue
        mark = MARKS.fullmatch(lines[begin - 1].strip())
        text = "\n".join(lines[begin + 1 : number])
        found.append(Block(page, begin + 1, lines[begin][3:], mark.group(1) if mark else "", text))
        begin = None
    assert begin is None, f"{page.name}: the block of line {begin} does not end"
    return found


ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language != "python"]
RUN = [block for block in ALL if block.mark.startswith("runs")]


def commands(text: str) -> list[list[str]]:
    """Arguments of every call of tunedcomm in a shell block, up to a redirection."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for start, word in enumerate(words):
            called = word == "tunedcomm" and (start == 0 or words[start - 1] != "install")
            if called or word == "tunedcomm.cli.main":
                rest = words[start + 1 :]
                end = next((i for i, w in enumerate(rest) if re.match(r"\d?[<>|&]", w)), len(rest))
                # Dots between options stand for more of them, as an option's value they are a text.
                found.append([w for i, w in enumerate(rest[:end]) if w != "..." or rest[i - 1].startswith("--")])
                break
    return found


def test_blocks_are_found() -> None:
    assert len(ALL) >= 40
    assert len(RUN) >= 4
    assert sum(len(commands(block.text)) for block in ALL) >= 50


@pytest.mark.parametrize("block", ALL, ids=str)
def test_every_block_says_whether_it_runs(block: Block) -> None:
    assert block.mark, f"{block}: put `<!-- runs -->` or `<!-- not run: WHY -->` above it"


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


@pytest.mark.parametrize("block", [block for block in SHELL if commands(block.text)], ids=str)
def test_tunedcomm_takes_the_command_lines(block: Block) -> None:
    for arguments in commands(block.text):
        try:
            parse(arguments)
        except Exception as error:
            raise AssertionError(f"{block}: tunedcomm {shlex.join(arguments)}: {error}") from error


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--opp"):
        parse(["tune", "--opp", "all_reduce"])
    with pytest.raises(AssertionError, match="no verb"):
        parse(["db", "burn"])
    assert commands("nohup tunedcomm tune --op a > o 2> e &\npip install tunedcomm") == [["tune", "--op", "a"]]


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_python_is_python_and_its_names_exist(block: Block) -> None:
    tree = ast.parse(block.text.replace("…", "and_so_on"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tunedcomm":
            assert hasattr(tunedcomm, node.attr), f"{block}: tunedcomm.{node.attr}"


@pytest.mark.parametrize(
    "block", [pytest.param(b, marks=() if b is RUN[0] else pytest.mark.slow) for b in RUN], ids=str
)
def test_it_runs(block: Block, tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    script = bin_folder / "tunedcomm"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tunedcomm.cli.main "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path),
        "OUT": str(tmp_path),
    }
    if "tunedcomm report" in block.text:
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")
    if block.language == "python":
        file = tmp_path / "block.py"
        text = block.text.replace('"cuda"', '"cpu"') if "CPU tensors" in block.mark else block.text
        preamble = "import tunedcomm\n" + ON_TWO_RANKS if "2 ranks" in block.mark else ""
        file.write_text(f"{preamble}{text}\n", encoding="utf-8")
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if preamble else []
        command = [sys.executable, *many, str(file)]
    else:
        command = ["bash", "-euc", block.text]
    folder = ROOT if "repository" in block.mark else tmp_path
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
