"""Compiles by Inductor's graph passes without its code generation, which would take most of the time of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

import tunedcomm


def inductor(folder: Path) -> dict[str, str]:
    """Variables of ranks that compile by Inductor: a cache of their own, and what takes least time."""
    # Precompiled headers take longer than what is compiled here.
    quick = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), **quick}


def compiled(
    function: Callable[..., Any],
    fusion: tunedcomm.FusionPass,
    graphs: list[fx.Graph] | None = None,
) -> Callable[..., Any]:
    """The function by the graphs that Inductor would make code of; they go into `graphs`."""

    def passed(*, is_inference: bool) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, inputs: Any) -> Any:
            mode = next((each.fake_mode for each in inputs if hasattr(each, "fake_mode")), FakeTensorMode())
            with fusion, V.set_fake_mode(mode):
                post_grad_passes(module, is_inference)
            module.recompile()
            if graphs is not None:
                graphs.append(module.graph)
            return module

        return compiler

    backend = aot_autograd(
        fw_compiler=passed(is_inference=False),
        bw_compiler=passed(is_inference=False),
        inference_compiler=passed(is_inference=True),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    run = torch.compile(function, backend=backend, fullgraph=True)

    def call(*inputs: Any) -> Any:
        with _forgetting():
            return run(*inputs)

    return call


def _forgetting() -> contextlib.AbstractContextManager[Any]:
    """What Dynamo forgets behind Inductor's backend, and not behind others, is forgotten before the backward pass."""
    config, name = torch._dynamo.config, "invalidate_compile_context_weakrefs"
    return config.patch({name: True}) if hasattr(config, name) else contextlib.nullcontext()  # type: ignore[attr-defined]


def calls_of(*graphs: fx.Graph) -> list[str]:
    """Names of the communicating operators, in order, in place or not."""
    spaces = ("tunedcomm.", "_c10d_functional.")
    targets = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    names = [target.split(".")[1] for target in targets if target.startswith(spaces)]
    return [name.removesuffix("_") for name in names if name != "wait_tensor"]  # some are in place


def fused_ops(fusion: tunedcomm.FusionPass) -> list[str]:
    """Ops of what was rewritten, in order."""
    return [record.op for record in fusion.records if record.fused]
