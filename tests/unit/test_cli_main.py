from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunedcomm import errors
from tunedcomm.cli import explain, main
from tunedcomm.version import VERSION

VERBS = (
    ("tune",),
    ("lookup",),
    ("explain",),
    ("bench",),
    ("report",),
    ("doctor",),
    ("demo",),
    ("db", "list"),
    ("db", "show"),
    ("db", "stats"),
    ("db", "check"),
    ("db", "verify"),
    ("db", "pin"),
    ("db", "unpin"),
    ("db", "prune"),
    ("db", "upgrade"),
    ("db", "export"),
    ("db", "import"),
    ("db", "merge"),
    ("db", "diff"),
)
HELP_BUDGET_S = 2.0
HELP_LINES = 40  # of 80 columns
ROOT = Path(__file__).parents[2]
# What measures, by verb.
MEASURING = {
    ("tune",): "tunedcomm.tuner.search.sweep.sweep",
    ("bench",): "tunedcomm.bench.runner.run_job",
    ("demo",): "tunedcomm.cli.demo.run_sweep",
    ("db", "verify"): "tunedcomm.tuner.verify.verify",
}


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.run(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_fits_a_screen(verb: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main.app, [*verb, "--help"], prog_name="tunedcomm", terminal_width=80)
    assert shown.exit_code == 0
    assert "--json" in shown.output
    assert len(shown.output.splitlines()) <= HELP_LINES


def examples(verb: tuple[str, ...]) -> list[list[str]]:
    """Arguments of every example in the help of a verb."""
    told = CliRunner().invoke(main.app, [*verb, "--help"], prog_name="tunedcomm").output.split("\n\n")
    return [shlex.split(part)[2:] for part in told if part.strip().startswith("Example:")]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_example_runs(verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On copies of a shipped database; what would measure takes note instead."""
    if verb == ("report",):
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
    (shipped,) = (ROOT / "tuning_db").glob("*-x4.db")
    monkeypatch.chdir(tmp_path)
    for name in ("tuned", "other-node", "before", "after", *(["cluster"] if verb != ("db", "export") else [])):
        shutil.copy(shipped, f"{name}.db")
    shutil.copytree(ROOT / "bench" / "results", "bench/results")
    Path("per-host").mkdir()
    shutil.copy(shipped, "per-host/one.db")
    if verb == ("db", "import"):
        assert exit_code("db", "export", "--db", "before.db", "--format", "jsonl", "from-a-colleague.jsonl") == 0
    if verb in {("db", "unpin"), ("db", "prune")}:  # of the user database, which a pin makes
        assert exit_code(*examples(("db", "pin"))[0]) == 0
    measured: list[object] = []
    stand_in = MEASURING.get(verb, "tunedcomm.tuner.search.sweep.sweep")
    monkeypatch.setattr(stand_in, lambda *arguments, **_: sys.exit(measured.append(arguments)))
    shown = examples(verb)
    assert shown
    for arguments in shown:
        assert tuple(arguments[: len(verb)]) == verb
        given = [name for part in arguments for name in (map(str, Path().glob(part)) if "*" in part else [part])]
        assert exit_code(*given) == 0, arguments
    assert len(measured) == (len(shown) if verb in MEASURING else 0) - ("--from-misses" in shown[-1])


def test_version_completion_and_stopping(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert VERSION in capfd.readouterr().out

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "choose", stop)
    assert exit_code("explain", "--op", "all_reduce", "--shape", "8", "--world-size", "2") == 130
    words = {"_TUNEDCOMM_COMPLETE": "complete_bash", "COMP_WORDS": "tunedcomm db exp", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "tunedcomm.cli.main"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["export"]


@pytest.mark.parametrize("verb", ["lookup", "doctor"])
def test_a_closed_pipe_is_no_trouble(verb: str) -> None:
    """Of a verb that ends at once and of one that takes itself apart."""
    more = ["--op", "all_reduce", "--shape", "8", "--world-size", "2"] if verb == "lookup" else []
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tunedcomm.cli.main", verb, *more]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.returncode == 141
    assert "Error" not in done.stderr


def test_help_lists_the_verbs() -> None:
    shown = CliRunner().invoke(main.app, ["--help"], prog_name="tunedcomm")
    for verb in VERBS:
        assert verb[0] in shown.output


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time\n"
        "from tunedcomm.cli import main\n"
        "try: main.run(['tune', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'triton', 'sqlalchemy', 'optuna', 'numpy'} & set(sys.modules)\n"
        "sys.stderr.write(repr((sorted(heavy), time.process_time())))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, seconds = ast.literal_eval(done.stderr)
    assert heavy == []
    assert seconds < HELP_BUDGET_S  # of the processor's, whatever else it does


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune"],
        ["trim"],
        ["lookup", "--op", "all_reduce"],
        ["lookup", "--op", "all_reduce", "--shape", "8", "--world-size", "0"],
        ["lookup", "--op", "all_reduce", "--shape", "wide", "--world-size", "2"],
        ["lookup", "--op", "all_redduce", "--shape", "8", "--world-size", "2"],
        ["explain", "--op", "all_reduce", "--shape", "8", "--world-size", "2", "--mode", "lazy"],
        ["tune", "--op", "all_reduce", "--budget", "soon"],
        ["tune", "--op", "all_reduce", "--variants", "three_shot"],
        ["tune", "--op", "all_reduce", "--dtype", "int3"],
        ["db", "show", "--op", "all_reduce", "--shape", "8x8", "--world-size", "2"],
        ["db", "list", "--db", "/nowhere/at/all.db"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_2_and_one_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip()
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UnknownNameError, 2),
        (errors.DatabaseCorruptError, 2),
        (errors.SettingError, 2),
        (errors.TuningError, 1),
        (errors.PeerTimeoutError, 1),
        (errors.AgreementError, 1),
    ],
)
def test_named_errors_become_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[errors.TunedCommError],
    code: int,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("the reason")

    monkeypatch.setattr(explain, "choose", fail)
    assert exit_code("explain", "--op", "all_reduce", "--shape", "8", "--world-size", "2") == code
    assert capsys.readouterr().err == f"tunedcomm: {error.__name__}: the reason\n"


def test_defects_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(explain, "choose", fail)
    with pytest.raises(KeyError):
        main.run(["explain", "--op", "all_reduce", "--shape", "8", "--world-size", "2"])
