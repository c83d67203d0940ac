"""Checks a candidate's results before it is timed: wrong and fast is the usual failure.

There are two depths, because a check costs more than a measurement:

- *full*, once per candidate and family of problems: one launch with random inputs and one with whole numbers, without a
  wait on the host between them, then one launch at each odd size near the shape;
- *light*, at every further shape: one launch with random inputs.

A candidate that was timed to the end is launched with whole numbers once more. Where it costs little, this late check
comes after enough launches that counters have passed 64, 128 and 1024: flags that wrap and buffers that are used again
go wrong late.

Every launch finds its outputs filled with NaN, and every rank starts after a random delay of its own. Inputs are
overwritten in stream order as soon as the rank's launch is over, so that a variant whose peers still read them fails.
`ordered` and `quantized` variants must give the op's exact bits. Other variants may differ by the op's tolerance on
random inputs, and must be exact on whole numbers that the dtype can hold.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from tunedcomm.spec import OpSpec, Problem

Tensors: TypeAlias = tuple[torch.Tensor, ...]

# Larger problems get one random launch alone; odd sizes are checked at smaller shapes.
LARGE_BYTES = 32 << 20
# Longest delay before a launch: several times as long as a barrier, or a launch on the host.
_MAX_DELAY_CYCLES = 200_000
_MAX_DELAY_S = 0.002

# Name of the exact result by reduction; ops without a reduction send elements unchanged.
_ORDERED = {"sum": "ordered sum", "avg": "ordered average", "max": "maximum", "min": "minimum"}

# Guard bytes before and behind inputs and outputs. Guards of inputs are NaN: a kernel that reads them gives a wrong
# result. Guards of outputs differ from them, so that guard bytes copied from input to output are found.
GUARD_BYTES = 16 << 10
_INPUT_GUARD, _OUTPUT_GUARD = 0xFF, 0xA5

# The late check: its case, the launches before it, and the most µs that these launches may take.
LATE_CASE = ("integers", 0)
_LATE_LAUNCHES = (1024, 128, 64)
_PAST = 8  # further launches after each count
_SEARCH_US, _FINAL_US = 20_000.0, 250_000.0

# A trial that takes less memory than this does not leak.
LEAK_BYTES = 8 << 20

_PRODUCT_EXTENTS = 3  # the product of more extents (tokens, experts) is no number of elements

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One rank's inputs and expected results.

    Attributes:
        kind: `random` or `integers`.
        inputs: this rank's inputs.
        expected: the results in float64.
        exact: the output's dtype holds `expected` without rounding.
        bits: the result of every ordered variant, in the output's dtype; None where the op promises no bits.
        quantized: the results that `quantized` variants may give.
        judged_bits: the judgement of `bits`, once a variant gave them; the same bits are not judged again.
    """

    kind: str
    inputs: Tensors
    expected: Tensors
    exact: bool
    bits: Tensors | None
    quantized: tuple[Tensors, ...] = ()
    judged_bits: list[Judgement] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One rank's judgement: the largest relative error, and the reason if the result is wrong."""

    error: float = 0.0
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason


def worst(found: Iterable[Judgement]) -> Judgement:
    """The first wrong judgement; if all are right, the largest error."""
    error = 0.0
    for one in found:
        if not one.right:
            return one
        error = max(error, one.error)
    return Judgement(error)


def plan_cases(problem: Problem, *, full: bool) -> list[tuple[str, int]]:
    """(kind, index) of the cases to launch at the problem's shape before it is timed, in order."""
    is_small = problem.nbytes <= LARGE_BYTES or len(problem.shape) > _PRODUCT_EXTENTS
    return [("random", 0), ("integers", 0)] if full and is_small else [("random", 0)]


def odd_problems(op: OpSpec, problem: Problem) -> list[Problem]:
    """Problems of shapes near this one that no vector width or world size divides evenly.

    Matrices lose or gain a row; GEMMs have no odd shapes.
    """
    if op.rank_of_shape > 2 or problem.nbytes > LARGE_BYTES:
        return []
    if op.rank_of_shape == 2:
        rows, columns = problem.shape
        return [replace(problem, shape=(count, columns)) for count in (rows - 1, rows + 1) if count > 0]
    numel = problem.shape[0]
    return [replace(problem, shape=(n,)) for n in (numel - 1, numel + 3) if n > 0]


def make_case(op: OpSpec, problem: Problem, rank: int, *, kind: str, seed: int, device: torch.device) -> Case:
    """Generate every rank's inputs from (seed, rank), and compute this rank's expected results."""
    everyone = [op.make_inputs(problem, peer, seed, kind, device) for peer in range(problem.world_size)]
    expected = op.reference(problem, everyone, rank)
    bits = op.ordered_reference(problem, everyone, rank) if op.ordered_reference else None
    refer = op.quantized_references if problem.scaling else None
    quantized = tuple(refer(problem, everyone, rank)) if refer else ()
    dtypes = [tensor.dtype for tensor in bits] if bits else [getattr(torch, problem.dtype)] * len(expected)
    exact = not quantized and all(bool((e.to(d).to(e.dtype) == e).all()) for e, d in zip(expected, dtypes, strict=True))
    return Case(kind, everyone[rank], expected, exact, bits, quantized)


@dataclass(frozen=True, slots=True, eq=False)
class Guarded:
    """A tensor and the guard bytes around it, which no launch may write.

    Attributes:
        tensor: the tensor that launches get.
        name: the tensor's name in sentences.
        before, behind: guard bytes next to the tensor; `before` is empty if the tensor begins an allocation.
        pattern: value of every guard byte.
    """

    tensor: torch.Tensor
    name: str
    before: torch.Tensor
    behind: torch.Tensor
    pattern: int


def guard(like: torch.Tensor, name: str, *, is_input: bool, room: torch.Tensor | None = None) -> Guarded:
    """A tensor like `like`, strides included, with guard bytes around it.

    `room` is memory (uint8) to use instead of a new allocation; the tensor begins at its start.
    """
    span = like.element_size() * (1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)))
    # The offset is a multiple of the allocators' alignment: the tensor is aligned as if it were alone.
    begin, size = (GUARD_BYTES, span if like.numel() else 0) if room is None else (0, like.nbytes)
    if room is None:
        padded = -(-size // 16) * 16
        room = torch.empty(2 * GUARD_BYTES + padded, dtype=torch.uint8, device=like.device)
    room = room[: begin + size + GUARD_BYTES]
    elements = room[begin : begin + size].view(like.dtype)
    tensor = elements.as_strided(like.shape, like.stride(), elements.storage_offset())
    pattern = _INPUT_GUARD if is_input else _OUTPUT_GUARD
    before, behind = room[:begin].fill_(pattern), room[begin + size :].fill_(pattern)
    return Guarded(tensor, name, before, behind, pattern)


def find_damage(guarded: Sequence[Guarded]) -> str:
    """Report changed guard bytes and their distance, and restore them; "" if none changed. Waits for the device."""
    sides = [(one, side) for one in guarded for side in (one.before, one.behind)]
    # An op may have inputs on the host beside those on the GPU.
    counts = [(side != one.pattern).sum().to(sides[0][1].device) for one, side in sides]
    counts = torch.stack(counts).tolist() if sides else []
    texts = []
    for (one, side), count in zip(sides, counts, strict=True):
        if count:
            changed = (side != one.pattern).nonzero()
            first, last = int(changed[0]), int(changed[-1])
            where, away = ("before", len(side) - first) if side is one.before else ("behind", last + 1)
            texts.append(f"{count} bytes {where} {one.name}, up to {away} bytes away")
            side.fill_(one.pattern)
    return f"wrote out of bounds: {'; '.join(dict.fromkeys(texts))}" if texts else ""


def launches_to_go(done: int, latency_us: float, *, final: bool) -> int:
    """Further launches before the late check of a candidate that has made `done` launches, if they cost little."""
    for count in _LATE_LAUNCHES:
        if done >= count + _PAST:
            return 0
        if (count + _PAST - done) * latency_us <= (_FINAL_US if final else _SEARCH_US):
            return count + _PAST - done
    return 0


def memory_bytes(device: torch.device) -> int:
    """Memory that this process holds on the host, and that its tensors take on the GPU, which others may use, too."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - read many times
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident + (torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)


def rank_delay(seed: int, rank: int, index: int, device: torch.device) -> None:
    """Delay this rank's stream (its thread, on the host) before launch `index` by a random time of its own."""
    share = random.Random(f"{seed}-{rank}-{index}").random()  # noqa: S311
    if device.type == "cuda":
        torch.cuda._sleep(int(share * _MAX_DELAY_CYCLES))  # type: ignore[no-untyped-call]
    else:
        time.sleep(share * _MAX_DELAY_S)


def judge(op: OpSpec, problem: Problem, case: Case, outputs: Tensors, *, ordered: bool) -> Judgement:
    """Compare results with the expected ones; `ordered`: the variant's class promises bits."""
    outputs = op.mask_unspecified(problem, (), outputs)[1]
    if len(outputs) != len(case.expected):
        return Judgement(float("inf"), f"gave {len(outputs)} outputs where {len(case.expected)} are due")
    as_ordered = case.bits is not None and all(map(_same_bits, outputs, case.bits))
    if as_ordered and case.judged_bits:
        return case.judged_bits[0]
    due = case.bits if ordered else None
    if ordered and case.quantized and not as_ordered:
        due = next((bits for bits in case.quantized if all(map(_same_bits, outputs, bits))), case.quantized[0])
    found = worst(
        _compare(op, problem, case, output, expected, None if due is None else due[index])
        for index, (output, expected) in enumerate(zip(outputs, case.expected, strict=True))
    )
    if as_ordered and found.right:
        case.judged_bits.append(found)
    return found


def are_kept(case: Case, inputs: Tensors) -> bool:
    """True if these tensors still hold the case's inputs, bit for bit."""
    return all(map(_same_bits, inputs, case.inputs))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _compare(
    op: OpSpec, problem: Problem, case: Case, output: torch.Tensor, expected: torch.Tensor, wanted: torch.Tensor | None
) -> Judgement:
    if output.shape != expected.shape:
        return Judgement(float("inf"), f"gave shape {tuple(output.shape)} instead of {tuple(expected.shape)}")
    if not output.numel():
        return Judgement()
    got = output.to(expected.dtype)
    if wanted is not None:
        rule = "quantised result" if case.quantized else _ORDERED.get(problem.reduction, "elements sent")
        wrong, rule = _bits(output) != _bits(wanted), f"bits of the {rule}"
    elif (case.kind == "integers" and case.exact) or not output.is_floating_point():
        wrong, rule = got != expected, "whole numbers, which must be exact"
    else:
        wrong, rule = ~torch.isfinite(got), "finite numbers"
    scale = expected.norm()
    error = (got - expected).norm() / torch.where(scale > 0, scale, torch.ones_like(scale))
    num_wrong, error_value = torch.stack([wrong.sum().to(error.dtype), error]).tolist()
    if num_wrong:
        where = int(wrong.flatten().nonzero()[0])
        got_there, due = output.flatten()[where].item(), expected.flatten()[where].item()
        found = f"{int(num_wrong)} of {output.numel()} elements differ, the first at {where}: {got_there!r}"
        return Judgement(error_value, f"{case.kind} inputs: {rule}; {found} instead of {due!r}")
    tolerance = op.tolerance_of(problem)
    if not error_value <= tolerance:
        return Judgement(error_value, f"{case.kind} inputs: relative error {error_value:.3g}, allowed {tolerance:.3g}")
    return Judgement(error_value)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])
