"""What each rank of a GPU test of FSDP2, fp32 results and gathers in place runs, by `run_bodies.py`."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured, same_bits
from reduce_scatter_bodies import some_configs
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import tunedcomm
import tunedcomm.fsdp
from tunedcomm.dispatch.groups import get_communicator
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.common.in_order import scatter_in_order
from tunedcomm.spec import Candidate, Problem, get_op, variants

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def wide_body() -> dict[str, object]:
    """fp32 results of every variant that gives them, in several configs, eagerly and in graphs."""
    comm, checked = get_communicator(), 0
    for op in ("all_reduce", "reduce_scatter"):
        names = [name for name in variants(op) if name.endswith("_fp32")]
        for numel, dtype in ((8, "bfloat16"), (1003, "float16"), (1 << 20, "bfloat16"), ((5 << 20) + 8, "bfloat16")):
            reduction = "avg" if numel % 2 else "sum"
            problem = Problem(op, (numel,), dtype, comm.world_size, reduction, layout="float32")
            everyone = [get_op(op).make_inputs(problem, r, numel, "random", "cuda") for r in range(comm.world_size)]
            (x,), (expected,) = everyone[comm.rank], get_op(op).ordered_reference(problem, everyone, comm.rank)
            for name in names:
                for config in some_configs(problem, name, random.Random(numel), 6):
                    with contextlib.suppress(InfeasibleError):
                        launch, out = comm.bind(problem, Candidate.of(op, name, config)), torch.empty_like(expected)
                        graph = captured(
                            lambda _, launch=launch, out=out, x=x: launch(
                                (x,), (out,), torch.cuda.current_stream().cuda_stream
                            ),
                            3,
                        )
                        for _ in range(5):
                            out.fill_(float("nan"))
                            graph.replay()
                            assert same_bits(out, expected), (op, name, config, numel)
                            checked += 1
    assert checked
    return {"right": checked}


def in_place_body() -> dict[str, object]:
    """Gathers whose input is the rank's own part of the output, by every variant."""
    rank, n, checked = dist.get_rank(), dist.get_world_size(), 0
    for name in variants("all_gather"):
        for numel in (7, 4096, 1 << 20, (3 << 20) + 8):
            expected = torch.cat([torch.arange(numel, device="cuda") + 100 * r for r in range(n)]).bfloat16()
            with contextlib.suppress(InfeasibleError), tunedcomm.force("all_gather", name):
                for _ in range(10):
                    out = torch.full_like(expected, float("nan"))
                    mine = out[numel * rank : numel * (rank + 1)].copy_(expected[numel * rank : numel * (rank + 1)])
                    assert same_bits(tunedcomm.all_gather(mine, out=out), expected), (name, numel)
                    checked += 1
    assert checked
    return {"right": checked}


class InRankOrder(DefaultReduceScatter):
    """Sums in fp32 in rank order."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        reduction = "avg" if op == dist.ReduceOp.AVG else "sum"
        scatter_in_order(input_tensor.view(group.size(), -1), output_tensor, reduction, group)


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(1000 + i, 1001 + i) for i in range(4))).cuda()
    for part in (*model, model):
        fully_shard(part, mp_policy=POLICY)
    return model


def _train(model: nn.Module, steps: int = 20) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator(device="cuda").manual_seed(100 * step + dist.get_rank())
        model(torch.randn(64, 1000, generator=generator, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().clone() for parameter in model.parameters()]


def train_body() -> dict[str, object]:
    """Whole models against sums in rank order: plain and symmetric inputs, asynchronous gathers, copy engines."""
    reference, checked = _model(), 0
    for module in reference.modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_reduce_scatter(InRankOrder())
    expected = _train(reference)
    for scatter, gather, is_async in (
        ("push_fp32", "push", False),
        ("one_shot_fp32", "copy_engine", False),
        ("push_fp32", "copy_engine", True),
        ("library", "library", True),
    ):
        with tunedcomm.force("reduce_scatter", scatter), tunedcomm.force("all_gather", gather):
            model = _model()
            for module in model.modules():
                if is_async and hasattr(module, "_set_unshard_async_op"):
                    module._set_unshard_async_op(True)
            tunedcomm.fsdp.install(model, wire=torch.bfloat16)
            found = _train(model)
        for a, b in zip(found, expected, strict=True):
            if scatter == "library" and dist.get_world_size() > 2:
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
            else:
                assert torch.equal(a, b), (scatter, gather, is_async)
            checked += 1
    return {"right": checked}
