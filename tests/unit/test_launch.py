"""Launches through Triton: what reaches its C function, for each of the layouts that `_through_triton` knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tunedcomm.kernels.common import launch

TAIL = (4, "bfloat16")


class _Run:
    """A stand-in of Triton's launcher object."""

    def __init__(self, **attributes: Any) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.__dict__.update(attributes)

    def launch(self, *arguments: Any) -> None:
        self.seen.append(arguments)

    def __call__(self, *arguments: Any) -> None:
        self.seen.append(("called", *arguments))


OWN = (8, 1, 1, 99, 5, False, True, "memory", None, ("m",), None, None, None)
SHARED = (8, 1, 1, 99, 5, False, True, ("m",), None, None, None, "memory", None, "annotations", "signature")
CALLED = ("called", 8, 1, 1, 99, 5, ("m",), None, None, None)


@pytest.mark.parametrize(
    ("arguments", "varying"),
    [((None, None, 10, 11), (1, 2)), ((None,) * 4, (1, 2, 10, 11)), ((None, 2, None, 11), (1, 10))],
)
@pytest.mark.parametrize("layout", ["own", "shared", "profile"])
def test_every_layout_gets_every_argument(layout: str, arguments: tuple[Any, ...], varying: tuple[int, ...]) -> None:
    extra = {
        "own": {},
        "shared": {"arg_annotations": "annotations", "kernel_signature": "signature"},
        "profile": {"profile_scratch_size": 16},
    }[layout]
    run = _Run(**extra)
    compiled = SimpleNamespace(run=run, function=5, packed_metadata=("m",))
    launch._through_triton(compiled, 8, TAIL, "memory", arguments)(99, *varying)
    payload = (1, 2, 10, 11, *TAIL)
    expected = {"own": (*OWN, *payload), "shared": (*SHARED, payload), "profile": (*CALLED, *payload)}[layout]
    assert run.seen == [expected]


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [(32, 0, 1024, 2 * 132), (255, 0, 512, 0), (128, 0, 512, 132), (72, 0, 512, 132), (16, 0, 32, 32 * 132)],
)
def test_resident_blocks(registers: int, shared: int, threads: int, expected: int) -> None:
    assert launch.resident_blocks(registers, shared, threads, 132) == expected
