"""FSDP2 models whose gathers and reduce-scatters are served, bit by bit against torch's own or against rank order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Ranks, logged, replaced
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.utils.checkpoint import checkpoint

import tunedcomm
import tunedcomm.fsdp
from tunedcomm import kernels
from tunedcomm.kernels.common.in_order import scatter_in_order

kernels.discover()
RANKS = Ranks(2, forget=False, env={"TUNEDCOMM_WORKSPACE_MIB": "1", "TUNEDCOMM_MISS_LOG": "0"})
BOTH = pytest.mark.parametrize("world_size", [2, 4])
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class InRankOrder(DefaultReduceScatter):
    """Sums in fp32 in rank order, rounded once, where gloo sums in the order of its ring."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        assert op == dist.ReduceOp.SUM
        scatter_in_order(input_tensor.view(group.size(), -1), output_tensor, "sum", group)


class Block(nn.Module):
    """Extents that no number of ranks divides."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.up, self.down, self.checkpointed = nn.Linear(10, 17), nn.Linear(17, 10, bias=False), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def make(mp: MixedPrecisionPolicy, *, checkpointed: bool = False, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 10), Block(checkpointed), Block(checkpointed), nn.Linear(10, 3))
    for part in (model[1], model[2], model):
        fully_shard(part, mp_policy=mp, **options)
    return model


def train(model: nn.Module, run: Any = None, *, steps: int = 20, accumulate: int = 1) -> list[torch.Tensor]:
    """The shards of all parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        for part in range(accumulate):
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + dist.get_rank())
            model.set_requires_gradient_sync(part == accumulate - 1)
            (run or model)(torch.randn(7, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().clone() for parameter in model.parameters()]


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "set_custom_reduce_scatter")]


def expected(mp: MixedPrecisionPolicy, *, steps: int = 20, accumulate: int = 1, **options: Any) -> list[torch.Tensor]:
    """With torch's own gathers, and its sums too where there is no order of more than two."""
    model = make(mp, **options)
    for module in fsdp_modules(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        if dist.get_world_size() > 2:
            module.set_custom_reduce_scatter(InRankOrder())
    return train(model, steps=steps, accumulate=accumulate)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    assert all(a.numel() == 0 or bool(a.isfinite().all()) for a in found)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@BOTH
def test_bits(rank: int, world_size: int) -> None:
    """Both dtypes of reduction, means and forced sums, parameters kept or freed after the forward pass."""
    for mp, wire in ((MixedPrecisionPolicy(), None), (BF16, None), (BF16, torch.bfloat16)):
        wanted = expected(mp)
        for reshard in (True, False):
            model = make(mp, reshard_after_forward=reshard)
            installed = tunedcomm.fsdp.install(model, wire=wire)
            assert len(installed.served) == 3
            with logged() as texts:
                equal(train(model), wanted)
            assert not texts
            names = {call.call for call in installed.calls()}
            assert names == {"all_gather", "reduce_scatter"}
            assert all(call.served_by for call in installed.calls())
            scattered = [call.problem for call in installed.calls() if call.call == "reduce_scatter"]
            assert any(problem.endswith("float32)") for problem in scattered) is (wire is not None)
            assert "reduce_scatter 100%" in str(installed)


@BOTH
def test_forms(rank: int, world_size: int) -> None:
    """Checkpointing, asynchronous gathers, compiled code, factors, a group of its own for reduce-scatters."""
    options = {"wire": torch.bfloat16}
    wanted = expected(BF16, steps=5)
    model = make(BF16, checkpointed=True)
    tunedcomm.fsdp.install(model, **options)
    equal(train(model, steps=5), wanted)

    model = make(BF16)
    for module in fsdp_modules(model):
        module._set_unshard_async_op(True)
    tunedcomm.fsdp.install(model, **options)
    equal(train(model, steps=5), wanted)

    model = make(BF16)
    tunedcomm.fsdp.install(model, **options)
    equal(train(model, torch.compile(model, backend="eager"), steps=5), wanted)

    model = make(BF16)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(2.0 * world_size)  # PREMUL_SUM
    reference = make(BF16)
    for module in fsdp_modules(reference):
        module.set_gradient_divide_factor(2.0 * world_size)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(InRankOrder())
    tunedcomm.fsdp.install(model, **options)
    equal(train(model, steps=5), train(reference, steps=5))

    model = make(BF16)
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group()
        installed = tunedcomm.fsdp.install(model, **options)
        assert len({comm.group for comm in installed.comms}) == 2
        equal(train(model, steps=5), wanted)


def test_accumulated_gradients(rank: int) -> None:
    """They are fp32: the second half of a step does not travel in bf16, which is said once."""
    wanted = expected(BF16, steps=5, accumulate=2)
    model = make(BF16)
    tunedcomm.fsdp.install(model, wire=torch.bfloat16)
    with logged() as texts:
        equal(train(model, steps=5, accumulate=2), wanted)
    assert len(texts) == (rank == 0)
    assert all("torch.float32" in text for text in texts)
    fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = make(fp32)
    tunedcomm.fsdp.install(model, wire=torch.bfloat16)
    equal(train(model, steps=5), expected(fp32, steps=5))


def test_buffers_take_turns(rank: int) -> None:
    """Peers read inputs where they lie: two buffers a size, and no more however many steps there are."""
    wanted, made = expected(BF16, steps=3), []
    with tunedcomm.force("reduce_scatter", "one_shot_fp32"):
        model = make(BF16)
        installed = tunedcomm.fsdp.install(model, wire=torch.bfloat16)

        def spy(*args: Any, **options: Any) -> torch.Tensor:
            made.append(tunedcomm.symmetric_empty(*args, **options))
            return made[-1]

        with replaced(tunedcomm.fsdp, "symmetric_empty", spy):
            equal(train(model, steps=3), wanted)
        sizes = [x.numel() for x in made]
        assert {sizes.count(size) for size in sizes} == {2}
        assert all("symmetric" in c.problem for c in installed.calls() if c.call == "reduce_scatter")


@pytest.mark.parametrize("world_size", [4])
def test_several_meshes(rank: int, world_size: int) -> None:
    """Shards in pairs with replicas, and a smaller mesh after the forward pass."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wanted = None
    for serve in (False, True):
        model = make(BF16, mesh=mesh)
        for module in fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(True)
        if serve:
            tunedcomm.fsdp.install(model, wire=torch.bfloat16)
        found = train(model, steps=5)
        equal(found, wanted or found)
        wanted = found
    model = make(BF16, reshard_after_forward=2)
    tunedcomm.fsdp.install(model, wire=torch.bfloat16)
    equal(train(model, steps=5), expected(BF16, steps=5))


def test_what_is_left_alone(rank: int) -> None:
    """Modules with a mesh for each parameter, others' communication, and torch's symmetric memory."""

    class Own(DefaultReduceScatter):
        pass

    model = make(BF16)
    model[1].set_custom_reduce_scatter(Own())
    state = model[2]._get_fsdp_state()
    state._fsdp_param_groups *= 2  # as a shard_placement_fn with several meshes makes them
    with logged() as texts:
        installed = tunedcomm.fsdp.install(model)
    assert installed.served == ("",)
    assert set(installed.left) == {"1", "2"}
    assert "Own" in installed.left["1"]
    assert len(texts) == (2 if rank == 0 else 0)
    with pytest.raises(ValueError, match="multiple param groups"):
        model[2].set_custom_all_gather(installed.comms[0])
    with pytest.raises(AssertionError, match="custom"):
        model.set_symm_mem_for_comm()
    with pytest.raises(tunedcomm.UnsupportedInputError, match="fully_shard"):
        tunedcomm.fsdp.install(nn.Linear(2, 2))
    with pytest.raises(tunedcomm.UnsupportedInputError, match="wire"):
        tunedcomm.fsdp.install(model, wire=torch.float16)


def test_calls_by_hand(rank: int) -> None:
    """The order of questions, an exception between them, a real work object, dtypes that do not belong together."""
    comm, cpu = tunedcomm.fsdp.ReduceScatter(dist.group.WORLD, torch.bfloat16), torch.device("cpu")

    def ask(grad_dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
        found = []
        for size in sizes:  # not in a frame of its own
            found.append(comm.allocate((size,), dtype=torch.float32, device=cpu))
        return found

    x, out = ask(torch.bfloat16, 12, 6)
    assert (x.dtype, out.dtype) == (torch.bfloat16, torch.float32)
    values = torch.arange(12) + rank
    work = comm(out, x.copy_(values), dist.group.WORLD, dist.ReduceOp.AVG, async_op=True)
    assert isinstance(work, dist.Work)
    work.wait()
    assert torch.equal(out, (torch.arange(12) + 0.5)[6 * rank : 6 * rank + 6])
    del x
    with logged() as texts:
        lost = ask(torch.bfloat16, 20)
        del lost
        x, out = ask(torch.bfloat16, 12, 6)
        assert (x.dtype, out.dtype) == (torch.bfloat16, torch.float32)
    assert len(texts) == (rank == 0)
    assert comm(out, x.copy_(values), dist.group.WORLD, dist.ReduceOp.PREMUL_SUM(0.5)) is None
    assert torch.equal(out, (torch.arange(12) + 0.5)[6 * rank : 6 * rank + 6])
    with pytest.raises(tunedcomm.UnsupportedInputError, match="float32"):
        comm(torch.empty(6, dtype=torch.bfloat16), torch.empty(12), dist.group.WORLD, dist.ReduceOp.SUM)

    gather = tunedcomm.fsdp.AllGather(dist.group.WORLD)
    for is_async in (False, True):
        out = gather.allocate((10,), dtype=torch.float32, device=cpu)
        out[5 * rank : 5 * rank + 5] = rank
        work = gather(out, out[5 * rank : 5 * rank + 5], dist.group.WORLD, async_op=is_async)
        assert isinstance(work, dist.Work) is is_async
        if is_async:
            work.wait()
        assert torch.equal(out, torch.arange(2).repeat_interleave(5).float())


def test_a_factor_of_one_is_a_sum(rank: int) -> None:
    """Interception serves torchtitan's PREMUL_SUM(1.0); another factor is the library's, and gloo knows none."""
    x, out = torch.arange(4.0) + rank, torch.empty(2)
    with tunedcomm.intercept() as calls:
        dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.PREMUL_SUM(1.0))
        assert torch.equal(out, (2 * torch.arange(4.0) + 1)[2 * rank : 2 * rank + 2])
        dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM(1.0))
        assert torch.equal(x, 2 * torch.arange(4.0) + 1)
        assert calls.num_served == 2
        with pytest.raises(RuntimeError):
            dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM(0.5))
    assert dist.distributed_c10d.AllreduceOptions is torch._C._distributed_c10d.AllreduceOptions


def test_gathers_in_place(rank: int) -> None:
    """`all_gather` into a tensor that holds the input where it belongs, by every variant."""
    for variant in ("library", "host_one_shot", "lamport", "pull", "push", "copy_engine"):
        with tunedcomm.force("all_gather", variant):
            for numel in (3, 1000, 1000):
                out = torch.full((2 * numel,), -1.0)
                x = out[numel * rank : numel * (rank + 1)]
                x.copy_(torch.arange(numel) + 10 * rank)
                assert tunedcomm.all_gather(x, out=out) is out
                assert torch.equal(out, torch.cat([torch.arange(numel) + 10.0 * r for r in range(2)]))
    with pytest.raises(tunedcomm.UnsupportedInputError, match="overlaps"):
        tunedcomm.all_gather(out[1:3], out=out[:4])
    with pytest.raises(tunedcomm.UnsupportedInputError, match="overlaps"):
        tunedcomm.all_gather(out[(1 - rank) * 2 :][:2], out=out[:4])
    assert torch.equal(tunedcomm.all_gather(torch.ones(1)), torch.ones(2))
