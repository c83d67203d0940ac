"""Whether kernels run in Triton's interpreter, decided before Triton is imported. A leaf that imports next to nothing.

Kernels are decorated when their module is imported, and Triton's own `tl.max` and the like when Triton is. A program
that imports Triton first, through Inductor, say, stays without interpreted kernels, so `import tunedcomm` has the
decision made at that moment.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

__all__ = ["choose", "watch"]

_VARIABLE = "TRITON_INTERPRET"
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")  # of the driver on Linux, and under Windows


def choose() -> None:
    """Interpret kernels where there is no GPU, unless TRITON_INTERPRET says otherwise: before any is made."""
    if _VARIABLE in os.environ or _has_gpu():
        return
    if "triton" in sys.modules:
        logging.getLogger("tunedcomm").warning(
            "Triton was imported before tunedcomm on a machine without GPUs, so its interpreter cannot be switched on: "
            "every call goes to the library; import tunedcomm first, or set TRITON_INTERPRET=1"
        )
        return
    os.environ[_VARIABLE] = "1"


def watch() -> None:
    """Choose, as far as that is certain without torch, when somebody imports Triton."""
    if "triton" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTriton())


class _BeforeTriton:
    """A finder of modules that finds none, and is asked before Triton is imported.

    torch is not asked whether there is a GPU: that would start CUDA in programs that mean to fork first.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if fullname == "triton" and _VARIABLE not in os.environ and not _has_device():
            os.environ[_VARIABLE] = "1"


def _has_gpu() -> bool:
    """What torch says, where it is imported: whoever launches kernels imports it first.

    Who only reads databases should not wait for torch. A device that is there and cannot be used is taken for a GPU
    without it, which changes nothing for a reader.
    """
    if "torch" in sys.modules:
        import torch

        return torch.cuda.is_available()
    return _has_device()


def _has_device() -> bool:
    """False where there is certainly no GPU: no device file of the driver, or none that may be used."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and any(map(os.path.exists, _DEVICE_FILES))
