"""Tables in terminals of 80, 100 and 120 columns: no line is wider, no number is broken."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pty
import re
import shutil
import struct
import tempfile
import termios
import threading
import tty
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_samples import PROBLEM, asked, outcome, real_trial, record, run
from db_samples import START
from verify_samples import run as run_verify
from verify_samples import tuned_copy

from tunedcomm.cli import demo, doctor, main, output
from tunedcomm.cli.output import Line, filled, shortened
from tunedcomm.db.records import Trial
from tunedcomm.hardware import detect
from tunedcomm.spec import Problem
from tunedcomm.tuner.search.summary import ProblemResult
from tunedcomm.tuner.verify import VerifyOutcome

WIDTHS = (80, 100, 120)
LONG = "no sign of life for 120 s while 1,284 launches ran; the gang was killed, and another one took its place"
ASKED = " ".join(asked(PROBLEM))
VERBS = (
    "tune --op all_reduce",
    "tune --list-models",
    "tune --op all_reduce --dry-run",
    "bench --op all_reduce",
    "demo",
    "doctor",
    f"lookup {ASKED} --hardware H200",
    f"explain {ASKED} --hardware H200 --all",
    "db list --db user.db",
    f"db show {ASKED} --db user.db",
    "db stats --db user.db",
    "db check --db user.db",
    "db verify --db user.db --no-store",
    "db prune --superseded --db user.db",
    "db export --db user.db out.db",
    "db import user.db --db new.db",
    "db merge user.db other.db --into new.db",
    "db diff user.db other.db",
)
HOST = replace(PROBLEM, dtype="float32", world_size=2, mode="eager")


def trials(factor: float) -> list[Trial]:
    found = [real_trial("one_shot", None, status="hung", reason=LONG, final=False, created_at=START)]
    for numel in (1024, 98304, 33554432):
        problem = replace(PROBLEM, shape=(numel,))
        for name, us in (("library", 1414.0), ("lamport", 4.25 * factor), ("two_shot", 123456.7)):
            found.append(real_trial(name, us, problem=problem, baseline_p50_us=1414.0, created_at=START))
    return found


def host_trial(problem: Problem, variant: str, latency_us: float) -> Trial:
    return real_trial(variant, latency_us, detect(None), problem=problem, baseline_p50_us=1414.0, created_at=START)


def results() -> list[ProblemResult]:
    problems = [replace(HOST, shape=(numel,)) for numel in (1024, 98304, 33554432)]
    failures = {"hung": 1, "compile_error": 12}
    best = [host_trial(problem, "host_two_shot", 12345.6) for problem in problems]
    return [
        ProblemResult(problem=problem, best=trial, library_us=23456.7, num_trials=117, failures=failures)
        for problem, trial in zip(problems, best, strict=True)
    ]


BENCHED: dict[str, Any] = {
    "op": "all_reduce",
    "dtype": "bfloat16",
    "reduction": "sum",
    "world_size": 2,
    "mode": "eager",
    "input_kind": "plain",
    "latency_p10_us": 1111.1,
    "latency_p50_us": 12345.6,
    "latency_p90_us": 23456.7,
    "algbw_gb_s": 1449.15,
    "ceiling_share": 0.4321,
    "num_sms": 8,
    "error": 1.2e-3,
    "gpu": "host-x86_64",
    "fabric": "host",
}


def bench_rows() -> list[dict[str, Any]]:
    configs = {"library": "", "tuned": "lamport(items=2, num_blocks=16, num_warps=16)"}
    return [
        {**BENCHED, "shape": str(numel), "message_bytes": 2 * numel, "contender": contender, "config": config}
        for numel in (1024, 98304, 33554432)
        for contender, config in configs.items()
    ]


@functools.cache
def databases() -> dict[str, bytes]:
    own = [host_trial(result.problem, "host_two_shot", 12345.6) for result in results()]
    with tempfile.TemporaryDirectory() as folder:
        factors = {f"{folder}/user.db": 1.0, f"{folder}/other.db": 1.5}
        paths = [Path(record(path, *trials(factor), *own)) for path, factor in factors.items()]
        return {path.name: path.read_bytes() for path in paths}


@functools.cache
def verified() -> VerifyOutcome:
    with tempfile.TemporaryDirectory() as folder:
        return run_verify(tuned_copy(Path(folder)), Path(folder), store=False)


LINES = [
    Line("python", "ok", "3.11.2 on x86_64"),
    Line("user database", "warn", f"/a/long/path/{'of-some-40-letters/' * 6}user.db cannot be written", "set 1 or 22"),
    Line("variables", "fail", f"TUNEDCOMM_MODE=12345 {LONG}", LONG),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of databases, in a process in which everything that measures answers at once."""
    sweep = outcome(*results())
    monkeypatch.setattr("tunedcomm.tuner.search.sweep.sweep", lambda *_: sweep)
    monkeypatch.setattr(
        "tunedcomm.bench.runner.run_job", lambda *_, on_line: on_line({"now": "", "rows": bench_rows(), "left_out": []})
    )
    monkeypatch.setattr("tunedcomm.tuner.verify.verify", lambda *_: verified())
    for name in ("run_module", "run_forked"):
        monkeypatch.setattr(f"tunedcomm.tuner.gang.ranks.{name}", lambda *_, **__: 0)
    monkeypatch.setattr(demo, "run_sweep", lambda *_, **__: (sweep, "user.db"))
    monkeypatch.setattr(doctor, "run_checks", lambda **_: LINES)
    monkeypatch.setenv("TUNEDCOMM_DB", "user.db")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return tmp_path


def fill(folder: Path) -> None:
    """Make the working directory as it was."""
    shutil.rmtree(folder / "w", ignore_errors=True)
    (folder / "w").mkdir()
    os.chdir(folder / "w")
    for name, content in databases().items():
        Path(name).write_bytes(content)


def on_terminal(width: int, command: str) -> str:
    """The output of a command on a terminal of that width, without what moves the cursor."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    read = bytearray()

    def follow() -> None:
        with contextlib.suppress(OSError):  # at the end
            while data := os.read(master, 1 << 16):
                read.extend(data)

    reader = threading.Thread(target=follow)
    reader.start()
    with open(slave, "w", encoding="utf-8") as stream:  # noqa: PTH123 - of a descriptor
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            main.code_of(command.split())
    reader.join(30)
    os.close(master)
    return read.decode()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d.,]*\d|\d", text))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", VERBS, ids=lambda command: command.partition(" --")[0])
def test_every_table_fits_and_no_number_is_broken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    monkeypatch.chdir(folder)
    fill(folder)
    piped = run(*command.split())
    fill(folder)
    shown = plain(on_terminal(width, command))
    assert piped.out
    assert [line for line in shown.splitlines() if len(line) > width] == []
    assert numbers(shown) <= numbers(piped.out + piped.err)
    outside = re.sub(r"\([^()]*\)?", "", piped.out)  # all numbers but a candidate's
    assert numbers(outside) <= numbers(shown)


def test_a_narrow_table_keeps_every_value_but_of_candidates() -> None:
    names = ("shape", "dtype", "winner", "reason")
    candidates = ("lamport(num_blocks=128, num_warps=16)", "two_shot(num_blocks=128, num_warps=16)")
    rows = [(1024, "float16", candidates[0], LONG), (33554432, "float16", candidates[1], "")]
    lines = "\n".join(output._table_lines(output.Table(names, rows, "title"), 70)).split("\n")
    assert (lines[0], lines[1].split()) == ("title; dtype float16", ["shape", "winner", "reason"])  # one value each
    assert max(map(len, lines)) <= 70
    blocks = "\n".join(output._table_lines(output.Table(names, rows), 40)).split("\n")
    assert ["winner", "lamport(num_blocks=128,"] in map(str.split, blocks)
    assert blocks.count("") == 1  # between two rows


def test_a_table_with_a_key_is_cut_into_several_that_fit() -> None:
    names = ("model", "hidden", "experts", "also")
    rows = [("llama3-70b", 8192, "-", "llama3.1-70b, llama3.3-70b"), ("kimi-k2", 7168, 384, "kimi-k2.5")]
    table = output.Table(names, rows, "sizes", is_keyed=True)
    lines = list(output._table_lines(table, 40))
    assert [line.split() for line in lines if "model" in line] == [["model", *names[1:3]], ["model", "also"]]
    assert ["llama3-70b", "8192", "-"] in map(str.split, lines)
    assert (lines[0], len(lines)) == ("sizes", 8)
    assert len(list(output._table_lines(table, 80))) == 4


def test_the_list_of_models_is_one_screen(folder: Path) -> None:
    assert len(plain(on_terminal(80, "tune --list-models")).splitlines()) <= 40


@pytest.mark.parametrize(
    ("text", "width", "found"),
    [
        ("lamport(num_blocks=128, num_warps=16)", 40, "lamport(num_blocks=128, num_warps=16)"),
        ("lamport(num_blocks=128, num_warps=16)", 23, "lamport(num_blocks=128…"),
        ("lamport(num_blocks=128, num_warps=16)", 22, "lamport(num_blocks=…"),
    ],
)
def test_candidates_are_shortened_and_their_numbers_are_not(text: str, width: int, found: str) -> None:
    assert shortened(text, width) == found


def test_only_long_paths_break_inside_of_a_word() -> None:
    assert filled("a 1,284 bc", 7).split("\n") == ["a 1,284", "bc"]
    assert filled("in /long/path/1284/user.db", 10).split("\n") == ["in /long/", "path/1284/", "user.db"]
    assert filled("SHA-256 0123456789abcdef", 10, 1).split("\n") == ["SHA-256", " 0123456789abcdef"]


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_levels_have_colours_on_terminals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = on_terminal(100, "doctor")
    assert ("\x1b[31mfail\x1b[0m" in shown, "\x1b" in shown) == (coloured, coloured)
    assert "\x1b" not in run("doctor").out
