"""The environment fingerprint: which hardware, fabric and software a number belongs to.

Hard fields (GPU model, SM count, compute capability, fabric class, multicast, nodes) must match for a stored trial to
be used at all; soft fields (driver and library versions) only rank older rows lower. Torch and NVML are imported when
something is detected, so that stored environments can be read and compared without either.

The fabric class says in one word how the GPUs of a machine reach each other:

    nvswitch-18             18 NVLinks a GPU, all through NVSwitch
    nvlink-12               12 NVLinks a GPU straight to others, every GPU linked to every other
    nvlink-4-partial        the same, but not every GPU is linked to every other
    pcie                    no NVLink
    pcie-nop2p              no NVLink, and the GPUs cannot reach each other's memory
    nvswitch-18-mig         a MIG slice: it reaches no other GPU, whatever links the whole GPU has
    loopback                a single GPU that all ranks share, if PyTorch is told to let them: to try out kernels
    host                    CPU tensors in shared memory

Databases hold these words, so a class is never renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunedcomm.version import VERSION

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

HARD_FIELDS = ("gpu", "num_sms", "compute_capability", "fabric", "multicast", "nodes")
SOFT_FIELDS = ("driver", "cuda", "torch", "triton", "nccl", "tunedcomm")

_CLASS = re.compile(r"(host|loopback|pcie|nvlink|nvswitch)(?:-(\d{1,3}))?(-partial)?(-nop2p)?(-mig)?")
# First compute capability with each generation of NVLink; unknown from 110 on.
_GENERATIONS = ((110, ""), (100, " 5"), (90, " 4"), (80, " 3"), (70, " 2"), (60, " 1"), (0, ""))
# More links than any GPU has straight to others: where NVML does not say what they lead to, it is a switch.
_MOST_DIRECT_LINKS = 4
_MOST_RANKS_OF_A_GPU = 8  # symm.layout.MAX_WORLD_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A fabric class, parsed.

    Attributes:
        kind: `nvswitch`, `nvlink`, `pcie`, `loopback`, `host`, or the whole text of an unknown class.
        num_links: NVLinks a GPU; 0 without NVLink.
        is_partial: some GPUs of the machine have no link to each other.
        has_p2p: False if GPUs without NVLink cannot reach each other's memory over PCIe either.
        is_mig: the device is a MIG slice.
    """

    kind: str
    num_links: int = 0
    is_partial: bool = False
    has_p2p: bool = True
    is_mig: bool = False

    @classmethod
    def parse(cls, text: str) -> Fabric:
        """Inverse of `str`."""
        found = _CLASS.fullmatch(text)
        if found is None:
            return cls(kind=text)
        kind, links, partial, no_p2p, mig = found.groups()
        return cls(kind=kind, num_links=int(links or 0), is_partial=bool(partial), has_p2p=not no_p2p, is_mig=bool(mig))

    def __str__(self) -> str:
        return (
            self.kind
            + (f"-{self.num_links}" if self.num_links else "")
            + ("-partial" if self.is_partial else "")
            + ("" if self.has_p2p else "-nop2p")
            + ("-mig" if self.is_mig else "")
        )

    @property
    def can_share_memory(self) -> bool:
        """True if kernels may address the memory of peers; over PCIe their protocols are not known to hold."""
        return self.kind != "pcie" and not self.is_mig


def describe_fabric(text: str, compute_capability: int) -> str:
    """A fabric class in words, e.g. `NVLink 4, 18 links through NVSwitch`.

    Args:
        text: the class.
        compute_capability: major × 10 + minor, which gives the generation of NVLink.
    """
    fabric = Fabric.parse(text)
    if fabric.kind == "host":
        return "CPU tensors in the host's shared memory"
    if fabric.kind == "loopback":
        return "one GPU that all ranks share: results count, times do not"
    if fabric.kind == "pcie":
        words = "PCIe without NVLink"
        words += "" if fabric.has_p2p else ", where GPUs cannot reach each other's memory"
    elif fabric.kind in ("nvswitch", "nvlink"):
        generation = next(generation for first, generation in _GENERATIONS if compute_capability >= first)
        links = f"{fabric.num_links} link{'s' if fabric.num_links != 1 else ''}"
        words = f"NVLink{generation}, {links} "
        if fabric.kind == "nvswitch":
            words += "through NVSwitch"
        else:
            words += "to some of the other GPUs" if fabric.is_partial else "straight to the other GPUs"
    else:
        words = f"{text} (a class that this version does not know)"
    return words + ("; a MIG slice, which reaches no other GPU" if fabric.is_mig else "")


@dataclass(frozen=True, slots=True)
class Environment:
    """Hardware, fabric and software of a measurement; by default the host backend's.

    Attributes:
        gpu: product name, e.g. `NVIDIA H200`; for the host backend architecture, CPU, cores and NUMA nodes, e.g.
            `host-x86_64 (AMD EPYC, 2 cores, 1 NUMA node)`.
        num_sms: streaming multiprocessors; 1 on the host backend.
        compute_capability: major × 10 + minor, e.g. 90; 0 on the host backend.
        memory_gib: device memory in GiB, rounded.
        fabric: link class, e.g. `nvswitch-18`, `nvlink-4`, `pcie`, `host`; see the top of this module.
        num_links: active NVLinks a GPU; 0 without NVLink.
        multicast: NVLink multicast (NVLS) is there and not switched off.
        nodes: number of hosts the group spans.
        driver, cuda, torch, triton, nccl, tunedcomm: versions; "" where there is none.
    """

    gpu: str
    num_sms: int = 1
    compute_capability: int = 0
    memory_gib: int = 0
    fabric: str = "host"
    num_links: int = 0
    multicast: bool = False
    nodes: int = 1
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    triton: str = ""
    nccl: str = ""
    tunedcomm: str = VERSION

    @property
    def is_host(self) -> bool:
        """True for the host backend, whose timings say nothing about GPUs."""
        return self.fabric == "host"

    @property
    def num_cores(self) -> int:
        """Cores of the host, of environments of the host backend; 1 where they were not stored."""
        found = re.search(r", (\d+) cores", self.gpu)
        return int(found[1]) if found else 1

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
        """Hard fields in which `other` differs, each with the difference in words."""
        found = {}
        for name in HARD_FIELDS:
            value, other_value = getattr(self, name), getattr(other, name)
            if value != other_value:
                words = f" ({self.fabric_in_words}; {other.fabric_in_words})" if name == "fabric" else ""
                found[name] = f"{name} is {value!r} here and {other_value!r} there{words}"
        return found

    @property
    def fabric_in_words(self) -> str:
        """The fabric class, as e.g. `NVLink 4, 18 links through NVSwitch`."""
        return describe_fabric(self.fabric, self.compute_capability)

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


def advice(name: str, machine: Environment, different: Collection[str]) -> str:
    """Advice on a difference in the field `name`, if what is stored differs in the fields `different`."""
    if machine.is_host:
        return "tune here; times of GPUs say nothing about the host backend"
    if name == "gpu":
        is_lent = {"compute_capability", "multicast", "nodes"}.isdisjoint(different)
        return "tune here" + (", or let its rows stand in (--borrow or TUNEDCOMM_BORROW)" if is_lent else "")
    if name == "multicast" and not machine.multicast:
        return "unset TORCH_SYMM_MEM_DISABLE_MULTICAST and NCCL_NVLS_ENABLE if they are set here, or tune here"
    return _ADVICE.get(name, "tune here")


_ADVICE = {
    "num_sms": "another model of the GPU or a slice of it, whose grids may not fit; tune here",
    "compute_capability": "another architecture; tune here",
    "fabric": "tune here, unless links of this machine are down (nvidia-smi nvlink --status)",
    "nodes": "groups within one host and across hosts are tuned apart",
}


def nearest(machine: Environment, stored: Iterable[Environment]) -> Environment | None:
    """The stored environment that differs least from `machine` in hard fields; None if there is none.

    GPUs are compared with GPUs only, and CPUs with CPUs. What weighs most comes first: architecture, hosts, fabric,
    multicast, model, number of SMs.
    """

    def distance(other: Environment) -> tuple[Any, ...]:
        return (
            machine.compute_capability != other.compute_capability,
            machine.nodes != other.nodes,
            Fabric.parse(machine.fabric).kind != Fabric.parse(other.fabric).kind,
            machine.fabric != other.fabric,
            machine.multicast != other.multicast,
            machine.gpu != other.gpu,
            abs(machine.num_sms - other.num_sms),
            abs(machine.compute_capability - other.compute_capability),
            other.digest,
        )

    return min((other for other in stored if other.is_host == machine.is_host), key=distance, default=None)


Place = tuple[int, int, int]  # PCI domain, bus and device


@dataclass(frozen=True, slots=True)
class Sight:
    """The machine's GPUs as NVML shows them to a process, which may see only one.

    Attributes:
        own: the process's GPU.
        fabrics: each GPU in sight to its fabric class as seen from here.
        reached: each GPU in sight to what its links lead to, where NVML says that.
    """

    own: Place
    fabrics: Mapping[Place, Fabric]
    reached: Mapping[Place, frozenset[Place]]


def _ask_nvml(ask: Callable[[Any], T], otherwise: T) -> T:
    """`ask(pynvml)` while NVML is initialised; `otherwise` where NVML cannot tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return otherwise
    try:
        return ask(pynvml)
    except pynvml.NVMLError:
        return otherwise
    finally:
        pynvml.nvmlShutdown()


def sight_of(*, uuid: str = "") -> Sight | None:
    """See `Sight`; None for a MIG slice, and where NVML cannot tell.

    Args:
        uuid: the CUDA device's UUID without prefix; of the first GPU where it is unknown.
    """

    def ask(pynvml: Any) -> Sight | None:
        own, is_mig = _device(pynvml, uuid)
        if is_mig:
            return None
        gpus = {_place(pynvml.nvmlDeviceGetPciInfo(gpu)): gpu for gpu in _all_gpus(pynvml)}
        fabrics = {place: _class_of(pynvml, gpu, is_mig=False) for place, gpu in gpus.items()}
        reached = {place: ends for place, gpu in gpus.items() if (ends := _reached(pynvml, gpu)) is not None}
        return Sight(_place(pynvml.nvmlDeviceGetPciInfo(own)), fabrics, reached)

    return _ask_nvml(ask, None)


def put_together(environment: Environment, own: Sight | None, sights: Iterable[Sight | None]) -> Environment:
    """The environment as a process that sees what all of them see would find it.

    Args:
        environment: what the process with the sight `own` found.
        own, sights: of the process; of all ranks on its host.
    """
    if own is None:
        return environment
    known = [sight for sight in sights if sight is not None]
    places = {place for sight in known for place in sight.fabrics}
    fabrics = [sight.fabrics[own.own] for sight in known if own.own in sight.fabrics]
    fabric = max(fabrics, key=lambda found: found.num_links)
    if fabric.kind == "nvlink":
        reached: dict[Place, frozenset[Place]] = {}
        for sight in known:
            for place, ends in sight.reached.items():
                reached[place] = reached.get(place, frozenset()) | ends
        fabric = replace(fabric, is_partial=any(not {place, *ends} >= places for place, ends in reached.items()))
    elif fabric.kind == "loopback" and len(places) > 1:
        fabric = Fabric(kind="pcie")
    if fabric.kind == "pcie":
        fabric = replace(fabric, has_p2p=all(found.has_p2p for sight in known for found in sight.fabrics.values()))
    return replace(environment, fabric=str(fabric), num_links=fabric.num_links)


def fabric_of(*, uuid: str = "") -> tuple[Fabric, str]:
    """Fabric class of a GPU, and the driver's version; `pcie` and "" where NVML cannot tell.

    Args:
        uuid: the CUDA device's UUID without prefix; of the first GPU where it is unknown.
    """

    def ask(pynvml: Any) -> tuple[Fabric, str]:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        gpu, is_mig = _device(pynvml, uuid)
        return _class_of(pynvml, gpu, is_mig=is_mig), driver

    return _ask_nvml(ask, (Fabric(kind="pcie"), ""))


def _device(pynvml: Any, uuid: str) -> tuple[Any, bool]:
    """The handle of the whole GPU, and True if the device is a MIG slice of it."""
    handle = None
    for prefix in ("GPU-", "MIG-") if uuid else ():
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
        except pynvml.NVMLError:
            continue
        if prefix == "MIG-":
            return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle), True
        break
    if handle is None:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    try:
        # CUDA sees nothing but slices of a GPU in MIG mode.
        return handle, pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # it cannot be sliced
        return handle, False


def _active_links(pynvml: Any, gpu: Any) -> list[int]:
    active = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(gpu, link) == pynvml.NVML_FEATURE_ENABLED:
                active.append(link)
        except pynvml.NVMLError:  # the GPU has no such link
            continue
    return active


def _is_switched(pynvml: Any, gpu: Any, links: list[int]) -> bool:
    """True if the active links go through a switch."""
    for count, link in enumerate(links, start=1):
        try:
            remote = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)
            if remote == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                return True
        except (pynvml.NVMLError, AttributeError):
            if count > _MOST_DIRECT_LINKS:
                return True
    return False


def _class_of(pynvml: Any, gpu: Any, *, is_mig: bool) -> Fabric:
    links = _active_links(pynvml, gpu)
    if _is_switched(pynvml, gpu, links):
        return Fabric(kind="nvswitch", num_links=len(links), is_mig=is_mig)
    # From here on the whole machine counts, because every rank of a group has to find the same.
    if links:
        is_partial = not is_mig and _is_partial(pynvml)
        return Fabric(kind="nvlink", num_links=len(links), is_partial=is_partial, is_mig=is_mig)
    if not is_mig and ranks_may_share_a_gpu() and pynvml.nvmlDeviceGetCount() == 1:
        return Fabric(kind="loopback")
    return Fabric(kind="pcie", has_p2p=is_mig or _has_p2p(pynvml), is_mig=is_mig)


def _all_gpus(pynvml: Any) -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _is_partial(pynvml: Any) -> bool:
    """True if two GPUs are known to have no link to each other; what NVML does not say counts as linked."""
    gpus = {_place(pynvml.nvmlDeviceGetPciInfo(gpu)): gpu for gpu in _all_gpus(pynvml)}
    reached = {place: _reached(pynvml, gpu) for place, gpu in gpus.items()}
    return any(ends is not None and not {place, *ends}.issuperset(gpus) for place, ends in reached.items())


def _reached(pynvml: Any, gpu: Any) -> frozenset[Place] | None:
    """The other ends of a GPU's links; None where NVML does not say."""
    try:
        links = _active_links(pynvml, gpu)
        return frozenset(_place(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)) for link in links)
    except (pynvml.NVMLError, AttributeError):
        return None


def _place(info: Any) -> Place:
    return (info.domain, info.bus, info.device)


def _has_p2p(pynvml: Any) -> bool:
    """False if two GPUs are known not to reach each other's memory."""
    try:
        gpus = _all_gpus(pynvml)
        return all(
            pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_READ) == pynvml.NVML_P2P_STATUS_OK
            for one in gpus
            for other in gpus
            if one is not other
        )
    except (pynvml.NVMLError, AttributeError):
        return True


def ranks_may_share_a_gpu() -> bool:
    """True if PyTorch is told to let symmetric memory of several ranks lie on one GPU."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def ranks_share_a_gpu() -> bool:
    """True if all ranks that commands start here run on one GPU: its fabric class is `loopback`."""
    return ranks_may_share_a_gpu() and fabric_of()[0].kind == "loopback"


def num_gpu_ranks() -> int:
    """Ranks that GPUs here serve: one each, or as many as kernels take where they share the only one.

    Makes no context; 0 where CUDA does not work.
    """
    import torch

    if not torch.cuda.is_available():
        return 0
    return _MOST_RANKS_OF_A_GPU if ranks_share_a_gpu() else torch.cuda.device_count()


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a rank that a command started; call it before the rank's first group is made."""
    import torch

    if not ranks_share_a_gpu():
        return torch.device("cuda", local_rank)
    # NCCL lets ranks share a GPU only if they run on different hosts; such ranks talk through sockets.
    for name, value in {"NCCL_HOSTID": str(local_rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}.items():
        os.environ.setdefault(name, value)
    return torch.device("cuda", 0)


def version_of(package: str) -> str:
    """The installed version of a package; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def multicast_disabled() -> bool:
    """True if the user switched NVLink multicast off for PyTorch or NCCL."""
    disabled = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "").strip().lower() in ("1", "true", "yes", "on")
    return disabled or os.environ.get("NCCL_NVLS_ENABLE", "").strip() == "0"


def _cuda(device: int, nodes: int) -> Environment:
    import torch

    properties = torch.cuda.get_device_properties(device)
    fabric, driver = fabric_of(uuid=str(properties.uuid))
    if " MIG " in properties.name:  # NVML may be out of reach
        fabric = replace(fabric, is_mig=True)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return Environment(
        gpu=properties.name,
        num_sms=properties.multi_processor_count,
        compute_capability=properties.major * 10 + properties.minor,
        memory_gib=round(properties.total_memory / 2**30),
        fabric=str(fabric),
        num_links=fabric.num_links,
        multicast=not fabric.is_mig and has_multicast(device),
        nodes=nodes,
        driver=driver,
        cuda=torch.version.cuda or "",
        torch=torch.__version__,
        triton=version_of("triton"),
        nccl=".".join(str(part) for part in nccl),
    )


def has_multicast(device: int) -> bool:
    """Asks the driver, through torch, unless the user switched multicast off; creates no multicast object."""
    if multicast_disabled():
        return False
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device))


def _host_name() -> str:
    """The host in words: what changes how fast its ranks exchange CPU tensors."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2] for line in lines if line.startswith(("model name", "CPU part"))]
        model = " ".join(names[0].split()) if names else model
    # The machine's and not this rank's, which may be bound to some of the cores: all ranks must find the same.
    cores, nodes = os.cpu_count() or 1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    parts = (model.replace(",", " "), f"{cores} cores", f"{nodes} NUMA node{'s' if nodes > 1 else ''}")
    return f"host-{platform.machine()} ({', '.join(part for part in parts if part)})"


def _host(nodes: int) -> Environment:
    import torch

    return Environment(gpu=_host_name(), nodes=nodes, torch=torch.__version__, triton=version_of("triton"))


@lru_cache(maxsize=16)
def sight(device: int | None) -> Sight | None:
    """The machine of CUDA device `device` as this process sees it; None for the host backend."""
    if device is None:
        return None
    import torch

    return sight_of(uuid=str(torch.cuda.get_device_properties(device).uuid))


@lru_cache(maxsize=16)
def detect(device: int | None = None, *, nodes: int = 1) -> Environment:
    """The environment of CUDA device `device`, or of the host backend where `device` is None."""
    return _host(nodes) if device is None else _cuda(device, nodes)


def process_start(pid: int) -> int | None:
    """When a living process was started, in the kernel's ticks since boot; None if it has ended, reaped or not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def kernel_identity() -> str:
    """Names the kernel and the namespace in which process ids mean what they mean here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # nothing can be said about processes then
        return f"unknown {socket.gethostname()} {os.getpid()}"


def this_process() -> tuple[str, int, int | None]:
    """Identifies this process: also against processes with its id on other machines, in other containers or later."""
    return kernel_identity(), os.getpid(), process_start(os.getpid())
