"""ep_dispatch and ep_combine: what they compute, in PyTorch, and the base classes and `library` of their variants.

The experts are dealt out to the ranks in order: rank d of n has the experts d · E/n to (d + 1) · E/n − 1. Every rank
has T tokens of H elements; `topk_ids` [T, K] names the experts of each, −1 for none.

ep_dispatch: inputs are x [T, H], topk_ids [T, K] and the alignment of experts in the layout `contiguous`. Outputs are

    tokens    [E/n, C, H] if `padded`, [R, H] if `contiguous`; e4m3 where the problem has a scaling
    scales    fp32: one for a token (`token`) or for 128 of its elements (`group128`), shaped as tokens; else empty
    counts    [E/n] int32, tokens that each expert of this rank was sent
    offsets   [E/n + 1] int32: expert e has the rows offsets[e] to offsets[e] + counts[e] − 1 of tokens as a matrix
    rows      [n, T, K] int32: row of rank r's token t for its k-th expert; −1 if that expert is not here, −2 if it is
              but had no room

Rows of an expert stand in the order of (source rank, token, k). Rows behind its count are not written. The capacity of
a call, C or R, is the shape of its output.

ep_combine: inputs are the experts' results as a matrix [R, H], weights [T, K] in fp32, topk_ids, and `rows` of the
dispatch. Output: y [T, H], where y[t] is the sum of weight · result over k in order, from +0.0 in fp32 (fp64 for fp64),
rounded once. What had no room counts as zeros.

**Overflow.** Nothing is written where there is no room. All ranks learn the counts of all experts, so that all raise:
calls of CPU tensors at once, those of GPUs at the next call of either op on this rank, or at `Sent.check`. What they
found is kept in a cell of pinned memory: `Overflow`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tunedcomm.errors import CapacityError, UnsupportedInputError
from tunedcomm.kernels.all_reduce_rms_norm.op import E4M3_MAX, to_e4m3
from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.reference import SUM_DTYPES, draw, draw_any, generator_of
from tunedcomm.kernels.common.variant import LibraryVariant, Workspace, all_gather_single
from tunedcomm.metrics import busbw_factor
from tunedcomm.space import Config
from tunedcomm.spec import ITEMSIZE, OpSpec, Problem, register_op

if TYPE_CHECKING:
    import torch

ALIGNMENT = 128  # of experts in the layout `contiguous`
GROUP = 128  # elements that share a scale
LAYOUTS = ("padded", "contiguous")
NOT_HERE, NO_ROOM = -1, -2  # in `rows`
_FEW_ROWS = 4096
_COUNT_BITS = 40


class Sizes(NamedTuple):
    """The canonical shape by name, and what follows from it."""

    tokens: int
    hidden: int
    topk: int
    experts: int
    local: int  # experts of a rank
    row_bytes: int  # of a token as it is stored
    num_scales: int  # of a token


def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem of either op."""
    tokens, hidden, topk, experts = problem.shape
    scales = {"": 0, "token": 1, "group128": hidden // GROUP}[problem.scaling]
    row_bytes = hidden * (1 if problem.scaling else ITEMSIZE[problem.dtype])
    return Sizes(tokens, hidden, topk, experts, experts // problem.world_size, row_bytes, scales)


def wire_bytes(problem: Problem) -> int:
    """Bytes of a token as it travels, with its scales."""
    s = sizes_of(problem)
    return s.row_bytes + 4 * s.num_scales


def token_dtype(problem: Problem) -> torch.dtype:
    """The dtype in which tokens arrive."""
    import torch

    return torch.float8_e4m3fn if problem.scaling else getattr(torch, problem.dtype)


class Placed(NamedTuple):
    """Outputs of ep_dispatch that follow from the ids of all ranks, and what `Overflow` keeps of the call."""

    counts: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    code: torch.Tensor  # int64 without dimensions: 0 if all tokens fit on all ranks


def place(ids: torch.Tensor, rank: int, problem: Problem, bound: int, alignment: int) -> Placed:
    """Rows of all tokens that `rank` is sent; never waits for the device.

    Args:
        ids: topk_ids of every rank, [n, T, K].
        rank: whose experts.
        problem: of the call.
        bound: rows of an expert if `padded`, of all experts of a rank if `contiguous`.
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
    position[order] = torch.arange(len(key), device=ids.device) - (totals.cumsum(0) - totals)[key[order]]
    counts = totals[:experts]
    offsets = offsets_of(counts.view(-1, local), problem, bound, alignment)
    begins = offsets[:, :-1].reshape(-1)
    limits = begins + bound if problem.layout == "padded" else torch.full_like(begins, bound)
    row, of_expert = begins[key.clamp(max=experts - 1)] + position, limits[key.clamp(max=experts - 1)]
    rows = torch.where(row < of_expert, row, NO_ROOM).where(named & (flat // local == rank), NOT_HERE)
    over = (counts > 0) & (begins + counts > limits)
    first, wrong = over.int().argmax(), (~named & (flat != -1)).sum()
    code = torch.where(over.any(), ((first + 1) << _COUNT_BITS) | counts[first], 0)
    own = slice(rank * local, (rank + 1) * local)
    return Placed(
        counts[own].int(), offsets[rank].int(), rows.view(ids.shape).int(), torch.where(wrong > 0, -wrong, code)
    )


def offsets_of(counts: torch.Tensor, problem: Problem, bound: int, alignment: int) -> torch.Tensor:
    """From counts [..., E/n] the first row of every expert of a rank, and the row behind the last one, in int64."""
    import torch

    aligned = torch.full_like(counts, bound, dtype=torch.int64)
    if problem.layout != "padded":
        aligned = (counts.long() + alignment - 1) // alignment * alignment
    return torch.nn.functional.pad(aligned.cumsum(-1), (1, 0))


class Overflow:
    """The last overflow of a group that has not been raised yet.

    Attributes:
        cell: a code (`Placed.code`) and the bound that was exceeded, int64: first as kernels write them, then as
            `note` does.
    """

    _all: ClassVar[weakref.WeakKeyDictionary[Any, dict[str, Overflow]]] = weakref.WeakKeyDictionary()

    def __init__(self, device: Any) -> None:
        import torch

        self.cell = torch.zeros(4, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._view = memoryview(self.cell.numpy())  # type: ignore[arg-type]
        self._kept = torch.zeros(2, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, group: Any, device: Any) -> Overflow:
        """That of a process group's tensors on such a device."""
        found = cls._all.setdefault(group, {})
        if device.type not in found:
            found[device.type] = cls(device)
        return found[device.type]

    def note(self, code: torch.Tensor, bound: int, peers: Any) -> None:
        """Keep the code of a call that PyTorch makes, in stream order; that of CPU tensors is raised at once."""
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
            UnsupportedInputError: `topk_ids` named an expert that does not exist.
        """
        if not self._view[0] and not self._view[2]:
            return
        peers.check_peers()
        code, bound = self._view[:2] if self._view[0] else self._view[2:]
        self.cell.zero_()
        self._kept.zero_()
        if code < 0:
            raise UnsupportedInputError(
                f"topk_ids of ep_dispatch named experts that do not exist, {-code} times on all ranks; ids are 0 to "
                "num_experts − 1, or −1 for a token that is dropped"
            )
        expert, count = (code >> _COUNT_BITS) - 1, code & ((1 << _COUNT_BITS) - 1)
        raise CapacityError(
            f"ep_dispatch: expert {expert} was sent {count} tokens by all ranks, which do not fit into the capacity of "
            f"{bound} rows; those beyond it were not written. Pass a larger capacity, or drop tokens in the router "
            "(id −1)"
        )


def quantised(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales) of rows: scale = max |x| / 448 in fp32, 1 for zeros; x / scale rounded once.

    Divisors are tensors on purpose: PyTorch divides by numbers by multiplying with their reciprocals on GPUs.
    """
    import torch

    groups = x.float().unflatten(-1, (-1, x.shape[-1] if scaling == "token" else GROUP))
    most = groups.abs().amax(-1)
    scales = torch.where(most > 0, most / torch.full_like(most, E4M3_MAX), 1.0)
    return to_e4m3(groups / scales.unsqueeze(-1)).flatten(-2), scales


def wire_rows(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Tokens as they are sent, as bytes: the row, then its scales."""
    import torch

    if problem.scaling:
        x, scales = quantised(x, problem.scaling)
        return torch.cat([x.view(torch.uint8), scales.view(torch.uint8)], 1)
    return x.contiguous().view(torch.uint8).view(x.shape[0], -1)


def sources_of(rows: torch.Tensor, count: int) -> torch.Tensor:
    """For each of `count` rows the token that stands there (its place in `rows` [tokens, K]), or −1."""
    import torch

    source = torch.full((count + 1,), -1, device=rows.device)
    tokens = torch.arange(len(rows), device=rows.device)
    source[torch.where(rows < 0, count, rows).long()] = tokens.unsqueeze(1).expand(rows.shape)
    return source[:count]


def weighted_sum(parts: Sequence[torch.Tensor], weights: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Σ weights[:, k] · parts[k] over valid k, in order, from +0.0 in fp32 (or fp64), rounded once."""
    import torch

    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = torch.zeros_like(parts[0], dtype=wide)
    for k, part in enumerate(parts):
        more = total + weights[:, k, None].to(wide) * part.to(wide)
        total = torch.where(valid[:, k, None], more, total)
    return total.to(parts[0].dtype)


def bound_of(problem: Problem, tokens: torch.Tensor) -> int:
    """Rows of an expert if `padded`, of all experts if `contiguous`."""
    return int(tokens.shape[1 if problem.layout == "padded" else 0])


def default_capacity(problem: Problem, alignment: int) -> int:
    """Room for whatever the router chooses, if it names no expert twice for a token."""
    s = sizes_of(problem)
    if problem.layout == "padded":
        return problem.world_size * s.tokens
    return problem.world_size * s.tokens * min(s.topk, s.local) + s.local * (alignment - 1)


def token_shapes(problem: Problem, capacity: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of every output of ep_dispatch."""
    import torch

    s = sizes_of(problem)
    leading = (s.local, capacity) if problem.layout == "padded" else (capacity,)
    scales = {"": (0,), "token": leading, "group128": (*leading, s.num_scales)}[problem.scaling]
    return [
        ((*leading, s.hidden), token_dtype(problem)),
        (scales, torch.float32),
        ((s.local,), torch.int32),
        ((s.local + 1,), torch.int32),
        ((problem.world_size, s.tokens, s.topk), torch.int32),
    ]


def fill_tokens(placed: Placed, wire: torch.Tensor, outputs: tuple[torch.Tensor, ...], problem: Problem) -> None:
    """Write all ranks' tokens, as they are sent, and their scales where `placed` says; never waits for the device."""
    import torch

    s = sizes_of(problem)
    source = sources_of(placed.rows.flatten(0, 1), outputs[0].numel() // max(s.hidden, 1))
    for output, values in zip(outputs, (wire[:, : s.row_bytes], wire[:, s.row_bytes :]), strict=False):
        if output.numel() and values.numel():
            target = output.view(len(source), -1).view(torch.uint8)
            target.copy_(torch.where((source >= 0).unsqueeze(-1), values[source.clamp(min=0)], target))


def dispatched(
    everyone: Sequence[torch.Tensor], ids: torch.Tensor, rank: int, problem: Problem, bound: int, alignment: int
) -> tuple[torch.Tensor, ...]:
    """The outputs of ep_dispatch from all ranks' x and ids, with zeros in rows that are not specified."""
    import torch

    placed = place(ids, rank, problem, bound, alignment)
    made = tuple(torch.zeros(size, dtype=dtype, device=ids.device) for size, dtype in token_shapes(problem, bound)[:2])
    fill_tokens(placed, torch.cat([wire_rows(x, problem) for x in everyone]), made, problem)
    return *made, *placed[:3]


def _sample_bound(problem: Problem) -> int:
    """The capacity of samples: all that a small problem may need, and room for the skew of a large one."""
    s, n = sizes_of(problem), problem.world_size
    if problem.layout == "padded":
        return n * s.tokens if n * s.tokens <= _FEW_ROWS else n * s.tokens * 5 // 8
    most = n * s.tokens * min(s.topk, s.local)
    return (most if most <= _FEW_ROWS else 2 * s.tokens * s.topk + n * s.tokens) + s.local * (ALIGNMENT - 1)


def _sample_ids(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> torch.Tensor:
    """Experts of every token of a rank, each once: `random` ones, or (`integers`) half of all tokens to one expert.

    The other half then has dropped ids, too.
    """
    import torch

    s, generator = sizes_of(problem), generator_of(rank, seed + 1, device)
    drawn = torch.rand(s.tokens, s.experts, generator=generator, device=device).argsort(-1)[:, : s.topk]
    ids = torch.nn.functional.pad(drawn, (0, s.topk - drawn.shape[1]), value=-1)
    if kind == "integers":
        hot, half = seed % s.experts, s.tokens // 2
        first, rest = ids[:half], ids[half:]
        first[first == hot] = -1
        first[:, 0] = hot
        rest[torch.rand(rest.shape, generator=generator, device=device) < 0.125] = -1
    return ids.contiguous()


def _dispatch_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    s = sizes_of(problem)
    if problem.scaling:  # quantisation compares numbers: no words that are none
        x = draw((s.tokens * s.hidden,), problem.dtype, generator_of(rank, seed, device), kind)
    else:
        x = draw_any(problem, s.tokens * s.hidden, rank, seed, kind, device)
    return x.view(s.tokens, s.hidden), _sample_ids(problem, rank, seed, kind, device)


def _dispatch_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor, ...]:
    import torch

    shapes = token_shapes(problem, _sample_bound(problem))
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)


def _dispatch_exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    import torch

    ids = torch.stack([given[1] for given in inputs])
    return dispatched([given[0] for given in inputs], ids, rank, problem, _sample_bound(problem), ALIGNMENT)


def _dispatch_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(output.double() for output in _dispatch_exact(problem, inputs, rank))


def _clear_dispatched(
    problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Zeros in rows behind the experts' counts."""
    if not outputs:
        return inputs, outputs
    tokens, scales, counts, offsets, rows = outputs
    s = sizes_of(problem)
    used = sources_of(rows.flatten(0, 1), tokens.numel() // s.hidden) >= 0
    return inputs, (_cleared(tokens, used), _cleared(scales, used), counts, offsets, rows)


def _cleared(values: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    import torch

    if not values.numel():
        return values
    words = values.view(torch.uint8) if values.element_size() == 1 else values
    return words.masked_fill(~used.view(-1, 1).expand(-1, values.numel() // len(used)).reshape(values.shape), 0).view(
        values.dtype
    )


def _combine_inputs(problem: Problem, rank: int, seed: int, kind: str, device: Any) -> tuple[torch.Tensor, ...]:
    """Results of the experts, weights, ids and rows; NaN in rows that hold no token."""
    import torch

    s, bound = sizes_of(problem), _sample_bound(problem)
    ids = torch.stack([_sample_ids(problem, peer, seed, kind, device) for peer in range(problem.world_size)])
    rows = place(ids, rank, problem, bound, ALIGNMENT).rows
    generator = generator_of(rank, seed, device)
    results = draw((bound, s.hidden), problem.dtype, generator, kind)
    results[sources_of(rows.flatten(0, 1), bound) < 0] = float("nan")
    # Whole numbers of which 8, weighted, sum up without rounding.
    weights = torch.rand(s.tokens, s.topk, generator=generator, device=device)
    return results, (weights * 2).floor() if kind == "integers" else weights, ids[rank], rows


def _combine_outputs(problem: Problem, device: Any) -> tuple[torch.Tensor]:
    import torch

    s = sizes_of(problem)
    return (torch.empty(s.tokens, s.hidden, dtype=getattr(torch, problem.dtype), device=device),)


def _combined(inputs: Sequence[tuple[Any, ...]], rank: int, dtype: Any) -> tuple[torch.Tensor]:
    """The weighted sum of a rank's tokens, of results in `dtype`."""
    import torch

    rows = torch.stack([given[3][rank] for given in inputs])
    parts = [torch.zeros(rows.shape[1], inputs[rank][0].shape[1], dtype=dtype) for _ in range(rows.shape[2])]
    for k, part in enumerate(parts):
        for (results, *_), places in zip(inputs, rows[:, :, k].long(), strict=True):
            part[places >= 0] = results[places[places >= 0]].to(dtype)
    return (weighted_sum(parts, inputs[rank][1], (rows >= 0).any(0)),)


def _combine_reference(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    import torch

    return _combined(inputs, rank, torch.float64)


def _combine_exact(problem: Problem, inputs: Sequence[tuple[Any, ...]], rank: int) -> tuple[torch.Tensor]:
    return _combined(inputs, rank, inputs[rank][0].dtype)


def _clear_combined(
    problem: Problem, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Zeros in rows of the experts' results that hold no token."""
    if not inputs:
        return inputs, outputs
    results, *rest = inputs
    used = sources_of(rest[2].flatten(0, 1), results.numel() // sizes_of(problem).hidden) >= 0
    return (_cleared(results, used), *rest), outputs


def _default_shapes(backend: str, itemsize: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(7, 256, 2, 8), (64, 1024, 4, 24), (512, 1024, 8, 48)]
    if backend != "cuda":
        return shapes
    return [*[(1 << power, 7168, 8, 256) for power in range(0, 9, 2)], (64, 4096, 8, 128), (64, 7168, 8, 64)]


def _check(problem: Problem) -> None:
    _, hidden, topk, experts = problem.shape
    if experts % problem.world_size:
        raise ValueError(f"{experts} experts cannot be shared equally by {problem.world_size} ranks")
    if topk < 1 or hidden < 1 or experts < 1:
        raise ValueError(f"hidden, top-k and experts must be at least 1: {problem.shape}")
    if problem.scaling == "group128" and hidden % GROUP:
        raise ValueError(f"group128 scales {GROUP} elements together, and {hidden} is no multiple of that")


EP_DISPATCH = register_op(
    OpSpec(
        name="ep_dispatch",
        summary="every token goes to the ranks of its experts, sorted by expert",
        reductions=(),
        dtypes=SUM_DTYPES,
        shape_help="tokens of a rank x hidden x top-k x experts, e.g. 64x7168x8x256",
        rank_of_shape=4,
        make_inputs=_dispatch_inputs,
        make_outputs=_dispatch_outputs,
        reference=_dispatch_reference,
        tolerance=dict.fromkeys((*SUM_DTYPES, "float64", "token", "group128"), 0.0),
        message_bytes=lambda problem: problem.shape[0] * wire_bytes(problem),
        busbw_factor=lambda world_size: busbw_factor("ep_dispatch", world_size),
        default_shapes=_default_shapes,
        ordered_reference=_dispatch_exact,
        layouts=LAYOUTS,
        scalings=("", "token", "group128"),
        check=_check,
        cleared=_clear_dispatched,
    )
)

EP_COMBINE = register_op(
    OpSpec(
        name="ep_combine",
        summary="the results of a token's experts come back and are summed by weight",
        reductions=(),
        dtypes=SUM_DTYPES,
        shape_help="tokens of a rank x hidden x top-k x experts, e.g. 64x7168x8x256",
        rank_of_shape=4,
        make_inputs=_combine_inputs,
        make_outputs=_combine_outputs,
        reference=_combine_reference,
        # ‖out − ref‖ / ‖ref‖ of a sum in fp32 that is rounded once.
        tolerance={"bfloat16": 4e-3, "float16": 6e-4, "float32": 1e-6, "float64": 1e-14},
        message_bytes=lambda problem: (
            problem.shape[0] * problem.shape[1] * problem.shape[2] * ITEMSIZE[problem.dtype] // problem.world_size
        ),
        busbw_factor=lambda world_size: busbw_factor("ep_combine", world_size),
        default_shapes=_default_shapes,
        ordered_reference=_combine_exact,
        check=_check,
        cleared=_clear_combined,
    )
)


class DispatchLibrary(LibraryVariant, registered=True):
    """all_to_all_single of the tokens, and their places in PyTorch; never waits for the device. Graph-safe on NCCL.

    Every rank is sent all tokens, so that sizes do not depend on what is in `topk_ids`.
    """

    op = "ep_dispatch"
    summary = "all_to_all_single of NCCL (gloo on CPUs), and PyTorch operators that sort"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        n, rank, group = problem.world_size, dist.get_rank(workspace.group), workspace.group
        gather, exchange, overflow = all_gather_single(), dist.all_to_all_single, Overflow.of(group, workspace.device)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, own, *rest = inputs
            alignment, bound = int(rest[0]) if rest else ALIGNMENT, bound_of(problem, outputs[0])
            ids = own.new_empty((n * len(own), *own.shape[1:]))
            gather(ids, own.contiguous(), group=group)
            ids = ids.view(n, *own.shape)
            placed = place(ids, rank, problem, bound, alignment)
            overflow.note(placed.code, bound, workspace)
            wire = wire_rows(x, problem)
            sent = wire.expand(n, *wire.shape).contiguous()
            got = torch.empty_like(sent)
            exchange(got, sent, group=group)
            fill_tokens(placed, got.flatten(0, 1), outputs, problem)
            for output, values in zip(outputs[2:], placed[:3], strict=True):
                output.copy_(values)

        return run


class CombineLibrary(LibraryVariant, registered=True):
    """all_to_all_single of the rows that are due, and a weighted sum in PyTorch. Graph-safe on NCCL.

    Eager calls wait for the number of rows; captured ones send room for every token, and take world_size times as much.
    """

    op = "ep_combine"
    summary = "all_to_all_single of NCCL (gloo on CPUs), and PyTorch operators that sum"

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch
        import torch.distributed as dist

        s, n, group, exchange = sizes_of(problem), problem.world_size, workspace.group, dist.all_to_all_single
        overflow = Overflow.of(workspace.group, workspace.device)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            results, weights, ids, rows = inputs
            results = results.view(-1, s.hidden).view(torch.uint8)
            sends = rows.view(n, -1) != NOT_HERE
            owner = torch.where(ids >= 0, ids // s.local, n).view(-1)
            due = owner == torch.arange(n, device=ids.device)[:, None]  # [n, T · K]
            if problem.mode == "graph":
                sent = results[rows.view(n, -1).clamp(min=0).long()]
                got = torch.empty_like(sent)
                exchange(got, sent, group=group)
                slots = got[owner.clamp(max=n - 1), torch.arange(len(owner), device=ids.device)]
            else:
                counts = torch.stack([sends.sum(1), due.sum(1)]).tolist()
                overflow.check(workspace)  # what the ranks send and expect would differ
                sent = results[rows.view(n, -1)[sends].long()]
                got = sent.new_empty(sum(counts[1]), sent.shape[1])
                exchange(got, sent, counts[1], counts[0], group=group)
                slots = sent.new_zeros(len(owner), sent.shape[1])
                slots[due.nonzero()[:, 1]] = got
            parts = slots.view(outputs[0].dtype).view(s.tokens, s.topk, s.hidden).unbind(1)
            outputs[0].copy_(weighted_sum(parts, weights, ids >= 0))

        return run
