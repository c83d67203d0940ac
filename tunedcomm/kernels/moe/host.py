"""host_one_shot: CPU tensors over a ring of slots in shared memory.

ep_dispatch: every rank publishes its ids, then its tokens in pieces; every rank copies the tokens of its experts from
its peers' slots to their rows. ep_combine: every rank publishes the results for a few tokens of each rank, at the place
(rank, token, k), and sums what its peers have at its own. Both pass as many pieces on every rank.

Numerics: ordered (ep_combine sums in the order of k in fp32, or fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunedcomm.kernels.common.feasibility import Launch
from tunedcomm.kernels.common.host import KIB, HostVariant
from tunedcomm.kernels.common.variant import Workspace
from tunedcomm.kernels.moe.op import (
    ALIGNMENT,
    NOT_HERE,
    Overflow,
    bound_of,
    place,
    sizes_of,
    token_dtype,
    weighted_sum,
    wire_bytes,
    wire_rows,
)
from tunedcomm.space import Choice, Config, Space
from tunedcomm.spec import ITEMSIZE, Limits, Problem
from tunedcomm.symm.layout import RING_SLOT_BYTES, RING_SLOTS

if TYPE_CHECKING:
    import torch

_FLOATS = ("bfloat16", "float16", "float32", "float64")


class _Ring:
    """The ring as a bound problem passes pieces through it."""

    def __init__(self, workspace: Workspace, problem: Problem, config: Config) -> None:
        assert workspace.ring is not None, "limits.host_cores says that there is one"
        self.ring, self.op, self.spins = workspace.ring, f"{problem.op} (called eagerly)", int(config["spins"])

    def view(self, rank: int, slot: int, nbytes: int) -> torch.Tensor:
        """The first bytes of a rank's slot."""
        import torch

        return torch.from_numpy(self.ring.view(rank, slot, 0, nbytes))

    def exchange(self, count: int, put: Callable[[int, int], object], take: Callable[[int, int], object]) -> None:
        """Pass `count` pieces: `put(piece, slot)` fills the own slot, `take(piece, slot)` reads those of all ranks."""
        ring, op = self.ring, self.op

        def publish(piece: int) -> int:
            step = ring.claim(op)
            put(piece, step % RING_SLOTS)
            ring.publish(step)
            return step

        step = publish(0) if count else 0
        for piece in range(count):
            ahead = publish(piece + 1) if piece + 1 < count else 0
            ring.wait(step, self.spins, op)
            take(piece, step % RING_SLOTS)
            ring.release(step)
            step = ahead


class _Host(HostVariant):
    name = "host_one_shot"
    dtypes = _FLOATS
    space = Space({"piece_kib": Choice(64, 256, 1024), "spins": Choice(1, 64, 1024)})

    def unit_bytes(self, problem: Problem) -> int:
        """Bytes of a slot that one token takes."""
        raise NotImplementedError

    def infeasible(self, problem: Problem, config: Config, limits: Limits) -> str | None:
        if limits.host_cores == 0:
            return "only CPU tensors of ranks on one host go through its shared memory"
        if problem.dtype not in self.dtypes:
            return f"it takes {', '.join(self.dtypes)}, not {problem.dtype}"
        if problem.numel == 0:
            return "there is nothing to do"
        if sizes_of(problem).experts % problem.world_size:
            return "the ranks cannot share the experts equally"
        if self.unit_bytes(problem) > int(config["piece_kib"]) * KIB:
            return f"a token takes {self.unit_bytes(problem)} bytes of a slot, more than a piece"
        return None

    def wish(self, problem: Problem, limits: Limits) -> Mapping[str, float]:
        return {"piece_kib": 256, "spins": 1 if problem.world_size > limits.host_cores else 1024}

    def tokens_of_piece(self, problem: Problem, config: Config) -> int:
        return int(config["piece_kib"]) * KIB // self.unit_bytes(problem)


class DispatchHost(_Host, registered=True):
    op = "ep_dispatch"
    summary = "CPU tensors: every rank copies its experts' tokens from shared memory"

    def unit_bytes(self, problem: Problem) -> int:
        return wire_bytes(problem)

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        s, n, passing = sizes_of(problem), problem.world_size, _Ring(workspace, problem, config)
        rank, overflow, dtype = passing.ring.rank, Overflow.of(workspace.group, workspace.device), token_dtype(problem)
        size, unit = self.tokens_of_piece(problem, config), self.unit_bytes(problem)
        pieces = [(first, min(first + size, s.tokens)) for first in range(0, s.tokens, size)]
        id_bytes, id_step = 4 * s.topk, RING_SLOT_BYTES // (4 * s.topk)
        id_pieces = [(first, min(first + id_step, s.tokens)) for first in range(0, s.tokens, id_step)]

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            x, own, *rest = inputs
            alignment, bound = int(rest[0]) if rest else ALIGNMENT, bound_of(problem, outputs[0])
            ids = torch.empty(n, s.tokens, s.topk, dtype=torch.int32)
            tokens, scales = outputs[0].view(-1, s.hidden), outputs[1].view(-1, max(s.num_scales, 1))
            sent = wire_rows(x, problem)

            def put_ids(piece: int, slot: int) -> None:
                first, last = id_pieces[piece]
                target = passing.view(rank, slot, (last - first) * id_bytes).view(torch.int32)
                target.copy_(own[first:last].reshape(-1))

            def take_ids(piece: int, slot: int) -> None:
                first, last = id_pieces[piece]
                for peer in range(n):
                    got = passing.view(peer, slot, (last - first) * id_bytes).view(torch.int32)
                    ids[peer, first:last] = got.view(-1, s.topk)

            with passing.ring.lock:
                passing.exchange(len(id_pieces), put_ids, take_ids)
                placed = place(ids, rank, problem, bound, alignment)
                overflow.note(placed.code, bound, workspace)
                # By rank, the places (token, k) that come here, in order, and their rows.
                here = [(rows >= 0).nonzero() for rows in placed.rows]
                where = [rows[rows >= 0].long() for rows in placed.rows]
                begins = [torch.searchsorted(found[:, 0].contiguous(), torch.tensor(_edges(pieces))) for found in here]

                def put(piece: int, slot: int) -> None:
                    first, last = pieces[piece]
                    passing.view(rank, slot, (last - first) * unit).view(-1, unit).copy_(sent[first:last])

                def take(piece: int, slot: int) -> None:
                    first, last = pieces[piece]
                    for peer in range(n):
                        begin, end = begins[peer][piece], begins[peer][piece + 1]
                        source = here[peer][begin:end, 0] - first
                        target = where[peer][begin:end]
                        if not len(target):
                            continue
                        got = passing.view(peer, slot, (last - first) * unit).view(-1, unit)[source]
                        tokens[target] = got[:, : s.row_bytes].contiguous().view(dtype)
                        if s.num_scales:
                            scales[target] = got[:, s.row_bytes :].contiguous().view(torch.float32)

                passing.exchange(len(pieces), put, take)
            for output, values in zip(outputs[2:], placed[:3], strict=True):
                output.copy_(values)

        return run


class CombineHost(_Host, registered=True):
    op = "ep_combine"
    summary = "CPU tensors: every rank sums its tokens' results from shared memory"

    def unit_bytes(self, problem: Problem) -> int:
        s = sizes_of(problem)
        return problem.world_size * s.topk * s.hidden * ITEMSIZE[problem.dtype]

    def bind(self, problem: Problem, config: Config, workspace: Workspace) -> Launch:
        import torch

        s, n, passing = sizes_of(problem), problem.world_size, _Ring(workspace, problem, config)
        rank, dtype, unit = passing.ring.rank, getattr(torch, problem.dtype), self.unit_bytes(problem)
        size = self.tokens_of_piece(problem, config)
        pieces = [(first, min(first + size, s.tokens)) for first in range(0, s.tokens, size)]
        ranks = torch.arange(n).view(n, 1, 1)

        def slots(of: int, slot: int, count: int) -> torch.Tensor:
            """A rank's slot as [n, tokens, K, H]."""
            return passing.view(of, slot, count * unit).view(dtype).view(n, count, s.topk, s.hidden)

        def run(inputs: tuple[Any, ...], outputs: tuple[Any, ...], stream: int) -> None:
            results, weights, ids, rows = inputs
            results, y = results.view(-1, s.hidden), outputs[0].view(-1, s.hidden)
            owner = torch.where(ids >= 0, ids // s.local, -1)
            from_rank = owner == ranks  # [n, T, K]

            def put(piece: int, slot: int) -> None:
                first, last = pieces[piece]
                asked = rows[:, first:last]
                here = asked != NOT_HERE
                found = asked[here].long()
                mine = results[found.clamp(min=0)]
                mine[found < 0] = 0
                slots(rank, slot, last - first)[here] = mine

            def take(piece: int, slot: int) -> None:
                first, last = pieces[piece]
                got = torch.zeros(last - first, s.topk, s.hidden, dtype=dtype)
                for peer in range(n):
                    here = from_rank[peer, first:last]
                    got[here] = slots(peer, slot, last - first)[rank][here]
                y[first:last] = weighted_sum(got.unbind(1), weights[first:last], ids[first:last] >= 0)

            with passing.ring.lock:
                passing.exchange(len(pieces), put, take)

        return run


def _edges(pieces: list[tuple[int, int]]) -> list[int]:
    """First token of every piece, and the token behind the last one."""
    return [first for first, _ in pieces] + [pieces[-1][1]]
