"""Contenders of a benchmark: dispatch, the library, every variant, the GEMM alone, PyTorch's operators and adapters.

An adapter is a file that runs another project's kernels; tunedcomm/peers.py says what such a file holds.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm import kernels
from tunedcomm.bench import nccl_symmetric
from tunedcomm.bench.csv import CUBLAS
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.decide import decide
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.all_reduce_rms_norm.op import Given, add_and_norm, form_of, given_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.dcp_combine.merge import merged_fast
from tunedcomm.kernels.dcp_combine.op import exchange_by_library
from tunedcomm.kernels.gemm.op import (
    SCALED_MULTIPLE,
    gemm_layout,
    operands_of,
    out_itemsize,
    product,
    product_reference,
    rows_of,
    usual_dtype,
)
from tunedcomm.ops import path_of, run_problem
from tunedcomm.ops.symmetric import symmetric_empty
from tunedcomm.peers import LeftOut, Peer, Tensors, default_group, need_rendezvous, symmetric
from tunedcomm.spec import Candidate, Problem, check_candidate, get_op, get_variant, usual_variants, variants
from tunedcomm.tuner.measure.timing import further_turns, num_turns

_ONE_SHOT_BYTES = 32 << 20  # a one-shot of more bytes is slower than NCCL
_GRANULE = 16  # bytes a rank that PyTorch's kernels move at once
_DTYPES = ("bfloat16", "float32")
_NATIVE_ROWS = 128  # of the only tile of PyTorch's native GEMM: a shard is whole tiles


@dataclass(slots=True, eq=False)
class Contender:
    """A contender at one problem.

    Attributes:
        name, config: columns of the row.
        num_sms: blocks that the contender occupies; None where not known.
        turns: inputs that launches take in turn.
        run: launches with one of these inputs on the current stream; returns the outputs.
        inputs_of: the op's inputs to the contender's inputs, if they differ.
        reference: computes the expected results, if they differ from the op's reference.
        is_peer: another project's code, which is left out where it fails.
        results: outputs of the last launch.
    """

    name: str
    config: str
    num_sms: int | None
    turns: tuple[Tensors, ...]
    run: Callable[[Tensors], Tensors]
    inputs_of: Callable[[Tensors], Tensors] | None = None
    reference: Callable[[], Tensors] | None = None
    is_peer: bool = False
    results: Tensors = ()

    def load(self, values: Tensors) -> None:
        """Copy the op's inputs into all turns."""
        values = values if self.inputs_of is None else self.inputs_of(values)
        for targets in self.turns:
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    def launch(self, inputs: Tensors, outputs: Tensors = (), stream: int = 0) -> None:
        """Run once on the current stream and keep the outputs; this is the launch that is timed."""
        self.results = self.run(inputs)


@dataclass(slots=True, eq=False)
class Contenders:
    """The contenders of one problem, and (name, reason) of those that were left out."""

    present: list[Contender] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def first_reason(reason: str | None) -> str | None:
    """The first rank's reason to leave a peer out, the same on every rank; None if no rank has one. Collective."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((found for found in reasons if found is not None), None)


def contenders_of(
    communicator: Communicator,
    problem: Problem,
    inputs: Tensors,
    names: Sequence[str] | None,
    adapters: Sequence[Adapter] = (),
) -> Contenders:
    """All contenders that can run `problem`, the library first. Collective.

    A contender with several settings comes several times. `names` selects contenders besides the library, by default
    all but interpreted kernels; one that is named and cannot run is left out with the reason. `adapters` are added to
    PyTorch's operators.
    """
    spec = get_op(problem.op)
    turns = (inputs, *further_turns(inputs, cold=spec.time_cold and problem.input_kind == "plain"))
    found = Contenders([_library(communicator, problem, turns)])

    def is_wanted(name: str) -> bool:
        return names is None or name in names

    if is_wanted("tuned"):
        chosen = decide(problem, communicator.snapshot, communicator.limits).candidate
        launch = None if path_of(problem) else communicator.bind(problem, chosen)
        found.present.append(_ours("tuned", problem, chosen, turns, launch))
    usual = usual_variants(problem.op, on_gpu=communicator.device.type == "cuda")
    for name in variants(problem.op):
        if name != "library" and name in (usual if names is None else names):
            found.present += _variant(communicator, problem, name, turns)
    if spec.is_gemm and is_wanted(CUBLAS):
        found.present.append(_gemm_alone(problem, turns))
    count = num_turns(inputs, cold=spec.time_cold)
    for adapter in (*TORCH_PEERS, *adapters):
        if is_wanted(adapter.name):
            _add_peers(found, adapter, problem, communicator.device, count)
    known = {contender.name for contender in found.present} | {name for name, _ in found.left_out}
    found.left_out += [(name, _why_not(communicator, problem, name)) for name in names or () if name not in known]
    return found


def _why_not(communicator: Communicator, problem: Problem, name: str) -> str:
    """The reason why a contender that was named has nothing to run."""
    if name == CUBLAS:
        return f"{problem.op} has no GEMM"
    if (variant := variants(problem.op).get(name)) is None:
        return f"it does not serve {problem} on {communicator.device.type}"
    candidate = Candidate.of(problem.op, name, variant.default_config(problem, communicator.limits))
    return check_candidate(problem, candidate, communicator.limits) or "its kernel takes more of an SM than there is"


def _ours(
    name: str, problem: Problem, candidate: Candidate, turns: tuple[Tensors, ...], launch: Launch | None
) -> Contender:
    """A contender that writes into the op's outputs: a bound launch, or without one the op's public function."""
    device, in_place = turns[0][0].device, problem.in_place
    on_gpu = device.type == "cuda"
    made = () if in_place else get_op(problem.op).make_outputs(problem, device)
    if get_op(problem.op).symmetric_outputs and problem.input_kind == "symmetric":
        made = tuple(symmetric_empty(each.shape, dtype=each.dtype, device=device) for each in made)

    def run(inputs: Tensors) -> Tensors:
        outputs = inputs if in_place else made
        if launch is None:
            run_problem(problem, inputs, outputs)
        else:
            launch(inputs, outputs, torch.cuda.current_stream().cuda_stream if on_gpu else 0)
        return outputs

    if name == "library":
        return Contender(name, "in place" if in_place else "", None, turns, run)
    blocks = get_variant(problem.op, candidate.variant).num_blocks(problem, candidate.config_dict)
    return Contender(name, str(candidate), blocks if blocks >= 0 else None, turns, run)


def _library(communicator: Communicator, problem: Problem, turns: tuple[Tensors, ...]) -> Contender:
    """NCCL (gloo) on plain memory; in place where the op allows it, which needs no copy."""
    spec, candidate = get_op(problem.op), Candidate.of(problem.op, "library", {})
    plain = replace(problem, in_place=spec.in_place, input_kind="plain")
    inputs = turns if spec.time_cold else (tuple(torch.empty_like(x) for x in turns[0]),)
    return _ours("library", plain, candidate, inputs, communicator.bind(plain, candidate))


def _variant(communicator: Communicator, problem: Problem, name: str, turns: tuple[Tensors, ...]) -> list[Contender]:
    """A variant with its best stored config for the problem, else its default config; nothing if neither can run."""
    variant = get_variant(problem.op, name)
    rows = [
        row
        for row in communicator.snapshot.family_rows(problem)
        if row.problem == problem and row.candidate.variant == name and row.source_hash == kernels.source_hash(variant)
    ]
    candidates = [row.candidate for row in sorted(rows, key=lambda row: row.latency_p50_us)]
    candidates.append(Candidate.of(problem.op, name, variant.default_config(problem, communicator.limits)))
    for candidate in candidates:
        if check_candidate(problem, candidate, communicator.limits) is None:
            with contextlib.suppress(InfeasibleError):  # its binary needs more of an SM than its variant estimated
                return [_ours(name, problem, candidate, turns, communicator.bind(problem, candidate))]
    return []


def _gemm_alone(problem: Problem, turns: tuple[Tensors, ...]) -> Contender:
    """The library's GEMM of a fused problem: the time of a fused kernel if communication cost nothing."""

    def inputs_of(values: Tensors) -> Tensors:
        """Operands of the whole GEMM; where A is gathered, this rank's rows stand for all ranks' rows."""
        if problem.op != "ag_gemm":
            return values
        repeated = (problem.world_size, 1)
        a, *rest = values
        if problem.scaling == "rowwise":
            rest[-2] = rest[-2].repeat(repeated)
        return a.repeat(repeated), *rest

    held = tuple(inputs_of(inputs) for inputs in turns)
    dtype = getattr(torch, gemm_layout(problem).dtype)
    out = torch.empty(problem.shape[:2], dtype=dtype, device=turns[0][0].device)

    def run(inputs: Tensors) -> Tensors:
        product(problem, operands_of(problem, inputs), out)  # without a bias
        return (out,)

    def reference() -> Tensors:
        return (product_reference(problem, held[0]),)

    return Contender(CUBLAS, "", None, held, run, inputs_of=inputs_of, reference=reference)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A contender's name, and the function that makes its settings for a problem."""

    name: str
    peers: Callable[[Problem, torch.device], Iterable[Peer]]


def load_adapter(path: Path) -> Adapter:
    """The adapter in a file; a file that cannot be loaded refuses every problem with the reason."""
    spec = importlib.util.spec_from_file_location(f"tunedcomm_peer_{path.stem}", path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "see above"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return Adapter(path.stem, module.peers)
    except Exception as error:  # noqa: BLE001 - another project's file; its error is the reason
        why = f"{path} cannot be loaded: {type(error).__name__}: {error}"

    def refuse(problem: Problem, device: torch.device) -> Iterable[Peer]:
        raise LeftOut(why)

    return Adapter(path.stem, refuse)


def _add_peers(found: Contenders, adapter: Adapter, problem: Problem, device: torch.device, count: int) -> None:
    """Add an adapter's settings if all ranks have the same settings, else the reason to leave the adapter out."""
    made: list[Contender] = []
    reason: str | None = None
    try:
        for peer in adapter.peers(problem, device):
            turns = tuple(peer.allocate() for _ in range(count))
            made.append(Contender(adapter.name, peer.config, peer.num_sms, turns, peer.run, is_peer=True))
    except LeftOut as why:
        reason = str(why)
    except ModuleNotFoundError as error:
        reason = f"{error.name} cannot be imported here"
    except Exception as error:  # noqa: BLE001 - another project's code; its error is the reason
        reason = f"it raised {type(error).__name__}: {error}"
    reason = first_reason(reason)
    if reason is None:
        settings: list[Any] = [None] * problem.world_size
        dist.all_gather_object(settings, [peer.config for peer in made])
        if any(other != settings[0] for other in settings):
            reason = f"its settings differ from rank to rank: {settings}"
    if reason is None:
        found.present += made
    else:
        found.left_out.append((adapter.name, reason))


# PyTorch's operators. Inputs in symmetric memory, where there is a choice, suit them best.


def _suits(problem: Problem, device: torch.device, op: str) -> bool:
    if problem.op != op or device.type != "cuda" or problem.reduction not in ("sum", ""):
        return False
    if problem.world_size not in (2, 4, 8):
        raise LeftOut(f"PyTorch's operators were made for 2, 4 or 8 ranks, not {problem.world_size}")
    if problem.dtype not in _DTYPES:
        raise LeftOut(f"PyTorch's operators take {' and '.join(_DTYPES)}, not {problem.dtype}")
    if problem.numel == 0 or problem.nbytes % (_GRANULE * problem.world_size):
        raise LeftOut(f"{problem.nbytes} bytes are not a multiple of {_GRANULE} for each of {problem.world_size} ranks")
    need_rendezvous(device)
    return True


def _torch_all_reduce(
    problem: Problem, device: torch.device, *, two_shot: bool = False, plain: bool = False
) -> Iterator[Peer]:
    """One of PyTorch's all_reduces on inputs in symmetric memory, or on `plain` ones, which are copied there."""
    if not _suits(problem, device, "all_reduce") or (plain and problem.input_kind != "plain"):
        return
    if not two_shot and problem.nbytes > _ONE_SHOT_BYTES:
        raise LeftOut(f"a one-shot of more than {_ONE_SHOT_BYTES >> 20} MiB only takes time")
    operators, name = torch.ops.symm_mem, default_group().group_name
    make = partial(symmetric, problem.shape, problem.dtype, device)
    plain_tensor = partial(torch.empty, problem.shape, dtype=getattr(torch, problem.dtype), device=device)
    in_place = two_shot and not plain
    staging, out = make() if plain else None, None if in_place else plain_tensor()

    def run(inputs: Tensors) -> Tensors:
        if in_place:
            operators.two_shot_all_reduce_(inputs[0], "sum", name)
            return inputs
        assert out is not None, "only calls in place have none"
        if staging is None:
            operators.one_shot_all_reduce_out(inputs[0], "sum", name, out)
        elif two_shot:
            staging.copy_(inputs[0])
            operators.two_shot_all_reduce_(staging, "sum", name)
            out.copy_(staging)
        else:
            operators.one_shot_all_reduce_copy_out(staging, inputs[0], "sum", name, out)
        return (out,)

    yield Peer("in place" if in_place else "", lambda: ((plain_tensor if plain else make)(),), run)


def _low_contention(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """The gather by copy engines, and the exchange with a sum behind it, that PyTorch's compiler may choose."""
    if problem.op not in ("all_gather", "reduce_scatter") or not _suits(problem, device, problem.op):
        return
    name, gathers = default_group().group_name, problem.op == "all_gather"
    rows = problem.numel if gathers else problem.numel * problem.world_size
    operators = torch.ops.symm_mem

    def run(inputs: Tensors) -> Tensors:
        if gathers:
            found = operators._low_contention_all_gather(inputs[0], name)
        else:
            found = operators._low_contention_reduce_scatter(inputs[0], "sum", name)
        return (torch.ops._c10d_functional.wait_tensor(found),)

    # The operators run on another stream; `wait_tensor` joins it.
    yield Peer("", lambda: (symmetric((rows,), problem.dtype, device),), run)


def _compiled_norm(problem: Problem, device: torch.device, *, windows: bool = False) -> Iterator[Peer]:
    """NCCL in place, which needs no copy, then one kernel of PyTorch's compiler: what a model without us runs.

    With `windows` the sum is in a symmetric window, as a model can have it.
    """
    if problem.op != "all_reduce_rms_norm" or device.type != "cuda":
        return
    spec = get_op(problem.op)
    compiled = torch.compile(add_and_norm, dynamic=False, fullgraph=True)

    def make() -> Tensors:
        return spec.make_inputs(problem, 0, 0, "random", device)

    def norm(given: Given) -> Any:
        return compiled(given.x, given, form_of(problem))

    try:
        norm(given_of(problem, make()))
    except Exception as error:  # whatever the compiler raises; the plain library is there all the same
        raise LeftOut(f"torch.compile raised {type(error).__name__}: {str(error).splitlines()[0]}") from error

    def run(inputs: Tensors) -> Tensors:
        given = given_of(problem, inputs)
        dist.all_reduce(given.x)
        return tuple(norm(given))

    yield Peer("in place", make, run)


def _compiled_merge(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """NCCL's two exchanges, then one kernel of PyTorch's compiler that merges."""
    if problem.op != "dcp_combine" or device.type != "cuda":
        return
    compiled, group = torch.compile(merged_fast, dynamic=False, fullgraph=True), default_group()
    dtype = getattr(torch, problem.dtype)

    def run(inputs: Tensors) -> Tensors:
        out, lse = compiled(*exchange_by_library(problem, inputs, group), problem.layout, torch.float32)
        return out.to(dtype), lse

    yield Peer("", partial(get_op(problem.op).make_inputs, problem, 0, 0, "random", device), run)


def _fused_gemm(problem: Problem, device: torch.device) -> Iterator[Peer]:
    """PyTorch's operators of asynchronous tensor parallelism. They return memory of their own, which is copied."""
    gathers = problem.op == "ag_gemm"
    if not (gathers or problem.op == "gemm_rs") or device.type != "cuda" or problem.reduction not in ("", "sum", "avg"):
        return
    need_rendezvous(device)
    _check_fused_gemm(problem, gathers=gathers)
    operators = _gathers_with_gemm(problem) if gathers else {"": _gemm_with_scatter(problem)}
    spec = get_op(problem.op)
    outputs = spec.make_outputs(problem, device)

    def run(inputs: Tensors, *, operator: Callable[[Tensors], Tensors]) -> Tensors:
        for target, value in zip(outputs, operator(inputs), strict=True):
            target.copy_(value)
        return outputs

    allocate = partial(spec.make_inputs, problem, 0, 0, "random", device)
    for config, operator in operators.items():
        yield Peer(config, allocate, partial(run, operator=operator))


def _check_fused_gemm(problem: Problem, *, gathers: bool) -> None:
    """Raise LeftOut for what PyTorch's fused operators do not serve."""
    wanted, (m, n, k), ranks, scaled = gemm_layout(problem), problem.shape, problem.world_size, bool(problem.scaling)
    if problem.numel == 0 or m % ranks:
        raise LeftOut(f"PyTorch's operators need the same number of rows on each of {ranks} ranks, not {m}")
    if (problem.dtype == "float8_e4m3fn") != scaled:
        raise LeftOut("PyTorch's operators scale fp8 operands and no others")
    if scaled and (n % SCALED_MULTIPLE or k % SCALED_MULTIPLE):
        raise LeftOut(f"PyTorch multiplies fp8 matrices by whole {SCALED_MULTIPLE} rows and columns, not {(n, k)}")
    if scaled and not (gathers or wanted.nk):
        raise LeftOut("PyTorch's scaled products need b stored [N, K]")
    if wanted.dtype != usual_dtype(problem.dtype) and not (gathers and scaled):
        raise LeftOut(f"PyTorch's fused operators do not make {wanted.dtype} of {problem.dtype}")


def _gemm_with_scatter(problem: Problem) -> Callable[[Tensors], Tensors]:
    """A launch of the GEMM with a reduce_scatter behind it, which returns the result."""
    wanted, (m, n, _), name = gemm_layout(problem), problem.shape, default_group().group_name
    symm_mem.get_symm_mem_workspace(name, m * n * out_itemsize(problem))  # cannot grow while a graph is captured

    def run(inputs: Tensors) -> Tensors:
        a, b, _, scale_a, scale_b = operands_of(problem, inputs)
        b = b.T if wanted.nk else b
        if not problem.scaling:
            return (torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, problem.reduction, 0, name),)
        operator, dtype = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, getattr(torch, wanted.dtype)
        return (operator(a, b, scale_a, scale_b, problem.reduction, 0, 0, name, [m, n], out_dtype=dtype),)

    return run


def _gathers_with_gemm(problem: Problem) -> dict[str, Callable[[Tensors], Tensors]]:
    """Launches of the gather with a GEMM behind it, by setting; they return the product and, if wanted, the gathered A.

    `native` is the form with a persistent GEMM that waits for progress signals. Otherwise the operator chooses between
    its forms by a rule of its own.
    """
    wanted, (_, n, k), name = gemm_layout(problem), problem.shape, default_group().group_name
    operators = torch.ops.symm_mem

    def run(inputs: Tensors, *, native: bool) -> Tensors:
        a, b, _, scale_a, scale_b = operands_of(problem, inputs)
        b = b.T if wanted.nk else b
        if native:
            gathered, result = symm_mem._fused_all_gather_matmul_native(a, b, name)
        elif problem.scaling:
            b = b if wanted.nk else b.T.contiguous().T  # multiplies by columns only
            dtype = getattr(torch, wanted.dtype)
            gathered, (result,) = operators.fused_all_gather_scaled_matmul(
                a, [b], scale_a, [scale_b], 0, name, [None], [None], [dtype], [False]
            )
        else:
            gathered, (result,) = operators.fused_all_gather_matmul(a, [b], 0, name, return_A=wanted.gathered)
        return (result, gathered) if wanted.gathered else (result,)

    whole_tiles = rows_of(problem) % _NATIVE_ROWS == 0 and n % 8 == 0 and k % 8 == 0
    present = hasattr(symm_mem, "_fused_all_gather_matmul_native") and hasattr(operators, "_async_input_mm")
    has_native = problem.dtype == "bfloat16" and whole_tiles and present
    return {f"native={native}": partial(run, native=native) for native in ((False, True) if has_native else (False,))}


TORCH_PEERS = (
    Adapter("torch_one_shot", partial(_torch_all_reduce, plain=True)),
    Adapter("torch_two_shot", partial(_torch_all_reduce, two_shot=True, plain=True)),
    Adapter("torch_one_shot_symmetric", _torch_all_reduce),
    Adapter("torch_two_shot_symmetric", partial(_torch_all_reduce, two_shot=True)),
    Adapter("torch_fused", _fused_gemm),
    Adapter("torch_low_contention", _low_contention),
    Adapter("nccl_compiled_norm", _compiled_norm),
    Adapter("nccl_symmetric", nccl_symmetric.peers),
    Adapter("nccl_symmetric_compiled_norm", partial(_compiled_norm, windows=True)),
    Adapter("nccl_compiled_merge", _compiled_merge),
)
