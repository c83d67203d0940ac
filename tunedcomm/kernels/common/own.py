"""What launches ask `torch` for does not go by the caller's surroundings: interception, and autocast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tunedcomm.kernels.common.launch import AddressLaunch, ManyLaunch

__all__ = ["intercepted", "own", "undisturbed"]


class _Own(threading.local):
    """True while this thread is in a launch."""

    yes = False


own = _Own()
# Not empty while any group is intercepted.
intercepted: list[bool] = []


def undisturbed(launch: Callable[..., None], device_type: str) -> Callable[..., None]:
    """A launch that does the same whatever surrounds the call; those by address run one kernel, and need no care.

    Its calls on `torch.distributed` are not served by kernels, and autocast does not round what its products read.
    """
    if isinstance(launch, (AddressLaunch, ManyLaunch)):
        return launch
    import torch

    def run_own(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        if not intercepted:
            launch(inputs, outputs, stream)
            return
        before, own.yes = own.yes, True
        try:
            launch(inputs, outputs, stream)
        finally:
            own.yes = before

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        if not torch.is_autocast_enabled(device_type):
            run_own(inputs, outputs, stream)
            return
        with torch.autocast(device_type, enabled=False):
            run_own(inputs, outputs, stream)

    return run
