"""`tunedcomm doctor`: checks that this machine is ready. Each check says ok, warn or fail, and what to do."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tunedcomm import settings
from tunedcomm.cli.options import BorrowOption, JsonOption, borrowed
from tunedcomm.cli.output import Line, checkup, note, show
from tunedcomm.cli.stored import environment_here, read_each, read_layers, stored_environments
from tunedcomm.errors import DatabaseError, SettingError
from tunedcomm.hardware import Environment, advice, nearest, version_of
from tunedcomm.metrics import format_bytes, plural
from tunedcomm.selection.snapshot import Snapshot, loans, matches
from tunedcomm.version import VERSION

OLDEST = {"torch": "2.9", "triton": "3.6"}
OLDEST_TRITON_HOST = "3.9"
SHM = Path("/dev/shm")
# Two ranks' workspaces at the default size fit in this with room to spare.
SHM_BYTES_WANTED = 512 << 20
# A package that brings variants is imported in well under a second, torch and Triton being imported already.
IMPORT_S, NOTE_S = 20.0, 2.0
_NONE_HERE = "tune it: tunedcomm tune --op all_reduce"


EngineOption = Annotated[
    Literal["vllm", "sglang", "fsdp"] | None,
    typer.Option(help="Show what this engine would ask tunedcomm, in its order, and which of it is tuned here."),
]


def doctor(*, engine: EngineOption = None, borrow: BorrowOption = None, as_json: JsonOption = False) -> None:
    """Check versions, GPUs, links, memory, databases and settings. Exit code 1 if something must be fixed.

    Example: tunedcomm doctor

    Example: tunedcomm doctor --engine vllm

    Example: tunedcomm doctor --borrow H100
    """
    lines = run_checks((partial(check_engine, engine),)) if engine else run_checks(borrow=borrowed(borrow))
    show([line._asdict() for line in lines], [checkup(lines)], as_json=as_json)
    if any(line.level == "fail" for line in lines):
        raise typer.Exit(1)


def _parsed(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: `2.13.0+cpu` to (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_versions() -> Iterator[Line]:
    """Python and the packages that decide what can run."""
    yield Line("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield Line("tunedcomm", "ok", VERSION)
    for name, oldest in OLDEST.items():
        found = version_of(name)
        if _parsed(found) >= _parsed(oldest):
            yield Line(name, "ok", found)
        else:
            wrong = f"{found} is older than {oldest}" if found else "is not installed"
            yield Line(name, "fail", wrong, f"pip install '{name}>={oldest}'")
    others = {name: version_of(name) or "missing" for name in ("sqlalchemy", "alembic", "optuna", "nvidia-ml-py")}
    fix = "pip install tunedcomm" if "missing" in others.values() else ""
    yield Line("packages", "fail" if fix else "ok", ", ".join(map(" ".join, others.items())), fix)


def check_gpus() -> Iterator[Line]:
    """GPUs, their links, and whether they can address each other's memory."""
    import torch

    from tunedcomm.hardware import Fabric, detect, multicast_disabled
    from tunedcomm.symm.layout import limits_for

    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi"):
            fix = "install a CUDA build of torch that the driver supports, and check CUDA_VISIBLE_DEVICES"
            yield Line("gpus", "fail", f"the driver has GPUs, torch {torch.__version__} cannot use them", fix)
        else:
            yield Line("gpus", "ok", "none found; CPU tensors go through shared memory")
        return
    count = torch.cuda.device_count()
    first, *more = [detect(index) for index in range(count)]
    yield Line("gpus", "ok", f"{count} x {first.gpu}, {first.num_sms} SMs, {first.memory_gib} GiB")
    yield Line("software", "ok", f"driver {first.driver or 'unknown'}, CUDA {first.cuda}, NCCL {first.nccl}")
    if mixed := sorted(set(map(str, more)) - {str(first)}):
        yield Line("mixed gpus", "warn", f"other GPUs: {'; '.join(mixed)}", "use groups of equal GPUs")
    fix = "nothing to do: without NVLink between the GPUs every call goes to the library"
    fix = "" if Fabric.parse(first.fabric).can_share_memory else fix
    yield Line("fabric", "warn" if fix else "ok", f"{first.fabric}: {first.fabric_in_words}", fix)
    if first.multicast:
        yield Line("multicast", "ok", "NVLink multicast is available")
    elif multicast_disabled():
        off = "switched off by TORCH_SYMM_MEM_DISABLE_MULTICAST or NCCL_NVLS_ENABLE"
        yield Line("multicast", "warn", off, "unset them, unless multicast does not work on this machine")
    else:
        yield Line("multicast", "ok", "the fabric has none; multimem variants stay unused")
    pairs = itertools.combinations(range(count), 2)
    if apart := [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]:
        fix = "the library serves such groups; check IOMMU and container settings if they share a host"
        yield Line("peer access", "warn", f"GPUs {', '.join(apart)} cannot address each other", fix)
    else:
        yield Line("peer access", "ok", "every GPU reaches every other" if count > 1 else "one GPU has no peers")
    largest = format_bytes(limits_for(first, max(count, 2)).staging_bytes)
    held = f"a group holds what its calls have used, for messages of up to {largest} (TUNEDCOMM_WORKSPACE_MIB)"
    yield Line("memory", "ok", f"{held}; tunedcomm.explain says how much, tunedcomm.reserve takes it ahead")


def check_symmetric_memory() -> Iterator[Line]:
    """The backends of symmetric memory."""
    import torch.distributed as dist

    if not dist.is_available():
        yield Line("symmetric memory", "fail", "torch.distributed is missing in this torch", "install another torch")
        return
    triton = version_of("triton")
    if _parsed(triton) < _parsed(OLDEST_TRITON_HOST):
        fix = f"pip install 'triton>={OLDEST_TRITON_HOST}' in an environment without GPUs"
        yield Line("host backend", "warn", f"the interpreter of Triton {triton} cannot run the kernels", fix)
    elif not dist.is_gloo_available():
        yield Line("host backend", "warn", "this torch has no gloo", "install a torch built with gloo")
    else:
        yield Line("host backend", "ok", f"Triton {triton} interprets, gloo connects")
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        yield Line("shared memory", "warn", f"{SHM} is not writable", f"mount a tmpfs at {SHM} for the host backend")
        return
    free = shutil.disk_usage(SHM).free
    few = free < SHM_BYTES_WANTED
    fix = "give the container more (--shm-size=2g) or lower TUNEDCOMM_WORKSPACE_MIB" if few else ""
    yield Line("shared memory", "warn" if few else "ok", f"{free >> 20} MiB free in {SHM}", fix)


def check_databases() -> Iterator[Line]:
    """Every layer: its content, and whether it can be read and lies where SQLite is safe."""
    from tunedcomm.db.layers import all_layers, is_absent, named_layers
    from tunedcomm.db.targets import parse_target, refuse_network

    try:
        named_layers()
    except DatabaseError as error:
        yield Line("user database", "warn", str(error), "set HOME or TUNEDCOMM_DB")
    for layer in all_layers():
        name, path, is_user = f"{layer.name} database", None, layer.name == "user"
        is_writable = True
        try:
            path = parse_target(layer.target).path
            is_writable = path is None or _is_writable(path)
            if is_absent(layer) or (is_user and not is_writable and not os.path.lexists(layer.target)):
                if is_writable:
                    yield Line(name, "ok", f"{layer.target} is not there yet; `tunedcomm tune` makes it")
            else:
                with layer.open() as database:
                    held = plural(len(database.problems()), "problem")
                    held += f", {plural(len(database.environments()), 'environment')}"
                    yield Line(name, "ok", f"{database.url}: {held}, schema {database.schema_version}")
        except DatabaseError as error:
            if is_user and _is_unused(layer.target):
                yield Line(name, "ok", f"{parse_target(layer.target)} is empty; `tunedcomm tune` makes its tables")
            else:
                gone = path is not None and not path.exists()
                mend = "make it or correct TUNEDCOMM_DB_PATH" if gone else "repair, upgrade or remove it"
                yield Line(name, "fail", str(error), f"{mend}; dispatch skips it until then")
        if is_user and path is not None:
            fix = "set TUNEDCOMM_DB to a file that may be written; until then nothing can be tuned or pinned here"
            if not is_writable:
                yield Line(name, "warn", f"{path} cannot be written", fix)
            try:
                refuse_network(path)
            except DatabaseError as error:
                yield Line(name, "warn", str(error), fix)


def _is_writable(path: Path) -> bool:
    """True if the file may be written, or made together with the folders that are missing."""
    found = next(part for part in (path.absolute(), *path.absolute().parents) if os.path.lexists(part))
    return os.access(found, os.W_OK, effective_ids=True) and (found == path.absolute() or found.is_dir())


def _is_unused(target: str) -> bool:
    from tunedcomm.db.engine import is_unused
    from tunedcomm.db.targets import parse_target

    with contextlib.suppress(DatabaseError):
        return is_unused(parse_target(target))
    return False


def check_this_machine() -> Iterator[Line]:
    """Measurements of hardware like this, or of hardware whose rows serve here, in any database."""
    machine = environment_here()
    stored = stored_environments(read_layers(None), is_quiet=True)
    like = [environment for environment in stored if environment.hard_key == machine.hard_key]
    if like:
        drift = machine.drift(like[0])
        since = f"; since then: {', '.join(drift)}" if drift and len(like) == 1 else ""
        whole, some = _tuned_ops(machine)
        if whole:
            beside = f", of {', '.join(some)} some sizes" if some else ""
            yield Line("this machine", "ok", f"{machine} is tuned: {', '.join(whole)}{beside}{since}")
        else:
            held = f"some sizes of {', '.join(some)}" if some else "no kernel"
            yield Line("this machine", "warn", f"{machine}: {held} measured, no op at its default sizes", _NONE_HERE)
        return
    lenders = {there.gpu: there for there, why in loans(machine, settings.borrow(), stored).items() if why is None}
    if lenders:
        served = f"{machine}: served by rows of {', '.join(lenders)}, checked at first use"
        yield Line("this machine", "ok", f"{served}; `tunedcomm tune` measures your own")
        return
    found = nearest(machine, stored)
    if found is None:
        until = "; rules of thumb choose until then" if machine.is_host else ""
        yield Line("this machine", "warn", f"no database holds anything for {machine}{until}", _NONE_HERE)
        return
    different = machine.differences(found)
    detail = f"no database holds anything for {machine}; the nearest is {found}: {'; '.join(different.values())}"
    yield Line("this machine", "warn", detail, advice(next(iter(different)), machine, different))


def _tuned_ops(machine: Environment) -> tuple[list[str], list[str]]:
    """Ops with a kernel measured at all of their default sizes, in some dtype and number of ranks; ops with others."""
    from tunedcomm.spec import ITEMSIZE, get_op, ops

    _discover()
    shapes: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for snapshot in _snapshots(machine):
        for row in snapshot.rows:
            if row.candidate.variant != "library" and row.problem.op in ops():
                key = row.problem.op, row.problem.dtype, snapshot.world_size
                shapes.setdefault(key, set()).add(row.problem.shape)
    backend = "host" if machine.is_host else "cuda"
    whole = {
        op
        for (op, dtype, _), found in shapes.items()
        if found.issuperset(get_op(op).default_shapes(backend, ITEMSIZE[dtype]))
    }
    return sorted(whole), sorted({op for op, *_ in shapes} - whole)


def _snapshots(machine: Environment) -> list[Snapshot]:
    """The merged rows for this machine, for each number of ranks that a database has problems of."""
    from tunedcomm.db.layers import load_snapshot

    layers = read_layers(None)
    counts = read_each(layers, lambda database: {problem.world_size for problem in database.problems()}, is_quiet=True)
    world_sizes = sorted(set().union(*(found for _, found in counts)))
    return [load_snapshot(machine, world_size, layers=layers) for world_size in world_sizes]


def check_borrowing(names: Sequence[str]) -> Iterator[Line]:
    """Hardware of these names, which may or may not stand in for this machine."""
    names = [name for name in names if name != settings.SIBLINGS]
    stored = stored_environments(read_layers(None), is_quiet=True)
    for name in names:
        if not any(matches(name, environment) for environment in stored):
            known = ", ".join(sorted({environment.gpu for environment in stored})) or "none"
            yield Line("borrowing", "warn", f"no database holds hardware {name!r}", f"stored are: {known}")
    for there, refusal in loans(environment_here(), names, stored).items():
        other = f"{there} ({there.digest[:8]})"
        if refusal is None:
            yield Line("borrowing", "ok", f"{other} may stand in where this machine is not tuned")
        else:
            yield Line("borrowing", "warn", f"{other} cannot: {refusal}", _NONE_HERE)


def _discover() -> str:
    """Import all variants; return the package whose import did not end in `IMPORT_S`, or "" if there is none.

    The import runs in a thread of its own, which an import that never ends keeps.
    """
    from tunedcomm import kernels
    from tunedcomm.kernels import plugins

    def run() -> None:
        with contextlib.suppress(Exception):  # which the call below raises again
            kernels.discover()

    thread, since_s = threading.Thread(target=run, daemon=True), time.monotonic()
    if not plugins.loading:  # else an earlier check has waited for it
        thread.start()
    while thread.is_alive():
        thread.join(NOTE_S)
        waited_s = time.monotonic() - since_s
        if thread.is_alive() and plugins.loading:
            note(f"importing {plugins.loading[0]}, for {waited_s:.0f} s")
            if waited_s > IMPORT_S:
                break
    if plugins.loading:
        return plugins.loading[0]
    kernels.discover()
    return ""


def check_packages() -> Iterator[Line]:
    """Other packages that bring variants."""
    from tunedcomm.kernels import plugins

    found: list[Line] = []
    if stuck := _discover():
        late = f"the import of {stuck} has not ended after {IMPORT_S:.0f} s"
        found.append(Line("variants", "fail", late, "fix or uninstall it; commands and programs wait for it"))
    for package, names in plugins.brought.items():
        if names:
            found.append(Line("variants", "ok", f"{package} brings {', '.join(names)}"))
        elif package not in plugins.failed:
            fix = "call register_variant in the module, or the function, that its entry point names"
            found.append(Line("variants", "warn", f"{package} brings nothing: its import registers no variant", fix))
    for package, why in plugins.failed.items():
        found.append(Line("variants", "warn", f"{package} brings no variants: {why}", "fix or uninstall it"))
    for package, group in plugins.misspelt_groups():
        why = f"{package} has an entry point in the unknown group {group!r}; did you mean {plugins.GROUP!r}?"
        found.append(Line("variants", "warn", why, "correct the group in its pyproject.toml and install it again"))
    yield from found or [Line("variants", "ok", f"no other package brings any (entry points {plugins.GROUP})")]


def check_binaries() -> Iterator[Line]:
    """Binaries that `tunedcomm db compile` left in Triton's cache, if any."""
    import torch

    from tunedcomm import kernels
    from tunedcomm.kernels.common import binaries

    _discover()
    if targets := binaries.targets():
        held, why = f"{binaries.folder()} has binaries of {', '.join(targets)}", None
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            why = binaries.misfit(10 * major + minor, kernels.source_hashes())
        yield Line("binaries", "warn" if why else "ok", why or held)


def check_variables() -> Iterator[Line]:
    """Environment variables that are set: valid, invalid, unknown."""
    from tunedcomm.spec import ops, variants

    _discover()
    named = sorted(name for name in os.environ if name.startswith(settings.PREFIX))
    for name in named:
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
        yield Line("variables", "warn", f"{name} is not a known variable", "see docs/environment.md for the names")
    if not named:
        yield Line("variables", "ok", f"none of {settings.PREFIX}* is set")


# Of an engine: the entry point group, the variable that lists plug-ins, and its calls in its order: the op that serves
# them ("" for a hook alone), and the file, class and functions that are hooked.
_VLLM = "distributed/device_communicators/cuda_communicator.py", "CudaCommunicator"
_SGLANG = "srt/distributed/parallel_state.py", "GroupCoordinator"
_FSDP = "distributed/fsdp/_fully_shard/_fully_shard.py", "FSDPModule"
_NORM = "all_reduce_rms_norm"
_ENGINES = {
    "vllm": (
        "vllm.general_plugins",
        "VLLM_PLUGINS",
        (
            ("", "platforms/cuda.py", "CudaPlatformBase", "get_device_communicator_cls"),
            (_NORM, "compilation/passes/fusion/allreduce_rms_fusion.py", "", "call_trtllm_fused_allreduce_norm"),
            ("all_reduce", *_VLLM, "all_reduce"),
            ("all_gather", *_VLLM, "all_gather custom_all_gather all_gatherv"),
            ("reduce_scatter", *_VLLM, "reduce_scatter custom_reduce_scatter reduce_scatterv"),
        ),
    ),
    "sglang": (
        "sglang.srt.plugins",
        "SGLANG_PLUGINS",
        (
            ("", "srt/plugins/hook_registry.py", "HookRegistry", "register apply_hooks"),
            (
                _NORM,
                "srt/layers/flashinfer_comm_fusion.py",
                "",
                "flashinfer_allreduce_residual_rmsnorm resolve_fusion_group",
            ),
            ("all_reduce", *_SGLANG, "_all_reduce_out_place _flashinfer_allreduce _all_reduce_in_place"),
            ("all_gather", *_SGLANG, "_all_gather_into_tensor all_gatherv"),
            ("reduce_scatter", *_SGLANG, "_reduce_scatter_tensor reduce_scatterv"),
        ),
    ),
    "fsdp": (
        "",  # `tunedcomm.fsdp.install` takes the place of an entry point
        "",
        (
            ("", "distributed/fsdp/_fully_shard/_fsdp_api.py", "Comm", "allocate"),
            ("all_gather", *_FSDP, "set_custom_all_gather"),
            ("reduce_scatter", *_FSDP, "set_custom_reduce_scatter"),
        ),
    ),
}
_TESTED_TORCH = "2.11 to 2.14"


def check_engine(engine: str) -> Iterator[Line]:
    """An installed engine: its version, the entry point, and of every hooked call what is tuned. Imports none of it."""
    import tunedcomm_plugin

    group, variable, calls = _ENGINES[engine]
    package, tested = ("torch", _TESTED_TORCH) if engine == "fsdp" else (engine, tunedcomm_plugin.TESTED[engine])
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        yield Line(package, "warn", "is not installed", f"install it in this environment; tested with {tested}")
        return
    version, (first, last) = version_of(package), map(_parsed, tested.split(" to "))
    is_tested = first <= _parsed(version) and _parsed(version)[: len(last)] <= last
    without = "set TUNEDCOMM_ENGINES=0" if group else "leave out tunedcomm.fsdp.install()"
    fix = "" if is_tested else f"if it is wrong or warns, {without} and report it"
    yield Line(package, "ok" if is_tested else "warn", f"{version}; tested with {tested}", fix)
    if group:
        yield _entry_point(engine, group, variable)
    for op, file, owner, names in calls:
        path = Path(spec.submodule_search_locations[0], file)
        missing = sorted(set(names.split()) - _defined(path, owner)) if path.exists() else names.split()
        if missing:
            why = f"{package} {version} has no {', '.join(missing)}"
            yield Line(op or "hook", "warn", why, f"use {package} {tested}")
        elif op:
            tuned = _tuned_calls(op)
            fix = "" if tuned else f"tune it: tunedcomm tune --op {op}"
            yield Line(op, "ok" if tuned else "warn", f"{', '.join(names.split())}: {tuned or 'nothing measured'}", fix)


def _entry_point(engine: str, group: str, variable: str) -> Line:
    """The entry point by which an engine loads tunedcomm."""
    found = [
        entry for entry in importlib.metadata.entry_points(group=group) if entry.value.startswith("tunedcomm_plugin")
    ]
    listed = os.environ.get(variable)
    if not found:
        return Line("entry point", "fail", f"tunedcomm has none in {group}", "install tunedcomm again")
    if not settings.engines():
        return Line("entry point", "warn", "switched off by TUNEDCOMM_ENGINES", "unset it")
    if listed is not None and (listed or engine == "vllm") and found[0].name not in listed.split(","):
        return Line("entry point", "warn", f"{variable}={listed} leaves it out", f"add {found[0].name} to {variable}")
    return Line("entry point", "ok", f"{found[0].name} in {group}")


def _defined(path: Path, owner: str) -> set[str]:
    """Functions that a file, or one class in it, defines."""
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    if owner:
        tree = next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner), ast.Module([], []))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _tuned_calls(op: str) -> str:
    """Measured problems of an op on this machine, by number of ranks: how many a kernel serves, from which layers."""
    from tunedcomm.dispatch.decide import decide
    from tunedcomm.symm.layout import limits_for

    machine, parts = environment_here(), []
    for snapshot in _snapshots(machine):
        problems = {row.problem for row in snapshot.rows if row.problem.op == op}
        limits = limits_for(machine, snapshot.world_size)
        decisions = [decide(problem, snapshot, limits) for problem in problems]
        served = [decision for decision in decisions if decision.candidate.variant != "library"]
        if problems:
            named = ", ".join(sorted({decision.layer for decision in served if decision.layer}))
            what = f"{len(served)} of {len(problems)} measured problems" + (f" ({named})" if named else "")
            parts.append(f"{snapshot.world_size} ranks: {what}")
    return "; ".join(parts)


CHECKS: tuple[Callable[[], Iterator[Line]], ...] = (
    check_versions,
    check_gpus,
    check_symmetric_memory,
    check_databases,
    check_this_machine,
    check_packages,
    check_binaries,
    check_variables,
)


def run_checks(checks: Sequence[Callable[[], Iterator[Line]]] = CHECKS, *, borrow: Sequence[str] = ()) -> list[Line]:
    """Every check's lines; one that raises becomes a failed line of its own, so that the others are still seen."""
    named = [(getattr(check, "__name__", "engine").removeprefix("check_"), check) for check in checks]
    found: list[Line] = []
    for name, check in [*named, *([("borrowing", lambda: check_borrowing(borrow))] if borrow else [])]:
        try:
            found += check()
        except Exception as error:  # noqa: BLE001 - a broken machine is what the doctor is called for
            found.append(Line(name, "fail", f"{type(error).__name__}: {error}", "see above"))
    if sys.platform != "linux":
        found.append(Line("platform", "fail", f"{sys.platform} is not supported", "use Linux"))
    return found
