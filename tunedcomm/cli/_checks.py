"""The checks of `tunedcomm doctor`: each looks at one thing and says ok, warn or fail, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunedcomm import settings
from tunedcomm.cli._check import Check, Level
from tunedcomm.cli._db_checks import check_borrowing, check_databases, check_this_machine
from tunedcomm.errors import SettingError
from tunedcomm.version import VERSION

__all__ = ["CHECKS", "Check", "Level", "run_checks"]

OLDEST_TORCH = (2, 9)
OLDEST_TRITON = (3, 6)
OLDEST_TRITON_HOST = (3, 9)
SHM = Path("/dev/shm")
# Two ranks' workspaces at the default size fit in this with room to spare.
SHM_BYTES_WANTED = 512 << 20


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parsed(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: `2.13.0+cpu` to (2, 13, 0)."""
    numbers = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _package(name: str, oldest: tuple[int, ...]) -> Check:
    wanted = ".".join(str(part) for part in oldest)
    found = _version(name)
    if found is None:
        return Check(name, "fail", "is not installed", f"pip install '{name}>={wanted}'")
    if _parsed(found) < oldest:
        return Check(name, "fail", f"{found} is older than {wanted}", f"pip install '{name}>={wanted}'")
    return Check(name, "ok", found)


def check_versions() -> Iterator[Check]:
    """Python and the packages that decide what can run."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield Check("tunedcomm", "ok", VERSION)
    yield _package("torch", OLDEST_TORCH)
    yield _package("triton", OLDEST_TRITON)
    others = [f"{name} {_version(name) or 'missing'}" for name in ("sqlalchemy", "alembic", "optuna", "nvidia-ml-py")]
    missing = any(text.endswith("missing") for text in others)
    yield Check("packages", "fail" if missing else "ok", ", ".join(others), "pip install tunedcomm" if missing else "")


def _driver_sees_gpus() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def check_gpus() -> Iterator[Check]:
    """GPUs, their links, and whether they can address each other's memory."""
    import torch

    if not torch.cuda.is_available():
        if _driver_sees_gpus():
            yield Check(
                "gpus",
                "fail",
                f"the driver has GPUs, torch {torch.__version__} cannot use them",
                "install a CUDA build of torch that the driver supports, and check CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Check(
                "gpus", "warn", "none found", "nothing, if this is meant: the host backend runs all, slowly, on CPUs"
            )
        return
    from tunedcomm.hardware import Fabric, detect, multicast_disabled

    count = torch.cuda.device_count()
    found = [detect(index) for index in range(count)]
    first = found[0]
    yield Check("gpus", "ok", f"{count} x {first.gpu}, {first.num_sms} SMs, {first.memory_gib} GiB")
    yield Check("software", "ok", f"driver {first.driver or 'unknown'}, CUDA {first.cuda}, NCCL {first.nccl}")
    if mixed := sorted({str(environment) for environment in found} - {str(first)}):
        yield Check("mixed gpus", "warn", f"other GPUs: {'; '.join(mixed)}", "use groups of equal GPUs")
    slow = not Fabric.parse(first.fabric).can_share_memory
    yield Check(
        "fabric",
        "warn" if slow else "ok",
        f"{first.fabric}: {first.fabric_in_words}",
        "nothing to do: without NVLink between the GPUs every call goes to the library" if slow else "",
    )
    if first.multicast:
        yield Check("multicast", "ok", "NVLink multicast is there")
    elif multicast_disabled():
        yield Check(
            "multicast",
            "warn",
            "switched off by TORCH_SYMM_MEM_DISABLE_MULTICAST or NCCL_NVLS_ENABLE",
            "unset them, unless multicast does not work on this machine",
        )
    else:
        yield Check("multicast", "ok", "the fabric has none; multimem variants stay unused")
    yield _peer_access(count)


def _peer_access(count: int) -> Check:
    import torch

    apart = [
        f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)
    ]
    if not apart:
        return Check("peer access", "ok", "every GPU reaches every other" if count > 1 else "one GPU has no peers")
    return Check(
        "peer access",
        "warn",
        f"GPUs {', '.join(apart)} cannot address each other",
        "the library serves such groups; check IOMMU and container settings if they share a host",
    )


def check_symmetric_memory() -> Iterator[Check]:
    """The backends of symmetric memory."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Check("symmetric memory", "fail", "torch.distributed is missing in this torch", "install another torch")
        return
    if torch.cuda.is_available():
        try:
            from torch.distributed._symmetric_memory import empty, rendezvous
        except ImportError as error:
            yield Check("symmetric memory", "fail", f"torch lacks it: {error}", "pip install 'torch>=2.9'")
        else:
            yield Check("symmetric memory", "ok", f"torch: {empty.__name__}, {rendezvous.__name__}")
    yield from _host_backend()


def _host_backend() -> Iterator[Check]:
    import torch.distributed as dist

    triton = _version("triton") or "0"
    if _parsed(triton) < OLDEST_TRITON_HOST:
        yield Check(
            "host backend",
            "warn",
            f"the interpreter of Triton {triton} cannot run the kernels",
            "pip install 'triton>=3.9' in an environment without GPUs",
        )
    elif not dist.is_gloo_available():
        yield Check("host backend", "warn", "this torch has no gloo", "install a torch built with gloo")
    else:
        yield Check("host backend", "ok", f"Triton {triton} interprets, gloo connects")
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        yield Check("shared memory", "warn", f"{SHM} is not writable", f"mount a tmpfs at {SHM} for the host backend")
        return
    free = shutil.disk_usage(SHM).free
    few = free < SHM_BYTES_WANTED
    yield Check(
        "shared memory",
        "warn" if few else "ok",
        f"{free >> 20} MiB free in {SHM}",
        "give the container more (--shm-size=2g) or lower TUNEDCOMM_WORKSPACE_MIB" if few else "",
    )


def check_packages() -> Iterator[Check]:
    """Other packages that bring variants."""
    from tunedcomm import kernels
    from tunedcomm.kernels import plugins

    kernels.discover()
    for package, names in plugins.brought.items():
        if names:
            yield Check("variants", "ok", f"{package} brings {', '.join(names)}")
        elif package not in plugins.failed:
            advice = "call register_variant in the module, or the function, that its entry point names"
            yield Check("variants", "warn", f"{package} brings nothing: its import registers no variant", advice)
    for package, why in plugins.failed.items():
        yield Check("variants", "warn", f"{package} brings no variants: {why}", "fix or uninstall it")
    misspelt = plugins.misspelt_groups()
    for package, group in misspelt:
        yield Check(
            "variants",
            "warn",
            f"{package} has an entry point in the group {group!r}, which means nothing; did you mean "
            f"{plugins.GROUP!r}?",
            "correct the group in its pyproject.toml and install it again",
        )
    if not plugins.brought and not plugins.failed and not misspelt:
        yield Check("variants", "ok", f"no other package brings any (entry points {plugins.GROUP})")


def check_variables() -> Iterator[Check]:
    """Environment variables that are set: valid, invalid, unknown."""
    from tunedcomm import kernels
    from tunedcomm.spec import ops, variants

    kernels.discover()
    seen = False
    for name in sorted(name for name in os.environ if name.startswith(settings.PREFIX)):
        seen = True
        yield Check(name, "ok", os.environ[name])
    for setting in settings.SETTINGS:
        try:
            setting()
        except SettingError as error:
            yield Check("variables", "fail", str(error), "correct or unset it")
    for op in ops():
        forced = settings.forced(op)
        if forced is not None and forced not in variants(op):
            yield Check("variables", "fail", f"{op} has no variant {forced!r}", f"one of {', '.join(variants(op))}")
    for name in settings.unknown_variables(tuple(ops())):
        yield Check("variables", "warn", f"{name} means nothing", "see docs/environment.md for the names")
    if not seen:
        yield Check("variables", "ok", f"none of {settings.PREFIX}* is set")


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_versions,
    check_gpus,
    check_symmetric_memory,
    check_databases,
    check_this_machine,
    check_packages,
    check_variables,
)


def run_checks(
    checks: tuple[Callable[[], Iterator[Check]], ...] = CHECKS, *, borrow: Sequence[str] = ()
) -> list[Check]:
    """Every check's lines; one that raises becomes a failed line of its own, so that the others are still seen.

    Args:
        checks: what to look at.
        borrow: names of other hardware of which to say whether its measurements may serve here.
    """
    found = [line for check in checks for line in _lines(check.__name__.removeprefix("check_"), check)]
    if borrow:
        found += _lines("borrowing", lambda: check_borrowing(borrow))
    if sys.platform != "linux":
        found.append(Check("platform", "fail", f"{sys.platform} is not supported", "use Linux"))
    return found


def _lines(name: str, check: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        found += check()
    except Exception as error:  # noqa: BLE001 - a broken machine is what the doctor is called for
        found.append(Check(name, "fail", f"{type(error).__name__}: {error}", "see above"))
    return found
