from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tunedcomm.bench import csv as bench_csv
from tunedcomm.bench import runner
from tunedcomm.cli import main, options
from tunedcomm.spec import Problem


def row(contender: str, latency_us: float) -> dict[str, Any]:
    return {
        "op": "all_reduce",
        "shape": "98304",
        "message_bytes": 196608,
        "dtype": "bfloat16",
        "world_size": 2,
        "mode": "eager",
        "input_kind": "plain",
        "contender": contender,
        "config": "lamport(num_blocks=8)" if contender == "tuned" else "",
        "latency_p10_us": latency_us * 0.9,
        "latency_p50_us": latency_us,
        "latency_p90_us": latency_us * 1.2,
        "algbw_gb_s": 49.152,
        "busbw_gb_s": None,
        "num_sms": 8 if contender == "tuned" else None,
        "ceiling_share": 0.4321 if contender == "tuned" else None,
        "reduction": "sum",
        "error": 1.2e-3,
        "gpu": "host-x86_64",
        "fabric": "host",
        "torch": "2.13.0",
        "triton": "3.9.0",
        "nccl": "",
    }


class Gang:
    """Stands in for the ranks: keeps the job and leaves what it was given as the result."""

    def __init__(self, rows: list[dict[str, Any]] | None, code: int = 0) -> None:
        self.rows, self.code = rows, code
        self.job: dict[str, Any] = {}
        self.world_size = 0
        self.left_out: list[dict[str, str]] = []

    @property
    def problems(self) -> list[Problem]:
        return [Problem.from_dict(problem) for problem in self.job["problems"]]

    def __call__(
        self, module: str, arguments: Sequence[str], *, world_size: int, environment: Mapping[str, str] | None = None
    ) -> int:
        assert module == "tunedcomm.bench.runner"
        self.job, self.world_size = json.loads(Path(arguments[0]).read_text()), world_size
        if self.rows is not None:
            Path(arguments[1]).write_text(json.dumps({"rows": self.rows, "left_out": self.left_out}))
        return self.code


def start(gang: Gang, monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 0) -> Any:
    monkeypatch.setattr(runner, "run_module", gang)
    monkeypatch.setattr(options, "num_gpus", lambda: gpus)
    return CliRunner().invoke(main.app, ["bench", "--op", "all_reduce", *arguments])


def test_table_compares_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(Gang([row("library", 14.0), row("tuned", 4.0)]), monkeypatch, "--shape", "98304")
    assert shown.exit_code == 0, shown.output
    line = next(line for line in shown.stdout.splitlines() if "tuned = lamport(num_blocks=8)" in line)
    found = " ".join(line.split())
    assert found == (
        "196608 98304 bfloat16 sum eager 3.60 4.00 4.80 49.15 - 43.2% 3.50x 8 1.2e-03 tuned = lamport(num_blocks=8)"
    )
    title, head, *_ = shown.stdout.splitlines()
    assert title == "all_reduce on 2 x host-x86_64 (host), torch 2.13.0, triton 3.9.0"
    assert {"bytes", "p50", "busbw", "ceiling", "library", "SMs", "contender"} <= set(head.split())


def test_who_was_left_out_is_said_once_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang([row("library", 14.0)])
    gang.left_out = [
        {"shape": shape, "dtype": "bfloat16", "mode": "graph", "peer": "kraken", "why": why}
        for shape, why in (("512", "not here"), ("1024", "not here"), ("2048", "too large"))
    ]
    shown = start(gang, monkeypatch, "--shape", "512")
    assert shown.exit_code == 0
    said = [line for line in shown.stderr.splitlines() if line.startswith("left out")]
    assert said == [
        "left out: kraken at 512 bfloat16 graph and 1 more: not here",
        "left out: kraken at 2048 bfloat16 graph: too large",
    ]
    assert "left out" not in shown.stdout


def test_adapters_are_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "_shared.py", "notes.md"):
        (tmp_path / name).write_text("")
    other = tmp_path / "more" / "c.py"
    other.parent.mkdir()
    other.write_text("")
    gang = Gang([])
    assert (
        start(gang, monkeypatch, "--peers", str(tmp_path), "--peers", str(other), "--link-gb-s", "400").exit_code == 0
    )
    assert gang.job["peers"] == [str(tmp_path / "a.py"), str(tmp_path / "b.py"), str(other)]
    assert gang.job["link_gb_s"] == 400
    empty = tmp_path / "empty"
    empty.mkdir()
    for wrong in (tmp_path / "notes.md", tmp_path / "none.py", empty):
        shown = start(gang, monkeypatch, "--peers", str(wrong))
        assert shown.exit_code == 2
        assert "no directory of some" in " ".join(shown.output.split())
    again = start(gang, monkeypatch, "--peers", str(tmp_path), "--peers", str(tmp_path / "a.py"))
    assert again.exit_code == 2
    assert "two adapters are named a" in " ".join(again.output.split())


def test_shapes_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang([])
    shown = start(gang, monkeypatch, "--model", "llama3-70b", "--tp", "2", "--tokens", "1,8", gpus=4)
    assert shown.exit_code == 0, shown.output
    assert gang.world_size == 2
    assert [(problem.numel, problem.dtype) for problem in gang.problems] == [(8192, "bfloat16"), (65536, "bfloat16")]
    assert start(gang, monkeypatch, "--model", "llama3-70b", "--shape", "512").exit_code == 2


def test_share_of_the_ceiling() -> None:
    h200 = {"gpu": "NVIDIA H200", "fabric": "nvswitch-18"}

    def place_of(problem: Problem) -> dict[str, Any]:
        return {"op": problem.op, "world_size": problem.world_size}

    def shares(problem: Problem, size: int, given: float | None = None, **times: float) -> dict[str, float | None]:
        rows = [
            {"contender": n, "message_bytes": size, "latency_p50_us": us, **place_of(problem), **h200}
            for n, us in times.items()
        ]
        bench_csv.add_ceiling_shares(rows, given)
        return {row["contender"]: row["ceiling_share"] for row in rows}  # type: ignore[misc]

    large = Problem("all_reduce", (64 << 20,), "bfloat16", 4)
    assert shares(large, 128 << 20, library=610.0, tuned=568.9) == {"library": 0.9326, "tuned": 1.0}
    assert shares(large, 128 << 20, given=351.0, tuned=573.6) == {"tuned": 1.0}
    gathered = Problem("all_gather", (64 << 20,), "bfloat16", 4)
    assert shares(gathered, 128 << 20, tuned=1137.8) == {"tuned": 1.0}
    gemm = Problem("gemm_rs", (4096, 8192, 3584), "bfloat16", 4, layout="nk", reduction="sum")
    assert shares(gemm, 48 << 20, cublas=325.0, tuned=400.0) == {"cublas": 1.0, "tuned": 0.8125}
    assert shares(gemm, 353_900_000, cublas=325.0, tuned=2000.0)["tuned"] == 0.5
    assert shares(gemm, 48 << 20, tuned=400.0) == {"tuned": None}
    elsewhere = [
        {
            "op": "all_reduce",
            "world_size": 4,
            "contender": "tuned",
            "message_bytes": 4096,
            "latency_p50_us": 2.0,
            "gpu": "x",
            "fabric": "pcie",
        }
    ]
    bench_csv.add_ceiling_shares(elsewhere, None)
    assert elsewhere[0]["ceiling_share"] is None  # type: ignore[comparison-overlap]


def test_job_says_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang = Gang([])
    csv = tmp_path / "out.csv"
    options = ("--shape", "512,1024", "--shape", "2048", "--dtype", "float16", "--contender", "tuned,library")
    shown = start(gang, monkeypatch, *options, "--mode", "both", "--csv", str(csv), "--seed", "7", gpus=4)
    assert shown.exit_code == 0, shown.output
    assert gang.world_size == 4
    assert gang.problems == [
        Problem("all_reduce", (numel,), "float16", 4, mode=mode)
        for mode in ("graph", "eager")
        for numel in (512, 1024, 2048)
    ]
    assert gang.job.pop("problems")
    assert gang.job.pop("run_id")
    assert gang.job.pop("command").startswith("tunedcomm")
    assert gang.job == {
        "contenders": ["tuned", "library"],
        "peers": [],
        "link_gb_s": None,
        "csv": str(csv),
        "seed": 7,
    }


@pytest.mark.parametrize(("gpus", "ranks", "mode"), [(0, 2, "eager"), (1, 2, "eager"), (4, 4, "graph")])
def test_defaults_follow_the_machine(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, mode: str) -> None:
    gang = Gang([])
    assert start(gang, monkeypatch, gpus=gpus).exit_code == 0
    assert gang.world_size == ranks
    assert {problem.mode for problem in gang.problems} == {mode}
    assert gang.job["contenders"] is None
    assert len(gang.problems) >= 3


def test_json_gives_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("library", 14.0)]
    shown = start(Gang(rows), monkeypatch, "--shape", "98304", "--json")
    assert json.loads(shown.stdout) == rows


@pytest.mark.parametrize("gang", [Gang(None), Gang([], code=1)], ids=["no result", "bad code"])
def test_failed_ranks_are_exit_code_1(monkeypatch: pytest.MonkeyPatch, gang: Gang) -> None:
    assert start(gang, monkeypatch, "--shape", "98304").exit_code == 1


def test_more_ranks_than_gpus_is_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(Gang([]), monkeypatch, "--world-size", "8", gpus=4).exit_code == 2
    monkeypatch.setattr(options, "num_gpus", lambda: 4)
    with pytest.raises(typer.BadParameter, match="8 ranks need 8 GPUs, this machine has 4"):
        options.local_ranks(8)


@pytest.mark.slow
def test_run_module_starts_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank_that_signs.py").write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
        "sys.exit(os.environ.get('FAIL', 0))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    assert runner.run_module("rank_that_signs", [str(out)], world_size=2) == 0
    assert {path.name: path.read_text() for path in out.iterdir()} == {"0": "2", "1": "2"}
    assert runner.run_module("rank_that_signs", [str(out)], world_size=2, environment={"FAIL": "3"}) != 0


def test_fp8_has_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang([])
    shape = ("--op", "gemm_rs", "--shape", "64x32x32")
    assert start(gang, monkeypatch, *shape, "--dtype", "bfloat16,float8_e4m3fn").exit_code == 0
    found = {(problem.dtype, problem.scaling, problem.layout) for problem in gang.problems}
    assert found == {("bfloat16", "", "nk"), ("float8_e4m3fn", "rowwise", "nk")}
    assert start(gang, monkeypatch, *shape, "--dtype", "float8_e4m3fn", "--scaling", "tensorwise").exit_code == 0
    assert {problem.scaling for problem in gang.problems} == {"tensorwise"}
    for wrong in (["--dtype", "bfloat16", "--scaling", "rowwise"], ["--dtype", "float8_e4m3fn", "--scaling", "none"]):
        shown = start(gang, monkeypatch, *shape, *wrong)
        assert shown.exit_code == 2
        assert "is not a scaling of gemm_rs" in shown.output
    shown = start(gang, monkeypatch, "--op", "gemm_rs", "--shape", "65x32x32")
    assert shown.exit_code == 2
    assert "M = 65 of gemm_rs is no multiple of 2 ranks" in " ".join(shown.output.split())


def test_a_contender_of_no_known_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang = Gang([])
    shown = start(gang, monkeypatch, "--shape", "64", "--contender", "tuned,lampor")
    assert shown.exit_code == 2
    assert "'lampor' is no contender of all_reduce; did you mean 'lamport'" in " ".join(shown.output.split())
    assert not gang.job
    (tmp_path / "theirs.py").write_text("")
    named = ("--contender", "tuned,library,lamport,theirs", "--peers", str(tmp_path / "theirs.py"))
    assert start(gang, monkeypatch, "--shape", "64", *named).exit_code == 0
    assert gang.job["contenders"] == ["tuned", "library", "lamport", "theirs"]


def test_rows_append_to_files_of_fewer_columns(tmp_path: Path) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("op,shape\nall_reduce,5\n")
    for path in (old, new):
        for _ in range(2):
            bench_csv.append_rows(path, [dict.fromkeys(bench_csv.COLUMNS, "x")])
    assert old.read_text().split() == ["op,shape", "all_reduce,5", "x,x", "x,x"]
    assert new.read_text().splitlines()[0].split(",") == list(bench_csv.COLUMNS)
    assert len(new.read_text().split()) == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda path: path.write_text("name,shape,value\nfoo,3,7\n"),
            "is another program's table: it lacks the columns op,",
        ),
        (lambda path: path.mkdir(), "cannot be appended to: "),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be appended to: "),
    ],
    ids=["another program's", "a directory", "no text"],
)
def test_a_csv_that_cannot_take_the_rows_is_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], Any], said: str
) -> None:
    path = tmp_path / "mine.csv"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    gang = Gang([])
    shown = start(gang, monkeypatch, "--shape", "98304", "--csv", str(path))
    assert shown.exit_code == 2
    assert said in " ".join(shown.stderr.replace("│", " ").split())
    assert not gang.job
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_csv_is_not_made_before_there_are_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    gang = Gang(None, code=1)
    assert start(gang, monkeypatch, "--shape", "98304", "--csv", str(path)).exit_code == 1
    assert gang.job["csv"] == str(path)
    assert not path.exists()
