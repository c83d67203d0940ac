from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tunedcomm import hardware
from tunedcomm.hardware import HARD_FIELDS, SOFT_FIELDS, Environment, Fabric
from tunedcomm.symm.layout import MAX_WORLD_SIZE

H200 = Environment(
    gpu="NVIDIA H200",
    num_sms=132,
    compute_capability=90,
    memory_gib=140,
    fabric="nvswitch-18",
    num_links=18,
    multicast=False,
    nodes=1,
    driver="570.1",
    cuda="12.8",
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.9",
    tunedcomm="0.1.0",
)


def test_environment_survives_json() -> None:
    again = Environment.from_dict(json.loads(json.dumps(H200.to_dict())))
    assert again == H200
    assert again.digest == H200.digest


def test_missing_field_is_named() -> None:
    data = H200.to_dict()
    del data["fabric"]
    with pytest.raises(ValueError, match="'fabric' is missing"):
        Environment.from_dict(data)


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


def test_environment_in_words() -> None:
    assert str(H200) == "NVIDIA H200, 132 SMs, nvswitch-18"
    assert str(dataclasses.replace(H200, multicast=True)).endswith("multicast")


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


def test_stored_environments_need_no_torch() -> None:
    code = (
        "import sys; from tunedcomm.hardware import Environment; assert Environment; "
        "print([name for name in ('torch', 'pynvml', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["loopback", "nvswitch"])
def test_ranks_that_share_the_only_gpu_are_as_many_as_kernels_serve(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(hardware, "fabric_of", lambda: (Fabric(kind=kind), ""))
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"):
        monkeypatch.setenv(name, "")  # so that it is taken back at the end, whoever sets it
        monkeypatch.delenv(name)
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    assert (hardware.num_gpu_ranks(), hardware.gpu_of(0).index, "NCCL_HOSTID" in os.environ) == (1, 0, False)

    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    shared = kind == "loopback"
    assert hardware.num_gpu_ranks() == (MAX_WORLD_SIZE if shared else 1)
    assert hardware.gpu_of(3).index == (0 if shared else 3)
    assert os.environ.get("NCCL_HOSTID") == ("3" if shared else None)
