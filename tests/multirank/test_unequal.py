"""Ranks that differ in what is their own (outputs, counts, rows in use): right, or an error that is soon known."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import HOST
from harness import run_ranks
from variant_checks import bits_of

import tunedcomm
from tunedcomm.ops.adapter import Tensors
from tunedcomm.ops.call import paths
from tunedcomm.ops.gemm import list_path

WAITS_S = 20.0
ENV = {**HOST, "TUNEDCOMM_PEER_TIMEOUT_S": str(WAITS_S)}
SOON_S = WAITS_S / 2


def drawn(rank: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-4, 5, shape, generator=generator).float()


def sent_to(rank: int, world_size: int, ids: torch.Tensor, **options: Any) -> tunedcomm.DispatchResult:
    return tunedcomm.ep_dispatch(drawn(rank, len(ids), 32), ids, num_experts=2 * world_size, **options)


def calls(rank: int, world_size: int) -> dict[str, tuple[Tensors, tuple[Any, ...]]]:
    """Operator to the inputs and options of a call of it."""
    x, row, ids = drawn(rank, 2 * world_size, 16), drawn(0, 16), torch.tensor([[0, 3], [2, 1], [1, -1]])
    wide, b, few = drawn(rank, 4, 128), drawn(0, 16, 8), drawn(rank, 2, 8)
    sent = sent_to(rank, world_size, ids)
    number, all_rows = torch.tensor(2 + rank % 2, dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    gemm = (x, b, None, None)
    counts = tuple(2 for _ in range(world_size))
    return {
        "all_reduce": ((x,), ("sum",)),
        "all_gather": ((x,), (0,)),
        "reduce_scatter": ((x,), ("sum", 0)),
        "all_reduce_fp32": ((x.bfloat16(),), ("sum",)),
        "reduce_scatter_fp32": ((x.bfloat16(),), ("sum", 0)),
        "all_reduce_wire": ((x,), ("sum", "fp8_group128")),
        "all_gather_wire": ((x,), (0, "fp8_group128")),
        "reduce_scatter_wire": ((x,), ("sum", 0, "fp8_group128")),
        "all_to_all": ((x,), ()),
        "all_to_all_v": ((x,), (counts, counts, 4)),
        "broadcast": ((x,), (1,)),
        "all_gather_list_3": ((x, row, ids), ((x.nbytes, row.nbytes, ids.nbytes), 0)),
        "all_gather_v": ((x[:2], None), (counts, 2, 4)),
        "reduce_scatter_v": ((x, None), (counts, 2, 4)),
        "dcp_combine": ((drawn(rank, 3, 2 * world_size, 8), drawn(rank, 3, 2 * world_size, seed=1)), ("e",)),
        "ulysses_scatter": ((drawn(rank, 1, 2, world_size, 8),), ()),
        "ulysses_gather": ((drawn(rank, 1, 2 * world_size, 1, 8),), ()),
        "all_reduce_bias": ((x, row), ()),
        "all_reduce_rms_norm": ((x, row, row, None, None), (1e-6, None)),
        "all_reduce_rms_norm_quantized": (
            (wide, drawn(0, 128), None, None, None), (1e-6, "token", "row", False, False, 0.0)
        ),
        "ag_gemm": (gemm, (None,)),
        "ag_gemm_gathered": (gemm, (None,)),
        "ag_gemm_list": ((few, None, drawn(0, 8, 8), drawn(0, 8, 4), None, None), (None,)),
        "gemm_rs": (gemm, (None, "sum")),
        "gemm_ar": ((x, b, None, None, None), (None,)),
        "ep_dispatch": ((drawn(rank, 3, 32), ids, None, number), (2 * world_size, 12, "padded", "", 128, True)),
        "ep_combine": ((sent.tokens, torch.ones(3, 2), ids, sent.rows, all_rows), (2 * world_size,)),
        "ep_combine_rank": (
            (sent.tokens, torch.ones(world_size, 3, 2), ids, sent.rows, all_rows), (2 * world_size, "")
        ),
        "ep_dispatch_tokens": ((drawn(rank, 3, 32), ids, None, number), (2 * world_size, True, False)),
        "ep_combine_tokens": (
            (drawn(rank, 3 * world_size, 32), ids.int().repeat(world_size, 1).clamp(max=1), ids, all_rows),
            (2 * world_size, ""),
        ),
    }  # fmt: skip


def as_tuple(found: Any) -> Tensors:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def same(found: Tensors, due: Tensors) -> bool:
    return all(torch.equal(bits_of(a), bits_of(b)) for a, b in zip(found, due, strict=True))


def misfits(inputs: Tensors, due: torch.Tensor) -> Iterator[tuple[str, Tensors, torch.Tensor]]:
    """Outputs that a call refuses in the place of one like `due`, with the inputs to pass beside them."""
    yield "shape", inputs, due.new_empty((*due.shape, 2))
    yield "dtype", inputs, torch.empty(due.shape, dtype=torch.complex64)
    yield "layout", inputs, torch.zeros(due.shape).to_sparse()
    if due.numel() > 1:
        yield "expanded", inputs, due.new_empty(1).expand(due.shape)
    x = inputs[0]
    if x.dtype == due.dtype and due.numel():
        whole = x.new_zeros(1 + x.numel() + due.numel())
        near = whole[: x.numel()].view(x.shape)
        near.copy_(x)
        yield "overlap", (near, *inputs[1:]), whole[1 : 1 + due.numel()].view(due.shape)
    if due.is_floating_point():
        yield "gradient", inputs, due.detach().clone().requires_grad_()


def outputs_body(rank: int, world_size: int) -> int:
    """One rank has an output that cannot be used: it raises, its peers get their results, the group goes on."""
    table, count = calls(rank, world_size), 0
    list_path(2)
    assert set(table) == set(paths), "an op is missing here"
    for name, (inputs, options) in table.items():
        path = paths[name]
        policy: Any = None if path.adapter.reduces else "default"

        def public(tensors: Tensors, path: Any = path, options: Any = options, policy: Any = policy) -> Tensors:
            call = path.call if path.adapter.has_operator else path.serve_again
            return as_tuple(call(tensors, options, dist.group.WORLD, policy, None))

        def operator(tensors: Tensors, path: Any = path, options: Any = options, name: str = name) -> Tensors:
            adapter = path.adapter
            given = dict(zip(adapter.outputs, tensors[len(adapter.inputs) :], strict=True))
            more = (None,) if adapter.reduces else ()
            group = dist.group.WORLD
            assert group is not None
            rest = (*options, world_size, group.group_name, *more, None)
            getattr(torch.ops.tunedcomm, name).out(*tensors[: len(adapter.inputs)], *rest, **given)
            return tuple(given.values())

        adapters: list[Callable[[Tensors], Tensors]] = [public]
        if path.adapter.has_operator:
            adapters.append(operator)
        due = public((*inputs, *(None,) * len(path.adapter.outputs)))
        for number, call in enumerate(adapters):
            for index in range(len(due)):
                for offset, (what, taken, wrong) in enumerate(misfits(inputs, due[index])):
                    outs = [torch.empty_like(tensor) for tensor in due]
                    at_fault = rank == (number + index + offset) % world_size
                    if at_fault:
                        outs[index] = wrong
                        try:
                            call((*taken, *outs))
                        except tunedcomm.UnsupportedInputError:
                            pass
                        else:
                            pytest.fail(f"{name} takes an output of {what} in form {number}")
                    else:
                        assert same(call((*inputs, *outs)), due), (name, what, index)
                    count += 1
        assert same(public((*inputs, *(None,) * len(due))), due), name
    return count


@pytest.mark.parametrize("mode", ["cached", "off"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_with_an_output_that_is_refused(world_size: int, mode: str) -> None:
    assert min(run_ranks(world_size, outputs_body, timeout=200, env={**ENV, "TUNEDCOMM_MODE": mode})) > 150


def experts_of(sent: tunedcomm.DispatchResult, rank: int) -> torch.Tensor:
    """Expert e adds e + 1; rows that hold no token are NaN."""
    flat = sent.tokens.view(-1, sent.tokens.shape[-1])
    out = torch.full_like(flat, float("nan"))
    for e, (begin, count) in enumerate(zip(sent.offsets.tolist(), sent.counts.tolist(), strict=False)):
        out[begin : begin + count] = flat[begin : begin + count] + (rank * len(sent.counts) + e + 1)
    return out.view(sent.tokens.shape)


def combined(rank: int, ids: torch.Tensor) -> torch.Tensor:
    """The sum over its experts of every token of `sent_to`."""
    return ((drawn(rank, len(ids), 32).unsqueeze(1) + ids.unsqueeze(-1) + 1) * (ids >= 0).unsqueeze(-1)).sum(1)


def rows_body(rank: int, world_size: int) -> int:
    """Results without the rows that are not in use, also where no row is: by every variant, the operator, gradients."""
    count, last = 0, 2 * world_size - 1
    everyone = {
        "one rank has all": torch.tensor([[0, 1], [1, -1], [-1, -1]]),
        "the last has none": torch.tensor([[0, last - 2], [1, 0], [max(last - 3, -1), 0]]),
        "none": torch.full((3, 2), -1),
        "mixed": torch.tensor([[0, last], [last - 1, 1], [1, -1]]),
    }
    for variant in ("library", "push", "lamport"):
        with tunedcomm.force("ep_combine", variant):
            for case, ids in everyone.items():
                for behind in (0, 5):
                    sent = sent_to(rank, world_size, ids, layout="contiguous")
                    used = int((sent.rows.max() + 1).clamp(min=0))
                    trimmed = experts_of(sent, rank)[: used + behind].clone()
                    weights, due = torch.ones(3, 2), combined(rank, ids)
                    for _ in range(2):
                        assert torch.equal(tunedcomm.ep_combine(trimmed, sent, weights), due), (variant, case, behind)
                    group = dist.group.WORLD
                    assert group is not None
                    more = (2 * world_size, world_size, group.group_name)
                    found = torch.ops.tunedcomm.ep_combine(trimmed, weights, ids, sent.rows, None, *more)
                    assert torch.equal(found, due), (variant, case, behind)
                    count += 1
    # Gradients that one rank asks for and others do not.
    ids, weights = everyone["mixed"], torch.ones(3, 2, requires_grad=rank != 0)
    sent = sent_to(rank, world_size, ids, layout="contiguous")
    used = int((sent.rows.max() + 1).clamp(min=0))
    trimmed = experts_of(sent, rank)[:used].detach().nan_to_num().requires_grad_(rank != 1)
    tunedcomm.ep_combine(trimmed, sent, weights).sum().backward()
    assert (weights.grad is None, trimmed.grad is None) == (rank == 0, rank == 1)
    return count


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_end_behind_the_rows_in_use(world_size: int) -> None:
    assert min(run_ranks(world_size, rows_body, timeout=200, env=ENV)) == 24


def bad_results(sent: tunedcomm.DispatchResult, results: torch.Tensor) -> dict[str, torch.Tensor]:
    """`expert_out` of shapes that a call refuses."""
    used = int(sent.rows.max()) + 1
    found = {
        "one more": torch.cat([results, results[:1]]), "three dimensions": results.unsqueeze(0),
        "half": results[: results.shape[0] // 2], "one dimension": results.view(-1),
    }  # fmt: skip
    if results.dim() == 2:
        return {**found, "none": results[:0], "one less than in use": results[: used - 1], "half": results[: used // 2]}
    return {**found, "flat": results.reshape(-1, results.shape[-1]), "none": results[:, :0]}


@contextlib.contextmanager
def ends(at_fault: bool) -> Iterator[None]:
    """The call inside the block ends the group: one rank is refused, and its peers soon know; then all begin anew."""
    dist.barrier()  # a peer may still be in the call before, which would end with the group
    begin = time.monotonic()
    with pytest.raises(tunedcomm.UnsupportedInputError if at_fault else tunedcomm.GroupAbortedError):
        yield
    assert time.monotonic() - begin < SOON_S
    with pytest.raises(tunedcomm.GroupAbortedError):
        tunedcomm.all_reduce(torch.ones(4))
    dist.barrier()
    tunedcomm.release_communicator()


def refused_body(rank: int, world_size: int) -> int:
    """One rank has results in a wrong shape: it raises, and so do its peers, which lack its results."""
    ids, weights, count = torch.tensor([[0, 2], [1, 3], [2, 0]]), torch.ones(3, 2), 0
    for variant in ("library", "push", "lamport"):
        with tunedcomm.force("ep_combine", variant):
            for layout in ("padded", "contiguous"):
                sent = sent_to(rank, world_size, ids, layout=layout)
                results = experts_of(sent, rank)
                for what in bad_results(sent, results) if rank == 1 else range(6):
                    with ends(rank == 1):
                        given = bad_results(sent, results)[str(what)] if rank == 1 else results
                        tunedcomm.ep_combine(given, sent, weights)
                    assert torch.equal(tunedcomm.ep_combine(results, sent, weights), combined(rank, ids))
                    count += 1
        more = (2 * world_size, world_size, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        few = results.view(-1, 32)[: int(sent.rows.max()) if rank == 1 else None]
        with ends(rank == 1):
            torch.ops.tunedcomm.ep_combine(few, weights, ids, sent.rows, None, *more)
    return count


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_with_results_that_are_refused(world_size: int) -> None:
    assert min(run_ranks(world_size, refused_body, timeout=250, env=ENV)) == 36


def debug_body(rank: int, world_size: int) -> None:
    """With TUNEDCOMM_DEBUG calls of no elements are served, and calls that differ raise on every rank."""
    table = calls(rank, world_size)
    list_path(2)
    empty = [name for name in table if name.startswith("all_reduce") or name in ("all_gather", "reduce_scatter")]
    empty.remove("all_reduce_fp32")  # its inputs have 16 bits
    for name in empty:
        path = paths[name]
        for shape in ((0,), (4 * world_size, 0), (0, 0), (0, 128)):
            _, *rest = table[name][0]
            fit = [None if one is None else torch.ones(shape[-1]) for one in rest]
            outs = (None,) * len(path.adapter.outputs)
            policy: Any = None if path.adapter.reduces else "default"
            found = as_tuple(path.call((torch.ones(shape), *fit, *outs), table[name][1], None, policy, None))
            assert found[0].numel() == 0, (name, shape)
    for index, (name, (inputs, options)) in enumerate(table.items()):
        path = paths[name]
        call = path.call if path.adapter.has_operator else path.serve_again
        tensors = [*inputs, *(None,) * len(path.adapter.outputs)]
        if rank == index % world_size:
            tensors[0] = tensors[0][:0] if name != "ep_combine" else tensors[0][..., :8]
        policy = None if path.adapter.reduces else "default"
        with pytest.raises((tunedcomm.AgreementError, tunedcomm.UnsupportedInputError)):
            call(tuple(tensors), options, dist.group.WORLD, policy, None)
    sent = sent_to(rank, world_size, torch.tensor([[0, 3], [2, 1], [1, -1]]))
    with pytest.raises((tunedcomm.AgreementError, tunedcomm.UnsupportedInputError)):
        tunedcomm.ep_combine(sent.tokens[0] if rank else sent.tokens, sent, torch.ones(3, 2))
    ids, number = torch.tensor([[0, 1], [1, -1]]), torch.tensor([1], dtype=torch.int32)
    for layout, name, tensor in (("tokens", "num_tokens", number), ("contiguous", "topk_weights", torch.ones(2, 2))):
        given: dict[str, Any] = {name: tensor} if rank else {}
        with pytest.raises(tunedcomm.AgreementError, match=f"tensors.*{name}"):
            tunedcomm.ep_dispatch(torch.ones(2, 64), ids, num_experts=2 * world_size, layout=layout, **given)
    counts = [2] * world_size
    with pytest.raises((tunedcomm.AgreementError, tunedcomm.UnsupportedInputError)):
        tunedcomm.all_to_all_v(torch.ones(2 * world_size), counts, [-1] * world_size if rank else counts)
    assert torch.equal(tunedcomm.all_reduce(torch.ones(4)), torch.full((4,), float(world_size)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_are_compared(world_size: int) -> None:
    run_ranks(world_size, debug_body, timeout=100, env={**ENV, "TUNEDCOMM_DEBUG": "1"})


def no_rows_body(rank: int, world_size: int) -> None:
    """A rank that sends nothing, gets nothing, or both."""
    for max_count, idle in ((None, "sends"), (4, "sends"), (4, "gets"), (8, "both"), (None, "both")):

        def rows(source: int, target: int, idle: str = idle) -> int:
            silent = (source == 1 and idle != "gets") or (target == 1 and idle != "sends")
            return 0 if silent else 1 + (source + target) % 3

        send = [rows(rank, target) for target in range(world_size)]
        recv = [rows(source, rank) for source in range(world_size)]
        x = torch.full((sum(send), 3), float(rank))
        found = tunedcomm.all_to_all_v(x, send, recv, max_count=max_count)
        assert torch.equal(found[:, 0], torch.tensor([float(s) for s in range(world_size) for _ in range(recv[s])]))


@pytest.mark.parametrize("mode", ["cached", "off"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_without_rows(world_size: int, mode: str) -> None:
    run_ranks(world_size, no_rows_body, timeout=100, env={**ENV, "TUNEDCOMM_MODE": mode})


def counts_body(rank: int, world_size: int) -> None:
    """One rank names counts that cannot be: they are its own, so its peers end, too."""
    x, counts = torch.ones(2 * world_size, 3), [2] * world_size
    for max_count in (None, 4):
        for wrong in (
            {"recv_counts": [2]},
            {"send_counts": [-1, *counts[1:]]},
            {"x": x[1:]},
            {"recv_counts": [3] * world_size},
        ):
            with ends(rank == 0):
                given: dict[str, Any] = {"x": x, "send_counts": counts, "recv_counts": counts}
                tunedcomm.all_to_all_v(**{**given, **(wrong if rank == 0 else {})}, max_count=max_count)
    assert torch.equal(tunedcomm.all_to_all_v(x, counts, counts), x)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_with_counts_that_are_refused(world_size: int) -> None:
    run_ranks(world_size, counts_body, timeout=100, env=ENV)


def differing_calls(rank: int, world_size: int) -> dict[str, Callable[[], object]]:
    """Calls that differ by rank."""
    small, halves = torch.ones(64 + rank), torch.ones(64, dtype=torch.bfloat16 if rank else torch.float32)
    large, wide = torch.ones((1 << 20) * (1 + rank)), torch.ones(world_size, 4)
    return {
        "shape": lambda: tunedcomm.all_reduce(small),
        "chunks": lambda: tunedcomm.all_reduce(large),
        "gathered": lambda: tunedcomm.all_gather(small),
        "dtype": lambda: tunedcomm.all_reduce(halves),
        "reduction": lambda: tunedcomm.all_reduce(wide, op="avg" if rank else "sum"),
        "op": lambda: (tunedcomm.all_gather if rank else tunedcomm.all_reduce)(wide),
        "root": lambda: tunedcomm.broadcast(wide, src=rank % 2),
    }


def different_body(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    """Each ends soon on every rank, in an error that names calls of two ranks; a new set-up works."""
    x = torch.arange(8.0) + rank
    for name in names:
        for _ in range(3):
            assert torch.equal(tunedcomm.all_reduce(x), world_size * torch.arange(8.0) + sum(range(world_size))), name
        begin = time.monotonic()
        with pytest.raises(tunedcomm.AgreementError, match=r"rank \d calls .*, rank \d calls"):
            differing_calls(rank, world_size)[name]()
        assert time.monotonic() - begin < SOON_S
        with pytest.raises(tunedcomm.AgreementError):
            tunedcomm.all_reduce(x)
        tunedcomm.release_communicators()


NAMES = ("shape", "chunks", "gathered", "dtype", "reduction", "op")


@pytest.mark.parametrize(("mode", "names"), [("cached", (*NAMES, "root")), ("off", NAMES)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_make_different_calls(world_size: int, mode: str, names: tuple[str, ...]) -> None:
    run_ranks(world_size, different_body, names, timeout=100, env={**ENV, "TUNEDCOMM_MODE": mode})
