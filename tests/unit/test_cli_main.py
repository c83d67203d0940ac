from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import Ended, record, run
from db_samples import trial
from programs import python
from typer.testing import CliRunner

from tunedcomm import errors
from tunedcomm.cli import explain, main
from tunedcomm.version import VERSION

_DB_VERBS = "list show stats check verify pin unpin prune upgrade export import merge diff"
VERBS = [(verb,) for verb in "tune lookup explain bench report doctor demo".split()]
VERBS += [("db", verb) for verb in _DB_VERBS.split()]
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


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_fits_a_screen_and_lists_the_verb(verb: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main.app, [*verb, "--help"], prog_name="tunedcomm", terminal_width=80)
    assert shown.exit_code == 0
    assert "--json" in shown.output
    assert len(shown.output.splitlines()) <= HELP_LINES
    assert verb[-1] in run(*verb[:-1], "--help").out


def examples(verb: tuple[str, ...]) -> list[list[str]]:
    """Arguments of every example in the help of a verb."""
    told = CliRunner().invoke(main.app, [*verb, "--help"], prog_name="tunedcomm").output.split("\n\n")
    shown = [part.replace("\\\n", "") for part in told if part.strip().startswith("Example:")]
    assert not [part for part in shown if "\n" in part.strip()], "a line ends in the middle of a command"
    return [shlex.split(part)[2:] for part in shown]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_example_runs(verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On copies of a shipped database; what would measure takes note instead."""
    if verb == ("report",):
        pytest.importorskip("plotly", reason="plotly is not installed (extra `report`)")
    (shipped,) = (ROOT / "tuning_db").glob("*-x4.db")
    monkeypatch.chdir(tmp_path)
    for name in ("tuned", "other-node", "before", "after", *(["cluster"] if verb != ("db", "export") else [])):
        shutil.copy(shipped, f"{name}.db")
    if verb == ("report",):
        shutil.copytree(ROOT / "bench" / "results", "bench/results")
    Path("per-host").mkdir()
    shutil.copy(shipped, "per-host/one.db")
    if verb == ("db", "import"):
        assert run(*"db export --db before.db --format jsonl from-a-colleague.jsonl".split()).code == 0
    if verb in {("db", "unpin"), ("db", "prune")}:  # of the user database, which a pin makes
        assert run(*examples(("db", "pin"))[0]).code == 0
    measured: list[object] = []
    stand_in = MEASURING.get(verb, "tunedcomm.tuner.search.sweep.sweep")
    monkeypatch.setattr(stand_in, lambda *arguments, **_: sys.exit(measured.append(arguments)))
    shown = examples(verb)
    assert shown
    for arguments in shown:
        assert tuple(arguments[: len(verb)]) == verb
        given = [name for part in arguments for name in (map(str, Path().glob(part)) if "*" in part else [part])]
        assert run(*given).code == 0, arguments
    assert len(measured) == (len(shown) if verb in MEASURING else 0) - ("--from-misses" in shown[-1])


@pytest.fixture
def explain_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """A function that lets `explain` raise an error."""

    def plant(error: BaseException) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(explain, "decide_offline", fail)

    return plant


EXPLAIN = ("explain", "--op", "all_reduce", "--shape", "8", "--world-size", "2")


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
    explain_fails: Callable[[BaseException], None], error: type[errors.TunedCommError], code: int
) -> None:
    explain_fails(error("the reason"))
    assert run(*EXPLAIN) == Ended(code, "", f"tunedcomm: {error.__name__}: the reason\n")


def test_defects_are_not_hidden(explain_fails: Callable[[BaseException], None]) -> None:
    explain_fails(KeyError("a defect"))
    with pytest.raises(KeyError):
        run(*EXPLAIN)


def test_version_completion_and_stopping(explain_fails: Callable[[BaseException], None]) -> None:
    with pytest.raises(SystemExit) as left:
        main.run(["--version"])
    assert left.value.code == 0
    assert VERSION in run("--version").out
    explain_fails(KeyboardInterrupt())
    assert run(*EXPLAIN).code == 130


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("tunedcomm db exp", ["export"]),
        ("tunedcomm lookup --op all_reduce_", ["all_reduce_bias", "all_reduce_rms_norm"]),
        ("tunedcomm tune --op gemm_ar --variants library,chunked", ["library,chunked"]),
        ("tunedcomm tune --model qwen3-8b,llama3-8", ["qwen3-8b,llama3-8b"]),
    ],
)
def test_verbs_ops_variants_and_models_are_completed(typed: str, found: list[str]) -> None:
    words = {"_TUNEDCOMM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-m", "tunedcomm.cli.main"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == found


@pytest.mark.parametrize(
    "arguments", ["lookup --shpe", "lookup", "lookp", "lookup --op all_reduce --shape wide --world-size 2", "db trim"]
)
def test_usage_errors_are_one_line_with_the_way_to_help(arguments: str) -> None:
    (line,) = run(*arguments.split()).err.splitlines()
    assert line.startswith("tunedcomm: UsageError: ")
    assert "--help`" in line


def test_help_has_a_short_name_and_is_printed_where_no_verb_is_named() -> None:
    assert run("lookup", "-h").out == run("lookup", "--help").out != ""
    for verb in ((), ("db",)):
        ended = run(*verb)
        assert (ended.code, ended.err.strip()) == (2, run(*verb, "-h").out.strip())


def test_characters_that_the_output_lacks_keep_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONIOENCODING", "ascii:strict")
    code = "from tunedcomm.cli import main, output; main.code_of = lambda _: output.show(['µs … é'], ['µs … é']"
    for flag, printed in (("True", r'[\n  "\u00b5s \u2026 \u00e9"\n]\n'), ("False", "us ~ \\xe9\n")):
        done = python("-c", f"{code}, as_json={flag}) or 0; main.run([])")
        assert done.stdout == printed.replace(r"\n", "\n")


@pytest.mark.parametrize("verb", [EXPLAIN, ("tune", "--list-models")], ids=["explain", "tune"])
def test_a_closed_pipe_is_no_trouble(verb: tuple[str, ...]) -> None:
    """Of a verb that ends at once and of one that takes itself apart."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "tunedcomm.cli.main", *verb]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.returncode == 141
    assert "Error" not in done.stderr


@pytest.mark.parametrize("verb", [(*EXPLAIN, "--hardware", "h200"), ("--help",)], ids=["explain", "help"])
@pytest.mark.parametrize(
    ("redirection", "variables", "code", "num_lines"),
    [
        (">/dev/full", {}, 1, 1),
        (">/dev/full", {"PYTHONUNBUFFERED": "1"}, 1, 1),
        (">&-", {}, 0, 0),
        (">&- 2>&-", {}, 0, 0),
        (">/dev/null", {"PYTHONIOENCODING": "ascii:strict"}, 0, 0),
    ],
    ids=["full", "full, unbuffered", "closed", "both closed", "ASCII"],
)
def test_output_that_cannot_be_written_is_one_line(
    verb: tuple[str, ...], redirection: str, variables: dict[str, str], code: int, num_lines: int
) -> None:
    command = f"exec {shlex.join([sys.executable, '-m', 'tunedcomm.cli.main', *verb])} {redirection}"
    environment = {**os.environ, **variables}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, num_lines), done.stderr


def test_help_is_fast_and_loads_nothing_heavy_and_databases_move_without_torch(tmp_path: Path) -> None:
    source, out = record(tmp_path / "source.db", trial(final=True)), str(tmp_path / "out.db")
    verbs = [["import", source, "--db", out], ["merge", source, "--into", out], ["diff", source, source]]
    verbs.append(["export", "--db", source, str(tmp_path / "exported.db")])
    code = (
        "import sys, time\n"
        "from tunedcomm.cli import main\n"
        "codes = [main.code_of(['tune', '--help'])]\n"
        "seconds = time.process_time()\n"
        "heavy = {'torch', 'triton', 'sqlalchemy', 'optuna', 'numpy'} & set(sys.modules)\n"
        f"codes += [main.code_of(['db', *verb]) for verb in {verbs!r}]\n"
        "heavy |= {'torch', 'triton', 'optuna'} & set(sys.modules)\n"
        "sys.stderr.write(repr((sorted(heavy), codes, seconds)))\n"
    )
    done = python("-c", code)
    heavy, codes, seconds = ast.literal_eval(done.stderr)
    assert (heavy, codes) == ([], [0] * 5)
    assert seconds < HELP_BUDGET_S  # of the processor's, whatever else it does
