"""Bad operands of the fused GEMMs give a named error that says what to do on every rank, and the group works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Ranks

import tunedcomm

RANKS = Ranks()
FP8 = torch.float8_e4m3fn
M, N, K = 6, 16, 24
OPS: dict[str, Callable[..., Any]] = {
    "ag_gemm": tunedcomm.ag_gemm,
    "gemm_rs": tunedcomm.gemm_rs,
    "gemm_ar": tunedcomm.gemm_ar,
}


def refuse(changes: dict[str, Any], said: str, *names: str) -> None:
    """Every one of the named ops (all by default) refuses a call with these arguments, and says so."""
    for name in names or OPS:
        given = {"a": torch.ones(M, K), "b": torch.ones(K, N), **changes}
        a, b = given.pop("a"), given.pop("b")
        with pytest.raises(tunedcomm.UnsupportedInputError, match=said) as caught:
            OPS[name](a, b, **given)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("world_size", [2, 3])
def test_shapes(rank: int, world_size: int) -> None:
    refuse({"b": torch.ones(K + 1, N)}, f"K = {K} columns and b has {K + 1} rows")
    refuse({"b": torch.ones(N, K)}, r"they must be equal; pass b\.t\(\)")
    refuse({"b": torch.ones(2, K, N)}, "it must be a matrix")
    refuse({"b": torch.ones(K)}, "it must be a matrix")
    refuse({"b": torch.tensor(1.0)}, "it must be a matrix")
    refuse({"a": torch.tensor(1.0)}, "must have at least")
    refuse({"a": torch.ones(K)}, "at least 2 dimensions", "ag_gemm", "gemm_rs")
    refuse({"b": None}, r"wants b \[K, N\], got None")


@pytest.mark.parametrize("world_size", [2, 3])
def test_rows_that_ranks_cannot_share(rank: int, world_size: int) -> None:
    for shape in ((world_size + 1, K), (1, K), (1, world_size, K), (world_size - 1, 4, K)):
        refuse({"a": torch.ones(shape)}, f"multiple of {world_size} .*: pad a", "gemm_rs")


@pytest.mark.parametrize("world_size", [2, 3])
def test_scales(rank: int, world_size: int) -> None:
    one = torch.ones(1)
    eight = {"a": torch.ones(M, K).to(FP8), "b": torch.ones(K, N).to(FP8)}
    refuse(eight, "wants scale_a and scale_b; pass both")
    refuse({**eight, "scale_a": one}, "wants scale_a and scale_b; pass both")
    refuse({**eight, "scale_b": one}, "wants scale_a and scale_b; pass both")
    refuse({"scale_a": one, "scale_b": one}, "are for")
    refuse({"scale_b": one}, "are for")
    for scale_a, scale_b in (
        (torch.ones(M), torch.ones(N)),
        (torch.ones(M, 1), one),
        (one, torch.ones(1, N)),
        (torch.ones(1, M), torch.ones(N, 1)),
        (torch.ones(M, 1), torch.ones(1, N + 1)),
        (torch.ones(0), torch.ones(0)),
    ):
        said = r"one element each, or \(6, 1\) and \(1, 16\)"
        refuse({**eight, "scale_a": scale_a, "scale_b": scale_b}, said)
    refuse({**eight, "scale_a": one.double(), "scale_b": one}, "got torch.float64")
    refuse({**eight, "scale_a": one, "scale_b": 1.0}, "scale_b of .* got float")
    refuse({**eight, "scale_a": one, "scale_b": one, "out_dtype": FP8}, "out_dtype=torch.float8_e4m3fn")


@pytest.mark.parametrize("world_size", [2, 3])
def test_bias(rank: int, world_size: int) -> None:
    for wrong in (torch.ones(N + 1), torch.ones(1, N), torch.ones(N).bfloat16()):
        refuse({"bias": wrong}, "bias of gemm_ar has shape", "gemm_ar")
    brain = {"a": torch.ones(M, K).bfloat16(), "b": torch.ones(K, N).bfloat16()}
    refuse({**brain, "bias": torch.ones(N)}, r"and torch\.bfloat16", "gemm_ar")
    refuse({"bias": 1.0}, "bias of gemm_ar wants a torch.Tensor", "gemm_ar")


@pytest.mark.parametrize("world_size", [2, 3])
def test_lists_of_b(rank: int, world_size: int) -> None:
    b, one = torch.ones(K, N), torch.ones(1)
    eight = {"a": torch.ones(M, K).to(FP8), "b": [b.to(FP8)] * 2, "scale_a": one}
    out = torch.ones(M * world_size, N)
    for changes, said in (
        ({"b": []}, "b of ag_gemm is an empty list"),
        ({"b": ()}, "is an empty list"),
        ({"b": [b, b.bfloat16()]}, r"b\[1\] of ag_gemm is of torch\.bfloat16"),
        ({"b": [b.bfloat16(), b.bfloat16()]}, r"a of torch\.float32 with b of torch\.bfloat16"),
        ({"b": [b, b.to("meta")]}, r"b\[1\] of ag_gemm is on meta, a on cpu"),
        ({"b": [b, b[1:]]}, r"K = 24 columns and b has 23 rows"),
        ({"b": [b, "b"]}, r"b\[1\] of ag_gemm wants a torch\.Tensor, got str"),
        ({"b": [b, None]}, r"wants b \[K, N\], got None"),
        ({"a": "a", "b": [b]}, "a of ag_gemm wants a torch.Tensor"),
        ({"b": [b, b], "out": out}, "out of ag_gemm has type Tensor"),
        ({"b": [b, b], "out": [out]}, "out of ag_gemm has 1 elements"),
        ({"b": [b, b], "out": [out, out]}, r"out\[1\] overlaps out\[0\]"),
        ({"b": [b, b], "out": [None, out[1:]]}, r"out\[1\] has shape"),
        ({"b": [b, b], "scale_b": [one, one]}, "are for torch.float8_e4m3fn"),
        ({**eight}, "wants scale_a and scale_b"),
        ({**eight, "scale_b": one}, "scale_b of ag_gemm has type Tensor"),
        ({**eight, "scale_b": [one]}, "scale_b of ag_gemm has 1 elements"),
        ({**eight, "scale_b": [one, None]}, "wants scale_a and scale_b"),
        ({"b": [b, b], "max_sms": -1}, "max_sms"),
        ({"b": [b, b], "numerics": "exact"}, "numerics"),
    ):
        refuse(changes, said, "ag_gemm")
    mixed = {"a": torch.ones(1, K).to(FP8), "b": [b.to(FP8)] * 2, "scale_a": torch.ones(1, 1)}
    refuse({**mixed, "scale_b": [torch.ones(1, N), one]}, "must be of one kind for all b", "ag_gemm")


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_group_works_after_all_that(rank: int, world_size: int) -> None:
    total = float(K * sum(range(1, world_size + 1)))
    a, b = torch.full((M, K), rank + 1.0), torch.ones(K, N)
    assert torch.equal(tunedcomm.gemm_ar(a, b), torch.full((M, N), total))
    assert torch.equal(tunedcomm.gemm_rs(a, b), torch.full((M // world_size, N), total))
    assert torch.equal(tunedcomm.ag_gemm(a, b)[:M], torch.full((M, N), float(K)))
