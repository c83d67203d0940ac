"""What a sweep is: problems, settings and gangs from what was asked for and what the machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay import read_recording, stand_in

from tunedcomm import kernels
from tunedcomm.db.store import Database
from tunedcomm.dispatch.dispatcher import source_hash_of
from tunedcomm.errors import TuningError, UnknownNameError
from tunedcomm.spec import Problem
from tunedcomm.tuner.gang.process import gang_environment
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search import sweep as plan
from tunedcomm.tuner.search.sweep import SweepSpec, gang_devices, resolve, sweep

RECORDING = Path(__file__).parents[1] / "data" / "trials_h200_x4.jsonl.gz"
PROBLEM = Problem(op="all_reduce", shape=(512,), dtype="bfloat16", world_size=2, mode="eager")
SETTINGS = Settings(backend="host", world_size=2, trials=8)


def test_host_defaults_are_small_and_eager() -> None:
    kernels.discover()
    problems, settings = resolve(SweepSpec(op="all_reduce", backend="host"))
    assert {problem.mode for problem in problems} == {"eager"}
    assert {problem.world_size for problem in problems} == {2}
    assert settings.backend == "host"
    assert len(problems) * settings.trials <= 60  # about a second each


def test_product_of_options_and_overrides() -> None:
    kernels.discover()
    spec = SweepSpec(
        op="all_reduce",
        backend="host",
        world_size=3,
        shapes=((64,), (128,)),
        dtypes=("bfloat16", "float16"),
        modes=("graph", "eager"),
        trials=5,
        peer_timeout_s=3.0,
    )
    problems, settings = resolve(spec)
    assert len(set(problems)) == 8
    assert (settings.trials, settings.peer_timeout_s, settings.world_size) == (5, 3.0, 3)


def test_a_problem_that_is_named_twice_is_one() -> None:
    kernels.discover()
    spec = SweepSpec(op="all_reduce", backend="host", shapes=((64,), (64,)), dtypes=("float32", "float32"))
    assert [str(problem) for problem in resolve(spec)[0]] == ["all_reduce 64 float32 world_size=2 eager"]
    assert resolve(replace(spec, problems=(PROBLEM, PROBLEM)))[0] == (PROBLEM,)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"op": "all_reduec"}, UnknownNameError, "did you mean 'all_reduce'"),
        ({"variants": ("lamprot",)}, UnknownNameError, "did you mean 'lamport'"),
        ({"reductions": ("xor",)}, ValueError, "no reduction 'xor'; allowed: sum"),
        ({"dtypes": ("int8",)}, ValueError, "no dtype 'int8'"),
        ({"shapes": ((4, 4),)}, ValueError, "does not fit all_reduce"),
        ({"world_size": 1}, TuningError, "world size 1"),
        ({"backend": "cuda", "world_size": 64}, TuningError, "world size 64 cannot be tuned here"),
        ({"problems": (PROBLEM,), "world_size": 3}, TuningError, "one world size"),
        ({"problems": (replace(PROBLEM, reduction="xor"),)}, ValueError, "no reduction 'xor'"),
        ({"gangs": 0}, TuningError, "at least 1 gang, got 0"),
    ],
)
def test_bad_sweeps_are_refused_with_what_is_allowed(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    kernels.discover()
    with pytest.raises(error, match=text):
        resolve(SweepSpec(**{"op": "all_reduce", "backend": "host", **changes}))


@pytest.mark.parametrize(
    ("gpus", "world_size", "asked", "expected"), [(4, 2, None, 2), (4, 4, None, 1), (8, 3, None, 2), (8, 2, 3, 3)]
)
def test_auto_fills_the_machine_with_gangs(
    monkeypatch: pytest.MonkeyPatch, gpus: int, world_size: int, asked: int | None, expected: int
) -> None:
    kernels.discover()
    monkeypatch.setattr(plan, "num_gpu_ranks", lambda: gpus)
    _, settings = resolve(SweepSpec(op="all_reduce", world_size=world_size, gangs=asked))
    assert (settings.backend, settings.gangs) == ("cuda", expected)


def test_host_has_one_gang_unless_told_otherwise() -> None:
    kernels.discover()
    assert [resolve(SweepSpec(op="all_reduce", backend="host", gangs=n))[1].gangs for n in (None, 3)] == [1, 3]


def test_more_gangs_than_fit_are_refused_with_how_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()
    monkeypatch.setattr(plan, "num_gpu_ranks", lambda: 5)
    with pytest.raises(TuningError, match=r"3 gangs of 2 ranks need 6 GPUs .* has 5 usable ones: at most 2 fit"):
        resolve(SweepSpec(op="all_reduce", world_size=2, gangs=3))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0,1", "2,3"]),
        ("", ["0,1", "2,3"]),
        ("3, 1,7,5", ["3,1", "7,5"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_gangs_share_out_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = replace(SETTINGS, backend="cuda", gangs=2)
    assert gang_devices(settings) == expected
    assert [gang_environment(settings, devices)["CUDA_VISIBLE_DEVICES"] for devices in expected] == expected
    assert gang_devices(replace(settings, backend="host")) == ["", ""]


def test_one_gang_shares_the_only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.discover()
    monkeypatch.setattr(plan, "num_gpu_ranks", lambda: 8)
    monkeypatch.setattr(plan, "ranks_share_a_gpu", lambda: True)
    found = [resolve(SweepSpec(op="all_reduce", world_size=ranks))[1] for ranks in (None, 4)]
    assert [(each.backend, each.world_size, each.gangs) for each in found] == [("cuda", 2, 1), ("cuda", 4, 1)]
    with pytest.raises(TuningError, match="at most 1 fit"):
        resolve(SweepSpec(op="all_reduce", world_size=2, gangs=2))
    for visible, expected in (("", "0"), ("5", "5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gang_devices(found[0]) == [expected]


def test_a_stand_in_needs_no_machine() -> None:
    kernels.discover()
    spec = SweepSpec(op="all_reduce", shapes=((1 << 15,),), world_size=4, stand_in=stand_in(RECORDING, 0.5))
    problems, settings = resolve(spec)
    assert [str(problem) for problem in problems] == ["all_reduce 32768 bfloat16 world_size=4 graph"]
    assert (settings.backend, settings.world_size, settings.gangs) == ("cuda", 4, 1)
    assert settings.stand_in == ("replay", str(RECORDING), "0.5")


def test_the_summary_leaves_out_kernels_that_have_changed_since(tmp_path: Path) -> None:
    kernels.discover()
    like = next(r for r in read_recording(RECORDING) if r.problem.shape == (1 << 15,) and r.variant == "lamport")
    faster = {"status": "ok", "reason": "", "latency_p10_us": None, "latency_p50_us": 0.5, "latency_p90_us": None}
    # A config that the sweep does not try.
    config = {**like.config, "num_blocks": 1}
    before = replace(like, source_hash="before", final=True, config=config, **faster)
    spec = SweepSpec(
        op="all_reduce", problems=(like.problem,), stand_in=stand_in(RECORDING), trials=2, variants=("lamport",)
    )
    with Database.open(tmp_path / "tuned.db", create=True) as database:
        database.record([before])
        (result,) = sweep(spec, database).problems
    assert result.best is not None
    assert result.best.source_hash == source_hash_of("all_reduce", result.best.variant)
    assert result.num_trials == 2


def test_fp8_is_tuned_with_scales_and_shapes_that_ranks_share() -> None:
    kernels.discover()

    def expand(**changes: Any) -> list[tuple[str, str]]:
        spec = SweepSpec(**{"op": "gemm_rs", "shapes": ((64, 32, 32),), "backend": "host", **changes})
        return [(problem.dtype, problem.scaling) for problem in resolve(spec)[0]]

    assert expand(dtypes=("bfloat16", "float8_e4m3fn")) == [("bfloat16", ""), ("float8_e4m3fn", "rowwise")]
    both = expand(dtypes=("float8_e4m3fn",), scalings=("tensorwise", "rowwise"))
    assert both == [("float8_e4m3fn", "tensorwise"), ("float8_e4m3fn", "rowwise")]
    with pytest.raises(ValueError, match="gemm_rs of bfloat16 has no scaling 'rowwise'; allowed: none"):
        expand(dtypes=("bfloat16",), scalings=("rowwise",))
    with pytest.raises(ValueError, match="M = 65 of gemm_rs is no multiple of 2 ranks"):
        expand(shapes=((65, 32, 32),))
