"""What a sweep is: problems, settings and gangs from what was asked for and what the machine has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunedcomm import kernels
from tunedcomm.errors import TuningError, UnknownNameError
from tunedcomm.spec import Problem
from tunedcomm.tuner.gang.process import gang_environment
from tunedcomm.tuner.gang.protocol import Settings
from tunedcomm.tuner.search import sweep as plan
from tunedcomm.tuner.search.sweep import SweepSpec, gang_devices, resolve

PROBLEM = Problem(op="all_reduce", shape=(512,), dtype="bfloat16", world_size=2, mode="eager")
SETTINGS = Settings(backend="host", world_size=2, trials=8)


def test_host_defaults_are_small_and_eager() -> None:
    kernels.discover()
    problems, settings = resolve(SweepSpec(op="all_reduce", backend="host"))
    assert {(problem.mode, problem.world_size) for problem in problems} == {("eager", 2)}
    assert settings.backend == "host"
    assert len(problems) * settings.trials <= 60  # about a second each


def test_product_of_options_and_overrides() -> None:
    kernels.discover()
    product = {"shapes": ((64,), (128,)), "dtypes": ("bfloat16", "float16"), "modes": ("graph", "eager")}
    overrides = {"trials": 5, "peer_timeout_s": 3.0, "world_size": 3}
    problems, settings = resolve(SweepSpec(op="all_reduce", backend="host", **product, **overrides))
    assert len(set(problems)) == 8
    assert {name: getattr(settings, name) for name in overrides} == overrides


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"op": "all_reduec"}, UnknownNameError, "'all_reduce'"),
        ({"variants": ("lamprot",)}, UnknownNameError, "'lamport'"),
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
