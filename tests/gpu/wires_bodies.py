"""Quantised wires on GPUs: bits of every kernel, replays with other values, ranks ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured, same_bits

import tunedcomm
from tunedcomm.fp8 import WIRES
from tunedcomm.spec import Problem, get_op

NAMES = {
    "all_reduce": ("lamport_quantized", "one_shot_quantized", "two_shot_quantized"),
    "reduce_scatter": ("lamport_quantized", "one_shot_quantized"),
    "all_gather": ("one_shot_quantized",),
}
SIZES = (1, 127, 1000, 4099, 65536, 1 << 20, (3 << 20) + 1234)
DTYPES = ("bfloat16", "float16", "float32")


def case(op: str, name: str, wire: str, numel: int, dtype: str, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input and its result; sizes differ by magnitudes within a tensor."""
    rank, n = dist.get_rank(), dist.get_world_size()
    everyone = []
    for r in range(n):
        generator = torch.Generator().manual_seed(1000 * turn + r)
        size = numel * (n if op == "reduce_scatter" else 1)
        x = torch.randn(size, generator=generator) * torch.linspace(1e-3, 50, size)
        x[turn::997] = 0.0
        everyone.append((x.to(getattr(torch, dtype)),))
    reduction = "" if op == "all_gather" else "sum"
    problem = Problem(op, (numel,), dtype, n, reduction, scaling=wire, mode="eager")
    refer = get_op(op).quantized_references
    assert refer is not None
    return everyone[rank][0].cuda(), refer(problem, everyone, rank)[int(name == "two_shot_quantized")][0].cuda()


def every_case() -> Iterator[tuple[str, str, str, int, str]]:
    forms = ((op, name, wire) for op, names in NAMES.items() for name in names for wire in WIRES)
    for number, ((op, name, wire), numel) in enumerate(itertools.product(list(forms), SIZES)):
        yield op, name, wire, numel, DTYPES[number % 3]


def calls_body() -> dict[str, object]:
    """Eager calls, and graphs whose input changes between replays."""
    checked = 0
    for op, name, wire, numel, dtype in every_case():
        function: Any = getattr(tunedcomm, op)
        turns = [case(op, name, wire, numel, dtype, turn) for turn in range(3)]
        with tunedcomm.force(op, name):
            for x, due in turns:
                for _ in range(3):
                    assert same_bits(function(x, wire=wire), due), (op, name, wire, numel, dtype)
            held, out = torch.zeros_like(turns[0][0]), torch.zeros_like(turns[0][1])
            graph = captured(lambda _, f=function, x=held, out=out, wire=wire: f(x, wire=wire, out=out), 3)
            for x, due in turns * 5:
                held.copy_(x)
                out.fill_(7.0)
                graph.replay()
                torch.cuda.synchronize()
                tunedcomm.get_communicator().check_peers()  # a kernel that waited too long has no right result
                assert same_bits(out, due), (op, name, wire, numel, dtype)
                checked += 1
    return {"checked": checked}


def ahead_body() -> dict[str, object]:
    """Ranks that run ahead of each other, with launches of other ops between, overwrite nothing that is still read."""
    for (op, names), wire in itertools.product(NAMES.items(), WIRES):
        function: Any = getattr(tunedcomm, op)
        for name, numel in itertools.product(names, (300, 200_000)):
            late, cases = [], [case(op, name, wire, numel + 16 * turn, "bfloat16", turn) for turn in range(8)]
            with tunedcomm.force(op, name):
                for turn in range(300):
                    if turn % 7 == dist.get_rank():
                        torch.cuda._sleep(200_000)
                    x, due = cases[turn % len(cases)]
                    late.append((function(x, wire=wire), due))
                    if turn % 3 == 0:
                        total = tunedcomm.all_gather_v(torch.ones(5, 8, device="cuda"), max_count=5)[0]
                        late.append((total, torch.ones_like(total)))
                assert all(same_bits(found, due) for found, due in late), (op, name, wire, numel)
    return {}
