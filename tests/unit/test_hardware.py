from __future__ import annotations

import dataclasses
import json

import pytest
from db_samples import H200

from tunedcomm import hardware
from tunedcomm.hardware import HARD_FIELDS, SOFT_FIELDS, Environment


def test_environment_survives_json() -> None:
    again = Environment.from_dict(json.loads(json.dumps(H200.to_dict())))
    assert again == H200
    assert again.digest == H200.digest


@pytest.mark.parametrize("name", HARD_FIELDS)
def test_hard_fields_mismatch(name: str) -> None:
    value = getattr(H200, name)
    other = dataclasses.replace(H200, **{name: "other" if isinstance(value, str) else value + 1})
    assert H200.hard_key != other.hard_key
    assert len(H200.mismatches(other)) == 1
    assert name in H200.mismatches(other)[0]
    assert H200.drift(other) == []
    assert other.digest != H200.digest


@pytest.mark.parametrize("name", SOFT_FIELDS)
def test_soft_fields_drift(name: str) -> None:
    other = dataclasses.replace(H200, **{name: "9.9"})
    assert H200.hard_key == other.hard_key
    assert H200.mismatches(other) == []
    assert len(H200.drift(other)) == 1
    assert name in H200.drift(other)[0]
    assert "9.9" in H200.drift(other)[0]
    assert other.digest != H200.digest


def test_host_environment() -> None:
    here = hardware.detect(None)
    assert here.is_host
    assert here.num_sms == 1
    assert not here.multicast
    assert here.torch
    assert "host backend" in str(here)
    assert hardware.detect(None, nodes=2).hard_key != here.hard_key


@pytest.mark.gpu(1)
def test_gpu_environment() -> None:
    here = hardware.detect(0)
    assert not here.is_host
    assert here.num_sms > 1
    assert here.compute_capability >= 70
    assert here.nccl


@pytest.mark.parametrize(
    ("variables", "disabled"),
    [
        ({}, False),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, True),
        ({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"}, False),
        ({"NCCL_NVLS_ENABLE": "0"}, True),
        ({"NCCL_NVLS_ENABLE": "1"}, False),
    ],
)
def test_multicast_switches(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], disabled: bool) -> None:
    for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hardware.multicast_disabled() is disabled
