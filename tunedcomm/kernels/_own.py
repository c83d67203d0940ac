"""What launches ask `torch.distributed` for is the library's, also while its calls are intercepted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tunedcomm.kernels._launch import AddressLaunch, ManyLaunch

__all__ = ["intercepted", "own", "unintercepted"]


class _Own(threading.local):
    """True while this thread is in a launch."""

    yes = False


own = _Own()
# Not empty while any group is intercepted.
intercepted: list[bool] = []


def unintercepted(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch whose calls on `torch.distributed` are not served by kernels; those by address make none."""
    if isinstance(launch, (AddressLaunch, ManyLaunch)):
        return launch

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        if not intercepted:
            launch(inputs, outputs, stream)
            return
        before, own.yes = own.yes, True
        try:
            launch(inputs, outputs, stream)
        finally:
            own.yes = before

    return run
