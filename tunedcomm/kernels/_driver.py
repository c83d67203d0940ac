"""Launches through the CUDA driver with arguments that were laid out in memory beforehand.

Triton's C launcher parses every argument from Python objects at every call; here the driver reads them from one block
of memory in which only the few that change (the tensors' addresses) are rewritten. What it takes is the driver's stable
interface: `cuLaunchKernelEx` and its structures (CUDA driver API, cuda.h).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence

__all__ = ["DirectLauncher", "driver_entry"]

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_INVALID_CONTEXT = 201
_SPARE = 2  # newer Tritons add scratch pointers behind a kernel's arguments; the driver reads as many as there are


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def driver_entry() -> Callable[..., int] | None:
    """`cuLaunchKernelEx`, called without letting go of the interpreter's lock; None where there is no such driver."""
    try:
        entry = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    entry.restype = ctypes.c_int
    return entry


class DirectLauncher:
    """Launches one loaded kernel on one grid.

    Args:
        function: the driver's handle of the kernel.
        grid, threads, shared_bytes: of the launch.
        launch_pdl: with programmatic dependent launch.
        fallback: `(stream, *arguments)`, taken where the calling thread has no CUDA context yet.
    """

    def __init__(
        self,
        function: int,
        *,
        grid: int,
        threads: int,
        shared_bytes: int,
        launch_pdl: bool,
        fallback: Callable[..., None],
    ) -> None:
        self._function = ctypes.c_void_p(function)
        self._shape = (grid, threads, shared_bytes, launch_pdl)
        self._fallback = fallback

    def fix(self, arguments: Sequence[int | None]) -> Callable[..., None]:
        """A launch `(stream, *varying)`: `varying` are the 64-bit arguments that are None in `arguments`, in order."""
        entry = driver_entry()
        assert entry is not None, "made only where the driver is there"
        values = (ctypes.c_int64 * (len(arguments) + _SPARE))(*(value or 0 for value in arguments))
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(values) + 8 * index for index in range(len(values)))
        )
        grid, threads, shared_bytes, launch_pdl = self._shape
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = _Config((grid, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), int(launch_pdl))
        places = [index for index, value in enumerate(arguments) if value is None]
        config_at, function = ctypes.byref(config), self._function
        # Threads of one process may share a launch: nobody may rewrite the arguments before the driver has read them.
        lock = threading.Lock()

        def launch(stream: int, *varying: int) -> None:
            with lock:
                for place, value in zip(places, varying):  # noqa: B905 - strict would cost a tenth of a launch
                    values[place] = value
                config.stream = stream
                code = entry(config_at, function, pointers, None)
            if code:
                self._failed(code, stream, tuple(values)[: len(arguments)])

        def launch_two(stream: int, first: int, second: int) -> None:
            with lock:
                values[0] = first
                values[1] = second
                config.stream = stream
                code = entry(config_at, function, pointers, None)
            if code:
                self._failed(code, stream, tuple(values)[: len(arguments)])

        return launch_two if places == [0, 1] else launch

    def _failed(self, code: int, stream: int, arguments: tuple[int, ...]) -> None:
        if code == _INVALID_CONTEXT:
            self._fallback(stream, *arguments)
            return
        raise RuntimeError(f"the CUDA driver refused a launch: cuLaunchKernelEx returned error {code}")
