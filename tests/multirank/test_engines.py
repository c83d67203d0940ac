"""Engines of a few lines, served through the entry point; test_engine_packages.py has the real classes."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy_engines as toy
from cases import inputs_of, same_bits
from harness import run_ranks

import tunedcomm_plugin

SIZES = (3, 96, 4096, 70_000)


def told(engine: str) -> list[str]:
    """What is logged to the engine's log from here on."""
    texts: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(f"{engine}.tunedcomm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return texts


def rows(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).float()


def total(world_size: int, *shape: int) -> torch.Tensor:
    return sum(rows(r, *shape) for r in range(world_size))  # type: ignore[return-value]


def serve_collectives(communicator: Any, rank: int, n: int) -> None:
    """Every method of vLLM's communicator, with the results that it promises."""
    for numel in SIZES:
        x = rows(rank, numel)
        assert torch.equal(communicator.all_reduce(x), total(n, numel))
        assert torch.equal(x, rows(rank, numel)), "the input is left as it is"
    x, every = rows(rank, 4, 6), [rows(r, 4, 6) for r in range(n)]
    for dim in (0, 1, -1):
        assert torch.equal(communicator.all_gather(x, dim), torch.cat(every, dim))
    scattered = total(n, 2 * n, 3 * n)
    for dim in (0, 1, -1):
        found = communicator.reduce_scatter(rows(rank, 2 * n, 3 * n), dim)
        assert torch.equal(found, scattered.chunk(n, dim)[rank])
    for sizes in (None, [4] * n):
        assert torch.equal(communicator.all_gatherv(x, 0, sizes), torch.cat(every))
        both = communicator.all_gatherv([x, x[:, :2]], sizes=sizes)
        assert torch.equal(both[0], torch.cat(every))
        assert torch.equal(both[1], torch.cat(every)[:, :2])
        assert torch.equal(
            communicator.reduce_scatterv(rows(rank, 4 * n, 2), 0, sizes), total(n, 4 * n, 2).chunk(n)[rank]
        )
    output = torch.empty(4, 2)
    assert communicator.reduce_scatterv_into_output(rows(rank, 4 * n, 2), output, 0, [4] * n) is output
    assert torch.equal(output, total(n, 4 * n, 2).chunk(n)[rank])
    assert torch.equal(communicator.custom_all_gather(x), torch.cat(every))
    assert torch.equal(communicator.custom_reduce_scatter(rows(rank, n, 4)), total(n, n, 4)[rank : rank + 1])


def norms(fused: Any, rank: int, n: int) -> None:
    """The forms of vLLM's fused norm."""
    shape, eps = (3, 128), 1e-5
    common = {"rms_eps": eps, "world_size": n, "launch_with_pdl": True, "fp32_acc": True, "max_token_num": 64}
    weight, residual = torch.linspace(0.5, 2, 128), rows(9, *shape)
    for bias in (0.0, 1.0):
        y, held = toy.reference_norm(total(n, *shape), residual, weight + bias, eps)
        x, kept = rows(rank, *shape), residual.clone()
        fused(x, kept, weight, pattern_code=1, weight_bias=bias, **common)
        torch.testing.assert_close(x, y)
        assert torch.equal(kept, held)
        x, kept, out = rows(rank, *shape).view(1, *shape), residual.clone().view(1, *shape), torch.empty(1, *shape)
        fused(x, kept, weight, pattern_code=1, norm_out=out, weight_bias=bias, **common)
        torch.testing.assert_close(out[0], y)
        assert torch.equal(x[0], held)
        assert torch.equal(kept[0], residual), "only the two outputs are written"
        scale = torch.tensor(0.05)
        expected = (y / scale).clamp(-448, 448)
        for norm_out in (None, torch.full(shape, 7.0)):
            x, kept, quantized = rows(rank, *shape), residual.clone(), torch.empty(shape, dtype=torch.float8_e4m3fn)
            more = {"quant_out": quantized, "scale_factor": scale, "norm_out": norm_out, "weight_bias": bias}
            fused(x, kept, weight, pattern_code=2, **more, **common)
            torch.testing.assert_close(quantized.float(), expected, rtol=0.07, atol=0.01)
            assert torch.equal(kept if norm_out is None else x, held)
    assert not toy.own
    for code in (0, 3, 5):
        fused(rows(rank, *shape), residual, weight, pattern_code=code, **common)
    assert toy.own == ["fused norm"] * 3
    toy.own.clear()


def vllm_body(rank: int, n: int) -> None:
    texts, engine = told("vllm"), toy.add_vllm()
    for _ in range(2):
        tunedcomm_plugin.register()
    communicator, idle = toy.make_communicator(dist.group.WORLD), toy.make_communicator(dist.new_group(), "pp:0")
    assert isinstance(communicator, toy.Communicator)
    assert type(communicator) is not toy.Communicator
    engine.tp = type("Coordinator", (), {"device_communicator": communicator})
    from tunedcomm.dispatch.groups import live_communicators
    from tunedcomm.integrations.engines import group

    before = group.is_capturing
    group.is_capturing = lambda: True
    assert torch.equal(communicator.all_reduce(rows(rank, 4)), total(n, 4))
    assert toy.own == ["all_reduce"], "a group is not set up within a capture"
    assert not live_communicators()
    group.is_capturing = before
    toy.own.clear()

    serve_collectives(communicator, rank, n)
    assert not toy.own, "all were served"
    assert len(live_communicators()) == 1, "a group that is asked for nothing has no memory"
    sizes = [r + 1 for r in range(n)]
    found = communicator.all_gatherv(rows(rank, rank + 1, 2), sizes=sizes)
    assert torch.equal(found, torch.cat([rows(r, r + 1, 2) for r in range(n)]))
    found = communicator.reduce_scatterv(rows(rank, sum(sizes), 2), 0, sizes)
    assert torch.equal(found, total(n, sum(sizes), 2).split(sizes)[rank])
    assert communicator.all_reduce(torch.ones(2, dtype=torch.bool)) is not None
    assert toy.own == ["all_reduce"]
    with pytest.raises(ValueError, match="own error"):
        communicator.all_reduce(torch.ones(2, dtype=torch.complex64))
    toy.own.clear()
    assert communicator.get_symmetric_memory_buffer("role") == "role"

    fused = toy.define_vllm_norm()
    norms(fused, rank, n)

    idle.destroy()
    assert not texts
    communicator.destroy()
    assert communicator.destroyed
    assert len(texts) == (rank == 0)
    for word in ("all_reduce 57% of 7", "all_gather 100% of 3", "all_gatherv 100% of 7") if texts else ():
        assert word in texts[0]
    toy.own.clear()
    again = toy.make_communicator(dist.new_group())  # a second engine in the process
    serve_collectives(again, rank, n)
    assert not toy.own
    again.destroy()
    assert len(texts) == 2 * (rank == 0), "each run has its line"


@pytest.mark.parametrize("world_size", [2, 3])
def test_vllm(world_size: int) -> None:
    run_ranks(world_size, vllm_body, fresh=True, timeout=200)


def deterministic_body(rank: int, n: int, which: str) -> None:
    """Sums in fp32 in rank order at every size, with nothing tuned and with kernels forced by nobody."""
    if which == "vllm":
        toy.add_vllm(batch_invariant=True)
        tunedcomm_plugin.register()
        communicator = toy.make_communicator(dist.group.WORLD)
        reduce = communicator.all_reduce
    else:
        toy.add_sglang(deterministic=True)
        tunedcomm_plugin.register()
        made = toy.GroupCoordinator(dist.group.WORLD)
        reduce = functools.partial(made._all_reduce_out_place, outplace_all_reduce_method="auto")
    for numel in (1, 33, 1000, 300_000):
        x, expected = inputs_of(rank, n, numel, "bfloat16")
        assert same_bits(reduce(x), expected)
    assert not toy.own
    assert torch.equal(reduce(torch.ones(3, dtype=torch.int64)), torch.full((3,), n))
    assert toy.own, "sums of integers have one result"


@pytest.mark.parametrize("which", ["vllm", "sglang"])
def test_deterministic_modes(which: str) -> None:
    run_ranks(3, deterministic_body, which, fresh=True, timeout=200)


def disagreeing_body(rank: int, n: int) -> None:
    """A rank whose plug-in is switched off: the others leave the group to the engine, and nobody waits for ever."""
    if rank == 1:
        os.environ["TUNEDCOMM_ENGINES"] = "0"
    texts = told("vllm")
    toy.add_vllm()
    tunedcomm_plugin.register()
    communicator = toy.make_communicator(dist.group.WORLD)
    assert (type(communicator) is toy.Communicator) == (rank == 1)
    if rank != 1:
        from tunedcomm.integrations.engines import group

        group._MEET_S = 0.5
    for _ in range(2):
        assert torch.equal(communicator.all_reduce(rows(rank, 64)), total(n, 64))
    assert toy.own == ["all_reduce"] * 2
    assert ["rank 1 has no plug-in" in text for text in texts] == [True] * (rank == 0)


def test_a_rank_without_the_plug_in() -> None:
    run_ranks(3, disagreeing_body, fresh=True, timeout=200)


def elastic_body(rank: int, n: int) -> None:
    toy.add_vllm(elastic=True)
    tunedcomm_plugin.register()
    assert type(toy.make_communicator(dist.group.WORLD)) is toy.Communicator
    toy.add_vllm()
    toy.CudaPlatformBase.stock = "toy_engines.Communicator"
    assert type(toy.make_communicator(dist.group.WORLD)) is toy.Communicator, "another platform's own class"


def test_classes_that_are_left_alone() -> None:
    run_ranks(2, elastic_body, fresh=True, timeout=200)


def sglang_body(rank: int, n: int) -> None:
    texts, engine = told("sglang"), toy.add_sglang()
    for _ in range(2):
        tunedcomm_plugin.register()
    made = engine.tp = toy.GroupCoordinator(dist.group.WORLD)
    for numel in SIZES:
        x = rows(rank, numel)
        assert torch.equal(made._all_reduce_out_place(x, outplace_all_reduce_method="ca"), total(n, numel))
        assert torch.equal(made._flashinfer_allreduce(input_=x), total(n, numel))
        assert torch.equal(x, rows(rank, numel)), "the input is left as it is"
        assert made._all_reduce_in_place(x) is None
        assert torch.equal(x, total(n, numel))
    x, every = rows(rank, 4, 6), torch.cat([rows(r, 4, 6) for r in range(n)])
    output = torch.empty(4 * n, 6)
    assert made._all_gather_into_tensor(output, x) is None
    assert torch.equal(output, every)
    shares, output = total(n, 2 * n, 6).chunk(n), torch.empty(2, 6)
    assert made._reduce_scatter_tensor(output, input=rows(rank, 2 * n, 6)) is output
    assert torch.equal(output, shares[rank])
    assert torch.equal(made.reduce_scatterv(rows(rank, 2 * n, 6), output.zero_(), [2] * n), shares[rank])
    assert torch.equal(made.reduce_scatterv(rows(rank, 2 * n, 6)), shares[rank])
    (gathered,) = made.all_gatherv(x, [4] * n)
    assert torch.equal(gathered, every)
    into = torch.empty(4 * n, 6)
    assert made.all_gatherv(x, output=into)[0] is into
    assert [torch.equal(one, every) for one in made.all_gatherv([x, x])] == [True, True]
    weight, residual = torch.linspace(0.5, 2, 128), rows(9, 3, 128)
    y, held = toy.reference_norm(total(n, 3, 128), residual, weight, 1e-6)
    module = sys.modules["sglang.srt.layers.flashinfer_comm_fusion"]
    eager, operator = (
        module.flashinfer_allreduce_residual_rmsnorm,
        torch.ops.sglang.flashinfer_allreduce_residual_rmsnorm,
    )
    for call in (eager, operator):
        for found in (
            call(rows(rank, 3, 128), residual, weight),
            call(rows(rank, 3, 128), residual=residual, weight=weight),
        ):
            torch.testing.assert_close(found[0], y)
            assert torch.equal(found[1], held)
    assert not toy.own, "all were served, each once"
    sizes = [r + 1 for r in range(n)]
    assert torch.equal(
        made.all_gatherv(rows(rank, rank + 1, 2), sizes=sizes)[0], torch.cat([rows(r, r + 1, 2) for r in range(n)])
    )
    assert torch.equal(
        made.reduce_scatterv(rows(rank, sum(sizes), 2), sizes=sizes), total(n, sum(sizes), 2).split(sizes)[rank]
    )
    assert made._all_reduce_out_place(torch.ones(2, dtype=torch.bool), "auto").all()
    assert toy.own == ["out of place", "in place"]
    made.destroy()
    assert toy.own[-1] == "destroy"
    assert len(texts) == (rank == 0)
    for word in ("all_reduce 92% of 13", "fused norm 100% of 4", "all_gatherv 100% of 5") if texts else ():
        assert word in texts[0], texts[0]


def test_sglang() -> None:
    run_ranks(2, sglang_body, fresh=True, timeout=200)
