"""The hooks in the Python files of real vLLM and SGLang, which `make engines` fetches; skipped without them.

The engines' own loaders call the entry point, and their own coordinators make and call the communicators over gloo.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import engine_packages
import pytest
import torch
import toy_engines as toy
from harness import run_ranks
from test_engines import SIZES, rows, serve_collectives, told, total

FETCHED = {engine: engine_packages.versions(engine) for engine in ("vllm", "sglang")}
needs_vllm = pytest.mark.skipif(not FETCHED["vllm"], reason="no vLLM: run `make engines`")
needs_sglang = pytest.mark.skipif(not FETCHED["sglang"], reason="no SGLang: run `make engines`")


def load_entry_point(engine: str, group: str) -> None:
    """Let the engine's own loader find the entry point, wherever tunedcomm was installed from."""
    from importlib import metadata

    found = metadata.EntryPoint("tunedcomm", "tunedcomm_plugin:register", group)
    everything = metadata.EntryPoints((found,))
    metadata.entry_points = everything.select  # type: ignore[assignment]


def vllm_body(rank: int, n: int, version: str) -> None:
    engine_packages.install("vllm", version)
    load_entry_point("vllm", "vllm.general_plugins")
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm import platforms
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.utils.import_utils import resolve_obj_by_qualname

    texts = told("vllm")  # vLLM's configuration of its loggers removes handlers
    cls = resolve_obj_by_qualname(CudaPlatformBase.get_device_communicator_cls())
    assert issubclass(cls, CudaCommunicator)
    assert cls is not CudaCommunicator
    from tunedcomm.integrations.engines.vllm import ServesCollectives, fused_norm

    # Every method of ours has the names and defaults of vLLM's.
    for name, method in vars(ServesCollectives).items():
        if not name.startswith("_") and (name != "reduce_scatterv_into_output" or hasattr(CudaCommunicator, name)):
            ours, theirs = (
                inspect.signature(method).parameters,
                inspect.signature(getattr(CudaCommunicator, name)).parameters,
            )
            assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()], name
    # In vLLM's own coordinator over gloo, where no CUDA communicator can be made: ours over vLLM's base class.
    served = type("Served", (ServesCollectives, DeviceCommunicatorBase), {})
    sys.modules[__name__].Served = served  # type: ignore[attr-defined]
    CudaPlatformBase.get_device_communicator_cls = classmethod(lambda cls: f"{__name__}.Served")
    platforms.current_platform = cpu_platform(CudaPlatformBase)
    parallel_state.current_platform = platforms.current_platform
    made = parallel_state.GroupCoordinator([list(range(n))], rank, "gloo", True, group_name="tp")
    assert type(made.device_communicator) is served
    serve_collectives(made.device_communicator, rank, n)
    for numel in SIZES:
        assert torch.equal(made._all_reduce_out_place(rows(rank, numel)), total(n, numel))
        assert torch.equal(made.all_reduce(rows(rank, numel)), total(n, numel))
    assert torch.equal(made.all_gather(rows(rank, 4, 6), 1), torch.cat([rows(r, 4, 6) for r in range(n)], 1))
    assert torch.equal(made.reduce_scatter(rows(rank, 2 * n, 4), 0), total(n, 2 * n, 4).chunk(n)[rank])
    # The fused norm's function has the arguments that ours reads.
    ours = {p.name for p in inspect.signature(fused_norm).parameters.values() if p.kind is p.KEYWORD_ONLY}
    source = engine_packages.source("vllm", version, "compilation/passes/fusion/allreduce_rms_fusion.py")
    assert ours <= engine_packages.arguments(source, "call_trtllm_fused_allreduce_norm")
    made.destroy()
    assert len(texts) == (rank == 0), texts
    assert not texts or "all_reduce 100%" in texts[0]


def cpu_platform(base: Any) -> Any:
    """As much of a platform as a coordinator asks for."""
    no = dict.fromkeys(
        ("is_cuda_alike", "is_xpu", "is_out_of_tree", "is_tpu", "is_cpu", "is_cuda", "is_rocm"), lambda: False
    )
    return SimpleNamespace(
        **no, use_custom_op_collectives=lambda: False, get_device_communicator_cls=base.get_device_communicator_cls
    )


@needs_vllm
@pytest.mark.parametrize("version", FETCHED["vllm"])
def test_vllm(version: str) -> None:
    run_ranks(2, vllm_body, version, fresh=True, timeout=280)


def sglang_body(rank: int, n: int, version: str) -> None:
    engine_packages.install("sglang", version)
    load_entry_point("sglang", "sglang.srt.plugins")
    texts = told("sglang")
    from sglang.srt.plugins import hook_registry, load_plugins

    load_plugins()
    load_plugins()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    import tunedcomm_plugin

    target = "sglang.srt.distributed.parallel_state.GroupCoordinator."
    for method in tunedcomm_plugin.SGLANG_HOOKS:
        assert len(hook_registry.HookRegistry._hooks[target + method]) == 1
        assert target + method in hook_registry.HookRegistry._patched
    options = inspect.signature(parallel_state.GroupCoordinator.__init__).parameters
    flags = {name: False for name in options if name.startswith("use_")}
    made = parallel_state.GroupCoordinator([list(range(n))], rank, "gloo", group_name="tp", **flags)
    assert made.tuned is not None
    for numel in SIZES:
        x = rows(rank, numel)
        assert torch.equal(made._all_reduce_out_place(x, "ca"), total(n, numel))
        assert torch.equal(made._flashinfer_allreduce(x), total(n, numel))
        assert made._all_reduce_in_place(x) is None
        assert torch.equal(x, total(n, numel))
    output = torch.empty(4 * n, 6)
    made._all_gather_into_tensor(output, rows(rank, 4, 6))
    assert torch.equal(output, torch.cat([rows(r, 4, 6) for r in range(n)]))
    assert torch.equal(made.all_gatherv(rows(rank, 4, 6), sizes=[4] * n)[0], output)
    assert torch.equal(made.reduce_scatterv(rows(rank, 2 * n, 6), sizes=[2] * n), total(n, 2 * n, 6).chunk(n)[rank])
    output = torch.empty(2, 6)
    made._reduce_scatter_tensor(output, rows(rank, 2 * n, 6))
    assert torch.equal(output, total(n, 2 * n, 6).chunk(n)[rank])
    if hasattr(fusion, "resolve_fusion_group"):
        fusion.resolve_fusion_group = lambda *, use_attn_tp_group: (n, rank, made)
        weight, residual = torch.linspace(0.5, 2, 128), rows(9, 3, 128)
        y, held = toy.reference_norm(total(n, 3, 128), residual, weight, 1e-6)
        for call in (
            fusion.flashinfer_allreduce_residual_rmsnorm,
            torch.ops.sglang.flashinfer_allreduce_residual_rmsnorm,
        ):
            found = call(input_tensor=rows(rank, 3, 128), residual=residual, weight=weight, fp32_acc=True)
            torch.testing.assert_close(found[0], y)
            assert torch.equal(found[1], held)
    made.destroy()
    assert len(texts) == (rank == 0), texts
    assert not texts or "all_reduce 100% of 12" in texts[0]


@needs_sglang
@pytest.mark.parametrize("version", FETCHED["sglang"])
def test_sglang(version: str) -> None:
    run_ranks(2, sglang_body, version, fresh=True, timeout=280)
