"""What each rank of a GPU test of serving engines runs, by `run_bodies.py`: the engines of a few lines, over NCCL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bodies import captured

sys.path.append(str(Path(__file__).parents[1]))

import toy_engines as toy

import tunedcomm
import tunedcomm_plugin

SIZES = (8, 4096, 131_072, 2_000_000)


def rows(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).to("cuda", torch.bfloat16)


def total(*shape: int) -> torch.Tensor:
    return sum(rows(rank, *shape).float() for rank in range(dist.get_world_size())).bfloat16()  # type: ignore[union-attr]


def make() -> tuple[Any, Any]:
    engine = toy.add_vllm()
    tunedcomm_plugin.register()
    made = toy.make_communicator(dist.group.WORLD, device=torch.device("cuda", torch.cuda.current_device()))
    engine.tp = type("Coordinator", (), {"device_communicator": made})
    return made, toy.define_vllm_norm("CUDA")


def vllm_body() -> dict[str, object]:
    """Collectives and the fused norm, eagerly and in graphs, with kernels that are forced."""
    rank, n, checked = dist.get_rank(), dist.get_world_size(), 0
    communicator, fused = make()
    with tunedcomm.force("all_reduce", "two_shot"), tunedcomm.force("all_gather", "lamport"):
        for numel in SIZES[:3]:
            x, expected = rows(rank, numel), total(numel)
            assert torch.equal(communicator.all_reduce(x), expected)
            assert torch.equal(communicator.all_gather(x, 0), torch.cat([rows(r, numel) for r in range(n)]))
            out = torch.empty_like(x)
            graph = captured(lambda _, x=x, out=out: out.copy_(communicator.all_reduce(x)), 1)
            for turn in range(20):
                x.copy_(rows(rank, numel) * (turn % 3))
                graph.replay()
                assert torch.equal(out, (expected.float() * (turn % 3)).bfloat16()), (numel, turn)
                checked += 1
    weight, residual = torch.linspace(0.5, 2, 4096, device="cuda").bfloat16(), rows(99, 16, 4096)
    common = {"rms_eps": 1e-5, "world_size": n, "launch_with_pdl": True, "fp32_acc": True, "max_token_num": 64}
    y, held = toy.reference_norm(total(16, 4096), residual, weight, 1e-5)
    with tunedcomm.force("all_reduce_rms_norm", "one_shot"):
        x, kept = rows(rank, 16, 4096), residual.clone()
        fused(x, kept, weight, pattern_code=1, **common)
        torch.testing.assert_close(x, y)
        assert torch.equal(kept, held)
        source, kept, out = rows(rank, 16, 4096), residual.clone(), torch.empty_like(y)

        def step(_: int) -> None:
            kept.copy_(residual)
            x.copy_(source)
            fused(x, kept, weight, pattern_code=1, norm_out=out, **common)

        graph = captured(step, 1)
        for _ in range(20):
            out.zero_()
            graph.replay()
            torch.testing.assert_close(out, y)
            assert torch.equal(x, held)
            checked += 1
    assert not toy.own, toy.own
    communicator.destroy()
    return {"checked": checked}


def deterministic_body() -> dict[str, object]:
    """With VLLM_BATCH_INVARIANT the bits of a row do not depend on the rows beside it, tuned or not."""
    toy.add_vllm(batch_invariant=True)
    tunedcomm_plugin.register()
    made = toy.make_communicator(dist.group.WORLD, device=torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    whole = torch.randn(512, 4096, generator=generator).to("cuda", torch.bfloat16)
    every, checked = made.all_reduce(whole), 0
    for num_rows in (1, 2, 3, 8, 31, 64, 200, 512):
        assert torch.equal(made.all_reduce(whole[:num_rows].contiguous()), every[:num_rows]), num_rows
        checked += 1
    assert not toy.own
    return {"checked": checked}
