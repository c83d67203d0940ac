"""Kernels by op: a folder's `op.py` declares an op, or several that share kernels; its other files hold their variants.

Variants without a kernel of ours that need a few lines stand in `op.py`, too.

`discover()` imports them all, which fills the registries of `tunedcomm.spec`, and then what other packages bring.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import sys
from pathlib import Path

from tunedcomm.kernels.common.source_hash import keep_hashes, source_hash
from tunedcomm.kernels.plugins import load_plugins
from tunedcomm.spec import find_variant, ops, variants

__all__ = ["discover", "source_hash", "source_hash_of", "source_hashes"]

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver on Linux, and under Windows


def _choose_interpreter() -> None:
    """Interpret kernels where there is no GPU, unless TRITON_INTERPRET says otherwise.

    Kernels are decorated when their module is imported, and Triton's own `tl.max` and the like when Triton is: so this
    must come before either, and a program that imported Triton before stays without interpreted kernels.
    """
    if "TRITON_INTERPRET" in os.environ or _has_gpu():
        return
    if "triton" in sys.modules:
        logging.getLogger("tunedcomm").info(
            "Triton was imported before tunedcomm on a machine without GPUs, so its interpreter cannot be switched on: "
            "variants without kernels (host_...) and the library serve all calls. To run kernels here, too, set "
            "TRITON_INTERPRET=1, or import tunedcomm.kernels before Triton"
        )
        return
    os.environ["TRITON_INTERPRET"] = "1"


def _has_gpu() -> bool:
    """True if there is a GPU: torch's answer if it is imported, as it is in every program that launches kernels.

    Programs that only read databases should not wait for torch. Without it, no device file means no GPU; a device that
    is there and cannot be used is taken for a GPU, which changes nothing for a reader.
    """
    if "torch" in sys.modules:
        import torch

        return torch.cuda.is_available()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and any(Path(device).exists() for device in _DEVICE_FILES)


@functools.cache
def discover() -> None:
    """Import every op and variant, once; then the packages with entry points in the group `tunedcomm.variants`."""
    for package in pkgutil.iter_modules(__path__, f"{__name__}."):
        if package.ispkg:
            module = importlib.import_module(package.name)
            for member in sorted(info.name for info in pkgutil.iter_modules(module.__path__, f"{package.name}.")):
                importlib.import_module(member)
    load_plugins()


def source_hash_of(op: str, variant: str) -> str | None:
    """Hash of the variant's kernels as they are now; None if there is no such variant."""
    found = find_variant(op, variant)
    return None if found is None else source_hash(found)


def source_hashes() -> dict[str, str]:
    """`OP.VARIANT` to source hash of everything that is registered; keeps new hashes for the next start."""
    found = {f"{each.op}.{each.name}": source_hash(each) for op in ops() for each in variants(op).values()}
    keep_hashes()
    return found


_choose_interpreter()
