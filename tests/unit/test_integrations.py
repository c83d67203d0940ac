"""How intercepted groups get at their communicator, and what `fusion_pass` refuses where there are no ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import python

import tunedcomm
from tunedcomm.integrations import check_torch, direct, intercept, serving
from tunedcomm.integrations.intercept import RoutedGroup
from tunedcomm.selection.select import Decision
from tunedcomm.spec import Candidate, Problem

CPU = torch.device("cpu")


class Group:
    """Stands for a process group."""

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a process group")


GROUP: Any = Group()


def test_a_serving_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def found(group: Any, device: Any = None) -> Any:
        asked.append(device)
        return SimpleNamespace(group=group, device=device, rank=0, world_size=2)

    for module in (serving, intercept):
        monkeypatch.setattr(module, "get_communicator", found)
    assert serving.ServingAllReduce(GROUP, CPU)._routed.communicator.device == CPU
    assert asked == [CPU] * 2


def test_a_communicator_forgotten_while_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(RoutedGroup):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, None if name == "_communicator" else value)

    made = object()
    monkeypatch.setattr(intercept, "get_communicator", lambda group, device=None: made)
    assert Forgetful(GROUP, CPU).communicator is made


def test_fusion_needs_a_group() -> None:
    with pytest.raises(tunedcomm.NotInitializedError, match="init_process_group"):
        tunedcomm.fusion_pass()


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130"])
def test_a_tested_torch_is_not_looked_into(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_torch("it", "instead", lambda: pytest.fail("looked into"))


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(tunedcomm.UnsupportedVersionError, match=r"torch 2\.11 to"):
        tunedcomm.fusion_pass()


def test_a_newer_torch_gets_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu150")
    for _ in range(2):
        check_torch("this test", "instead", intercept._missing)
    assert [record.levelname for record in caplog.records if "2.99.0" in record.message] == ["WARNING"]


def test_a_newer_torch_that_lacks_an_internal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunedcomm.integrations import fusion

    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with monkeypatch.context() as patch:
        patch.setattr(fusion, "config", object())
        with pytest.raises(tunedcomm.UnsupportedVersionError, match=r"post_grad.*tunedcomm\.ag_gemm"):
            tunedcomm.fusion_pass()
    with monkeypatch.context() as patch:
        patch.delattr(torch._C._distributed_c10d, "_register_work")
        with pytest.raises(tunedcomm.UnsupportedVersionError, match="_register_work"):
            check_torch("it", "instead", intercept._missing)
    with monkeypatch.context() as patch:  # an argument that nobody reads
        patch.setattr(intercept, "_OTHERS", intercept._OTHERS - {"root_tensor"})
        with pytest.raises(tunedcomm.UnsupportedVersionError, match="broadcast_"):
            check_torch("it", "instead", intercept._missing)


def test_the_settings_of_inductor_can_be_copied_with_the_pass() -> None:
    from tunedcomm.integrations.fusion import FusionPass

    fusion = FusionPass((GROUP,), "pays", "default", None, None)
    assert copy.deepcopy({"post_grad_custom_post_pass": fusion})["post_grad_custom_post_pass"] is fusion


@pytest.mark.slow
def test_inductor_is_not_imported_for_other_names() -> None:
    code = "import sys, tunedcomm; tunedcomm.gemm_rs; print('tunedcomm.integrations.fusion' in sys.modules)"
    assert python("-c", code).stdout.strip() == "False"


def test_a_record_of_calls_fits_120_columns() -> None:
    told = intercept.RoutedCall(
        group="0",
        call="c10d::allreduce_",
        problem="all_reduce 98304 bfloat16 world_size=4 eager",
        served_by="two_shot_lamport(launch_pdl=True, num_blocks=128, num_warps=16)",
        why="trial 1284 in the packaged layer: 12.3 µs, 1.24x as fast as the library, 1.3x as fast as lamport(items=8)",
    )
    record = intercept._Record(lambda: told)
    record.count = 128
    group: Any = SimpleNamespace(record={"place": record})
    seen = intercept.Interception((group,))
    record.count = 256
    lines = str(seen).splitlines()
    assert lines[0].startswith("128 x group 0: c10d::allreduce_")
    assert max(map(len, lines)) <= 120
    assert " ".join(" ".join(lines).split()) == f"128 x {told}"


MIB = 1 << 20
SERVED: dict[str, Any] = {"source": "exact", "latency_us": 2.0, "library_us": 6.1}


@pytest.mark.parametrize(
    ("changes", "nbytes", "mode", "barriers_us", "num_barriers", "why"),
    [
        ({}, 1024, "graph", 3.6, 2, ""),
        ({}, 1024, "graph", 4.2, 2, "4.2"),
        ({"latency_us": 400.0, "library_us": 500.0}, 64 * MIB, "graph", 3.6, 2, "8 MiB"),
        ({"latency_us": 400.0, "library_us": 500.0}, 64 * MIB, "graph", None, 0, ""),
        ({}, 1024, "graph", None, 2, "time"),
        ({"latency_us": None, "library_us": None}, 1024, "graph", 3.6, 1, "time"),
        ({}, 1024, "eager", 3.6, 2, "eager"),
        ({}, 1024, "eager", None, 0, "eager"),
        ({"source": "forced", "latency_us": None}, 64 * MIB, "eager", None, 2, ""),
    ],
)
def test_what_pays_for_barriers(
    changes: dict[str, Any], nbytes: int, mode: Any, barriers_us: float | None, num_barriers: int, why: str
) -> None:
    decision = Decision(candidate=Candidate.of("all_reduce", "lamport", {}), why="", **SERVED | changes)
    problem = Problem("all_reduce", (nbytes // 2,), "bfloat16", 2, reduction="sum", mode=mode)
    found = direct.why_slower(decision, problem, barriers_us, num_barriers)
    assert bool(found) == bool(why)
    assert why in found


def test_all_operators_on_symmetric_memory_are_known() -> None:
    """An operator with other arguments than those that are read would be left alone."""
    assert [reader.base for reader in intercept._direct_readers()] == list(direct.OPERATORS)
