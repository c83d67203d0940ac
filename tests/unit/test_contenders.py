"""Of the benchmark, what needs no GPU: adapters, PyTorch's own operators as contenders, bandwidths."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

from tunedcomm import kernels, metrics
from tunedcomm.bench import contenders, nccl_symmetric
from tunedcomm.bench.contenders import TORCH_PEERS
from tunedcomm.bench.csv import floor_us
from tunedcomm.peers import LeftOut, Peer
from tunedcomm.spec import Problem, get_op

kernels.discover()
PEERS = Path(__file__).parents[2] / "bench" / "peers"
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
REDUCED = Problem("all_reduce", (4096,), "bfloat16", 4, reduction="sum")
GATHERED = Problem("all_gather", (4096,), "bfloat16", 4)
GEMM = Problem("gemm_rs", (4096, 8192, 3584), "bfloat16", 4, layout="nk", reduction="sum")
BY_NAME = {adapter.name: adapter for adapter in TORCH_PEERS}


def made(name: str, problem: Problem, device: torch.device = CUDA) -> list[Peer]:
    return list(BY_NAME[name].peers(problem, device))


@pytest.mark.parametrize("name", BY_NAME)
def test_torch_has_nothing_to_say_of_other_ops_and_of_the_host(name: str) -> None:
    other, own = (REDUCED, GEMM) if name == "torch_fused" else (GEMM, REDUCED)
    assert made(name, other) == []
    assert made(name, own, CPU) == []
    assert made(name, replace(own, reduction="max")) == []


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (replace(REDUCED, world_size=3), "2, 4 or 8 ranks, not 3"),
        (replace(REDUCED, dtype="float16"), "not float16"),
        (replace(REDUCED, shape=(4095,)), "8190 bytes are not a multiple of 16 for each of 4 ranks"),
        (replace(REDUCED, shape=(0,)), "0 bytes"),
        (replace(REDUCED, shape=(1 << 26,)), "a one-shot of more than 32 MiB"),
    ],
)
def test_torch_one_shot_says_why_not(problem: Problem, why: str) -> None:
    with pytest.raises(LeftOut, match=why):
        made("torch_one_shot_symmetric", problem)


@pytest.mark.parametrize("value", [None, "1"])
def test_windows_are_refused_where_nccl_may_use_multicast(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_symmetric, "_NVLS_AT_START", value)
    with pytest.raises(LeftOut, match="NCCL_NVLS_ENABLE=0"):
        nccl_symmetric.in_windows((torch.empty(4),), CUDA)


def test_a_pool_is_registered_once_and_deregistered_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Pool:
        def __del__(self) -> None:
            done.append("gone")

    backend = SimpleNamespace(
        mem_allocator=None,
        register_mem_pool=lambda pool, symm: done.append(f"registered, symm={symm}"),
        deregister_mem_pool=lambda pool: done.append("deregistered"),
    )
    monkeypatch.setattr(nccl_symmetric, "_NVLS_AT_START", "0")
    monkeypatch.setattr(nccl_symmetric, "default_group", lambda: SimpleNamespace(_get_backend=lambda device: backend))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: Pool())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("idle"))
    for _ in range(2):
        nccl_symmetric.in_windows((torch.empty(4),), CUDA)
    nccl_symmetric.release()
    nccl_symmetric.release()
    assert done == ["registered, symm=True", "idle", "deregistered", "gone"]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_low_contention_operators_are_called_on_symmetric_inputs_and_waited_for(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []

    def operator(*arguments: object) -> str:
        calls.append(arguments)
        return "pending"

    operators = SimpleNamespace(**{f"_low_contention_{op}": operator})
    monkeypatch.setattr(contenders, "torch", SimpleNamespace(
        ops=SimpleNamespace(symm_mem=operators, _c10d_functional=SimpleNamespace(wait_tensor=lambda x: f"{x}, done"))
    ))  # fmt: skip
    monkeypatch.setattr(contenders, "default_group", lambda: SimpleNamespace(group_name="0"))
    monkeypatch.setattr(contenders, "symmetric", lambda shape, dtype, device: (tuple(shape), dtype))
    reduction = "sum" if op == "reduce_scatter" else ""
    (peer,) = made("torch_low_contention", replace(GATHERED, op=op, reduction=reduction))
    inputs = peer.allocate()
    assert inputs == ((((4096 if op == "all_gather" else 16384),), "bfloat16"),)
    assert peer.run(inputs) == ("pending, done",)
    assert calls == [(inputs[0], "0") if op == "all_gather" else (inputs[0], "sum", "0")]


@pytest.mark.parametrize(
    ("shape", "configs"),
    [
        ((512, 256, 64), ["native=False", "native=True"]),
        ((384, 256, 64), ["native=False"]),
        ((512, 260, 64), ["native=False"]),
    ],
)
def test_the_fused_gather_is_called_with_the_operands_and_its_result_copied(
    shape: tuple[int, int, int], configs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; the native operator's tile has 128 rows and 16-byte rows of operands."""
    problem = Problem("ag_gemm", shape, "bfloat16", 2, layout="nk")
    spec, (m, n, k) = get_op("ag_gemm"), shape

    def gather(a: torch.Tensor, b: Any, *rest: object, **options: object) -> tuple[Any, Any]:
        product = torch.cat((a, a)) @ (b[0] if rest[0] == 0 else b)
        return None, [product] if rest[0] == 0 else product

    monkeypatch.setattr(contenders, "default_group", lambda: SimpleNamespace(group_name="0"))
    monkeypatch.setattr(symm_mem, "_fused_all_gather_matmul_native", gather, raising=False)
    operators = SimpleNamespace(fused_all_gather_matmul=gather, _async_input_mm=None)
    monkeypatch.setattr(torch.ops, "symm_mem", operators)
    made_here = SimpleNamespace(
        make_outputs=lambda problem, device: spec.make_outputs(problem, CPU),
        make_inputs=lambda *rest: spec.make_inputs(*rest[:-1], CPU),
    )
    monkeypatch.setattr(contenders, "get_op", lambda name: made_here)
    peers = made("torch_fused", problem)
    assert [peer.config for peer in peers] == configs
    for peer in peers:
        a, b, *_ = inputs = peer.allocate()
        assert (a.shape, b.shape) == ((m // 2, k), (n, k))
        assert torch.equal(peer.run(inputs)[0], torch.cat((a, a)) @ b.T)


@pytest.mark.parametrize(
    ("shape", "rows"), [((512,), (1, 512)), ((98304,), (12, 8192)), ((24,), (3, 8)), ((64, 5120), (64, 5120))]
)
def test_flashinfer_is_given_rows(shape: tuple[int, ...], rows: tuple[int, int]) -> None:
    rows_of = runpy.run_path(str(PEERS / "flashinfer.py"))["rows_of"]
    assert rows_of(replace(REDUCED, shape=shape)) == rows


@pytest.mark.parametrize("path", sorted(PEERS.glob("*.py")), ids=lambda path: path.stem)
def test_adapters_name_the_package_that_is_missing(path: Path) -> None:
    peers = runpy.run_path(str(path))["peers"]
    with pytest.raises(ModuleNotFoundError):
        list(peers(REDUCED, CPU))


# Bandwidths


FACTORS = {
    ("all_reduce", 1): 0.0,
    ("all_reduce", 2): 1.0,
    ("all_reduce", 4): 1.5,
    ("all_gather", 4): 0.75,
    ("reduce_scatter", 8): 0.875,
    ("all_to_all", 3): 2 / 3,
}


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert {(op, ranks): get_op(op).busbw_factor(ranks) for op, ranks in FACTORS} == pytest.approx(FACTORS)
    assert get_op("gemm_rs").busbw_factor is None
    assert metrics.algbw_gb_s(1_000_000, 10.0) == pytest.approx(100.0)


def test_floor_is_the_time_of_the_links() -> None:
    assert floor_us(get_op("all_reduce"), 128 << 20, 4, 351.0) == pytest.approx(573.6, abs=0.1)
    assert floor_us(get_op("all_gather"), 1 << 20, 4, 300.0) == pytest.approx((3 << 20) / 300e3)
    assert floor_us(get_op("gemm_rs"), 3_000, 4, 300.0) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("world_size.*0", lambda: metrics.all_reduce_factor(0)),
        ("latency_us.*0", lambda: metrics.algbw_gb_s(8, 0)),
    ],
)
def test_bad_values_are_refused(text: str, call: Callable[[], float]) -> None:
    with pytest.raises(ValueError, match=text):
        call()
