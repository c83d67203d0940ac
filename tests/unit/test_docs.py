"""Pages: generated parts are current, links lead somewhere, docstrings are complete, and the code blocks run.

- ```python blocks of one page make one program, run without GPUs by the command that the page names, on 2 ranks if it
  names none. `<!-- skip: WHY -->` above a block leaves it out. A page that does not call `init_process_group` gets a
  group and a tensor `x` first.
- ```console blocks: the lines that begin with `$ ` are run in a folder that holds `tuning_db` and `bench`.
- The commands of other blocks run in a folder of their own, where that takes no GPU and no minutes: `db`, `lookup`,
  `explain`, `doctor`, `report`, `tune` as a dry run, and `bench` without its ranks. Of other commands the options are
  parsed. A command that needs GPUs, a cluster or another project says so on the page: `# needs 4 GPUs`, behind it or in
  a line of its block.
- Commands within a sentence name verbs, options, targets and files that exist.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_samples import real_trial, record
from cli_samples import run as run_verb
from db_samples import START
from quick import some

import tunedcomm
from tunedcomm import kernels, settings
from tunedcomm.bench.csv import COLUMNS, known_link_gb_s
from tunedcomm.cli.main import app
from tunedcomm.db.misses import Miss, append
from tunedcomm.hardware import detect
from tunedcomm.spec import Problem, get_op, ops

ROOT = Path(__file__).parents[2]
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *SHOWN,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(ROOT / name / "README.md" for name in ("tuning_db", "bench/peers")),
]
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
        moves_any = spec.dtypes == ("uint8",) or len(spec.dtypes) > len(SHORT)
        assert moves_any, "an op that only moves bytes takes any dtype, or has bytes as its own"


# Code blocks

GROUP = """
import torch, tunedcomm
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


# Commands

VERBS_THAT_RUN = ("lookup", "explain", "doctor", "report", "db", "bench", "tune")
PROBLEM = "--op all_reduce --shape 98304 --world-size 4".split()
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SAID = re.compile(r"#.*\bneeds \w")


@dataclass(frozen=True)
class Command:
    """A command of a page: its variables, its words, and whether the page says that it needs more than this machine."""

    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    is_marked: bool = False
    is_whole: bool = True

    def __str__(self) -> str:
        return shlex.join(self.words)


def split_commands(text: str, *, is_marked: bool = False, is_whole: bool = True) -> list[Command]:
    """The commands of a line, without redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "#", True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(word)
    commands = []
    for words in found:
        end = next((i for i, word in enumerate(words) if set(word) <= set("<>")), len(words))
        rest = [word for word in words[:end] if not (word == "2" and end < len(words))]
        named = []
        while rest and (rest[0] in ("export", "nohup") or re.match(r"[A-Z_]+=", rest[0])):
            first = rest.pop(0)
            named += [tuple(first.split("=", 1))] if "=" in first else []
        if rest or named:
            commands.append(Command(tuple(named), tuple(rest), is_marked, is_whole))
    return commands


def commands_of(block: Block) -> list[Command]:
    text = re.sub(r"\\\n\s*", "", block.text)
    lines = [line.removeprefix("$ ") for line in text.splitlines() if line.strip()]
    is_marked = any(line.startswith("#") and SAID.search(line) for line in lines)
    found, variables = [], dict[str, str]()
    for line in lines:
        full = functools.reduce(lambda text, one: text.replace(f"${one[0]} ", f"{one[1]} "), variables.items(), line)
        commands = split_commands(full, is_marked=is_marked or bool(SAID.search(line)))
        variables |= {name: value for command in commands for name, value in command.variables}
        found += commands
    return found


def mentions(page: Path) -> list[Command]:
    """The commands within the sentences of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    spans = [re.sub(r"<(\w+)>", r"\1", f"tunedcomm {span}" if span.startswith("db ") else span) for span in spans]
    return [
        command
        for span in spans
        if " " in span and re.match(r"([A-Z_]+=\S+ )*(\S+)", span)[2] in READERS  # type: ignore[index]
        for command in split_commands(span, is_whole=False)
    ]


def parser_of(arguments: list[str]) -> tuple[Any, list[str]]:
    """The verb that the arguments name, and its own arguments."""
    verb = typer.main.get_command(app)
    context = typer.Context(verb, info_name="tunedcomm")
    while hasattr(verb, "list_commands") and not (arguments or ["--"])[0].startswith("-"):
        name, *arguments = arguments
        assert name in verb.list_commands(context), name
        verb = verb.get_command(context, name)
    return verb, arguments


# They measure or compile for minutes; tests of their own run them.
LONG_VERBS = {("db", "verify"), ("db", "compile")}


def read_tunedcomm(command: Command, folder: Path | None) -> None:
    verb, arguments = parser_of(list(command.words[1:]))
    if not command.is_whole or "--help" in arguments:
        known = {option for parameter in verb.params for option in parameter.opts} | {"--help", "-h"}
        assert {word for word in arguments if word.startswith("-")} - {"-"} <= known, command
        return
    if "--list-models" not in arguments:
        verb.make_context(verb.name, list(arguments))
    words = [re.sub("^/shared", f"{folder}/shared", word) for word in command.words[1:]]
    is_elsewhere = command.is_marked or any("://" in word for word in words)
    if folder is None or is_elsewhere or words[0] not in VERBS_THAT_RUN or tuple(words[:2]) in LONG_VERBS:
        return
    if words[0] == "report":
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
    found = [path for word in words for path in ([str(p) for p in Path().glob(word)] if "*" in word else [word])]
    if words[:2] == ["db", "export"] and "--cluster" not in words:
        Path(words[-1]).unlink(missing_ok=True)
    ended = run_verb(*found, *(["--dry-run"] if words[0] == "tune" else []))
    assert ended.code == 0 or words[0] == "doctor", (str(command), ended)  # doctor speaks of the machine that tests it
    assert "Traceback" not in ended.err


def read_options(script: str, rest: Sequence[str]) -> None:
    """A script of the repository takes the options."""
    path = ROOT / script
    if path.exists():
        text = path.read_text(encoding="utf-8") + (ROOT / "bench" / "rows.py").read_text(encoding="utf-8")
        for option in (word for word in rest if word.startswith("--")):
            assert f'"{option}"' in text or f"{option[2:].replace('-', '_')}=" in text, (script, option)
    else:
        assert script in WRITTEN, f"no file {script}"


def read_python(command: Command, folder: Path | None) -> None:
    read_options(command.words[1], command.words[2:])


def read_torchrun(command: Command, folder: Path | None) -> None:
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(list(command.words[1:]))
    if found.module:
        assert found.training_script == "tunedcomm.cli.main"
        read_tunedcomm(replace(command, words=("tunedcomm", *found.training_script_args)), None)
    else:
        read_options(found.training_script, found.training_script_args)


def read_pip(command: Command, folder: Path | None) -> None:
    shown = r"pip install (?:-e )?(?:\.|tunedcomm)(?:\[(.+)\])?"
    target = re.fullmatch(shown, " ".join(command.words))
    assert target, command
    for extra in (target[1] or "test").split(","):
        assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE), extra


def read_make(command: Command, folder: Path | None) -> None:
    target = next(word for word in command.words[1:] if "=" not in word)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


def read_nothing(command: Command, folder: Path | None) -> None:
    """test_git_textconv.py runs what the pages configure of git."""


def read_script(command: Command, folder: Path | None) -> None:
    assert os.access(ROOT / command.words[0], os.X_OK), command
    assert command.is_marked or not command.is_whole, command


READERS: dict[str, Callable[[Command, Path | None], None]] = {
    "tunedcomm": read_tunedcomm,
    "python": read_python,
    "torchrun": read_torchrun,
    "pip": read_pip,
    "make": read_make,
    "git": read_nothing,
    "cd": read_nothing,
    "cp": read_nothing,
    "bench/campaign.sh": read_script,
}
SHELL = [block for page in PAGES for block in blocks(page) if block.language in ("bash", "")]
WRITTEN = {"example.py", "first.py", "run.py"}  # the reader makes these of python blocks


def read(command: Command, folder: Path | None) -> None:
    """Run the command in the folder, or check what can be checked of it without."""
    if not command.words:
        return
    is_module = command.words[:2] == ("python", "-m")
    if "tunedcomm" in command.words and command.words[0] not in READERS:  # behind a launcher
        assert command.is_marked, command
        read_tunedcomm(replace(command, words=command.words[command.words.index("tunedcomm") :]), None)
    elif command.words[0] in READERS and not is_module:
        READERS[command.words[0]](command, folder)
    else:
        assert command.is_marked, f"no test knows `{command}`: teach this one, or write behind it what it needs"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands read, under the names that they use."""
    folder = tmp_path_factory.mktemp("files")
    made = record(folder / "user.db", real_trial("library", 14.0), real_trial("lamport", 4.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDCOMM_DB", made)
        assert run_verb("db", "pin", *PROBLEM, "--variant", "library", "--reason", "x").code == 0
    for name in "tuned cluster other-node before after host1 host2 per-host/one per-host/two".split():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(made, folder / f"{name}.db")
    text = run_verb("db", "export", "--all", "--format", "jsonl", "-", "--db", made).out
    (folder / "from-a-colleague.jsonl").write_text(text, encoding="utf-8")
    (folder / "shared" / "tunedcomm").mkdir(parents=True)
    called = Problem("all_reduce", (4096,), "float32", 2, mode="eager")
    miss = Miss(problem=called, hard_key=detect(None).hard_key, count=3, source="library", last_seen=START)
    append(folder / "misses.jsonl", [miss])
    return folder


@pytest.fixture
def sandbox(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these files, and a user database in it."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    for name in ("tuning_db", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEDCOMM_DB", str(tmp_path / "user.db"))
    monkeypatch.setenv("TUNEDCOMM_MISS_LOG", str(tmp_path / "misses.jsonl"))
    monkeypatch.setattr("tunedcomm.bench.runner.run_job", lambda *_, **__: None)
    return tmp_path


@pytest.mark.parametrize("block", [block for block in SHELL if commands_of(block)], ids=str)
def test_the_commands_of_a_page_run_or_parse(block: Block, sandbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of one page run in multirank/test_plugins.py; others are on record for what they made.
    is_parsed = block.page.name == "adding_a_variant.md" or block.page.parent.name == "tuning_db"
    for command in commands_of(block):
        for name, value in command.variables:
            if name.startswith("TUNEDCOMM_") and "://" not in value:
                monkeypatch.setenv(name, re.sub("/shared", f"{sandbox}/shared", value))
                assert not settings.unknown_variables(tuple(ops()))
        read(command, None if is_parsed else sandbox)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_sentences_exist(page: Path) -> None:
    for command in mentions(page):
        read(command, None)


@pytest.mark.parametrize(
    "text",
    [
        "new-tool --fast",
        "tunedcomm tone",
        "tunedcomm tune --opp x",
        "make browser",
        "pip install '.[no]'",
        "python no.py",
    ],
)
def test_a_command_that_no_test_knows_is_found(text: str) -> None:
    (command,) = split_commands(text)
    with pytest.raises((AssertionError, typer.BadParameter.__mro__[1])):
        read(command, None)
    if text.startswith("new"):
        read(split_commands(text, is_marked=True)[0], None)


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_python_is_python_and_its_names_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tunedcomm":
            assert hasattr(tunedcomm, node.attr), f"{block}: tunedcomm.{node.attr}"


def run(command: Sequence[str], folder: Path, *variables: tuple[str, str]) -> None:
    """Run a command as on a machine without GPUs; of the kernels' interpreter it knows what `variables` say."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "tunedcomm"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tunedcomm.cli.main "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    for name in ("tuning_db", "bench"):
        (folder / name).symlink_to(ROOT / name)
    paths = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment = {**os.environ, **paths, **dict(variables)}
    if "TRITON_INTERPRET" not in dict(variables):
        environment.pop("TRITON_INTERPRET", None)  # this process has set it
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", some(sorted(PROGRAMS), len(PROGRAMS)))  # README.md in `make test`
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    text, end = "\n".join(block.text for block in PROGRAMS[page]), "torch.distributed.destroy_process_group()\n"
    if end in text:  # what later blocks add comes before it
        text = text.replace(end, "") + end
    program = tmp_path / "page.py"
    program.write_text(("" if "init_process_group" in text else GROUP) + text, encoding="utf-8")
    named = [one for one in mentions(PROGRAMS[page][0].page) if one.words[0] == "torchrun" and one.words[-1] in WRITTEN]
    (command,) = named or [Command((), ("torchrun", "--nproc-per-node", "2", ""))]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    run((*launcher, *command.words[1:-1], str(program)), tmp_path, *command.variables)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in ALL if block.language == "console"], ids=str)
def test_console_blocks_run(block: Block, tmp_path: Path) -> None:
    if "tunedcomm report" in block.text:
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `report`)")
    lines = [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]
    run(["bash", "-euc", "\n".join(lines)], tmp_path)
