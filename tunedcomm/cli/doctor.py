"""`tunedcomm doctor`: is this machine ready, and what to do where it is not.

Each check looks at one thing and says ok, warn or fail, and what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tunedcomm import settings
from tunedcomm.cli.options import BorrowOption, JsonOption, borrowed
from tunedcomm.cli.output import Line, emit_json, print_lines
from tunedcomm.cli.stored import environment_here, nearest_stored, open_layer, read_layers, stored_environments
from tunedcomm.errors import DatabaseError, SettingError
from tunedcomm.hardware import advice
from tunedcomm.version import VERSION

if TYPE_CHECKING:
    from tunedcomm.db.layers import Layer
    from tunedcomm.hardware import Environment

OLDEST_TORCH = (2, 9)
OLDEST_TRITON = (3, 6)
OLDEST_TRITON_HOST = (3, 9)
SHM = Path("/dev/shm")
# Two ranks' workspaces at the default size fit in this with room to spare.
SHM_BYTES_WANTED = 512 << 20
_NONE_HERE = "tune it: tunedcomm tune --op all_reduce"


def doctor(*, borrow: BorrowOption = None, as_json: JsonOption = False) -> None:
    """Check versions, GPUs, links, symmetric memory, databases and settings; exit code 1 if something must be fixed.

    Example: tunedcomm doctor

    Example: tunedcomm doctor --borrow H100
    """
    lines = run_checks(borrow=borrowed(borrow))
    if as_json:
        emit_json([line._asdict() for line in lines])
    else:
        print_lines(lines)
    if any(line.level == "fail" for line in lines):
        raise typer.Exit(1)


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


def _package(name: str, oldest: tuple[int, ...]) -> Line:
    wanted = ".".join(str(part) for part in oldest)
    found = _version(name)
    if found is None:
        return Line(name, "fail", "is not installed", f"pip install '{name}>={wanted}'")
    if _parsed(found) < oldest:
        return Line(name, "fail", f"{found} is older than {wanted}", f"pip install '{name}>={wanted}'")
    return Line(name, "ok", found)


def check_versions() -> Iterator[Line]:
    """Python and the packages that decide what can run."""
    yield Line("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield Line("tunedcomm", "ok", VERSION)
    yield _package("torch", OLDEST_TORCH)
    yield _package("triton", OLDEST_TRITON)
    others = [f"{name} {_version(name) or 'missing'}" for name in ("sqlalchemy", "alembic", "optuna", "nvidia-ml-py")]
    missing = any(text.endswith("missing") for text in others)
    yield Line("packages", "fail" if missing else "ok", ", ".join(others), "pip install tunedcomm" if missing else "")


def _driver_sees_gpus() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def check_gpus() -> Iterator[Line]:
    """GPUs, their links, and whether they can address each other's memory."""
    import torch

    if not torch.cuda.is_available():
        if _driver_sees_gpus():
            yield Line(
                "gpus",
                "fail",
                f"the driver has GPUs, torch {torch.__version__} cannot use them",
                "install a CUDA build of torch that the driver supports, and check CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Line(
                "gpus", "warn", "none found", "nothing, if this is meant: the host backend runs all, slowly, on CPUs"
            )
        return
    from tunedcomm.hardware import Fabric, detect, multicast_disabled

    count = torch.cuda.device_count()
    found = [detect(index) for index in range(count)]
    first = found[0]
    yield Line("gpus", "ok", f"{count} x {first.gpu}, {first.num_sms} SMs, {first.memory_gib} GiB")
    yield Line("software", "ok", f"driver {first.driver or 'unknown'}, CUDA {first.cuda}, NCCL {first.nccl}")
    if mixed := sorted({str(environment) for environment in found} - {str(first)}):
        yield Line("mixed gpus", "warn", f"other GPUs: {'; '.join(mixed)}", "use groups of equal GPUs")
    slow = not Fabric.parse(first.fabric).can_share_memory
    yield Line(
        "fabric",
        "warn" if slow else "ok",
        f"{first.fabric}: {first.fabric_in_words}",
        "nothing to do: without NVLink between the GPUs every call goes to the library" if slow else "",
    )
    if first.multicast:
        yield Line("multicast", "ok", "NVLink multicast is there")
    elif multicast_disabled():
        yield Line(
            "multicast",
            "warn",
            "switched off by TORCH_SYMM_MEM_DISABLE_MULTICAST or NCCL_NVLS_ENABLE",
            "unset them, unless multicast does not work on this machine",
        )
    else:
        yield Line("multicast", "ok", "the fabric has none; multimem variants stay unused")
    yield _peer_access(count)


def _peer_access(count: int) -> Line:
    import torch

    apart = [
        f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not torch.cuda.can_device_access_peer(a, b)
    ]
    if not apart:
        return Line("peer access", "ok", "every GPU reaches every other" if count > 1 else "one GPU has no peers")
    return Line(
        "peer access",
        "warn",
        f"GPUs {', '.join(apart)} cannot address each other",
        "the library serves such groups; check IOMMU and container settings if they share a host",
    )


def check_symmetric_memory() -> Iterator[Line]:
    """The backends of symmetric memory."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Line("symmetric memory", "fail", "torch.distributed is missing in this torch", "install another torch")
        return
    if torch.cuda.is_available():
        try:
            from torch.distributed._symmetric_memory import empty, rendezvous
        except ImportError as error:
            yield Line("symmetric memory", "fail", f"torch lacks it: {error}", "pip install 'torch>=2.9'")
        else:
            yield Line("symmetric memory", "ok", f"torch: {empty.__name__}, {rendezvous.__name__}")
    yield from _host_backend()


def _host_backend() -> Iterator[Line]:
    import torch.distributed as dist

    triton = _version("triton") or "0"
    if _parsed(triton) < OLDEST_TRITON_HOST:
        yield Line(
            "host backend",
            "warn",
            f"the interpreter of Triton {triton} cannot run the kernels",
            "pip install 'triton>=3.9' in an environment without GPUs",
        )
    elif not dist.is_gloo_available():
        yield Line("host backend", "warn", "this torch has no gloo", "install a torch built with gloo")
    else:
        yield Line("host backend", "ok", f"Triton {triton} interprets, gloo connects")
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        yield Line("shared memory", "warn", f"{SHM} is not writable", f"mount a tmpfs at {SHM} for the host backend")
        return
    free = shutil.disk_usage(SHM).free
    few = free < SHM_BYTES_WANTED
    yield Line(
        "shared memory",
        "warn" if few else "ok",
        f"{free >> 20} MiB free in {SHM}",
        "give the container more (--shm-size=2g) or lower TUNEDCOMM_WORKSPACE_MIB" if few else "",
    )


def check_databases() -> Iterator[Line]:
    """Every layer: can it be read, what does it hold, does it lie where SQLite is safe."""
    from tunedcomm.db.layers import is_absent, layers, named_layers

    try:
        named_layers()
    except DatabaseError as error:
        yield Line("user database", "warn", str(error), "set HOME or TUNEDCOMM_DB")
    for layer in layers():
        name = f"{layer.name} database"
        if is_absent(layer):
            yield Line(name, "ok", f"{layer.target} is not there yet; `tunedcomm tune` makes it")
        else:
            yield _readable(name, layer)
        if layer.name == "user":
            yield from _network(name, layer)


def _readable(name: str, layer: Layer) -> Line:
    from tunedcomm.db.engine import parse_target

    try:
        with open_layer(layer) as database:
            held = f"{len(database.problems())} problems, {len(database.environments())} environments"
            return Line(name, "ok", f"{database.url}: {held}, schema {database.schema_version}")
    except DatabaseError as error:
        path = parse_target(layer.target).path
        gone = path is not None and not path.exists()
        mend = "make it or correct TUNEDCOMM_DB_PATH" if gone else "repair, upgrade or remove it"
        return Line(name, "fail", str(error), f"{mend}; dispatch skips it until then")


def _network(name: str, layer: Layer) -> Iterator[Line]:
    from tunedcomm.db.engine import parse_target, refuse_network

    path = parse_target(layer.target).path
    if path is None:
        return
    try:
        refuse_network(path)
    except DatabaseError as error:
        yield Line(name, "warn", str(error), "set TUNEDCOMM_DB; until then nothing can be tuned or pinned here")


def check_this_machine() -> Iterator[Line]:
    """Does any database hold measurements of hardware like this."""
    here = environment_here()
    stored = stored_environments(read_layers(None), is_quiet=True)
    like = [environment for environment in stored if environment.hard_key == here.hard_key]
    if like:
        drift = here.drift(like[0])
        since = f"; since then: {', '.join(drift)}" if drift and len(like) == 1 else ""
        yield Line("this machine", "ok", f"{here} is tuned{since}")
        return
    found = nearest_stored(here, stored)
    if found is None:
        yield Line("this machine", "warn", f"no database holds anything, so {here} runs the library", _NONE_HERE)
        return
    yield Line("this machine", "warn", f"no database holds anything for {here}; the nearest is {found}", _NONE_HERE)
    different = here.differences(found)
    for name, difference in different.items():
        yield Line("this machine", "warn", difference, advice(name, here, different))


def check_borrowing(names: Sequence[str]) -> Iterator[Line]:
    """May the hardware of these names stand in for this machine."""
    from tunedcomm.selection.snapshot import loans, matches

    here = environment_here()
    stored = stored_environments(read_layers(None), is_quiet=True)
    for name in names:
        if not any(matches(name, environment) for environment in stored):
            known = ", ".join(sorted({environment.gpu for environment in stored})) or "none"
            yield Line("borrowing", "warn", f"no database holds hardware {name!r}", f"stored are: {known}")
    for loan in loans(here, names, stored):
        if loan.refusal is None:
            yield Line("borrowing", "ok", f"{_named(loan.environment)} may stand in where this machine is not tuned")
        else:
            yield Line("borrowing", "warn", f"{_named(loan.environment)} cannot: {loan.refusal}", _NONE_HERE)


def _named(environment: Environment) -> str:
    return f"{environment} ({environment.digest[:8]})"


def check_packages() -> Iterator[Line]:
    """Other packages that bring variants."""
    from tunedcomm import kernels
    from tunedcomm.kernels import plugins

    kernels.discover()
    for package, names in plugins.brought.items():
        if names:
            yield Line("variants", "ok", f"{package} brings {', '.join(names)}")
        elif package not in plugins.failed:
            advice = "call register_variant in the module, or the function, that its entry point names"
            yield Line("variants", "warn", f"{package} brings nothing: its import registers no variant", advice)
    for package, why in plugins.failed.items():
        yield Line("variants", "warn", f"{package} brings no variants: {why}", "fix or uninstall it")
    misspelt = plugins.misspelt_groups()
    for package, group in misspelt:
        yield Line(
            "variants",
            "warn",
            f"{package} has an entry point in the group {group!r}, which means nothing; did you mean "
            f"{plugins.GROUP!r}?",
            "correct the group in its pyproject.toml and install it again",
        )
    if not plugins.brought and not plugins.failed and not misspelt:
        yield Line("variants", "ok", f"no other package brings any (entry points {plugins.GROUP})")


def check_variables() -> Iterator[Line]:
    """Environment variables that are set: valid, invalid, unknown."""
    from tunedcomm import kernels
    from tunedcomm.spec import ops, variants

    kernels.discover()
    seen = False
    for name in sorted(name for name in os.environ if name.startswith(settings.PREFIX)):
        seen = True
        yield Line(name, "ok", os.environ[name])
    for setting in settings.SETTINGS:
        try:
            setting()
        except SettingError as error:
            yield Line("variables", "fail", str(error), "correct or unset it")
    for op in ops():
        forced = settings.forced(op)
        if forced is not None and forced not in variants(op):
            yield Line("variables", "fail", f"{op} has no variant {forced!r}", f"one of {', '.join(variants(op))}")
    for name in settings.unknown_variables(tuple(ops())):
        yield Line("variables", "warn", f"{name} means nothing", "see docs/environment.md for the names")
    if not seen:
        yield Line("variables", "ok", f"none of {settings.PREFIX}* is set")


CHECKS: tuple[Callable[[], Iterator[Line]], ...] = (
    check_versions,
    check_gpus,
    check_symmetric_memory,
    check_databases,
    check_this_machine,
    check_packages,
    check_variables,
)


def run_checks(checks: tuple[Callable[[], Iterator[Line]], ...] = CHECKS, *, borrow: Sequence[str] = ()) -> list[Line]:
    """Every check's lines; one that raises becomes a failed line of its own, so that the others are still seen.

    Args:
        checks: what to look at.
        borrow: names of other hardware of which to say whether its measurements may serve here.
    """
    found = [line for check in checks for line in _lines(check.__name__.removeprefix("check_"), check)]
    if borrow:
        found += _lines("borrowing", lambda: check_borrowing(borrow))
    if sys.platform != "linux":
        found.append(Line("platform", "fail", f"{sys.platform} is not supported", "use Linux"))
    return found


def _lines(name: str, check: Callable[[], Iterator[Line]]) -> list[Line]:
    found: list[Line] = []
    try:
        found += check()
    except Exception as error:  # noqa: BLE001 - a broken machine is what the doctor is called for
        found.append(Line(name, "fail", f"{type(error).__name__}: {error}", "see above"))
    return found
