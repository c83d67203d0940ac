"""GPU communication kernels that know, for every call, which kernel to run.

Public names are loaded at first use, so that `import tunedcomm` costs next to nothing.
"""

from __future__ import annotations

import importlib

from tunedcomm import errors
from tunedcomm.errors import *  # noqa: F403 - every error is public

# Type checkers take it for True. The module `typing` would take longer to import than all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tunedcomm.dispatch.agreement import Agreement, check_agreement
    from tunedcomm.dispatch.communicator import Communicator, get_communicator, release_communicators
    from tunedcomm.dispatch.dispatcher import explain, force
    from tunedcomm.integrations.fusion import FusionPass, fusion_pass
    from tunedcomm.integrations.intercept import install, intercept, uninstall
    from tunedcomm.integrations.serving import ServingAllReduce
    from tunedcomm.ops.ag_gemm import ag_gemm
    from tunedcomm.ops.all_gather import all_gather
    from tunedcomm.ops.all_reduce import all_reduce, all_reduce_
    from tunedcomm.ops.all_reduce_bias import all_reduce_bias
    from tunedcomm.ops.all_reduce_rms_norm import all_reduce_rms_norm
    from tunedcomm.ops.all_to_all import all_to_all
    from tunedcomm.ops.all_to_all_v import all_to_all_v
    from tunedcomm.ops.gemm_ar import gemm_ar
    from tunedcomm.ops.gemm_rs import gemm_rs
    from tunedcomm.ops.progress import GatherProgress, all_gather_with_progress
    from tunedcomm.ops.reduce_scatter import reduce_scatter
    from tunedcomm.ops.symmetric import register_symmetric, symmetric_empty
    from tunedcomm.spec import Problem

# Module to its public names; type checkers need the imports above and the literal below.
_HOMES = {
    "dispatch.agreement": "Agreement check_agreement",
    "dispatch.communicator": "Communicator get_communicator release_communicators",
    "dispatch.dispatcher": "explain force",
    "integrations.fusion": "FusionPass fusion_pass",
    "integrations.intercept": "install intercept uninstall",
    "integrations.serving": "ServingAllReduce",
    "ops.ag_gemm": "ag_gemm",
    "ops.all_gather": "all_gather",
    "ops.all_reduce": "all_reduce all_reduce_",
    "ops.all_reduce_bias": "all_reduce_bias",
    "ops.all_reduce_rms_norm": "all_reduce_rms_norm",
    "ops.all_to_all": "all_to_all",
    "ops.all_to_all_v": "all_to_all_v",
    "ops.gemm_ar": "gemm_ar",
    "ops.gemm_rs": "gemm_rs",
    "ops.progress": "GatherProgress all_gather_with_progress",
    "ops.reduce_scatter": "reduce_scatter",
    "ops.symmetric": "register_symmetric symmetric_empty",
    "spec": "Problem",
}

__all__ = [
    "Agreement",
    "Communicator",
    "FusionPass",
    "GatherProgress",
    "Problem",
    "ServingAllReduce",
    "ag_gemm",
    "all_gather",
    "all_gather_with_progress",
    "all_reduce",
    "all_reduce_",
    "all_reduce_bias",
    "all_reduce_rms_norm",
    "all_to_all",
    "all_to_all_v",
    "check_agreement",
    "explain",
    "force",
    "fusion_pass",
    "gemm_ar",
    "gemm_rs",
    "get_communicator",
    "install",
    "intercept",
    "reduce_scatter",
    "register_symmetric",
    "release_communicators",
    "symmetric_empty",
    "uninstall",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
