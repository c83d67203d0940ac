"""Many small checks in the few processes of one `run_ranks`, each reported as a test of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tunedcomm
from tunedcomm import kernels, spec
from tunedcomm.hardware import process_start
from tunedcomm.spec import Problem, get_op, register_variant, variants

Case = Callable[[int], None]

# Where a peer is lost on purpose: beside other tests on two cores a good call may take over a second.
PEER_TIMEOUT_S = 3.0
# For tests that keep the variants for CPU tensors. Nobody can make that database, root neither.
HOST = {"TUNEDCOMM_WORKSPACE_MIB": "1", "TUNEDCOMM_DB": "/proc/none/tuned.db", "TUNEDCOMM_MISS_LOG": "0"}
# What such a machine may stand still for.
_STALL_S = 20.0


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How the tests of a module that have a parameter `rank` run; each such module has one as `RANKS`.

    Args:
        world_size: ranks of the tests that have no parameter `world_size`.
        timeout: seconds for all of them.
        env: variables of the ranks, besides TEST_FOLDER, an empty folder for all of them.
        prepare: fills that folder, here and before they start; gives more variables.
        setup: called on every rank before the tests.
        forget: without the caller's settings and the variants for CPU tensors (`run_cases`).
    """

    world_size: int = 2
    timeout: float = 240.0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Path], dict[str, str]] | None = None
    setup: Callable[[int], None] | None = None
    forget: bool = True


def run_on_ranks(rank: int, world_size: int, module: str, tests: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """Run a module's tests, by name to (function, arguments); test to its traceback, "" where it passed."""
    found = importlib.import_module(module)
    cases = {name: functools.partial(getattr(found, function), **more) for name, (function, more) in tests.items()}
    if found.RANKS.setup is not None:
        found.RANKS.setup(rank)
    return (run_cases if found.RANKS.forget else run_each)(cases, rank)


def run_cases(cases: Mapping[str, Case], rank: int) -> dict[str, str]:
    """Case to its traceback, "" where it passed; ends at the first failure, for the ranks may be out of step then."""
    _forget_settings()
    _forget_host_variants()
    return run_each(cases, rank)


def run_each(cases: Mapping[str, Case], rank: int) -> dict[str, str]:
    """`run_cases` with settings and variants as they are."""
    found = dict.fromkeys(cases, "not run, because a case before it failed")
    for name, case in cases.items():
        try:
            case(rank)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - reported by the test of that name
            found[name] = traceback.format_exc()
            break
        found[name] = ""
    return found


def report(outcomes: list[dict[str, str]], name: str) -> None:
    """Fail with the traceback of every rank on which the case failed."""
    failed = {rank: found[name] for rank, found in enumerate(outcomes) if found[name]}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())


def _forget_settings() -> None:
    """Keep out what the caller of the tests has set; what a test passes on begins with TEST_."""
    for name in [name for name in os.environ if name.startswith("TUNEDCOMM_")]:
        del os.environ[name]
    os.environ["TUNEDCOMM_WORKSPACE_MIB"] = "1"
    os.environ["TUNEDCOMM_PEER_TIMEOUT_S"] = "20"
    os.environ["TUNEDCOMM_DB"] = os.environ.get("TEST_DB", "/proc/none/tuned.db")
    os.environ["TUNEDCOMM_MISS_LOG"] = os.environ.get("TEST_MISS_LOG", "0")


def _forget_host_variants() -> None:
    """What nobody tuned goes to the library here: these checks are about kernels; test_host_variants has the rest."""
    kernels.discover()
    for op, name in [key for key in spec._variants if key[1].startswith("host_")]:
        del spec._variants[op, name]


@contextlib.contextmanager
def settings(values: Mapping[str, str | None]) -> Iterator[None]:
    """Inside the block communicators are made anew with these variables (None: unset), and after it once more."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        tunedcomm.release_communicators()
        yield
    finally:
        _set(before)
        tunedcomm.release_communicators()


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def gives_up_in_time(least: float = PEER_TIMEOUT_S) -> Iterator[None]:
    """Inside the block one waits `least` seconds for a lost peer and not for ever (0: it is refused at once).

    A rank that another one tells of it waits a little less.
    """
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert 0.7 * least <= took, f"gave up after {took:.2f} s"
    assert took < (least + _STALL_S if least else PEER_TIMEOUT_S), f"waited {took:.2f} s"


@dataclasses.dataclass(frozen=True)
class Launched:
    """One launch of a variant, as it happened."""

    variant: str
    config: Mapping[str, Any]
    problem: Problem


def spy_on_launches(launched: list[Launched], op: str = "all_reduce") -> None:
    """Add every launch from here on to the list, by wrapping what the registered variants bind."""
    kernels.discover()

    def bind(variant: Any, problem: Problem, config: Mapping[str, Any], workspace: Any) -> Any:
        launch = variant.bind(problem, config, workspace)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            launched.append(Launched(variant.name, dict(config), problem))
            launch(inputs, outputs, stream)

        return run

    for variant in variants(op).values():
        register_variant(dataclasses.replace(variant, bind=functools.partial(bind, variant)))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any, *, here: bool = True) -> Iterator[None]:
    """Another attribute inside the block, on the ranks for which `here` holds."""
    before = getattr(owner, name)
    if here:
        setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """The library's warnings inside the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tunedcomm")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def processes(*words: str) -> list[int]:
    """Live processes whose command line has all these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if set(words) <= set(said) and process_start(int(folder.name)):
                found.append(int(folder.name))
    return sorted(found)


def inputs_of(
    group_rank: int, world_size: int, numel: int, dtype: str = "float32", reduction: str = "sum"
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input, and the bits that ordered variants of all_reduce give."""
    asked = Problem("all_reduce", (numel,), dtype, world_size, reduction=reduction, mode="eager")
    op = get_op("all_reduce")
    everyone = [op.make_inputs(asked, r, numel, "random", "cpu") for r in range(world_size)]
    return everyone[group_rank][0], op.ordered_reference(asked, everyone, group_rank)[0]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, comparable where NaN and -0.0 are not."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))
