"""The environment fingerprint: which hardware, fabric and software a number belongs to.

Hard fields (GPU model, SM count, compute capability, fabric class, multicast, nodes) must match for a stored trial to
be used at all; soft fields (driver and library versions) only rank older rows lower. Torch and NVML are imported when
something is detected, so that stored environments can be read and compared without either.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tunedcomm.fabric import Fabric, describe
from tunedcomm.nvml import links_of, ranks_may_share_a_gpu
from tunedcomm.version import VERSION

if TYPE_CHECKING:
    import torch

__all__ = [
    "HARD_FIELDS",
    "SOFT_FIELDS",
    "Environment",
    "advice",
    "detect",
    "gpu_of",
    "multicast_disabled",
    "nearest",
    "num_gpu_ranks",
    "ranks_share_a_gpu",
]

HARD_FIELDS = ("gpu", "num_sms", "compute_capability", "fabric", "multicast", "nodes")
_SHARERS = 8  # symm.layout.MAX_WORLD_SIZE
SOFT_FIELDS = ("driver", "cuda", "torch", "triton", "nccl", "tunedcomm")


@dataclass(frozen=True, slots=True)
class Environment:
    """Hardware, fabric and software under which a number was measured.

    Attributes:
        gpu: product name, e.g. `NVIDIA H200`, or `host-x86_64` for the host backend.
        num_sms: streaming multiprocessors; 1 on the host backend.
        compute_capability: major × 10 + minor, e.g. 90; 0 on the host backend.
        memory_gib: device memory in GiB, rounded.
        fabric: link class, e.g. `nvswitch-18`, `nvlink-4`, `pcie`, `host`; see `tunedcomm.fabric`.
        num_links: active NVLinks a GPU; 0 without NVLink.
        multicast: NVLink multicast (NVLS) is there and not switched off.
        nodes: number of hosts the group spans.
        driver, cuda, torch, triton, nccl, tunedcomm: versions; "" where there is none.
    """

    gpu: str
    num_sms: int
    compute_capability: int
    memory_gib: int
    fabric: str
    num_links: int
    multicast: bool
    nodes: int
    driver: str
    cuda: str
    torch: str
    triton: str
    nccl: str
    tunedcomm: str

    @property
    def is_host(self) -> bool:
        """True for the host backend, whose timings say nothing about GPUs."""
        return self.fabric == "host"

    @property
    def hard_key(self) -> tuple[Any, ...]:
        """The fields that must be equal for a row to be used."""
        return tuple(getattr(self, name) for name in HARD_FIELDS)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Environment:
        """Inverse of `to_dict`; raises ValueError if a field is missing."""
        missing = [f.name for f in fields(cls) if f.name not in data]
        if missing:
            raise ValueError(f"not an environment: field {missing[0]!r} is missing in {dict(data)!r}")
        return cls(**{f.name: data[f.name] for f in fields(cls)})

    @property
    def digest(self) -> str:
        """SHA-256 over every field, first 32 hex digits."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def mismatches(self, other: Environment) -> list[str]:
        """Hard fields in which `other` differs, each with what to do; empty if its rows may be used here."""
        found = self.differences(other)
        return [f"{text}: {advice(name, self, found)}" for name, text in found.items()]

    def differences(self, other: Environment) -> dict[str, str]:
        """Each hard field in which `other` differs, to the difference in words."""
        found = {}
        for name in HARD_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                words = f" ({self.fabric_in_words}; {other.fabric_in_words})" if name == "fabric" else ""
                found[name] = f"{name} is {mine!r} here and {theirs!r} there{words}"
        return found

    @property
    def fabric_in_words(self) -> str:
        """The fabric class, as e.g. `NVLink 4, 18 links through NVSwitch`."""
        return describe(self.fabric, self.compute_capability)

    def drift(self, other: Environment) -> list[str]:
        """Soft fields in which `other` differs, in words."""
        return [
            f"{name} {getattr(other, name) or '(none)'} → {getattr(self, name) or '(none)'}"
            for name in SOFT_FIELDS
            if getattr(self, name) != getattr(other, name)
        ]

    def __str__(self) -> str:
        if self.is_host:
            return f"{self.gpu} (host backend)"
        return f"{self.gpu}, {self.num_sms} SMs, {self.fabric}{', multicast' if self.multicast else ''}"


def advice(name: str, here: Environment, different: Collection[str]) -> str:
    """What to do about the field `name` where all that is stored differs in the fields `different`."""
    if here.is_host:
        return "tune here; times of GPUs say nothing about the host backend"
    if name == "gpu":
        is_lent = {"compute_capability", "multicast", "nodes"}.isdisjoint(different)
        return "tune here" + (", or let its rows stand in (--borrow or TUNEDCOMM_BORROW)" if is_lent else "")
    if name == "num_sms":
        return "another model of the GPU or a slice of it, whose grids may not fit; tune here"
    if name == "compute_capability":
        return "another architecture; tune here"
    if name == "fabric":
        return "tune here, unless links of this machine are down (nvidia-smi nvlink --status)"
    if name == "multicast":
        switches = "TORCH_SYMM_MEM_DISABLE_MULTICAST and NCCL_NVLS_ENABLE"
        return "tune here" if here.multicast else f"unset {switches} if they are set here, or tune here"
    return "groups within one host and across hosts are tuned apart"


def nearest(here: Environment, stored: Iterable[Environment]) -> Environment | None:
    """The stored environment that differs least from `here` in hard fields; None if there is none.

    What weighs most comes first: GPU or host backend, architecture, hosts, fabric, multicast, model, number of SMs.
    """

    def distance(other: Environment) -> tuple[Any, ...]:
        return (
            here.is_host != other.is_host,
            here.compute_capability != other.compute_capability,
            here.nodes != other.nodes,
            Fabric.parse(here.fabric).kind != Fabric.parse(other.fabric).kind,
            here.fabric != other.fabric,
            here.multicast != other.multicast,
            here.gpu != other.gpu,
            abs(here.num_sms - other.num_sms),
            abs(here.compute_capability - other.compute_capability),
            other.digest,
        )

    return min(stored, key=distance, default=None)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _truthy(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def multicast_disabled() -> bool:
    """True if the user switched NVLink multicast off for PyTorch or NCCL."""
    return _truthy("TORCH_SYMM_MEM_DISABLE_MULTICAST") or os.environ.get("NCCL_NVLS_ENABLE", "").strip() == "0"


def ranks_share_a_gpu() -> bool:
    """True if all ranks that commands start here run on one GPU: its fabric class is `loopback`."""
    return ranks_may_share_a_gpu() and links_of(0).fabric.kind == "loopback"


def num_gpu_ranks() -> int:
    """Ranks that GPUs here serve: one each, or as many as kernels take where they share the only one.

    Asks NVML, so that no context is made.
    """
    import torch

    return _SHARERS if ranks_share_a_gpu() else torch.cuda.device_count()


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank that a command started; call it before the rank's first group is made."""
    import torch

    if not ranks_share_a_gpu():
        return torch.device("cuda", local_rank)
    # NCCL lets ranks of different hosts alone share a GPU; those meet through sockets.
    for name, value in {"NCCL_HOSTID": str(local_rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}.items():
        os.environ.setdefault(name, value)
    return torch.device("cuda", 0)


def _physical_index(device: int) -> int:
    """NVML's index of a CUDA device, which counts from `CUDA_VISIBLE_DEVICES`."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if device < len(visible) and visible[device].isdigit():
        return int(visible[device])
    return device


def _cuda(device: int, nodes: int) -> Environment:
    import torch

    properties = torch.cuda.get_device_properties(device)
    links = links_of(_physical_index(device), uuid=str(getattr(properties, "uuid", "")))
    fabric = links.fabric
    if " MIG " in properties.name:  # NVML may be out of reach
        fabric = replace(fabric, is_mig=True)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return Environment(
        gpu=properties.name,
        num_sms=properties.multi_processor_count,
        compute_capability=properties.major * 10 + properties.minor,
        memory_gib=round(properties.total_memory / 2**30),
        fabric=str(fabric),
        num_links=links.num_links,
        multicast=not fabric.is_mig and _has_multicast(device),
        nodes=nodes,
        driver=links.driver,
        cuda=torch.version.cuda or "",
        torch=torch.__version__,
        triton=_version("triton"),
        nccl=".".join(str(part) for part in nccl),
        tunedcomm=VERSION,
    )


def _has_multicast(device: int) -> bool:
    """Asks the driver, through torch, unless the user switched multicast off; creates no multicast object."""
    if multicast_disabled():
        return False
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device))


def _host(nodes: int) -> Environment:
    import torch

    return Environment(
        gpu=f"host-{platform.machine()}",
        num_sms=1,
        compute_capability=0,
        memory_gib=0,
        fabric="host",
        num_links=0,
        multicast=False,
        nodes=nodes,
        driver="",
        cuda="",
        torch=torch.__version__,
        triton=_version("triton"),
        nccl="",
        tunedcomm=VERSION,
    )


@lru_cache(maxsize=16)
def detect(device: int | None = None, *, nodes: int = 1) -> Environment:
    """The environment of CUDA device `device`, or of the host backend where `device` is None."""
    return _host(nodes) if device is None else _cuda(device, nodes)
