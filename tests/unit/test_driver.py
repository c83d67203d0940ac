"""Launches through the driver: what reaches `cuLaunchKernelEx`, read back by a stand-in of the same C signature."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tunedcomm.kernels import _driver
from tunedcomm.kernels._driver import DirectLauncher


class _Seen:
    """What the stand-in read at each call, and what it returns."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.code = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> _Seen:
    record = _Seen()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def stand_in(config_at: int, function: int, pointers_at: int, extra: int) -> int:
        config = _driver._Config.from_address(config_at)
        pointers = (ctypes.c_void_p * 4).from_address(pointers_at)
        record.calls.append(
            {
                "grid": list(config.grid),
                "block": list(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream,
                "pdl": [(config.attributes[i].id, config.attributes[i].value) for i in range(config.num_attributes)],
                "function": function,
                "arguments": [ctypes.c_int64.from_address(pointer).value for pointer in pointers],
                "extra": extra,
            }
        )
        return record.code

    monkeypatch.setattr(_driver, "driver_entry", lambda: stand_in)
    return record


def _launcher(*, launch_pdl: bool = False, fallback: Any = None) -> DirectLauncher:
    return DirectLauncher(77, grid=4, threads=64, shared_bytes=16, launch_pdl=launch_pdl, fallback=fallback)


def test_everything_reaches_the_driver(seen: _Seen) -> None:
    launch = _launcher(launch_pdl=True).fix((None, None, 5, 1 << 46))
    launch(9, 1 << 47, -3)
    launch(10, 7, 8)
    first, second = seen.calls
    assert first["grid"] == [4, 1, 1]
    assert first["block"] == [64, 1, 1]
    assert (first["shared"], first["stream"], first["function"], first["extra"]) == (16, 9, 77, None)
    assert first["pdl"] == [(6, 1)]
    assert first["arguments"] == [1 << 47, -3, 5, 1 << 46]
    assert second["arguments"] == [7, 8, 5, 1 << 46]
    assert second["stream"] == 10


def test_arguments_that_vary_anywhere(seen: _Seen) -> None:
    launch = _launcher().fix((None, 2, None, 4))
    launch(0, 11, 33)
    assert seen.calls[0]["arguments"] == [11, 2, 33, 4]
    assert seen.calls[0]["pdl"] == []


def test_launches_do_not_share_arguments(seen: _Seen) -> None:
    launcher = _launcher()
    one, two = launcher.fix((None, None, 1, 1)), launcher.fix((None, None, 2, 2))
    one(0, 5, 5)
    two(0, 6, 6)
    one(0, 7, 7)
    assert [call["arguments"] for call in seen.calls] == [[5, 5, 1, 1], [6, 6, 2, 2], [7, 7, 1, 1]]


def test_a_thread_without_a_context_takes_the_fallback(seen: _Seen) -> None:
    taken: list[tuple[int, ...]] = []
    seen.code = 201
    _launcher(fallback=lambda *arguments: taken.append(arguments)).fix((None, None, 5, 6))(3, 1, 2)
    assert taken == [(3, 1, 2, 5, 6)]


def test_a_refused_launch_raises(seen: _Seen) -> None:
    seen.code = 700
    with pytest.raises(RuntimeError, match="700"):
        _launcher().fix((None, None, 5, 6))(3, 1, 2)


def test_the_structures_are_as_large_as_the_drivers() -> None:
    assert ctypes.sizeof(_driver._Attribute) == 72
    assert ctypes.sizeof(_driver._Config) == 56
