"""Fabric classes: how the GPUs of a machine reach each other, as the one word that databases hold, and in plain ones.

    nvswitch-18             18 NVLinks a GPU, all through NVSwitch
    nvlink-12               12 NVLinks a GPU straight to others, every GPU linked to every other
    nvlink-4-partial        the same, but not every GPU is linked to every other
    pcie                    no NVLink
    pcie-nop2p              no NVLink, and the GPUs cannot reach each other's memory
    nvswitch-18-mig         a MIG slice: it reaches no other GPU, whatever links the whole has
    loopback                one GPU alone that all ranks share, where PyTorch is told to let them: to try kernels out on
    host                    CPU tensors in shared memory

The class is a hard field of the environment: rows of another class are not used. A class that is written here once is
never renamed, for databases hold it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Fabric", "describe"]

_CLASS = re.compile(r"(host|loopback|pcie|nvlink|nvswitch)(?:-(\d{1,3}))?(-partial)?(-nop2p)?(-mig)?")
# First compute capability with each generation of NVLink.
_GENERATIONS = ((100, 5), (90, 4), (80, 3), (70, 2), (60, 1))
_LAST_KNOWN = 109


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """A fabric class, taken apart.

    Attributes:
        kind: `nvswitch`, `nvlink`, `pcie`, `loopback`, `host`, or the whole text of a class that this version does not
            know.
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
        """True if kernels may address the memory of peers: over PCIe their protocols are not known to hold."""
        return self.kind != "pcie" and not self.is_mig

    @property
    def kind_in_words(self) -> str:
        """The class without its number of links."""
        kinds = {
            "nvswitch": "NVLink through NVSwitch",
            "nvlink": "NVLink from some GPUs to some others" if self.is_partial else "NVLink from GPU to GPU",
            "pcie": "PCIe" if self.has_p2p else "PCIe without peer access",
            "loopback": "one GPU that all ranks share",
            "host": "shared memory of the host",
        }
        return kinds.get(self.kind, self.kind) + (", of a MIG slice" if self.is_mig else "")


def describe(text: str, compute_capability: int) -> str:
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
        generation = _generation(compute_capability)
        links = f"{fabric.num_links} link{'s' if fabric.num_links != 1 else ''}"
        words = f"NVLink{'' if generation is None else f' {generation}'}, {links} "
        if fabric.kind == "nvswitch":
            words += "through NVSwitch"
        else:
            words += "to some of the other GPUs" if fabric.is_partial else "straight to the other GPUs"
    else:
        words = f"{text} (a class that this version does not know)"
    return words + ("; a MIG slice, which reaches no other GPU" if fabric.is_mig else "")


def _generation(compute_capability: int) -> int | None:
    if compute_capability > _LAST_KNOWN:
        return None
    return next((generation for first, generation in _GENERATIONS if compute_capability >= first), None)
