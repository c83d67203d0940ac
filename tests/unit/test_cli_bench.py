from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_samples import Ended, run

from tunedcomm import hardware
from tunedcomm.bench import runner
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
        self,
        module: str,
        arguments: Sequence[str],
        *,
        world_size: int,
        environment: Mapping[str, str],
        on_wait: Callable[[], None],
    ) -> int:
        assert module == "tunedcomm.bench.runner"
        self.job, self.world_size = json.loads(Path(arguments[0]).read_text()), world_size
        if self.rows is not None:
            Path(arguments[1]).write_text(json.dumps({"rows": self.rows, "left_out": self.left_out}) + "\n")
        return self.code


def start(gang: Gang, monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 0, op: str = "all_reduce") -> Ended:
    monkeypatch.setattr(runner, "run_module", gang)
    monkeypatch.setattr(hardware, "num_gpu_ranks", lambda: gpus)
    return run("bench", "--op", op, *arguments)


def test_table_compares_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = start(Gang([row("library", 14.0), row("tuned", 4.0)]), monkeypatch, "--shape", "98304")
    assert shown.code == 0, shown.err
    assert shown.line("tuned = lamport(num_blocks=8)") == (
        "196608 98304 bfloat16 sum eager 3.60 4.00 4.80 49.15 - 43.2% 3.50x 8 1.2e-03 tuned = lamport(num_blocks=8)"
    )
    title, head, *_ = shown.out.splitlines()
    assert "2 x host-x86_64" in title
    assert {"bytes", "p50", "busbw", "ceiling", "library", "SMs", "contender"} <= set(head.split())


def test_the_best_other_is_neither_ours_nor_a_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"library": 14.0, "nccl_symmetric": 6.0, "lamport": 3.0, "cublas": 1.0, "tuned": 4.0}
    shown = start(Gang([row(name, us) for name, us in times.items()]), monkeypatch, "--shape", "98304")
    name, ratio = shown.line("best other").split(": ")[1].split(", ")
    assert (name.split()[0], ratio) == ("nccl_symmetric", "1.50x the time of tuned")


def test_job_says_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang = Gang([])
    csv = tmp_path / "out.csv"
    options = ("--shape", "512,1024", "--shape", "2048", "--dtype", "float16", "--contender", "tuned,library")
    shown = start(gang, monkeypatch, *options, "--mode", "both", "--csv", str(csv), "--seed", "7", gpus=4)
    assert shown.code == 0, shown.err
    assert gang.world_size == 4
    assert gang.problems == [
        Problem("all_reduce", (numel,), "float16", 4, mode=mode)
        for mode in ("graph", "eager")
        for numel in (512, 1024, 2048)
    ]
    assert gang.job.pop("problems")
    assert gang.job.pop("run_id")
    assert gang.job.pop("command").startswith("tunedcomm")
    asked = {"contenders": ["tuned", "library"], "seed": 7, "inputs": "random"}
    assert gang.job == {**asked, "peers": [], "link_gb_s": None, "csv": str(csv)}


def test_skew_is_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = Gang([])
    refused = start(gang, monkeypatch, "--shape", "512", "--skew")
    assert refused.code == 2
    assert "all_reduce has no experts" in refused.err
    start(gang, monkeypatch, "--shape", "8x128x2x4", "--skew", op="ep_dispatch")
    assert gang.job["inputs"] == "integers"


@pytest.mark.parametrize(("gpus", "ranks", "mode"), [(0, 2, "eager"), (1, 2, "eager"), (4, 4, "graph")])
def test_defaults_follow_the_machine(monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, mode: str) -> None:
    gang = Gang([])
    assert start(gang, monkeypatch, gpus=gpus).code == 0
    assert gang.world_size == ranks
    assert {problem.mode for problem in gang.problems} == {mode}
    assert ("no CUDA graphs" in start(gang, monkeypatch, "--mode", "graph", gpus=gpus).err) == (mode == "eager")
    assert gang.job["contenders"] is None
    assert len(gang.problems) >= 3


@pytest.mark.parametrize("flag", ["", "--json"])
def test_a_problem_is_printed_as_it_ends_and_stays_after_ctrl_c(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    class Interrupted(Gang):
        def __call__(self, module: str, arguments: Sequence[str], **options: Any) -> int:
            with Path(arguments[1]).open("a") as result:
                for line in (
                    {"now": "[1/2] first"},
                    {"rows": [row("library", 14.0)], "left_out": []},
                    {"now": "[2/2]"},
                ):
                    result.write(json.dumps(line) + "\n")
                    result.flush()
                    options["on_wait"]()
                result.write('{"rows": [')  # in the midst of a line
            raise KeyboardInterrupt

    shown = start(Interrupted(None), monkeypatch, "--shape", "98304,512", *filter(None, [flag]))
    assert shown.code == 130
    assert [line for line in shown.err.splitlines() if line.startswith("[")] == ["[1/2] first", "[2/2]"]
    if flag:
        assert [one["contender"] for one in shown.json] == ["library"]
    else:
        assert shown.line("1.00x").endswith("library")


@pytest.mark.parametrize("gang", [Gang(None), Gang([], code=1)], ids=["no result", "bad code"])
def test_failed_ranks_are_exit_code_1(monkeypatch: pytest.MonkeyPatch, gang: Gang) -> None:
    assert start(gang, monkeypatch, "--shape", "98304").code == 1


def test_a_contender_of_no_known_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gang = Gang([])
    shown = start(gang, monkeypatch, "--shape", "64", "--contender", "tuned,lampor")
    assert shown.code == 2
    assert "did you mean 'lamport'" in " ".join(shown.err.split())
    assert not gang.job
    (tmp_path / "theirs.py").write_text("")
    named = ("--contender", "tuned,library,lamport,theirs", "--peers", str(tmp_path / "theirs.py"))
    assert start(gang, monkeypatch, "--shape", "64", *named).code == 0
    assert gang.job["contenders"] == ["tuned", "library", "lamport", "theirs"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_text("name,shape,value\nfoo,3,7\n"), "another program's table"),
        (lambda path: path.mkdir(), "cannot be appended to"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be appended to"),
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
    assert shown.code == 2
    assert said in " ".join(shown.err.replace("│", " ").split())
    assert not gang.job
    assert (path.read_bytes() if path.is_file() else b"") == before
