"""Fused GEMMs as benchmarks ask for them, and their launches by address."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from cases import Ranks, replaced

import tunedcomm
from tunedcomm import kernels
from tunedcomm.kernels.all_gather import progress
from tunedcomm.kernels.common import copies
from tunedcomm.kernels.common.launch import AddressLaunch
from tunedcomm.kernels.gemm import ar, chunked
from tunedcomm.kernels.gemm.op import operands_of
from tunedcomm.ops import gemm, run_problem
from tunedcomm.ops.call import paths
from tunedcomm.space import Space
from tunedcomm.spec import Problem, Variant, get_op, register_variant

kernels.discover()
RANKS = Ranks()


def test_run_problem(rank: int, world_size: int) -> None:
    """`run_problem` asks for the very problem, whatever its layout and scaling."""
    for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
        spec = get_op(op)
        asked = [(layout, "") for layout in spec.layouts if layout.endswith(("k", "n", "bias", "gathered", "float32"))]
        plain = [layout for layout in spec.layouts[:4] if "float" not in layout]
        asked += [(layout, scaling) for layout in plain for scaling in ("tensorwise", "rowwise")]
        asked += [("nk+float16", "rowwise"), ("kn+float32", "tensorwise")]
        for number, (layout, scaling) in enumerate(asked):
            dtype, reduction = "float8_e4m3fn" if scaling else "float16", spec.reductions[-1]
            more = {"layout": layout, "scaling": scaling, "mode": "eager"}
            problem = Problem(op, (2 * world_size, 16, 32), dtype, world_size, reduction, **more)
            everyone = [spec.make_inputs(problem, r, number, "random", "cpu") for r in range(world_size)]
            outputs = spec.make_outputs(problem, "cpu")
            run_problem(problem, everyone[rank], outputs)
            for output, wanted in zip(outputs, spec.reference(problem, everyone, rank), strict=True):
                assert output.shape == wanted.shape
                error = (output.double() - wanted).norm() / wanted.norm()
                assert error <= spec.tolerance[scaling or dtype], (problem, error)
            plans = tunedcomm.get_communicator().plans
            assert any(key[0] == problem for key in plans if isinstance(key[0], Problem)), problem


def test_launches_by_address(rank: int, world_size: int) -> None:
    """Launches by address: the second call of a kind is fast, and every address comes where it belongs."""
    seen: list[tuple[int, ...]] = []

    def plant(op: str) -> None:
        def bind(problem: Problem, config: Any, workspace: Any) -> AddressLaunch:
            def arrange(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[int, ...]:
                a, b, bias, *scales = operands_of(problem, inputs)
                tensors = (a, b, *([bias] if op == "gemm_ar" else []), *scales, *outputs)
                found = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
                return (*found, 0) if op == "ag_gemm" and len(outputs) == 1 else found

            return AddressLaunch(lambda stream, *addresses: seen.append(addresses), arrange)

        register_variant(
            Variant(
                op=op,
                name="planted",
                numerics="ordered",
                summary="records addresses",
                space=Space(),
                infeasible=lambda problem, config, limits: None,
                default=lambda problem, limits: {},
                bind=bind,
                num_blocks=lambda problem, config: 1,
            )
        )

    half = {"dtype": torch.bfloat16}
    a, weight, bias = torch.ones(6, 2, 32, **half), torch.ones(16, 32, **half), torch.ones(16, **half)
    out, part = torch.ones(6, 2, 16, **half), torch.ones(6 // world_size, 2, 16, **half)
    whole, gathered = torch.ones(6 * world_size, 2, 16, **half), torch.ones(6 * world_size, 2, 32, **half)
    at = torch.Tensor.data_ptr
    for op, options, wanted in (
        ("gemm_ar", {"bias": bias, "out": out}, (at(a), at(weight), at(bias), 0, 0, at(out))),
        ("gemm_ar", {"out": out}, (at(a), at(weight), 0, 0, 0, at(out))),
        ("gemm_rs", {"out": part}, (at(a), at(weight), 0, 0, at(part))),
        ("ag_gemm", {"out": whole}, (at(a), at(weight), 0, 0, at(whole), 0)),
    ):
        plant(op)
        with tunedcomm.force(op, "planted"):
            for turn in range(4):
                seen.clear()
                fast = paths[op].last.get(dist.group.WORLD)
                assert (fast is not None) == (turn > 0), (op, turn)
                getattr(tunedcomm, op)(a, weight.t(), **options)
                assert seen == [wanted], (op, turn)
            seen.clear()
            other = torch.ones(8, 32, **half)  # another width of the same a has a fast call of its own
            for _ in range(2):
                getattr(tunedcomm, op)(a, other.t())
                getattr(tunedcomm, op)(a, weight.t(), **options)
            assert [addresses[1] for addresses in seen] == [at(other), at(weight)] * 2
    with tunedcomm.force("ag_gemm", "planted"):
        for _ in range(2):
            seen.clear()
            tensors = (a, weight.t(), None, None, whole, gathered)
            results = gemm.ag_gemm_gathered(tensors, None, dist.group.WORLD, "default", None)
            assert seen == [(at(a), at(weight), 0, 0, at(whole), at(gathered))]
            assert results[0] is whole
            assert results[1] is gathered
        moved = torch.ones(6, 32, 2, **half).transpose(1, 2)  # a copy stands for what no kernel takes as it lies
        for _ in range(2):
            seen.clear()
            tunedcomm.ag_gemm(moved, weight.t(), out=whole)
            assert seen[0][0] != at(moved)


def test_nobody_writes_what_a_slow_peer_still_reads(rank: int, world_size: int) -> None:
    """The last rank is slow to read, while the others are at the next call already, of another op."""
    a, b = torch.ones(32, 32, dtype=torch.float16), torch.eye(32, dtype=torch.float16)
    real, seconds = ar.load_packets, 0.0

    class Slow:
        def __call__(self, *args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return real(*args, **options)

    slow = replaced(ar, "load_packets", Slow())
    with slow, tunedcomm.force("gemm_ar", "one_shot"), tunedcomm.force("ag_gemm", "library_tuned"):
        tunedcomm.gemm_ar(a, b)
        tunedcomm.ag_gemm(a[:16], b)
        dist.barrier()
        seconds = 0.5 if rank == world_size - 1 else 0.0
        summed = tunedcomm.gemm_ar(a * 5, b)
        gathered = tunedcomm.ag_gemm(a[:16] * 7, b)
    assert torch.equal(summed, torch.full_like(summed, 5 * world_size))
    assert torch.equal(gathered, torch.full_like(gathered, 7))


def test_a_gather_under_way_shares_no_event_with_calls_in_between() -> None:
    assert min(copies.EVENTS_OF_PROGRESS) >= copies.NUM_EVENTS
    assert {progress._BEGUN, progress._SENT} == set(copies.EVENTS_OF_PROGRESS)
    assert chunked._DONE + copies.NUM_STREAMS < copies.NUM_EVENTS
