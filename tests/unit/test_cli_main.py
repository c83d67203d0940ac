from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tunedcomm import errors
from tunedcomm.cli import explain, main

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


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.run(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_an_example_and_json(verb: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main.app, [*verb, "--help"], prog_name="tunedcomm")
    assert shown.exit_code == 0
    assert f"Example: tunedcomm {' '.join(verb)}" in " ".join(shown.output.split())
    assert "--json" in shown.output


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
