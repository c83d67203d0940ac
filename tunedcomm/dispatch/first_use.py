"""The check of a borrowed candidate before its first call on a machine where nobody measured it.

The rows of other hardware say which candidate is probably best; ops with a `shape_reach` also run kernels where nothing
near was measured. That such a candidate is right here, and faster than the library here, is found out at the first call
of a problem, outside of captures, by all ranks of the group together; after three problems of a family that it passed,
no further one is checked:

1. All ranks bind the candidate and make the op's own samples, of at most `_MOST_BYTES`. They vote, and nothing is
   launched unless every rank is ready. Rank 0 notes that the check begins: if it ends the process, the next start does
   not try again.
2. Candidate and library are launched with the same samples, random ones and, the first time for a dtype, whole numbers.
   The results are compared as TUNEDCOMM_CHECK compares them.
3. Both are timed, where the sample has the size of the call. The slowest rank counts. The library stays where it is
   faster, three times in a row.

The ranks exchange what they found, so they come to one outcome, which becomes part of everyone's snapshot. Rank 0 alone
reads and writes the file of outcomes (`tunedcomm.db.sidecar`).
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tunedcomm.db.sidecar import begin_check, store_check
from tunedcomm.dispatch.communicator import Communicator
from tunedcomm.dispatch.compare import fault_of, fresh_copies, is_out_of_memory, norm_of_input
from tunedcomm.dispatch.launches import no_intercept
from tunedcomm.errors import GroupAbortedError, InfeasibleError, PeerTimeoutError, WorkspaceError
from tunedcomm.kernels import source_hash_of
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.reference import fill_sentinel
from tunedcomm.metrics import format_us
from tunedcomm.selection.snapshot import Check, CheckStatus
from tunedcomm.spec import Candidate, Problem, get_op, get_variant
from tunedcomm.state import clean_thread
from tunedcomm.symm.buffer import by_reason
from tunedcomm.symm.workspace import allocate

logger = logging.getLogger("tunedcomm")

# Larger problems are checked at a smaller size of their family.
_MOST_BYTES = 64 << 20
_TIMED_LAUNCHES = 10
_MOST_ROUNDS = 3
_SEED = 20_011
# The GPU waits so long before timed launches in graph mode that the host has enqueued them all.
_LEAD_CYCLES = 1_000_000

_Tensors = tuple[torch.Tensor, ...]


class _Call(NamedTuple):
    """One launch of the candidate, with what the library needs to give the same results."""

    inputs: _Tensors
    outputs: _Tensors
    copies: tuple[Any, ...]
    expected: _Tensors


class _Outcome(NamedTuple):
    status: CheckStatus
    why: str = ""


def is_due(communicator: Communicator, problem: Problem, candidate: Candidate) -> bool:
    """True if the candidate was not checked here at this problem."""
    if candidate.variant == "library":
        return False
    source_hash = source_hash_of(candidate.op, candidate.variant) or ""
    return communicator.snapshot.is_unchecked(problem, candidate, source_hash)


def check(communicator: Communicator, problem: Problem, candidate: Candidate) -> None:
    """Check a borrowed or unproven candidate and keep the outcome in the snapshot; collective, never in a capture.

    Raises:
        PeerTimeoutError: the candidate timed out waiting for a peer; the outcome is kept.
        GroupAbortedError: another rank raised in the check; the outcome is kept.
    """
    source_hash = source_hash_of(candidate.op, candidate.variant) or ""
    made = Check(problem=problem, candidate=candidate, source_hash=source_hash, status="skipped")
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun = True
        if communicator.rank == 0:
            begin_check(communicator.environment, made)

    def keep(outcome: _Outcome) -> None:
        found = replace(made, status=outcome.status, why=outcome.why)
        communicator.snapshot = communicator.snapshot.with_checks(found)
        if communicator.rank == 0 and has_begun:
            store_check(communicator.environment, found)

    communicator.queue.join()
    in_full = not communicator.snapshot.was_checked(*made.key)
    try:
        with no_intercept(), clean_thread():
            outcome = _outcome(communicator, problem, candidate, begin, in_full=in_full)
    except Exception as error:
        keep(_Outcome("failed", f"its check on this machine ended with {type(error).__name__}: {error}"))
        raise
    keep(outcome)
    if outcome.status == "failed":
        communicator.forget_plans()  # of other problems, with this candidate
        if communicator.rank == 0:
            logger.warning(
                "%s is not used on this machine, where no row of it was measured: %s", candidate, outcome.why
            )
    else:
        logger.info("%s: the check of %s %s. %s", problem, candidate, outcome.status, outcome.why)


def _outcome(
    communicator: Communicator, problem: Problem, candidate: Candidate, begin: Callable[[], None], *, in_full: bool
) -> _Outcome:
    if problem.dtype == "float32" and get_op(problem.op).is_gemm and _products_are_lowered():
        return _Outcome("skipped", "the program lowers the precision of fp32 products, with which nothing can compare")
    sample = _sample(communicator, problem, candidate)
    if sample is None:
        return _Outcome("skipped", f"no size up to {_MOST_BYTES >> 20} MiB of it can be checked")
    plain = replace(sample, input_kind="plain")
    refusal = _Outcome("skipped")
    calls: list[_Call] = []
    launch = by_library = None
    try:
        _synchronize(communicator)
        launch = communicator.bind(sample, candidate, for_calls=True)
        by_library = communicator.bind(plain, Candidate.of(problem.op, "library", {}), for_calls=True)
        calls = [_call(communicator, sample, kind) for kind in ("random", "integers")[: 1 + in_full]]
    except (InfeasibleError, WorkspaceError) as error:
        refusal = _Outcome("skipped", str(error))
    except (PeerTimeoutError, GroupAbortedError):
        raise
    except Exception as error:  # noqa: BLE001 - the ranks vote on it
        refusal = _refusal_for(error)
    refusals: list[_Outcome] = communicator.exchange(refusal)
    if why := by_reason([each.why for each in refusals]):
        return _Outcome("failed" if any(each.status == "failed" for each in refusals) else "skipped", why)
    assert launch is not None
    assert by_library is not None
    if sample.input_kind == "symmetric":
        try:
            calls = [_addressed_by_peers(communicator, sample, call) for call in calls]
        except WorkspaceError as error:  # on every rank
            return _Outcome("skipped", str(error))
    begin()
    fault = ""
    for call in calls:
        fault = fault or _fault(communicator, sample, launch, by_library, call)
    communicator.check_peers()
    faults: list[str] = communicator.exchange(fault)
    outcome = (
        _Outcome("failed", f"it gave another result than the library at {sample} ({why})")
        if (why := by_reason(faults))
        else _Outcome("passed")
    )
    is_interpreted = communicator.limits.backend == "host" and bool(get_variant(problem.op, candidate.variant).kernels)
    if not why and sample == problem and not is_interpreted:
        outcome = _timed(communicator, sample, launch, by_library, calls[0])
    _release(communicator, sample, calls)
    return outcome


def _refusal_for(error: Exception) -> _Outcome:
    if is_out_of_memory(error):
        return _Outcome("skipped", "no memory for its check")
    return _Outcome("failed", f"it does not compile: {type(error).__name__}: {error}")


def _timed(communicator: Communicator, sample: Problem, launch: Launch, by_library: Launch, call: _Call) -> _Outcome:
    """`slower` if the library was faster in every one of `_MOST_ROUNDS` rounds, for one round may be disturbed."""
    for tensor in (*call.inputs, *call.copies) if sample.in_place else ():
        tensor.zero_()  # sums of sums would overflow
    said = ""
    for _ in range(_MOST_ROUNDS):
        times = (
            _median_us(communicator, sample, lambda stream: launch(call.inputs, call.outputs, stream)),
            _median_us(communicator, sample, lambda stream: by_library(call.copies, call.expected, stream)),
        )
        communicator.check_peers()
        found: list[tuple[float, float]] = communicator.exchange(times)
        own_us, library_us = (max(each[index] for each in found) for index in (0, 1))
        said = f"it took {format_us(own_us)} µs here and the library {format_us(library_us)} µs"
        if own_us <= library_us:
            return _Outcome("passed")
    return _Outcome("slower", said)


def _products_are_lowered() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch refuses to tell where a program has set a part of it
        return True


def _sample(communicator: Communicator, problem: Problem, candidate: Candidate) -> Problem | None:
    """The problem, or if that is too large the largest one that the candidate can run: borrowed, or of fewer tokens.

    Only ops that run unmeasured have the latter.
    """
    spec = get_op(problem.op)

    def nbytes(of: Problem) -> int:
        return spec.payload_bytes(spec.message_bytes(of), of.world_size)

    if nbytes(problem) <= _MOST_BYTES:
        return problem
    variant, rows = get_variant(problem.op, candidate.variant), communicator.snapshot.families(problem.op).items()
    shapes = {row.problem.shape for (_, borrowed), family in rows if borrowed for row in family}
    if spec.shape_reach:
        shapes |= {(problem.shape[0] >> halvings, *problem.shape[1:]) for halvings in range(1, 16)}
    smaller = [replace(problem, shape=shape) for shape in shapes if shape[1:] == problem.shape[1:]]
    fitting = [
        each
        for each in smaller
        if nbytes(each) <= _MOST_BYTES
        and variant.infeasible_reason(each, candidate.config_dict, communicator.limits) is None
    ]
    return max(fitting, key=nbytes, default=None)


def _call(communicator: Communicator, sample: Problem, kind: str) -> _Call:
    """A rank's tensors for one launch; outputs hold what no right result holds."""
    spec, device = get_op(sample.op), communicator.device
    inputs: _Tensors = spec.make_inputs(sample, communicator.rank, _SEED, kind, device)
    outputs = inputs if sample.in_place else spec.make_outputs(sample, device)
    copies, expected = fresh_copies(inputs, outputs)
    if not sample.in_place:
        fill_sentinel((*outputs, *expected))
    return _Call(inputs, outputs, copies, expected)


def _addressed_by_peers(communicator: Communicator, sample: Problem, call: _Call) -> _Call:
    """The call with its inputs, and outputs that peers address, in symmetric memory until `_release`; collective."""
    moved = []
    outputs = call.outputs if get_op(sample.op).symmetric_outputs else ()
    for tensor in (*call.inputs, *outputs):
        buffer = allocate(communicator.group, communicator.device, max(tensor.nbytes, 16))
        if communicator.workspace is not None:
            communicator.workspace.register(buffer.local, buffer)
        moved.append(buffer.local[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor))
    inputs, addressed = tuple(moved[: len(call.inputs)]), tuple(moved[len(call.inputs) :])
    return call._replace(inputs=inputs, outputs=inputs if sample.in_place else addressed or call.outputs)


def _release(communicator: Communicator, sample: Problem, calls: list[_Call]) -> None:
    """Forget the calls' symmetric memory, which no rank uses any more."""
    if sample.input_kind == "symmetric" and communicator.workspace is not None:
        for tensor in (tensor for call in calls for tensor in (*call.inputs, *call.outputs)):
            communicator.workspace.symmetric.pop(tensor.untyped_storage().data_ptr(), None)


def _fault(communicator: Communicator, sample: Problem, launch: Launch, by_library: Launch, call: _Call) -> str:
    """This rank's fault in one call, or ""."""
    stream, size = _stream(communicator), norm_of_input(sample, call.inputs)
    launch(call.inputs, call.outputs, stream)
    by_library(call.copies, call.expected, stream)
    _synchronize(communicator)
    communicator.check_peers()
    return fault_of(sample, call.inputs, call.outputs, call.expected, size)


def _median_us(communicator: Communicator, sample: Problem, launch: Callable[[int], None]) -> float:
    """Median of the times between launches: on the GPU as in a graph, else as eager calls have them."""
    stream = _stream(communicator)
    if communicator.device.type != "cuda":
        times = []
        for _ in range(_TIMED_LAUNCHES):
            begin_s = time.perf_counter()
            launch(stream)
            times.append(time.perf_counter() - begin_s)
        return 1e6 * statistics.median(times)
    made: Any = torch.cuda.Event
    events = [made(enable_timing=True) for _ in range(_TIMED_LAUNCHES + 1)]
    if sample.mode == "graph":
        torch.cuda._sleep(_LEAD_CYCLES)  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        launch(stream)
        event.record()
    _synchronize(communicator)
    return float(1e3 * statistics.median(one.elapsed_time(next_) for one, next_ in itertools.pairwise(events)))


def _stream(communicator: Communicator) -> int:
    device = communicator.device
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _synchronize(communicator: Communicator) -> None:
    """Wait for all of this rank's work on the GPU: graphs may be using the lane that the check takes."""
    if communicator.device.type == "cuda":
        torch.cuda.synchronize(communicator.device)
