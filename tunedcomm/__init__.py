"""GPU communication kernels that know, for every call, which kernel to run.

Public names are loaded at first use, so that `import tunedcomm` costs next to nothing.
"""

from __future__ import annotations

import importlib

from tunedcomm import errors
from tunedcomm.errors import *  # noqa: F403 - every error is public
from tunedcomm.version import VERSION as __version__  # noqa: F401, N811

# Type checkers take it for True. The module `typing` would take longer to import than all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tunedcomm.dispatch.agreement import Agreement as Agreement
    from tunedcomm.dispatch.agreement import check_agreement as check_agreement
    from tunedcomm.dispatch.agreement import force as force
    from tunedcomm.dispatch.communicator import Communicator as Communicator
    from tunedcomm.dispatch.groups import get_communicator as get_communicator
    from tunedcomm.dispatch.groups import release_communicator as release_communicator
    from tunedcomm.dispatch.groups import release_communicators as release_communicators
    from tunedcomm.integrations.fusion import FusionPass as FusionPass
    from tunedcomm.integrations.fusion import fusion_pass as fusion_pass
    from tunedcomm.integrations.intercept import install as install
    from tunedcomm.integrations.intercept import intercept as intercept
    from tunedcomm.integrations.intercept import uninstall as uninstall
    from tunedcomm.integrations.serving import ServingAllReduce as ServingAllReduce
    from tunedcomm.ops import explain as explain
    from tunedcomm.ops.attention import dcp_combine as dcp_combine
    from tunedcomm.ops.attention import ulysses_gather as ulysses_gather
    from tunedcomm.ops.attention import ulysses_scatter as ulysses_scatter
    from tunedcomm.ops.by_counts import all_gather_v as all_gather_v
    from tunedcomm.ops.by_counts import reduce_scatter_v as reduce_scatter_v
    from tunedcomm.ops.call import numerics as numerics
    from tunedcomm.ops.collectives import all_gather as all_gather
    from tunedcomm.ops.collectives import all_gather_list as all_gather_list
    from tunedcomm.ops.collectives import all_reduce as all_reduce
    from tunedcomm.ops.collectives import all_reduce_ as all_reduce_
    from tunedcomm.ops.collectives import all_reduce_bias as all_reduce_bias
    from tunedcomm.ops.collectives import all_to_all as all_to_all
    from tunedcomm.ops.collectives import all_to_all_v as all_to_all_v
    from tunedcomm.ops.collectives import broadcast as broadcast
    from tunedcomm.ops.collectives import reduce_scatter as reduce_scatter
    from tunedcomm.ops.experts import DispatchResult as DispatchResult
    from tunedcomm.ops.experts import ExpertBuffers as ExpertBuffers
    from tunedcomm.ops.experts import Sent as Sent
    from tunedcomm.ops.experts import TokenDispatchResult as TokenDispatchResult
    from tunedcomm.ops.experts import ep_buffers as ep_buffers
    from tunedcomm.ops.experts import ep_combine as ep_combine
    from tunedcomm.ops.experts import ep_dispatch as ep_dispatch
    from tunedcomm.ops.gemm import ag_gemm as ag_gemm
    from tunedcomm.ops.gemm import gemm_ar as gemm_ar
    from tunedcomm.ops.gemm import gemm_rs as gemm_rs
    from tunedcomm.ops.rms_norm import all_reduce_rms_norm as all_reduce_rms_norm
    from tunedcomm.ops.symmetric import GatherProgress as GatherProgress
    from tunedcomm.ops.symmetric import all_gather_with_progress as all_gather_with_progress
    from tunedcomm.ops.symmetric import register_symmetric as register_symmetric
    from tunedcomm.ops.symmetric import reserve as reserve
    from tunedcomm.ops.symmetric import symmetric_empty as symmetric_empty
    from tunedcomm.spec import Problem as Problem
    from tunedcomm.warmup import autotune as autotune

# Module to its public names, for use at run time; type checkers read the imports above.
_HOMES = {
    "dispatch.agreement": "Agreement check_agreement force",
    "dispatch.communicator": "Communicator",
    "dispatch.groups": "get_communicator release_communicator release_communicators",
    "integrations.fusion": "FusionPass fusion_pass",
    "integrations.intercept": "install intercept uninstall",
    "integrations.serving": "ServingAllReduce",
    "ops": "explain",
    "ops.attention": "dcp_combine ulysses_gather ulysses_scatter",
    "ops.by_counts": "all_gather_v reduce_scatter_v",
    "ops.call": "numerics",
    "ops.collectives": "all_gather all_gather_list all_reduce all_reduce_ all_reduce_bias all_to_all all_to_all_v "
    "broadcast reduce_scatter",
    "ops.experts": "DispatchResult ExpertBuffers Sent TokenDispatchResult ep_buffers ep_combine ep_dispatch",
    "ops.gemm": "ag_gemm gemm_ar gemm_rs",
    "ops.rms_norm": "all_reduce_rms_norm",
    "ops.symmetric": "GatherProgress all_gather_with_progress register_symmetric reserve symmetric_empty",
    "spec": "Problem",
    "warmup": "autotune",
}

__all__ = [name for names in _HOMES.values() for name in names.split()]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    if name == "fsdp":
        return importlib.import_module(f"{__name__}.fsdp")
    for module, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
