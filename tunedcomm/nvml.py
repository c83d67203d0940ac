"""What NVML says about a GPU's links, and which fabric class that makes.

A leaf. NVML is imported when it is asked, and whatever it cannot tell is taken for what a plain machine has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tunedcomm.fabric import Fabric

__all__ = ["Links", "links_of"]

# More links than any GPU has straight to others: where NVML does not say what they lead to, it is a switch.
_MOST_DIRECT_LINKS = 4


@dataclass(frozen=True, slots=True)
class Links:
    """How one GPU is connected.

    Attributes:
        fabric: its class.
        num_links: active NVLinks.
        driver: the driver's version, "" where unknown.
    """

    fabric: Fabric
    num_links: int = 0
    driver: str = ""


_NOTHING_KNOWN = Links(Fabric(kind="pcie"))


def links_of(index: int, *, uuid: str = "") -> Links:
    """The links of a GPU; `pcie` where NVML cannot tell.

    Args:
        index: NVML's index of the GPU.
        uuid: the CUDA device's UUID without prefix, which is certain where the index is a guess; "" if unknown.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _NOTHING_KNOWN
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handle, is_mig = _device(pynvml, index, uuid)
        num_links, is_switched = _active_links(pynvml, handle)
        return Links(_class_of(pynvml, num_links, is_switched=is_switched, is_mig=is_mig), num_links, driver)
    except pynvml.NVMLError:
        return _NOTHING_KNOWN
    finally:
        pynvml.nvmlShutdown()


def _device(pynvml: Any, index: int, uuid: str) -> tuple[Any, bool]:
    """The handle of the whole GPU, and whether the device is a MIG slice of it."""
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
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        # CUDA sees nothing but slices of a GPU in MIG mode.
        return handle, pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # it cannot be sliced
        return handle, False


def _active_links(pynvml: Any, handle: Any) -> tuple[int, bool]:
    """Number of active links, and whether they go through a switch."""
    active, is_switched = 0, False
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
        except pynvml.NVMLError:
            continue
        active += 1
        try:
            remote = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            is_switched |= remote == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        except (pynvml.NVMLError, AttributeError):
            is_switched |= active > _MOST_DIRECT_LINKS
    return active, is_switched


def _class_of(pynvml: Any, num_links: int, *, is_switched: bool, is_mig: bool) -> Fabric:
    if is_switched:
        return Fabric(kind="nvswitch", num_links=num_links, is_mig=is_mig)
    # What follows looks at the whole machine, for every rank of a group has to find the same.
    if num_links:
        return Fabric(kind="nvlink", num_links=num_links, is_partial=not is_mig and _is_partial(pynvml), is_mig=is_mig)
    if not is_mig and ranks_may_share_a_gpu() and pynvml.nvmlDeviceGetCount() == 1:
        return Fabric(kind="loopback")
    return Fabric(kind="pcie", has_p2p=is_mig or _has_p2p(pynvml), is_mig=is_mig)


def ranks_may_share_a_gpu() -> bool:
    """True if PyTorch is told to let symmetric memory of several ranks lie on one GPU."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def _all_gpus(pynvml: Any) -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _is_partial(pynvml: Any) -> bool:
    """True if two GPUs are known to have no link to each other; what NVML does not say counts as linked."""
    try:
        gpus = _all_gpus(pynvml)
        places = [_place(pynvml.nvmlDeviceGetPciInfo(gpu)) for gpu in gpus]
        for gpu, place in zip(gpus, places, strict=True):
            reached = {place}
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                try:
                    if pynvml.nvmlDeviceGetNvLinkState(gpu, link) != pynvml.NVML_FEATURE_ENABLED:
                        continue
                except pynvml.NVMLError:
                    continue
                reached.add(_place(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)))
            if not reached.issuperset(places):
                return True
    except (pynvml.NVMLError, AttributeError):
        return False
    return False


def _place(info: Any) -> tuple[int, int, int]:
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
