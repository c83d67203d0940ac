"""What the library is that speed-ups are over, as an op's variant `library` describes itself."""

from __future__ import annotations

from tunedcomm import kernels
from tunedcomm.report.measured import Group
from tunedcomm.spec import variants

__all__ = ["library_of"]


def library_of(group: Group) -> str:
    """`NCCL, then PyTorch operators, not compiled`; `the library` of an op that this tunedcomm does not have."""
    kernels.discover()
    found = variants(group.op).get("library")
    if found is None:
        return "the library"
    here, elsewhere = (" on CPUs", " on GPUs") if group.fabric == "host" else (" on GPUs", " on CPUs")
    parts = [part for part in found.summary.split(", ") if not part.endswith(elsewhere)]
    said = ", ".join(part.removesuffix(here) for part in parts)
    # What follows the collective are calls of PyTorch, as a program without torch.compile makes them.
    return f"{said}, not compiled" if ", then " in said else said
