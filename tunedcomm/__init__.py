"""GPU communication kernels that know, for every call, which kernel to run.

Public names are loaded at first use, so that `import tunedcomm` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunedcomm.dispatch.agreement import Agreement, check_agreement
    from tunedcomm.dispatch.communicator import Communicator, get_communicator, release_communicators
    from tunedcomm.dispatch.dispatcher import explain, force
    from tunedcomm.errors import (
        AgreementError,
        ConfigError,
        DatabaseAccessError,
        DatabaseAwayError,
        DatabaseBusyError,
        DatabaseCorruptError,
        DatabaseError,
        DatabaseFullError,
        DatabaseVersionError,
        GroupError,
        InfeasibleError,
        MissingPackageError,
        NanInputError,
        NotInitializedError,
        PeerTimeoutError,
        SettingError,
        TunedCommError,
        TuningError,
        UnknownNameError,
        UnsupportedInputError,
        UnsupportedVersionError,
        WorkspaceError,
    )
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

__all__ = [
    "Agreement",
    "AgreementError",
    "Communicator",
    "ConfigError",
    "DatabaseAccessError",
    "DatabaseAwayError",
    "DatabaseBusyError",
    "DatabaseCorruptError",
    "DatabaseError",
    "DatabaseFullError",
    "DatabaseVersionError",
    "FusionPass",
    "GatherProgress",
    "GroupError",
    "InfeasibleError",
    "MissingPackageError",
    "NanInputError",
    "NotInitializedError",
    "PeerTimeoutError",
    "Problem",
    "ServingAllReduce",
    "SettingError",
    "TunedCommError",
    "TuningError",
    "UnknownNameError",
    "UnsupportedInputError",
    "UnsupportedVersionError",
    "WorkspaceError",
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

_HOME = {
    "Agreement": "dispatch.agreement",
    "Communicator": "dispatch.communicator",
    "FusionPass": "integrations.fusion",
    "GatherProgress": "ops.progress",
    "Problem": "spec",
    "ag_gemm": "ops.ag_gemm",
    "ServingAllReduce": "integrations.serving",
    "all_gather": "ops.all_gather",
    "all_gather_with_progress": "ops.progress",
    "all_reduce": "ops.all_reduce",
    "all_reduce_": "ops.all_reduce",
    "all_to_all": "ops.all_to_all",
    "all_reduce_bias": "ops.all_reduce_bias",
    "all_reduce_rms_norm": "ops.all_reduce_rms_norm",
    "all_to_all_v": "ops.all_to_all_v",
    "check_agreement": "dispatch.agreement",
    "explain": "dispatch.dispatcher",
    "force": "dispatch.dispatcher",
    "fusion_pass": "integrations.fusion",
    "gemm_ar": "ops.gemm_ar",
    "gemm_rs": "ops.gemm_rs",
    "get_communicator": "dispatch.communicator",
    "install": "integrations.intercept",
    "intercept": "integrations.intercept",
    "reduce_scatter": "ops.reduce_scatter",
    "register_symmetric": "ops.symmetric",
    "release_communicators": "dispatch.communicator",
    "symmetric_empty": "ops.symmetric",
    "uninstall": "integrations.intercept",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
