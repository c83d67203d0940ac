"""ep_dispatch and ep_combine: what they compute, in PyTorch, and the base classes and `library` of their variants.

The experts are dealt out to the ranks in order: rank d of n has the experts d · E/n to (d + 1) · E/n − 1. Every rank
has T tokens of H elements; `topk_ids` [T, K] names the experts of each, −1 for none.

ep_dispatch: inputs are x [T, H], topk_ids [T, K], topk_weights [T, K] in fp32 if they travel along, and the alignment
of experts in the layout `contiguous`. Outputs are

    tokens    [E/n, C, H] if `padded`, [R, H] if `contiguous`; e4m3 where the problem has a scaling
    scales    fp32: one for a token (`token`) or for 128 of its elements (`group128`), shaped as tokens; else empty
    counts    [E/n] int32, tokens that each expert of this rank was sent
    offsets   [E/n + 1] int32: expert e has the rows offsets[e] to offsets[e] + counts[e] − 1 of tokens as a matrix
    rows      [n, T, K] int32: row of rank r's token t for its k-th expert; −1 if that expert is not here, −2 if it is
              but had no room
    weights   [n, T, K] fp32, topk_weights of all ranks, −0.0 as 0.0; empty if no weights travel

Rows of an expert stand in the order of (source rank, token, k). Rows behind its count are not written. The capacity of
a call, C or R, is the shape of its output.

In the layout `tokens` a token arrives once at each rank that has experts of it, at a row that follows from its address.
Inputs are x, topk_ids and, if they travel along, topk_weights [T, K] in fp32. Outputs are

    tokens      [n · T, H]: row r · T + t is token t of rank r; rows of tokens that are not here are not written
    expert_ids  [n · T, K] int32, numbered from this rank's first expert; −1 for experts of other ranks
    weights     [n · T, K] fp32, of all experts, −0.0 as 0.0; empty if no weights travel

In all layouts a further input, `num_tokens`, int32, behind the weights, may say of how many tokens this rank has
values: the others count as tokens of no expert, whose weights are 0, and are not read. A last output, [2] int32, then
has this number and one that no rank's exceeds, by which ep_combine, as its last input, leaves out the same tokens; it
need not write their y. A number below 0 or above T counts as the nearest of these, and is an error at the next call of
the rank that passed it.

ep_combine: inputs are the experts' results as a matrix [R, H], weights [T, K] in fp32, topk_ids, and `rows` of the
dispatch. Output: y [T, H], where y[t] is the sum of weight · result over k in order, from +0.0 in fp32 (fp64 for fp64),
rounded once. What had no room counts as zeros. In the layout `tokens` inputs are one row for each row of tokens,
[n · T, H], expert_ids of the dispatch and topk_ids; y[t] is the sum of the ranks' rows in order, from +0.0 in fp32
(fp64 for fp64), rounded once.

In the layout `rank` of ep_combine the weights are all ranks' weights, [n, T, K]. Each rank sums its rows of a token by
weight over k in order, from +0.0 in fp32 (fp64 for fp64), and rounds to the results' dtype; y[t] is the sum of these
sums in rank order, rounded once more. What had no room adds nothing.

**Overflow.** Nothing is written where there is no room. All ranks learn the counts of all experts, so that all raise:
calls of CPU tensors at once, calls on GPUs at the next call of either op on this rank, or at `DispatchResult.check`.
What they found is kept in a cell of pinned memory: `Overflow`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tunedcomm.errors import CapacityError, UnsupportedInputError
from tunedcomm.fp8 import E4M3_MAX, GROUP, WIRES, sent, to_e4m3
from tunedcomm.kernels.common.feasibility import Launch, kept
from tunedcomm.kernels.common.reference import (
    SUM_DTYPES,
    WIRE_TOLERANCE,
    draw,
    draw_any,
    generator_of,
    weighted_sum,
)
from tunedcomm.kernels.common.variant import LibraryVariant, Workspace, all_gather_single
from tunedcomm.metrics import shard_factor
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

ALIGNMENT = 128  # of experts in the layout `contiguous`
SORTED = ("padded", "contiguous")  # layouts whose rows stand expert by expert
BY_TOKEN = "tokens"  # noqa: S105 - a layout
BY_RANK = "rank"  # of ep_combine
LAYOUTS = (*SORTED, BY_TOKEN)
# Variants of SORTED that move weights, too.
WITH_WEIGHTS = ("lamport", "push", "two_phase", "library", "host_unfused", "copy_engine")
NOT_HERE, NO_ROOM = -1, -2  # in `rows`
_SLACK = 4096  # rows of samples, for the skew of small ones
_COUNT_BITS = 40


class Sizes(NamedTuple):
    """The canonical shape by name, and what follows from it."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    local: int  # experts of a rank
    row_bytes: int  # of a token as it is stored
    num_scales: int  # of a token, in fp32
    wire_bytes: int  # of a token and its scales


@kept
def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem of either op."""
    tokens, hidden, topk, experts = problem.shape
    scales = {"token": 1, "group128": hidden // GROUP}.get(problem.scaling, 0)
    row_bytes = hidden * (1 if scales else ITEMSIZE[problem.dtype])
    local = experts // problem.world_size
    return Sizes(tokens, hidden, topk, experts, local, row_bytes, scales, row_bytes + 4 * scales)


class Placed(NamedTuple):
    """Outputs of ep_dispatch that follow from the ids of all ranks, and what `Overflow` keeps of the call."""

    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    code: torch.Tensor  # int64 without dimensions: 0 if all tokens fit on all ranks


def place(ids: torch.Tensor, rank: int, problem: Problem, capacity: int, alignment: int) -> Placed:
    """Rows of all tokens that `rank` is sent; never waits for the device.

    Args:
        ids: topk_ids of every rank, [n, T, K].
        rank: whose experts.
        problem: of the call.
        capacity: rows of an expert if `padded`, of all experts of a rank if `contiguous`.
        alignment: of experts, if `contiguous`.
    """
    import torch

    local, experts = sizes_of(problem).local, sizes_of(problem).experts
    flat = ids.reshape(-1).long()
    named = (flat >= 0) & (flat < experts)
    key = torch.where(named, flat, experts)
    order = torch.argsort(key, stable=True)
    totals = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, key, torch.ones_like(key))
    position = torch.empty_like(key)
    turns = torch.arange(len(key), dtype=torch.int64, device=ids.device)
    position[order] = turns - (totals.cumsum(0) - totals)[key[order]]
    counts = totals[:experts]
    offsets = offsets_of(counts.view(-1, local), problem, capacity, alignment)
    begins = offsets[:, :-1].reshape(-1)
    limits = begins + capacity if problem.layout == "padded" else torch.full_like(begins, capacity)
    row, of_expert = begins[key.clamp(max=experts - 1)] + position, limits[key.clamp(max=experts - 1)]
    rows = torch.where(row < of_expert, row, NO_ROOM).where(named & (flat // local == rank), NOT_HERE)
    over = (counts > 0) & (begins + counts > limits)
    first, wrong = over.int().argmax(), (~named & (flat != -1)).sum()
    code = torch.where(over.any(), ((first + 1) << _COUNT_BITS) | counts.take(first), 0)  # an index would wait
    own = slice(rank * local, (rank + 1) * local)
    return Placed(
        counts[own].int(), offsets[rank].int(), rows.view(ids.shape).int(), torch.where(wrong > 0, -wrong, code)
    )


def local_ids(ids: torch.Tensor, rank: int, problem: Problem) -> torch.Tensor:
    """Ids of experts as a rank numbers its own ones, int32; −1 for experts of other ranks and for none."""
    import torch

    s = sizes_of(problem)
    is_local = (ids >= rank * s.local) & (ids < (rank + 1) * s.local)
    return torch.where(is_local, ids - rank * s.local, NOT_HERE).int()


def offsets_of(counts: torch.Tensor, problem: Problem, capacity: int, alignment: int) -> torch.Tensor:
    """From counts [..., E/n] the first row of every expert of a rank, and the row behind the last one, in int64."""
    import torch

    aligned = torch.full_like(counts, capacity, dtype=torch.int64)
    if problem.layout != "padded":
        aligned = (counts.long() + alignment - 1) // alignment * alignment
    return torch.nn.functional.pad(aligned.cumsum(-1), (1, 0))


CLAMPED = 1 << 62  # code of counts outside of their bound; their number is added
MISCOUNTED = 1 << 61  # code of a `num_tokens` outside of its bound, which is added as 32 bits


class Overflow:
    """The last overflow of a group that has not been raised yet.

    Attributes:
        cell: a code (`Placed.code`) and the bound that was exceeded, int64: first as kernels write them, then as
            `note` does.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[Any, dict[str, Overflow]]] = weakref.WeakKeyDictionary()

    def __init__(self, device: Any) -> None:
        import torch

        from tunedcomm.state import clean_thread

        with clean_thread():
            self.cell = torch.zeros(4, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
            self._kept = torch.zeros(2, dtype=torch.int64, device=device)
        self._view = memoryview(self.cell.numpy())  # type: ignore[arg-type]

    @classmethod
    def of(cls, group: Any, device: Any) -> Overflow:
        """That of a process group's tensors on such a device."""
        found = cls._all.setdefault(group, {})
        if device.type not in found:
            found[device.type] = cls(device)
        return found[device.type]

    @classmethod
    def forget(cls, group: Any) -> None:
        """Forget what was found in a process group."""
        for found in cls._all.get(group, {}).values():
            found.clear()

    def clear(self) -> None:
        """Forget what was found."""
        self.cell.zero_()
        self._kept.zero_()

    def note(self, code: torch.Tensor, bound: int, peers: Any) -> None:
        """Keep the code of a call that PyTorch makes, in stream order; the code of CPU tensors is raised at once."""
        import torch

        self._kept.copy_(torch.stack([code, torch.full_like(code, bound)]).where(self._kept[0] == 0, self._kept))
        self.cell[2:].copy_(self._kept, non_blocking=True)
        if not code.is_cuda:
            self.check(peers)

    def check(self, peers: Any) -> None:
        """Raise what was found, once.

        Args:
            peers: the group's workspace or communicator. What a kernel counts after it gave up waiting is not true.

        Raises:
            PeerTimeoutError: a kernel gave up waiting.
            CapacityError: an expert was sent more tokens than it had room for.
            UnsupportedInputError: `topk_ids` named an expert that does not exist, `expert_out` lacked rows in use, or
                counts of rows or `num_tokens` were outside of their bound.
        """
        if not self._view[0] and not self._view[2]:
            return
        peers.check_peers()
        code, bound = self._view[:2] if self._view[0] else self._view[2:]
        self.clear()
        if code >= CLAMPED:
            refusal = UnsupportedInputError(
                f"{code - CLAMPED} counts of an earlier all_gather_v or reduce_scatter_v were not within 0 and "
                f"max_count={bound}; the rows beyond were left out. Pass a larger max_count on every rank"
            )
            refusal.ends_group = self._kept.is_cuda  # on CPUs every rank raises in the same call
            raise refusal
        if code >= MISCOUNTED:
            given = ((code - MISCOUNTED) ^ (1 << 31)) - (1 << 31)
            refusal = UnsupportedInputError(
                f"num_tokens of an ep_dispatch was {given}; it must be 0 to the number of tokens in x"
            )
            refusal.ends_group = True  # this rank alone knows
            raise refusal
        if code < 0:
            raise UnsupportedInputError(
                f"topk_ids of ep_dispatch named experts that do not exist, {-code} times or more on all ranks; ids are "
                "0 to num_experts − 1, or −1 for a token that is dropped"
            )
        expert, count = (code >> _COUNT_BITS) - 1, code & ((1 << _COUNT_BITS) - 1)
        if expert < 0:  # of ep_combine
            refusal = unfit((int(bound),), f"{count} more")
            refusal.ends_group = True
            raise refusal
        raise CapacityError(
            f"ep_dispatch: expert {expert} was sent {count} tokens by all ranks, which do not fit into the capacity of "
            f"{bound} rows; those beyond it were not written. A token that names an "
            "expert twice counts twice. Pass a larger capacity, or drop tokens in the router (id −1)"
        )


def unfit(shape: tuple[int, ...], due: Any) -> UnsupportedInputError:
    """The error for `expert_out` of these leading dimensions; `due` are the tokens' dimensions, or the rows in use."""
    need = f"sent.tokens have {due}" if isinstance(due, tuple) else f"{due} rows are in use"
    return UnsupportedInputError(
        f"expert_out of ep_combine has the leading dimensions {shape}, but {need}; pass results in the shape of "
        "sent.tokens, which in the layout 'contiguous' may end behind the last row in use"
    )


def some_rows(results: torch.Tensor) -> torch.Tensor:
    """The results, or a row of zeros where there are none, for indices that stand for no row."""
    return results if len(results) else results.new_zeros((1, results.shape[1]))


def quantised(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales) of rows: scale = max |x| / 448 in fp32, 1 for zeros; x / scale rounded once.

    Divisors are tensors on purpose: PyTorch divides by numbers by multiplying with their reciprocals on GPUs.
    """
    import torch

    groups = x.float().unflatten(-1, (-1, x.shape[-1] if scaling == "token" else GROUP))
    most = groups.abs().amax(-1)
    scales = torch.where(most > 0, most / torch.full_like(most, E4M3_MAX), 1.0)
    return to_e4m3(groups / scales.unsqueeze(-1)).flatten(-2), scales


def wire_rows(x: torch.Tensor, ids: torch.Tensor, problem: Problem, weights: torch.Tensor | None) -> torch.Tensor:
    """Tokens as they are sent, as bytes: the row, its scales, its ids in int32, its weights or zeros."""
    import torch

    parts = [*quantised(x, problem.scaling)] if problem.scaling else [x]
    parts.append(ids.clamp(-2, sizes_of(problem).experts).int())  # what is no expert stays none
    parts.append(torch.zeros_like(parts[-1]) if weights is None else torch.where(weights == 0, 0.0, weights))
    return torch.cat([part.contiguous().view(torch.uint8).view(len(x), -1) for part in parts], 1)


def sources_of(rows: torch.Tensor, count: int) -> torch.Tensor:
    """For each of `count` rows the token that stands there (its place in `rows` [tokens, K]), or −1."""
    import torch

    source = torch.full((count + 1,), -1, dtype=torch.int64, device=rows.device)
    tokens = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
    source[torch.where(rows < 0, count, rows).long()] = tokens.unsqueeze(1).expand(rows.shape)
    return source[:count]


def sums_of_experts(results: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sums [n · T, H] of this rank's rows for all tokens, by weight in the order of k, rounded once.

    Args:
        results: of this rank's experts, [R, H].
        weights, rows: of all ranks, [n, T, K].
    """
    places, results = rows.flatten(0, 1).long(), some_rows(results)
    parts = [results[places[:, k].clamp(min=0)] for k in range(places.shape[1])]
    return weighted_sum(parts, weights.flatten(0, 1), places >= 0)


def in_use(values: torch.Tensor, number: torch.Tensor, other: int) -> torch.Tensor:
    """The rows of as many tokens as the number says, then `other`."""
    import torch

    tokens = torch.arange(len(values), dtype=torch.int32, device=values.device).unsqueeze(1)
    return torch.where(tokens < number, values, other)


def within_number(
    ids: torch.Tensor, weights: torch.Tensor | None, number: torch.Tensor, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Ids and weights of as many tokens as the number says, then −1 and 0, and the code of a wrong number.

    Fills `limits` for an exchange of all tokens: the own number, and how many tokens of each rank to look at.
    """
    import torch

    given = number.reshape(1).long()
    own = given.clamp(0, len(ids))
    limits.copy_(torch.cat([own, torch.full_like(own, len(ids))]))
    code = torch.where(own == given, 0, MISCOUNTED + (given & 0xFFFFFFFF))[0]
    return in_use(ids, own, NOT_HERE), None if weights is None else in_use(weights, own, 0), code


def capacity_of(problem: Problem, tokens: torch.Tensor) -> int:
    """Rows of an expert if `padded`, of all experts otherwise."""
    return int(tokens.shape[1 if problem.layout == "padded" else 0])


def default_capacity(problem: Problem, alignment: int) -> int:
    """Room for whatever the router chooses, if it names no expert twice for a token."""
    s = sizes_of(problem)
    if problem.layout == "padded":
        return problem.world_size * s.tokens
    return problem.world_size * s.tokens * min(s.topk, s.local) + s.local * (alignment - 1)


def token_shapes(
    problem: Problem, capacity: int, *, weighted: bool, numbered: bool = False
) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of every output of ep_dispatch; the layout `tokens` has no capacity."""
    import torch

    s, limits = sizes_of(problem), ((2,) if numbered else (0,), torch.int32)
    if problem.layout == BY_TOKEN:
        count = problem.world_size * s.tokens
        weights = ((count, s.topk) if weighted else (0,), torch.float32)
        return [((count, s.hidden), getattr(torch, problem.dtype)), ((count, s.topk), torch.int32), weights, limits]
    leading = (s.local, capacity) if problem.layout == "padded" else (capacity,)
    scales = {"": (0,), "token": leading, "group128": (*leading, s.num_scales)}[problem.scaling]
    rows = (problem.world_size, s.tokens, s.topk)
    return [
        ((*leading, s.hidden), torch.float8_e4m3fn if problem.scaling else getattr(torch, problem.dtype)),
        (scales, torch.float32),
        ((s.local,), torch.int32),
        ((s.local + 1,), torch.int32),
        (rows, torch.int32),
        (rows if weighted else (0,), torch.float32),
        limits,
    ]


def bytes_of_wire_row(problem: Problem) -> int:
    """Bytes of a row of `wire_rows`."""
    s = sizes_of(problem)
    return s.wire_bytes + 8 * s.topk


def _unpack_by_token(
    wire: torch.Tensor, rank: int, problem: Problem, outputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """`unpack` in the layout `tokens`."""
    import torch

    s = sizes_of(problem)
    row, ids, weights = wire.split([s.row_bytes, 4 * s.topk, 4 * s.topk], 1)
    ids = ids.contiguous().view(torch.int32)
    held = local_ids(ids, rank, problem)
    target = outputs[0].view(torch.uint8)
    torch.where((held >= 0).any(1, keepdim=True), row, target, out=target)
    outputs[1].copy_(held)
    if outputs[2].numel():
        outputs[2].copy_(weights.contiguous().view(torch.float32))
    wrong: torch.Tensor = ((ids < -1) | (ids >= s.experts)).sum()
    return -wrong


def unpack(
    wire: torch.Tensor, rank: int, problem: Problem, outputs: tuple[torch.Tensor, ...], alignment: int
) -> torch.Tensor:
    """Fill the outputs of ep_dispatch from all ranks' tokens as they are sent; never waits for a GPU.

    Returns:
        `Placed.code`.
    """
    import torch

    if problem.layout == BY_TOKEN:
        return _unpack_by_token(wire, rank, problem, outputs)
    s = sizes_of(problem)
    tokens, scales, ids, weights = wire.split([s.row_bytes, 4 * s.num_scales, 4 * s.topk, 4 * s.topk], 1)
    ids = ids.contiguous().view(torch.int32).view(problem.world_size, s.tokens, s.topk)
    placed = place(ids, rank, problem, capacity_of(problem, outputs[0]), alignment)
    source = sources_of(placed.rows.flatten(0, 1), outputs[0].numel() // s.hidden)
    used = source >= 0
    for output, values in zip(outputs, (tokens, scales), strict=False):
        if not output.numel():
            continue
        target = output.view(len(source), -1).view(torch.uint8)
        if wire.is_cuda:  # indices of unknown number would be waited for
            torch.where(used.unsqueeze(-1), values[source.clamp(min=0)], target, out=target)
        else:
            target[used] = values[source[used]]
    for output, found in zip(outputs[2:5], placed[:3], strict=True):
        output.copy_(found)
    if outputs[5].numel():
        outputs[5].copy_(weights.contiguous().view(torch.float32).view(ids.shape))
    return placed.code


def dispatched(
    everyone: Sequence[tuple[torch.Tensor, ...]], rank: int, problem: Problem, capacity: int, alignment: int
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The outputs of ep_dispatch from all ranks' inputs, with zeros in rows that hold no token, and `Placed.code`.

    Inputs are (x, ids), or (x, ids, weights or None), or of one rank alone also (x, ids, weights or None, number or
    None): these have the output `token_limits`, too.
    """
    import torch

    (x, ids, *more), *others = everyone
    weights, number = (*more, None, None)[:2]
    shapes = token_shapes(problem, capacity, weighted=weights is not None, numbered=number is not None)
    shapes = shapes if len(more) > 1 else shapes[:-1]
    made = tuple(torch.zeros(size, dtype=dtype, device=x.device) for size, dtype in shapes)
    wrong = None
    if number is not None:
        ids, weights, wrong = within_number(ids, weights, number, made[-1])
    every: list[tuple[Any, ...]] = [(x, ids, weights), *others]
    wire = torch.cat([wire_rows(x, ids, problem, *(more or (None,))) for x, ids, *more in every])
    code = unpack(wire, rank, problem, made, alignment)
    return made, code if wrong is None else wrong.where(wrong != 0, code)


def _sample_capacity(problem: Problem) -> int:
    """The capacity of samples: the default one, or less where a large sample's skew asks for less."""
    s, every = sizes_of(problem), problem.world_size * problem.shape[0]
    asked = every * 5 // 8 if problem.layout == "padded" else 2 * s.tokens * s.topk + every + s.local * (ALIGNMENT - 1)
    return min(default_capacity(problem, ALIGNMENT), asked + _SLACK)


def _sample_ids(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> torch.Tensor:
    """Experts of every token of a rank, each once: `random` ones, or (`integers`) half of all tokens to one expert.

    The other half then has dropped ids, too.
    """
    import torch

    s, generator = sizes_of(problem), generator_of(rank, seed + 1, device)
    drawn = torch.rand(s.tokens, s.experts, generator=generator, dtype=torch.float32, device=device)
    drawn = drawn.argsort(-1)[:, : s.topk]
    ids = torch.nn.functional.pad(drawn, (0, s.topk - drawn.shape[1]), value=-1)
    if kind == "integers":
        hot, half = seed % s.experts, s.tokens // 2
        first, rest = ids[:half], ids[half:]
        first[first == hot] = -1
        first[:, 0] = hot
        rest[torch.rand(rest.shape, generator=generator, dtype=torch.float32, device=device) < 0.125] = -1
    return ids.contiguous()


def _dispatch_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    s = sizes_of(problem)
    if problem.scaling:  # quantisation compares numbers: no words that are none
        x = draw((s.tokens * s.hidden,), problem.dtype, generator_of(rank, seed, device), kind)
    else:
        x = draw_any(problem, s.tokens * s.hidden, rank, seed, kind, device)
    given = x.view(s.tokens, s.hidden), _sample_ids(problem, rank, seed, kind, device)
    return (*given, _sample_weights(problem, rank, seed, kind, device)) if problem.layout == BY_TOKEN else given


def _sample_weights(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> torch.Tensor:
    """Weights of every token: whole numbers (`integers`), of which 8, weighted, sum up without rounding, or any."""
    import torch

    s, generator = sizes_of(problem), generator_of(rank, seed + 2, device)
    weights = torch.rand(s.tokens, s.topk, generator=generator, dtype=torch.float32, device=device)
    return (weights * 2).floor() if kind == "integers" else weights - 0.125


def _dispatch_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    shapes = token_shapes(problem, _sample_capacity(problem), weighted=problem.layout == BY_TOKEN)[:-1]
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)


def _dispatch_exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    return dispatched(inputs, rank, problem, _sample_capacity(problem), ALIGNMENT)[0]


def _cleared(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """`values` of `count` rows, with zeros in those that hold no token."""
    import torch

    if not values.numel():
        return values
    unused = sources_of(rows.flatten(0, 1), count) < 0
    words = values.view(count, -1).view(torch.uint8)
    return words.masked_fill(unused.unsqueeze(1), 0).view(values.dtype).view(values.shape)


def _cleared_by_token(values: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """`values` with zeros in the rows of tokens that are not here; `held` are the expert_ids."""
    return values.masked_fill((held < 0).all(1, keepdim=True), 0)


def _clear_dispatched(
    problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Zeros in rows that hold no token, and in tokens without an expert; no bound of all ranks' numbers of tokens."""
    import torch

    if inputs:
        x, ids, *rest = inputs
        numbers = [each for each in rest if isinstance(each, torch.Tensor) and each.dtype == torch.int32]
        used = ids
        if numbers:
            used = in_use(ids, numbers[0], NOT_HERE)
            rest = [
                in_use(each, numbers[0], 0) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
                for each in rest
            ]
        inputs = (x.masked_fill((used < 0).all(1, keepdim=True), 0), ids, *rest)
    if not outputs:
        return inputs, outputs
    num_fixed = 3 if problem.layout == BY_TOKEN else 6
    outputs, limits = outputs[:num_fixed], [each[:1] for each in outputs[num_fixed:]]
    if problem.layout == BY_TOKEN:
        return inputs, (_cleared_by_token(outputs[0], outputs[1]), *outputs[1:], *limits)
    rows, count = outputs[4], outputs[0].numel() // problem.shape[1]
    return inputs, (*(_cleared(values, rows, count) for values in outputs[:2]), *outputs[2:], *limits)


def _combine_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """Results of the experts, weights, ids and rows; NaN in rows that hold no token."""
    import torch

    if problem.layout == BY_TOKEN:
        return _combine_inputs_by_token(problem, rank, seed, kind, device)
    s, capacity, ranks = sizes_of(problem), _sample_capacity(problem), range(problem.world_size)
    ids = torch.stack([_sample_ids(problem, peer, seed, kind, device) for peer in ranks])
    rows = place(ids, rank, problem, capacity, ALIGNMENT).rows
    generator = generator_of(rank, seed, device)
    results = draw((capacity, s.hidden), problem.dtype, generator, kind)
    results[sources_of(rows.flatten(0, 1), capacity) < 0] = float("nan")
    if problem.layout == BY_RANK:
        everyone = torch.stack([_sample_weights(problem, peer, seed, kind, device) for peer in ranks])
        return results, everyone, ids[rank], rows
    # Whole numbers of which 8, weighted, sum up without rounding.
    weights = torch.rand(s.tokens, s.topk, generator=generator, dtype=torch.float32, device=device)
    return results, (weights * 2).floor() if kind == "integers" else weights, ids[rank], rows


def _combine_inputs_by_token(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[Any, ...]:
    """Results for all tokens that are here, expert_ids and ids; NaN in rows that hold no token."""
    import torch

    s = sizes_of(problem)
    ids = torch.stack([_sample_ids(problem, peer, seed, kind, device) for peer in range(problem.world_size)])
    held = local_ids(ids.view(-1, s.topk), rank, problem)
    results = draw((len(held), s.hidden), problem.dtype, generator_of(rank, seed, device), kind)
    results[(held < 0).all(1)] = float("nan")
    return results, held, ids[rank]


def _combine_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    s = sizes_of(problem)
    return (torch.empty(s.tokens, s.hidden, dtype=getattr(torch, problem.dtype), device=device),)


def on_wire_of(rows: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Rows as they arrive over the problem's wire, in fp32."""
    return sent(rows.reshape(-1), problem.scaling).view(rows.shape)


def sum_by_token(parts: Sequence[torch.Tensor], ids: torch.Tensor, problem: Problem) -> torch.Tensor:
    """The sum of [T, H] of every rank in order, of those that have experts of the token, as ep_combine rounds it."""
    import torch

    there = torch.stack([(local_ids(ids, rank, problem) >= 0).any(1) for rank in range(len(parts))], 1)
    return weighted_sum(parts, torch.ones_like(there, dtype=torch.float32), there)


def _combined(
    problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int, dtype_name: str, *, on_wire: bool = False
) -> tuple[torch.Tensor]:
    """The sum of a rank's tokens, of results in that dtype, `on_wire` as they travel."""
    import torch

    if problem.layout in (BY_TOKEN, BY_RANK):
        own = slice(rank * problem.shape[0], (rank + 1) * problem.shape[0])
        parts = [given[0].to(getattr(torch, dtype_name)) for given in inputs]
        if problem.layout == BY_RANK:
            parts = [sums_of_experts(part, given[1], given[3]) for part, given in zip(parts, inputs, strict=True)]
        parts = [on_wire_of(part[own], problem) if on_wire else part[own] for part in parts]
        return (sum_by_token(parts, inputs[rank][2], problem).to(getattr(torch, dtype_name)),)
    dtype, device = getattr(torch, dtype_name), inputs[rank][0].device
    rows = torch.stack([given[3][rank] for given in inputs])
    shape = rows.shape[1], inputs[rank][0].shape[1]
    parts = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(rows.shape[2])]
    for k, part in enumerate(parts):
        for (results, *_), places in zip(inputs, rows[:, :, k].long(), strict=True):
            part[places >= 0] = results[places[places >= 0]].to(dtype)
    return (weighted_sum(parts, inputs[rank][1], (rows >= 0).any(0)),)


def _clear_combined(
    problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Zeros in rows of results that hold no token, in weights of no expert, and in y of tokens that were left out."""
    if not inputs:
        return inputs, outputs
    limits = inputs[3 if problem.layout == BY_TOKEN else 4 :]
    outputs = tuple(in_use(y, limits[0][:1], 0) for y in outputs) if limits else outputs
    if problem.layout == BY_TOKEN:
        return (_cleared_by_token(inputs[0], inputs[1]), *inputs[1:]), outputs
    results, weights, ids, rows = inputs[:4]
    results = _cleared(results, rows, results.numel() // problem.shape[1])
    used = in_use(ids, limits[0][:1], NOT_HERE) if limits else ids
    unused = (rows if problem.layout == BY_RANK else used) < 0
    return (results, weights.masked_fill(unused, 0), ids, rows, *limits), outputs


def _combined_bytes(problem: Problem) -> int:
    """Bytes of results that go to each rank: a row for each expert of a token, or one for all that are there."""
    s = sizes_of(problem)
    row_of_rank = s.row_bytes if problem.layout in (BY_TOKEN, BY_RANK) else s.row_bytes * s.topk // problem.world_size
    return s.tokens * row_of_rank


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(7, 256, 2, 8), (64, 1024, 4, 24), (512, 1024, 8, 48)]
    if backend != "cuda":
        return shapes
    return [*[(1 << power, 7168, 8, 256) for power in range(0, 9, 2)], (64, 4096, 8, 128), (64, 7168, 8, 64)]


def check(problem: Problem) -> None:
    """Refuse sizes that the ranks, or the groups of a scale, cannot share equally.

    Raises:
        UnsupportedInputError: says what to pass.
    """
    _, hidden, _, experts = problem.shape
    if problem.op == "ep_combine" and problem.scaling and (problem.layout == "" or hidden % GROUP):
        raise UnsupportedInputError(
            f"wire= of ep_combine is for layout '{BY_TOKEN}' and reduce='{BY_RANK}', and rows of a multiple of {GROUP} "
            f"elements, not {hidden}"
        )
    if problem.op == "ep_dispatch" and problem.layout == BY_TOKEN and problem.scaling:
        raise UnsupportedInputError(f"layout='{BY_TOKEN}' moves tokens as they are; quantize them before, or pass None")
    if experts < 1 or experts % problem.world_size:
        raise UnsupportedInputError(
            f"{experts} experts cannot be shared equally by {problem.world_size} ranks; pass a multiple of that as "
            "num_experts"
        )
    if problem.scaling == "group128" and hidden % GROUP:
        raise UnsupportedInputError(f"quantize='group128' needs a multiple of {GROUP} elements, not {hidden}")


def _model_shapes(shard: Any) -> list[tuple[int, ...]]:
    """Tokens of a rank, hidden size, experts of a token and experts; nothing for a dense model."""
    model, experts = shard.model, shard.model.experts
    if experts is None:
        return []
    return [(shard.tokens_per_rank, model.hidden_size, experts.num_experts_per_token, experts.num_experts)]


_spec = functools.partial(
    OpSpec,
    reductions=(),
    dtypes=SUM_DTYPES,
    shape_help="tokens of a rank x hidden x top-k x experts, e.g. 64x7168x8x256",
    rank_of_shape=4,
    busbw_factor=shard_factor,
    default_shapes=_default_shapes,
    check=check,
    is_per_rank=True,
    model_shapes=_model_shapes,
    skewed_inputs="integers",
    shape_reach=(8, 4, 4, 4),
)
register_op(
    _spec(
        name="ep_dispatch",
        summary="every token goes to the ranks of its experts, sorted by expert",
        make_inputs=_dispatch_inputs,
        make_outputs=_dispatch_outputs,
        reference=lambda *asked: tuple(output.double() for output in _dispatch_exact(*asked)),
        tolerance=dict.fromkeys((*SUM_DTYPES, "float64", "token", "group128"), 0.0),
        message_bytes=lambda problem: problem.shape[0] * sizes_of(problem).wire_bytes,
        ordered_reference=_dispatch_exact,
        layouts=LAYOUTS,
        symmetric_outputs=True,
        scalings=("", "token", "group128"),
        # Tokens as they are, then in fp8, whose sizes count in their own bytes.
        related_forms=lambda problem: (SORTED, ("", "token", "group128")) if problem.layout in SORTED else ((), ()),
        mask_unspecified=_clear_dispatched,
    )
)
register_op(
    _spec(
        name="ep_combine",
        summary="the results of a token's experts come back and are summed by weight",
        make_inputs=_combine_inputs,
        make_outputs=_combine_outputs,
        reference=lambda problem, inputs, rank: _combined(problem, inputs, rank, "float64"),
        # ‖out − ref‖ / ‖ref‖ of a sum in fp32 that is rounded once.
        tolerance={"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-6, "float64": 1e-14, **WIRE_TOLERANCE},
        message_bytes=_combined_bytes,
        ordered_reference=lambda problem, inputs, rank: _combined(problem, inputs, rank, problem.dtype),
        quantized_references=lambda problem, inputs, rank: [
            _combined(problem, inputs, rank, problem.dtype, on_wire=True)
        ],
        layouts=("", BY_TOKEN, BY_RANK),
        scalings=("", *WIRES),
        mask_unspecified=_clear_combined,
    )
)


def dispatch_by(
    gather: Callable[[torch.Tensor, torch.Tensor, int], object], problem: Problem, workspace: Workspace
) -> Launch:
    """A launch of ep_dispatch: `gather(all, own, stream)` collects all tokens, PyTorch takes this rank's experts'."""
    import torch.distributed as dist

    overflow = Overflow.of(workspace.group, workspace.device)

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        # No `overflow.check` here: a rank that raised while others do not yet know would leave them in the collective.
        x, ids, *rest = inputs
        weights = rest.pop(0) if outputs[2 if problem.layout == BY_TOKEN else 5].numel() else None
        wrong = None
        limits = outputs[3:] if problem.layout == BY_TOKEN else outputs[6:]
        if limits and limits[0].numel():
            ids, weights, wrong = within_number(ids, weights, rest.pop(0), limits[0])
        wire = wire_rows(x, ids, problem, weights)
        everyone = wire.new_empty(problem.world_size * wire.shape[0], wire.shape[1])
        gather(everyone, wire, stream)
        alignment = int(rest[0]) if rest else ALIGNMENT
        code = unpack(everyone, dist.get_rank(workspace.group), problem, outputs, alignment)
        code = code if wrong is None else wrong.where(wrong != 0, code)
        overflow.note(code, capacity_of(problem, outputs[0]), workspace)

    return run


def combine_by_token(
    trade: Callable[[torch.Tensor, torch.Tensor, int], object], problem: Problem, *, on_wire: bool = False
) -> Launch:
    """A launch of ep_combine in the layouts `tokens` and `rank`.

    `trade(come, sent, stream)` is an all_to_all of rows, as bytes; `on_wire`: of fp32, as quantised rows arrive.
    """
    import torch

    def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
        if problem.layout == BY_RANK:
            results, weights, ids, rows, *limits = inputs
            sums = sums_of_experts(results, weights, rows)
        else:
            results, held, ids, *limits = inputs
            sums = _cleared_by_token(results, held)
        ids = in_use(ids, limits[0][:1], NOT_HERE) if limits else ids
        sums = on_wire_of(sums, problem) if on_wire else sums
        rows_out = sums.view(problem.world_size, *outputs[0].shape)
        come = torch.empty_like(rows_out)
        trade(come.view(torch.uint8), rows_out.view(torch.uint8), stream)
        outputs[0].copy_(sum_by_token(come.unbind(), ids, problem))

    return run


class DispatchLibrary(LibraryVariant, registered=True):
    """All tokens go to all ranks, so that sizes do not depend on ids. Graph-safe on NCCL."""

    op = "ep_dispatch"
    numerics = "ordered"  # bits are moved
    summary = "all_gather of NCCL (gloo on CPUs), and PyTorch operators that sort"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        gather, group = all_gather_single(), workspace.group
        return dispatch_by(lambda everyone, own, stream: gather(everyone, own, group=group), problem, workspace)


class CombineLibrary(LibraryVariant, registered=True):
    """Rows of results that are due are exchanged, and summed in PyTorch. Graph-safe on NCCL.

    Eager calls wait for the number of rows; captured ones send room for every token, and take world_size times as much.
    """

    op = "ep_combine"
    numerics = "ordered"  # the sum is `weighted_sum`
    summary = "all_to_all_single of NCCL (gloo on CPUs), and PyTorch operators that sum"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        exchange: Any = functools.partial(dist.all_to_all_single, group=workspace.group)
        if problem.layout in (BY_TOKEN, BY_RANK):
            return combine_by_token(lambda come, sent, stream: exchange(come, sent), problem)
        s, n, overflow = sizes_of(problem), problem.world_size, Overflow.of(workspace.group, workspace.device)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            results, weights, ids, rows, *limits = inputs
            ids = in_use(ids, limits[0][:1], NOT_HERE) if limits else ids
            places, owner = rows.view(n, -1), torch.where(ids >= 0, ids // s.local, n).view(-1)
            due = owner == torch.arange(n, dtype=torch.int64, device=ids.device)[:, None]  # [n, T · K]
            counts: list[list[int]] = []
            if problem.mode == "eager":
                is_placed = places != NOT_HERE
                counts, places = torch.stack([due.sum(1), is_placed.sum(1)]).tolist(), places[is_placed]
            overflow.check(workspace)  # after what was waited for
            sent = some_rows(results.view(-1, s.hidden))[places.clamp(min=0).long()].masked_fill_(
                places.unsqueeze(-1) < 0, 0
            )
            got = sent.new_empty(sum(counts[0]), s.hidden) if counts else torch.empty_like(sent)
            exchange(got.view(torch.uint8), sent.view(torch.uint8), *counts)
            if counts:
                slots = got.new_empty(len(owner), s.hidden)
                slots[due.nonzero()[:, 1]] = got
            else:
                turns = torch.arange(len(owner), dtype=torch.int64, device=ids.device)
                slots = got[owner.clamp(max=n - 1), turns]
            outputs[0].copy_(weighted_sum(slots.view(s.tokens, s.topk, s.hidden).unbind(1), weights, ids >= 0))

        return run
