"""Under numerics="ordered" every op serves what it serves otherwise, by ordered variants, tuned or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from db_samples import H200
from quick import some
from torch.fx.experimental.proxy_tensor import make_fx

from tunedcomm import kernels
from tunedcomm.dispatch.decide import decide
from tunedcomm.errors import InfeasibleError
from tunedcomm.kernels.common.reference import reduced
from tunedcomm.selection.select import Decision
from tunedcomm.selection.snapshot import Snapshot
from tunedcomm.spec import Problem, get_variant
from tunedcomm.symm.layout import limits_for

ROWS = ((1, 8192), (5, 1001), (3, 40000), (40000, 8192))


def decided(op: str, shape: tuple[int, ...], ranks: int, dtype: str = "bfloat16", **changes: Any) -> Decision:
    kernels.discover()
    max_sms = changes.pop("max_sms", None)
    asked = Problem(op, shape, dtype, ranks, **changes)
    snapshot = Snapshot(environment=H200, world_size=ranks)
    found = decide(asked, snapshot, limits_for(H200, ranks), policy="ordered", max_sms=max_sms)
    assert get_variant(op, found.candidate.variant).numerics == "ordered"
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8, 12])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_sums_of_any_size_and_dtype(op: str, ranks: int) -> None:
    for numel in (1, 1001, 1 << 20, (1 << 27) + 1):
        decided(op, (numel,), ranks)
        decided(op, (numel,), ranks, max_sms=16)
    for dtype, reduction in (("float64", "avg"), ("int32", "sum"), ("bfloat16", "max")):
        assert decided(op, (1001,), ranks, dtype, reduction=reduction).candidate.variant == "in_order"


def test_a_mean_is_divided_by_a_tensor() -> None:
    """PyTorch multiplies with the reciprocal of a number on GPUs, and kernels divide."""
    graph = make_fx(lambda x: reduced([x] * 3, "avg", torch.float32))(torch.ones(2)).graph
    (division,) = (node for node in graph.nodes if "div" in str(node.target))
    assert all(isinstance(given, torch.fx.Node) for given in division.args)


@pytest.mark.parametrize("shape", some(ROWS, 2), ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
def test_rows_of_any_length(shape: tuple[int, int], ranks: int) -> None:
    for dtype in ("bfloat16", "float64"):
        decided("all_reduce_bias", shape, ranks, dtype)
        for scaling in ("", "fp8", "token"):
            decided("all_reduce_rms_norm", shape, ranks, dtype, layout="residual", scaling=scaling)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", some([7, 64, 1000, 1, 33, 100, 4096]))
def test_products_of_any_number_of_rows(rows: int, dtype: str) -> None:
    """Always by tiles of 64 rows and more, whose instruction is the same."""
    scaling = "rowwise" if dtype.startswith("float8") else ""
    for ranks in (2, 8):
        for op, shape, reduction in (
            ("gemm_ar", (rows, 8192, 2048), "sum"),
            ("gemm_ar", (rows, 1040, 7168), "sum"),
            ("gemm_rs", (rows * ranks, 8192, 2048), "sum"),
            ("ag_gemm", (rows * ranks, 2048, 8192), ""),
        ):
            found = decided(op, shape, ranks, dtype, layout="nk", scaling=scaling, reduction=reduction)
            assert int(found.candidate.config_dict["block_m"]) >= 64


@pytest.mark.parametrize(
    ("rows", "dtype", "token"), some([(1 << 20, "bfloat16", "WORKSPACE_MIB"), (64, "float32", "float32")], 2)
)
def test_a_product_that_no_tile_takes_says_why(rows: int, dtype: str, token: str) -> None:
    with pytest.raises(InfeasibleError, match=token):
        decided("gemm_ar", (rows, 8192, 2048), 2, dtype, layout="nk")
