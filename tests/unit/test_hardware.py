"""Environments: fabric classes, from NVML's answers to the word that is stored and plain ones; what differs."""

# ruff: noqa: N802 - the fake has NVML's names

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from db_samples import H200

from tunedcomm import hardware
from tunedcomm.hardware import HARD_FIELDS, SOFT_FIELDS, Environment, Fabric, describe_fabric, fabric_of, nearest
from tunedcomm.symm.layout import limits_for

SWITCH, GPU, CPU = "switch", "gpu", "cpu"


class FakeNvml(SimpleNamespace):
    """What NVML would say of a machine.

    Args:
        links: of each GPU, what is at the other end of each link: `SWITCH`, `CPU`, another GPU's number, or None for a
            link that is down.
        remote: what `nvmlDeviceGetNvLinkRemoteDeviceType` and `...RemotePciInfo` do: answer, or raise an NVMLError.
        p2p: of two GPUs, whether they reach each other; None where nothing says so.
        mig: GPUs in MIG mode; None where the GPUs know no such mode.
        uuids: UUID with prefix to the GPU that it means.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FEATURE_ENABLED = NVML_DEVICE_MIG_ENABLE = 1
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 3
    NVML_P2P_CAPS_INDEX_READ = NVML_P2P_STATUS_OK = 0

    def __init__(
        self,
        links: Sequence[Sequence[Any]],
        *,
        remote: bool = True,
        p2p: Callable[[int, int], bool] | None = lambda one, other: True,
        mig: frozenset[int] | None = frozenset(),
        uuids: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        def answer(value: Any, *, known: bool = True) -> Any:
            if not known:
                raise self.NVMLError("Not Supported")
            return value

        def pci(gpu: int, link: int | None = None) -> Any:
            end = gpu if link is None else links[gpu][link]
            if end == CPU:
                return SimpleNamespace(domain=1, bus=99, device=0)
            return answer(SimpleNamespace(domain=0, bus=end, device=0), known=remote or link is None)

        self.is_open = 0
        self.nvmlSystemGetDriverVersion = lambda: "580.1"
        self.nvmlDeviceGetCount = lambda: len(links)
        self.nvmlDeviceGetHandleByIndex = lambda gpu: answer(gpu, known=gpu < len(links))
        self.nvmlDeviceGetHandleByUUID = lambda uuid: answer(uuids.get(uuid), known=uuid in uuids)
        self.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda gpu: gpu
        self.nvmlDeviceGetMigMode = lambda gpu: answer([int(gpu in (mig or ())), 0], known=mig is not None)
        self.nvmlDeviceGetNvLinkState = lambda gpu, link: (
            int(links[gpu][link] is not None) if link < len(links[gpu]) else answer(0, known=False)
        )
        self.nvmlDeviceGetNvLinkRemoteDeviceType = lambda gpu, link: answer(
            3 if links[gpu][link] == SWITCH else 1, known=remote
        )
        self.nvmlDeviceGetPciInfo = self.nvmlDeviceGetNvLinkRemotePciInfo = pci
        self.nvmlDeviceGetP2PStatus = lambda one, other, index: (
            answer(0, known=False) if p2p is None else int(not p2p(one, other))
        )

    def nvmlInit(self) -> None:
        self.is_open += 1

    def nvmlShutdown(self) -> None:
        self.is_open -= 1


def mesh(num_gpus: int, links_each: int) -> list[list[int]]:
    return [[other for other in range(num_gpus) if other != gpu] * links_each for gpu in range(num_gpus)]


# Eight V100: six links each, and every GPU lacks three of the others.
CUBE_MESH = [[1, 1, 2, 3, 3, 4], [0, 0, 2, 2, 3, 5], [0, 1, 1, 3, 3, 6], [0, 0, 1, 2, 2, 7],
             [5, 5, 6, 7, 7, 0], [4, 4, 6, 6, 7, 1], [4, 5, 5, 7, 7, 2], [4, 4, 5, 6, 6, 3]]  # fmt: skip


def ask(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml, uuid: str = "") -> tuple[Fabric, str]:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = fabric_of(uuid=uuid)
    assert fake.is_open == 0
    return found


@pytest.mark.parametrize(
    ("fake", "expected", "num_links"),
    [
        (FakeNvml([[SWITCH] * 18] * 8), "nvswitch-18", 18),
        (FakeNvml([[SWITCH] * 18] * 8, mig=None), "nvswitch-18", 18),
        (FakeNvml([[SWITCH] * 18] * 4, remote=False), "nvswitch-18", 18),
        (FakeNvml([[SWITCH] * 16 + [None] * 2] * 4), "nvswitch-16", 16),
        (FakeNvml([[SWITCH] * 8] * 8), "nvswitch-8", 8),
        (FakeNvml(mesh(4, 4)), "nvlink-12", 12),
        (FakeNvml(mesh(2, 2)), "nvlink-2", 2),
        (FakeNvml(mesh(2, 2), remote=False), "nvlink-2", 2),
        (FakeNvml(mesh(1, 4)), "pcie", 0),
        (FakeNvml(CUBE_MESH), "nvlink-6-partial", 6),
        (FakeNvml([[1, 1], [0, 0], [3, 3], [2, 2]]), "nvlink-2-partial", 2),
        (FakeNvml([[1, 1, CPU], [0, 0, CPU]]), "nvlink-3", 3),
        (FakeNvml([[]] * 4), "pcie", 0),
        (FakeNvml([[]] * 4, p2p=None), "pcie", 0),
        (FakeNvml([[]] * 4, p2p=lambda one, other: one // 2 == other // 2), "pcie-nop2p", 0),
        (FakeNvml([[]], p2p=lambda one, other: False), "pcie", 0),
        (FakeNvml([[SWITCH] * 18] * 8, mig=frozenset({0})), "nvswitch-18-mig", 18),
        (FakeNvml(mesh(4, 4), mig=frozenset({0})), "nvlink-12-mig", 12),
        (FakeNvml([[]] * 2, mig=frozenset({0}), p2p=lambda one, other: False), "pcie-mig", 0),
    ],
)
def test_class_of_a_machine(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml, expected: str, num_links: int) -> None:
    found = ask(monkeypatch, fake)
    assert (str(found[0]), found[0].num_links, found[1]) == (expected, num_links, "580.1")


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml([[SWITCH] * 18, []], uuids={"GPU-b": 1, "MIG-s": 0})
    assert ask(monkeypatch, fake, "b")[0].num_links == 0
    assert ask(monkeypatch, fake, "s") == (Fabric(kind="nvswitch", num_links=18, is_mig=True), "580.1")
    assert ask(monkeypatch, fake, "unknown")[0].num_links == 18


class Masked(FakeNvml):
    """A machine of which NVML shows some GPUs; their links lead to all of it."""

    def __init__(self, machine: FakeNvml, shown: Sequence[int], *, knows_links: bool = True) -> None:
        vars(self).update(vars(machine))
        self.nvmlDeviceGetCount = lambda: len(shown)
        self.nvmlDeviceGetHandleByIndex = lambda index: shown[index]
        self.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-"))
        if not knows_links:
            self.nvmlDeviceGetNvLinkState = lambda gpu, link: 0


@pytest.mark.parametrize(
    "links", [[[SWITCH] * 18] * 4, mesh(4, 4), [[1, 1], [0, 0], [3, 3], [2, 2]], [[]] * 4], ids=str
)
def test_ranks_put_together_what_each_sees(monkeypatch: pytest.MonkeyPatch, links: list[list[Any]]) -> None:
    """As with all GPUs in sight, whichever each process sees; also where only one of them sees more than its own."""
    machine = FakeNvml(links, p2p=lambda one, other: one // 2 == other // 2)
    expected = str(ask(monkeypatch, machine)[0])

    def found(views: Sequence[FakeNvml]) -> set[str]:
        sights, environments = [], []
        for rank, view in enumerate(views):
            monkeypatch.setitem(sys.modules, "pynvml", view)
            sights.append(hardware.sight_of(uuid=str(rank)))
            seen, _ = fabric_of(uuid=str(rank))
            environments.append(replace(H200, fabric=str(seen), num_links=seen.num_links))
        pairs = zip(environments, sights, strict=True)
        return {hardware.put_together(environment, own, sights).fabric for environment, own in pairs}

    every = range(4)
    if links[0]:  # what NVML says of pairs needs both in sight
        assert found([Masked(machine, [rank]) for rank in every]) == {expected}
    assert found([Masked(machine, every if rank == 2 else [rank]) for rank in every]) == {expected}
    blind = [Masked(machine, every if rank == 0 else [rank], knows_links=rank == 0) for rank in every]
    assert found(blind) == {expected}
    assert hardware.put_together(H200, None, [None] * 4) is H200


def test_a_gpu_of_each_rank_is_not_one_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    machine, sights = FakeNvml([[]] * 2), []
    for gpus in ([0], [1]):
        monkeypatch.setitem(sys.modules, "pynvml", Masked(machine, gpus))
        sights.append(hardware.sight_of(uuid=str(gpus[0])))
    alone = replace(H200, fabric="loopback", num_links=0)
    assert hardware.put_together(alone, sights[0], sights).fabric == "pcie"
    assert hardware.put_together(alone, sights[0], sights[:1]).fabric == "loopback"


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml([[SWITCH] * 18])
    assert ask(monkeypatch, FakeNvml([])) == (Fabric(kind="pcie"), "")
    monkeypatch.setattr(fake, "nvmlInit", lambda: fake.nvmlDeviceGetHandleByIndex(1))
    assert ask(monkeypatch, fake) == (Fabric(kind="pcie"), "")


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
def test_environment_of_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import torch

    properties = SimpleNamespace(name=name, multi_processor_count=16, major=9, minor=0, total_memory=10 << 30, uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(hardware, "has_multicast", lambda device: True)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([[SWITCH] * 18]))
    found = hardware.detect.__wrapped__(0)
    is_slice = "MIG" in name
    assert found.fabric == ("nvswitch-18-mig" if is_slice else "nvswitch-18")
    assert (found.num_sms, found.num_links, found.multicast, found.driver) == (16, 18, not is_slice, "580.1")
    assert limits_for(found, 2).symmetric is not is_slice


CLASSES = {
    "nvswitch-18": ("NVLink 4, 18 links through NVSwitch", True),
    "nvlink-12": ("NVLink 4, 12 links straight to the other GPUs", True),
    "nvlink-1": ("NVLink 4, 1 link straight to the other GPUs", True),
    "nvlink-4-partial": ("NVLink 4, 4 links to some of the other GPUs", True),
    "pcie": ("PCIe without NVLink", False),
    "pcie-nop2p": ("PCIe without NVLink, where GPUs cannot reach each other's memory", False),
    "nvswitch-18-mig": ("NVLink 4, 18 links through NVSwitch; a MIG slice, which reaches no other GPU", False),
    "pcie-mig": ("PCIe without NVLink; a MIG slice, which reaches no other GPU", False),
    "loopback": ("one GPU that all ranks share: results count, times do not", True),
    "host": ("CPU tensors in the host's shared memory", True),
    "photons-7": ("photons-7 (a class that this version does not know)", True),
    "nvswitch-18-partial-mig-x": ("nvswitch-18-partial-mig-x (a class that this version does not know)", True),
}


@pytest.mark.parametrize("text", CLASSES)
def test_a_class_in_words_and_back(text: str) -> None:
    words, shares = CLASSES[text]
    assert str(Fabric.parse(text)) == text
    assert describe_fabric(text, 90) == words
    assert Fabric.parse(text).can_share_memory is shares
    assert limits_for(replace(H200, fabric=text), 4).symmetric is shares


GENERATIONS = {60: " 1", 70: " 2", 75: " 2", 80: " 3", 86: " 3", 90: " 4", 100: " 5", 103: " 5", 120: "", 0: ""}


@pytest.mark.parametrize("capability", GENERATIONS)
def test_generation_of_nvlink(capability: int) -> None:
    assert describe_fabric("nvswitch-18", capability).startswith(f"NVLink{GENERATIONS[capability]}, 18 links")


# Environments that differ


# Another value, and tokens of what is said of it.
OTHERS: dict[str, tuple[Any, list[str]]] = {
    "gpu": ("NVIDIA H100", ["'NVIDIA H200' here and 'NVIDIA H100' there", "--borrow"]),
    "num_sms": (114, ["132 here and 114 there"]),
    "compute_capability": (100, ["90 here and 100 there"]),
    "fabric": ("nvlink-4-partial", ["'nvlink-4-partial' there", "nvidia-smi nvlink"]),
    "multicast": (True, ["False here and True there", "TORCH_SYMM_MEM_DISABLE_MULTICAST"]),
    "nodes": (2, ["1 here and 2 there"]),
}


@pytest.mark.parametrize("name", HARD_FIELDS)
def test_a_mismatch_of_a_hard_field_says_what_and_what_to_do(name: str) -> None:
    value, tokens = OTHERS[name]
    other = replace(H200, **{name: value})
    (said,) = H200.mismatches(other)
    assert all(token in said for token in tokens)
    assert H200.differences(other).keys() == {name}
    assert H200.hard_key != other.hard_key
    assert H200.drift(other) == []
    assert other.digest != H200.digest


@pytest.mark.parametrize("name", SOFT_FIELDS)
def test_soft_fields_drift(name: str) -> None:
    other = replace(H200, **{name: "9.9"})
    assert (H200.hard_key, H200.mismatches(other)) == (other.hard_key, [])
    (said,) = H200.drift(other)
    assert name in said
    assert other.digest != H200.digest


def test_environment_survives_json() -> None:
    again = Environment.from_dict(json.loads(json.dumps(H200.to_dict())))
    assert (again, again.digest) == (H200, H200.digest)


def test_host_environment() -> None:
    here = hardware.detect(None)
    assert here.is_host
    assert (here.num_sms, here.multicast) == (1, False)
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


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", ["TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"])
def test_multicast_switches(monkeypatch: pytest.MonkeyPatch, name: str, disabled: bool) -> None:
    for other in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(other, raising=False)
    assert not hardware.multicast_disabled()
    monkeypatch.setenv(name, str(int(disabled == name.startswith("TORCH"))))
    assert hardware.multicast_disabled() is disabled


def test_the_nearest_environment() -> None:
    h100 = replace(H200, gpu="NVIDIA H100 80GB HBM3")
    nvl = replace(H200, gpu="NVIDIA H100 NVL", fabric="nvlink-12", num_sms=114)
    b200 = replace(H200, gpu="NVIDIA B200", compute_capability=100, num_sms=148)
    far = replace(H200, nodes=2)
    host = hardware.detect()
    order = [H200, h100, nvl, far, b200]
    for count in range(len(order)):
        assert nearest(H200, reversed(order[count:])) == order[count]
    assert nearest(H200, [host]) is None
    assert nearest(host, [*order, host]) == host
