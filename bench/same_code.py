"""Finds the measured rows that still describe the code after an edit of kernels or of what launches them.

    git worktree add ../before COMMIT
    python bench/same_code.py --before ../before [--full] [--op OP] tuning_db/*.db

For each distinct (problem, variant, config) of the rows that are current in either tree, each tree binds and launches
the variant in a process of its own, without a GPU: memory, streams and torch's devices are stand-ins. What is recorded:

- each kernel that is bound: compile options and grid, and constants where its source is the same in both trees;
- each launch's arguments in order, where addresses have names, such as `in0`, `status+6` or `lane.graph.rank1+64`;
- copies, events, collectives and what torch is asked to compute, in order;
- `num_blocks`, `num_rounds`, `infeasible`, the variant's version and numerics, and every variant's `default` config.

Names and modules of kernels are not compared. Their code is: by the source hash of each kernel alone, and where that
differs, or for every kernel with `--full`, by PTX for the row's GPU, up to the names of kernels and the numbers of
parameters, registers and labels. PTX is made by the Triton that is imported: put the one that the rows were measured
with (3.6) on PYTHONPATH.

Rows whose variant got another source hash and which are equal in all of this take the new hash. Others are listed, and
the exit status is 1. A variant that cannot be bound without a GPU is listed, too: there only its compile requests and
the numbers above are compared. One rank (1) of each group is looked at.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sqlalchemy import delete, select, update
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).resolve()
_ROOM = 1 << 36  # between stand-in addresses: more than any offset
_FIRST = 1 << 44
_RANK = 1
_TIMEOUT_NS = 987_654_321_987
_STREAM = 7_777_777
_PROPERTIES = SimpleNamespace(  # of an NVIDIA H200
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    L2_cache_size=62914560,
    total_memory=150_000_000_000,
)
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "empty_strided")
_READS = {"data_ptr", "__get__", "numel", "element_size", "size", "stride", "dim", "storage_offset", "untyped_storage"}


class Addresses:
    """Stand-in addresses that can be named back."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.storages: dict[int, tuple[int, Any]] = {}
        self.words = {_TIMEOUT_NS: "timeout_ns", _STREAM: "stream"}

    def make(self, name: str) -> int:
        self.names.append(name)
        return _FIRST + (len(self.names) - 1) * _ROOM

    def of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.put(tensor, self.make(f"tensor{len(self.storages)}[{storage.nbytes()}]"))
        return int(self.storages[storage._cdata][0] + tensor.storage_offset() * tensor.element_size())

    def put(self, tensor: torch.Tensor, address: int) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = address, storage

    def told(self, value: Any) -> Any:
        """A value as what it stands for."""
        if isinstance(value, torch.Tensor):
            strides = ",".join(map(str, value.stride()))
            return f"{self.told(self.of(value))}:{value.dtype}{list(value.shape)}/{strides}"
        if isinstance(value, (tuple, list)):
            return [self.told(item) for item in value]
        if isinstance(value, Mapping):
            return {str(key): self.told(item) for key, item in sorted(value.items())}
        if isinstance(value, bool) or value is None or isinstance(value, (float, str)):
            return value
        if isinstance(value, int):
            place, offset = divmod(value - _FIRST, _ROOM)
            if 0 <= place < len(self.names):
                return self.names[place] + (f"+{offset}" if offset else "")
            return self.words.get(value, value)
        plain = isinstance(value, (torch.dtype, torch.device, torch.Size))
        return str(value) if plain else getattr(value, "__dict__", {}).get("label", f"<{type(value).__name__}>")


class Recorder(TorchFunctionMode):
    """Records what a variant does in `bind` and in a launch; tensors have no memory.

    `calls` is a mock: whatever is called on it, or on what such a call returned, becomes an event.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.addresses = Addresses()
        self.calls = mock.MagicMock()
        self.calls.group.group_name = "group"
        self.requests: list[Any] = []

    def events(self) -> list[Any]:
        """Everything that was called since `bind` began, in order."""
        return [self.addresses.told((name, *args, *([kw] if kw else []))) for name, args, kw in self.calls.mock_calls]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if name == "data_ptr" and args:
            return self.addresses.of(args[0])
        if "device" in kwargs or name in _FACTORIES:
            kwargs["device"] = "meta"
        for word in ("generator", "pin_memory"):
            kwargs.pop(word, None)
        if name not in _READS:
            self.calls.torch(name, args, kwargs)
        return func(*args, **kwargs)


def import_everything() -> None:
    """Import the modules of kernels and of symmetric memory, so that all names that are replaced are there."""
    from tunedcomm import kernels, symm

    kernels.discover()
    for package in (symm, kernels):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


@functools.cache
def places(function: str) -> list[tuple[ModuleType, str, Any]]:
    """Every place of tunedcomm where a function that is defined in it under that name is known."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tunedcomm":
            for key, value in list(vars(module).items()):
                ours = str(getattr(value, "__module__", "")).startswith("tunedcomm.")
                if ours and getattr(value, "__name__", None) == function:
                    found.append((module, key, value))
    return found


def flat(values: Iterable[Any]) -> list[Any]:
    """Arguments with tuples taken apart: a binary takes a tuple as its elements."""
    return [item for value in values for item in (flat(value) if isinstance(value, tuple) else [value])]


def stand_ins(recorder: Recorder) -> list[tuple[Any, str, Any]]:
    """Replacements while a variant is bound and launched: (module, name, value)."""
    addresses = recorder.addresses
    (_, _, original), *_ = places("bind_kernel")
    bound_kernel = original.__globals__["BoundKernel"]

    def bind_kernel(request: Any, grid: int, device: Any) -> Any:
        number = len(recorder.requests)
        recorder.requests.append(request)
        recorder.calls.bind(number, options_of(request), grid, str(device))

        def fix(arguments: Sequence[int | None]) -> Callable[..., None]:
            names = [name for name in request.resolve().arg_names if name not in dict(request.constants)]
            if len(names) != len(arguments):
                raise TypeError(f"{request.function} takes {len(names)} arguments, got {len(arguments)}")

            def launch(stream: int, *varying: int) -> None:
                given = iter(varying)
                whole = flat(next(given) if value is None else value for value in arguments)
                recorder.calls.launch(number, stream, whole, len(list(given)))

            return launch

        return bound_kernel(fix)

    def allocate(group: Any, device: Any, nbytes: int) -> Any:
        return made_buffer(recorder, f"buffer{len(addresses.names)}[{nbytes}]", nbytes)

    @functools.cache
    def copies_of(workspace: Any, mode: str) -> Any:
        sides = tuple(addresses.make(f"side{number}") for number in range(9))
        copies = mock.MagicMock(streams=sides, beside=addresses.make("beside"), current=recorder.calls.on)
        recorder.calls.attach_mock(copies, f"copies_{mode}")
        return copies

    generator = torch.Generator()  # nothing is drawn from it
    ours = {"bind_kernel": bind_kernel, "allocate": allocate, "copies_of": copies_of}
    found: list[tuple[Any, str, Any]] = [(module, key, ours[name]) for name in ours for module, key, _ in places(name)]

    def stream_of(handle: Any = _STREAM, *_: Any) -> Any:
        name = f"stream {addresses.told(handle)}"
        made = mock.MagicMock(cuda_stream=handle, label=name)
        recorder.calls.attach_mock(made, name)
        return made

    cuda: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "get_device_properties": lambda *_: _PROPERTIES,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "device": lambda *_: contextlib.nullcontext(),
        "stream": recorder.calls.on,
        "current_stream": lambda *_: stream_of(),
        "synchronize": recorder.calls.synchronize,
        "get_stream_from_external": stream_of,
        "ExternalStream": stream_of,
    }
    found += [(torch.cuda, name, value) for name, value in cuda.items()]
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    found += [
        (torch, "Generator", lambda *_, **__: generator),
        (torch.distributed, "get_rank", lambda *_: _RANK),
        (torch.distributed, "get_world_size", lambda *_: recorder.world_size),
        (symmetric, "rendezvous", recorder.calls.rendezvous),
    ]
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "barrier"):
        found.append((torch.distributed, name, getattr(recorder.calls.dist, name)))
    for name in ("one_shot_all_reduce_out", "one_shot_all_reduce_copy_out", "two_shot_all_reduce_"):
        found.append((torch.ops.symm_mem, name, getattr(recorder.calls.symm_mem, name)))
    return found


def made_buffer(recorder: Recorder, name: str, nbytes: int) -> Any:
    """A symmetric buffer with an address on each rank, and no memory."""
    from tunedcomm.symm.buffer import SymmetricBuffer

    local = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    places_ = tuple(recorder.addresses.make(f"{name}.rank{rank}") for rank in range(recorder.world_size))
    recorder.addresses.put(local, places_[_RANK])
    return SymmetricBuffer(local, places_, _RANK, recorder.addresses.make(f"{name}.multicast"), None)


def made_workspace(recorder: Recorder, problem: Any, layout: Any) -> Any:
    """A workspace of the tree's own class, whose memory is made up."""
    from tunedcomm.spec import ops
    from tunedcomm.symm.layout import LANES, rotate
    from tunedcomm.symm.workspace import Lane, Workspace

    addresses = recorder.addresses
    status = addresses.make("status")
    order = [(op, mode) for op in sorted(ops()) for mode in LANES]

    class StandIn(Workspace):
        def status_argument(self, problem: Any) -> int:
            problem = self._reported or problem
            return status + 1 + order.index((problem.op, problem.mode))

        def peers_of(self, tensor: Any) -> tuple[int, ...]:
            offset = addresses.of(tensor)
            return tuple(peers[step] + offset - inputs for step in range(len(peers)))

    inputs = addresses.make("in0")
    peers = rotate(tuple(addresses.make(f"in0.rank{rank}") for rank in range(problem.world_size)), _RANK)
    made: Any = StandIn.__new__(StandIn)
    buffers = {m: made_buffer(recorder, f"lane.{m}", layout.total_bytes) for m in LANES}
    lanes = {m: Lane(b.addresses[_RANK], rotate(b.addresses, _RANK), b.multicast_address) for m, b in buffers.items()}
    made.__dict__.update(
        group=recorder.calls.group,
        device=torch.device("cuda", 0),
        layout=layout,
        timeout_ns=_TIMEOUT_NS,
        buffers=buffers,
        lanes=lanes,
        rank=_RANK,
        world_size=problem.world_size,
        symmetric={},
        status_view=memoryview(bytes(256)).cast("i"),
        _names=tuple(range(problem.world_size)),
        _callers=order,
        _first_input=inputs,
        _reported=None,
        _panels={},
        _scratch={},
    )
    return made


def launch_record(variant: Any, spec: Any, problem: Any, config: Any, layout: Any) -> tuple[list[Any], list[Any]]:
    """Events of a bind and two launches, and the requests of the kernels that were bound."""
    recorder = Recorder(problem.world_size)
    with recorder, contextlib.ExitStack() as stack:
        for module, name, value in stand_ins(recorder):
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        workspace = made_workspace(recorder, problem, layout)
        inputs = spec.make_inputs(problem, _RANK, 0, "random", torch.device("cuda", 0))
        outputs = (inputs[0],) if problem.in_place else spec.make_outputs(problem, torch.device("cuda", 0))
        for kind, tensors in (("in", inputs), ("out", outputs)):
            for number, tensor in enumerate(tensors):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in (
                    recorder.addresses.storages if kind == "out" else {}
                ):
                    first = kind == "in" and number == 0
                    address = workspace._first_input if first else recorder.addresses.make(f"{kind}{number}")
                    recorder.addresses.put(tensor, address)
        recorder.calls.reset_mock()
        launch = variant.bind(problem, config, workspace)
        for _ in range(2):  # plans may count their calls
            recorder.calls.call("by address" if hasattr(launch, "by_address") else "")
            launch(inputs, outputs, _STREAM)
        return recorder.events(), recorder.requests


def short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def normalised(ptx: str) -> str:
    """PTX without comments and debug information, kernels' names and the numbers of parameters, registers, labels."""
    text = re.sub(r"\.section\s+\.debug\w*\s*\{.*?\n\s*\}", "", ptx, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.(loc|file|version|reg)\b[^\n]*$", "", text, flags=re.M)
    # Debug information alone uses these labels.
    text = re.sub(r"^\s*\$L__(tmp|func_begin|func_end)\d+:\s*$", "", text, flags=re.M)
    for name in re.findall(r"\.entry\s+([\w$]+)", text):
        text = re.sub(rf"\b{re.escape(name)}(?=\b|_param_)", "KERNEL", text)
    seen: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()

    def renumbered(match: re.Match[str]) -> str:
        token, kind = match.group(0), match.group(1)
        if token not in seen:
            seen[token] = f"{kind}{counts[kind]}"
            counts[kind] += 1
        return seen[token]

    text = re.sub(r"(%[a-z]+|\$L__\w*?|KERNEL_param_)\d+(?:_\d+)?\b", renumbered, text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


@contextlib.contextmanager
def without_assembler() -> Iterator[None]:
    """Compile to PTX alone: assembling it takes most of the time, and nothing of it is compared."""
    from triton.backends.nvidia.compiler import CUDABackend

    begin, add_stages = CUDABackend.__init__, CUDABackend.add_stages

    def init(self: Any, target: Any) -> None:
        begin(self, target)
        self.binary_ext = "ptx"

    def stages_to_ptx(self: Any, stages: dict[str, Any], *args: Any) -> None:
        add_stages(self, stages, *args)
        del stages["cubin"]

    with mock.patch.multiple(CUDABackend, __init__=init, add_stages=stages_to_ptx):
        yield


@functools.cache
def code_of(request: Any, capability: int) -> str:
    """Digest of the PTX that a request compiles to."""
    from triton.backends.compiler import GPUTarget

    compiler = places("compile_request")[0][2]
    with without_assembler():
        return short(normalised(compiler(request, GPUTarget("cuda", capability, 32)).asm["ptx"].decode()))


def described(asked: Mapping[str, Any]) -> dict[str, Any]:
    """One tree's answer about one row."""
    from tunedcomm import kernels, settings
    from tunedcomm.hardware import Environment
    from tunedcomm.spec import Problem, get_op, variants
    from tunedcomm.symm.layout import LaneLayout, limits_for

    if asked["variant"] not in variants(asked["op"]):
        return {"failed": "there is no such variant"}
    variant = variants(asked["op"])[asked["variant"]]
    problem = Problem.from_dict(asked["problem"])
    layout = LaneLayout.for_messages(settings.workspace_bytes())
    limits = limits_for(Environment(**asked["environment"]), problem.world_size, layout=layout)
    found: dict[str, Any] = {"source": kernels.source_hash(variant)}
    try:
        config = variant.space.validate(asked["config"])
        found |= {
            "version": variant.version,
            "numerics": variant.numerics,
            "num_blocks": variant.num_blocks(problem, config),
            "num_rounds": variant.num_rounds(problem, config),
            "infeasible": variant.infeasible(problem, config, limits),
            "defaults": short({name: v.default(problem, limits) for name, v in variants(asked["op"]).items()}),
        }
        requests = list(variant.compile_requests(problem, config))
        found["asked"] = sorted(short(options_of(request)) for request in requests)
    except Exception as error:  # noqa: BLE001 - whatever a variant raises is why its row is refused
        return found | {"failed": f"{type(error).__name__}: {error}"}
    try:
        found["events"], requests = launch_record(variant, get_op(asked["op"]), problem, config, layout)
    except Exception as error:  # noqa: BLE001 - such a variant is named in the report
        found["unbound"] = f"{type(error).__name__}: {str(error)[:200]}"
    alone = (dataclasses.replace(variant, kernels=(request.resolve(),), version=1) for request in requests)
    found["kernels"] = [kernels.source_hash(one) for one in alone]
    found["constants"] = [dict(request.constants) for request in requests]
    if asked.get("ptx"):
        try:
            found["ptx"] = [code_of(request, asked["environment"]["compute_capability"]) for request in requests]
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is why a row is refused
            found["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def options_of(request: Any) -> dict[str, Any]:
    """The options of a request, without the kernel's name and constants."""
    names = (f.name for f in dataclasses.fields(request))
    return {name: getattr(request, name) for name in names if name not in ("module", "function", "constants")}


def answer() -> None:
    """Answer for one tree: a line of JSON on stdout for each on stdin."""
    from tunedcomm import kernels

    here = Path(kernels.__file__).parents[2]
    assert here.samefile("."), f"tunedcomm was imported from {here} instead of {Path.cwd()}"
    import_everything()
    for line in sys.stdin:
        print(json.dumps(described(json.loads(line))), flush=True)


def ask(tree: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row's answer by the sources of one tree."""
    if not rows:
        return []
    given = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    unseen = {"PYTHONPATH": os.pathsep.join([str(tree), *given]), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    begin = f"import sys; sys.path.append({str(HERE.parent)!r}); import same_code"
    command = [sys.executable, "-c", f"{begin}; same_code.answer()"]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    done = subprocess.run(
        command, input=lines, env={**os.environ, **unseen}, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Why a row is not the same in both trees, or None; code is compared as far as it is told."""
    for name, tree in (("before", before), ("now", after)):
        if "failed" in tree:
            return f"{name}: {tree['failed']}"
    for key in ("version", "numerics", "num_blocks", "num_rounds", "infeasible", "defaults", "asked"):
        if before[key] != after[key]:
            return f"{key}: was {before[key]}, is {after[key]}"
    if ("unbound" in before) != ("unbound" in after):
        return f"binding fails in one tree alone: {before.get('unbound') or after.get('unbound')}"
    old, new = before.get("events", []), after.get("events", [])
    for number, (was, now) in enumerate(zip(old, new, strict=False)):
        if was != now:
            return f"event {number}: was {was}, is {now}"
    if len(old) != len(new):
        return f"there were {len(old)} events and are {len(new)}"
    if before["kernels"] == after["kernels"] and before["constants"] != after["constants"]:
        return f"constants: were {before['constants']}, are {after['constants']}"
    if "ptx" in before and "ptx" in after and before["ptx"] != after["ptx"]:
        return "a kernel compiles to other code"
    return None


def compared(before: Path, rows: Sequence[dict[str, Any]], *, full: bool) -> list[tuple[str | None, Any, Any]]:
    """(difference or None, before, after) of each row."""
    trees = before.resolve(), HERE.parents[1]
    answers = [ask(tree, [{**row, "ptx": full} for row in rows]) for tree in trees]
    both = list(zip(*answers, strict=True))
    # Where the kernels of an equal row have other sources, their PTX decides.
    again = [i for i, (old, new) in enumerate(both) if not difference(old, new) and old["kernels"] != new["kernels"]]
    if not full:
        answers = [ask(tree, [{**rows[i], "ptx": True} for i in again]) for tree in trees]
        for i, pair in zip(again, zip(*answers, strict=True), strict=True):
            both[i] = pair
    return [(difference(*pair), *pair) for pair in both]


def asked_of(trial: Any) -> dict[str, Any]:
    """The question about a row to a tree."""
    from tunedcomm.hardware import HARD_FIELDS

    return {
        "op": trial.problem.op,
        "variant": trial.variant,
        "problem": trial.problem.to_dict(),
        "config": dict(trial.config),
        "environment": {name: getattr(trial.environment, name) for name in HARD_FIELDS},
    }


def keep(database: Any, trials: Sequence[Any]) -> None:
    """Give rows today's source hashes; where none of a variant is left with the old one, its entry goes."""
    from tunedcomm.db.schema import TrialRow, VariantRow
    from tunedcomm.db.store import get_or_create
    from tunedcomm.kernels import source_hash_of

    def change(connection: Any) -> None:
        renewed = [dataclasses.replace(t, source_hash=source_hash_of(t.problem.op, t.variant) or "") for t in trials]
        ids = get_or_create(connection, (trial.stored_variant for trial in renewed))
        left = set(get_or_create(connection, (trial.stored_variant for trial in trials)).values())
        for trial in renewed:
            moved = update(TrialRow).where(TrialRow.id == trial.id)
            connection.execute(moved.values(variant_id=ids[trial.stored_variant]))
        unused = VariantRow.id.not_in(select(TrialRow.variant_id))
        connection.execute(delete(VariantRow).where(VariantRow.id.in_(left), unused))

    database.change(change)


def checked(path: Path, before: Path, ops: Sequence[str], *, full: bool) -> int:
    """Compare, report and re-key one database; returns how many rows differ."""
    from tunedcomm.db.store import Database

    with Database.open(path, readonly=True) as database:
        trials = [trial for trial in database.trials() if not ops or trial.problem.op in ops]
    keys = [json.dumps(asked_of(trial), sort_keys=True) for trial in trials]
    distinct = sorted(set(keys))
    results = compared(before, [json.loads(key) for key in distinct], full=full)
    by_key = dict(zip(distinct, results, strict=True))
    refused: dict[tuple[str, str], int] = collections.Counter()
    unbound: dict[tuple[str, str], int] = collections.Counter()
    kept, num_equal, num_old = [], 0, 0
    for trial, key in zip(trials, keys, strict=True):
        why, old, new = by_key[key]
        name = f"{trial.problem.op}.{trial.variant}"
        if trial.source_hash not in (old.get("source"), new.get("source")):
            num_old += 1
        elif why is not None:
            refused[name, why] += 1
        else:
            num_equal += 1
            if "unbound" in new:
                unbound[name, new["unbound"]] += 1
            if trial.source_hash != new["source"]:
                kept.append(trial)
    if kept:
        with Database.open(path) as database:
            keep(database, kept)
    how = "by PTX" if full else "by sources, else PTX"
    print(
        f"{path}: {num_equal} of {len(trials)} rows equal (code {how}), {len(kept)} took the new hash, "
        f"{sum(refused.values())} differ, {num_old} current in neither tree"
    )
    for (name, why), count in sorted(unbound.items()):
        print(f"  not bound, requests and counts compared alone: {name}, {count} rows: {why}")
    for (name, why), count in sorted(refused.items()):
        print(f"  differs: {name}, {count} rows: {why[:600]}")
    return sum(refused.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout with the code from before the edit")
    parser.add_argument("--full", action="store_true", help="compare the PTX of every kernel")
    parser.add_argument("--op", action="append", default=[], help="compare rows of this op alone (may be repeated)")
    parser.add_argument("databases", type=Path, nargs="+", help="databases; changed where rows take a new hash")
    args = parser.parse_args()
    from tunedcomm import kernels

    kernels.discover()
    return 1 if sum(checked(path, args.before, args.op, full=args.full) for path in args.databases) else 0


if __name__ == "__main__":
    sys.exit(main())
