"""Former place of `tunedcomm.ops.torch_ops`; kept for one release."""

import warnings

import tunedcomm.ops  # noqa: F401 - defines the operators
from tunedcomm.ops.torch_ops import NAMESPACE, Operator  # noqa: F401

warnings.warn(
    "tunedcomm.integrations.operators moved to tunedcomm.ops.torch_ops; looking up a public function such as "
    "tunedcomm.all_reduce, or import tunedcomm.ops, defines the operators",
    DeprecationWarning,
    stacklevel=2,
)
